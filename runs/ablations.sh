#!/usr/bin/env bash
# What quickstart.sh leaves open, in the same run folder: process rewards (Fig. 4), half of the demonstrations (Table 3)
# and what single choices are worth. QLASS with M = 4 on the same test tasks each time, told apart by --label.
set -euo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
play() {  # NAME LABEL FLAG...: test tasks with what the flags say
    stage q_search.py "${common[@]}" --out "$RUN/results-$1.jsonl" --label "$2" "${@:3}"
}
variant() {  # NAME LABEL FLAG...: another QNet of the same trees
    [ -d "$RUN/qnet-$1" ] || stage train_qnet.py "${common[@]}" --out "$RUN/qnet-$1" "${@:3}"
    play "$1" "$2" --method qlass -M 4 --qnet "$RUN/qnet-$1"
}
other_trees() {  # NAME LABEL FLAG...: trees of the same agent, grown otherwise, and their QNet
    local grown=(--env "$ENV" --run "$RUN/$1" --seed "$SEED")
    stage build_trees.py "${grown[@]}" --sft "$RUN/sft" "${@:3}"
    [ -f "$RUN/$1/q_labels.jsonl" ] || stage bellman.py "${grown[@]}"
    [ -d "$RUN/$1/qnet" ] || stage train_qnet.py "${grown[@]}" --sft "$RUN/sft"
    play "$1" "$2" --method qlass -M 4 --qnet "$RUN/$1/qnet"
}
retrained() {  # NAME LABEL FLAG...: the agent cloned anew with its own trajectories, played greedily
    [ -d "$RUN/sft-$1" ] || stage -m experiments.self_train "${common[@]}" --name "$1" "${@:3}"
    play "$1" "$2" --method greedy --sft "$RUN/sft-$1"
}

# Fig. 4: three process rewards of the same trees, to search with and to self-train with. Q is quickstart.sh's own QNet.
for target in avg reward; do
    labels=$RUN/q_labels-$target.jsonl
    [ -f "$labels" ] || stage bellman.py "${common[@]}" --target $target --out "$labels"
    variant $target "target=$target" --labels "$labels"
    retrained self-$target "self-trained, target=$target" --method qlass --qnet "$RUN/qnet-$target"
done
retrained self-q "self-trained, target=q" --method qlass
retrained self-rft "self-trained, RFT" --method rft

# Table 3: half of the demonstrations, trees as before.
half=(--env webshop --run "$RUN/half" --seed "$SEED")
[ -d "$RUN/half/sft" ] || stage sft.py "${half[@]}" --n-expert 675
stage build_trees.py "${half[@]}"
[ -f "$RUN/half/q_labels.jsonl" ] || stage bellman.py "${half[@]}"
[ -d "$RUN/half/qnet" ] || stage train_qnet.py "${half[@]}"
stage q_search.py "${half[@]}" --method greedy qlass -M 4 --label "half of the demonstrations" \
    --out "$RUN/results-half.jsonl"

# Without a discount: with it each further step costs a tenth, a click on an option that the goal asks for too.
labels=$RUN/q_labels-gamma1.jsonl
[ -f "$labels" ] || stage bellman.py "${common[@]}" --gamma 1 --out "$labels"
variant gamma1 "gamma=1" --labels "$labels"

# Ablations: how QNet is trained and read, what its trees hold, and how candidates are drawn.
variant frozen "frozen backbone" --freeze
variant lora "LoRA backbone, rank 8" --lora 8
variant loss-action "loss on the action" --loss-on action
variant loss-last "loss on the last token" --loss-on last
variant reward-last "plain rewards, loss on the last token" --loss-on last --labels "$RUN/q_labels-reward.jsonl"
play readout-mean "readout=mean" --method qlass -M 4 --readout mean
other_trees no-expert "trees without expert" --no-expert
other_trees prune-tail "trees pruned as in the released code" --prune tail
play paraphrased paraphrased --method qlass -M 4 --paraphrase
stage q_search.py "${common[@]}" --method oracle_lookahead -M 4  # the search of the released code
stage -m experiments.qval "${common[@]}" --references exact policy -K 4  # all QNets above, and what else scores a step
stage report.py --run "$RUN" --out "$RUN/report.html"
