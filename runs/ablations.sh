#!/usr/bin/env bash
# What quickstart.sh leaves open, in its run folder: what the trees are worth without a QNet, process rewards (Fig. 4), half of
# the demonstrations (Table 3) and what single choices are worth. QLASS with M = 4 on the same test tasks each time,
# distinguished by --label. Six hours by estimate: a QNet takes almost half of one. 300 trees would take a third of that, but
# teach QNet too little.
set -euo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
no_flags "$@"

qnet() {  # NAME LABEL FLAG...: another QNet of the same trees
    stage train_qnet.py "${common[@]}" --run "$RUN" "${qnet[@]}" --out "$RUN/qnet-$1" "${@:3}"
    variant "$1" "$2" --method qlass -M 4 --qnet "$RUN/qnet-$1"
}
other_trees() {  # NAME LABEL FLAG...: trees of the same agent, grown otherwise, and their QNet
    learn_q "$RUN/$1" "$RUN/sft" "${@:3}"
    variant "$1" "$2" --method qlass -M 4 --qnet "$RUN/$1/qnet"
}
retrained() {  # NAME LABEL FLAG...: the agent cloned again with its own trajectories, played greedily
    stage -m experiments.self_train "${common[@]}" --run "$RUN" --name "$1" "${@:3}"
    variant "$1" "$2" --method greedy --sft "$RUN/sft-$1"
}

clone
learn_q "$RUN" "$RUN/sft"
trees_best
# Fig. 4: three process rewards of the same trees, to search with and to self-train with, with the loss on the last token
# and as in Eq. (11) on all tokens. Q on the last token is the QNet above.
for target in avg reward; do
    q=$RUN/q_labels-$target.jsonl
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}" --target $target --out "$q"
    qnet $target "target=$target" --labels "$q"
    qnet $target-all "target=$target, loss on all tokens" --labels "$q" --loss-on all
    retrained self-$target "self-trained, target=$target" --method qlass --qnet "$RUN/qnet-$target"
done
qnet all "target=q, loss on all tokens" --loss-on all
retrained self-q "self-trained, target=q" --method qlass
retrained self-q-perfect "self-trained, target=q, the perfect ones" --method qlass --threshold 1  # as RFT filters
retrained self-rft "self-trained, RFT" --method rft
# Table 3: half of the demonstrations, and trees without the expert, whose branches would be further demonstrations. 50
# are too few to hold some out, so this agent gets about as many updates as the one of all demonstrations: with more its draws
# agree more often, and QLASS has less to choose from. half-end, trained for 50 epochs, shows what QLASS makes up for.
half=$RUN/half
stage sft.py "${common[@]}" --run "$half" --n-expert 50 --epochs 25
learn_q "$half" "$half/sft" --no-expert
RUN=$half search --method all  # this agent's own table: python report.py RUN/half
variant half "half of the demonstrations" --method qlass -M 2 4 6 --sft "$half/sft" --qnet "$half/qnet"
stage sft.py "${common[@]}" --run "$half-end" --n-expert 50
variant half-end "half of the demonstrations, 50 epochs" --method greedy sample --sft "$half-end/sft"
# The paper's discount: each further step costs a tenth, a click on an option that the goal asks for too.
stage bellman.py "${common[@]}" --run "$RUN" --gamma 0.9 --out "$RUN/q_labels-gamma.jsonl"
qnet gamma "gamma=0.9" --labels "$RUN/q_labels-gamma.jsonl"
# How QNet is trained and read, what its trees hold, and how candidates are drawn.
qnet frozen "frozen backbone" --freeze
qnet action "loss on the action" --loss-on action
variant readout-mean "readout=mean" --method qlass -M 4 --readout mean
other_trees no-expert "trees without expert" --no-expert
other_trees prune-tail "trees pruned as in the released code" --prune tail
variant paraphrased paraphrased --method qlass -M 4 --paraphrase
search --method oracle_lookahead -M 4  # the search of the released code
report
