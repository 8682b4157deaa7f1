#!/usr/bin/env bash
# What quickstart.sh leaves open, in its run folder: what the trees are worth without a QNet, process rewards (Fig. 4), half of
# the demonstrations (Table 3), trees without the expert. QLASS with M = 4 on the same test tasks each time, distinguished by
# --label. 300 trees would take a third of the time, but teach QNet too little.
set -euo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
no_flags "$@"

qnet() {  # NAME LABEL FLAG...: another QNet of the same trees
    stage train_qnet.py "${common[@]}" --run "$RUN" "${qnet[@]}" --out "$RUN/qnet-$1" "${@:3}"
    variant "$1" "$2" --method qlass -M 4 --qnet "$RUN/qnet-$1"
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
RUN=$half compare --method all  # this agent's own table: python -m reporting RUN/half
variant half "half of the demonstrations" --method qlass -M 2 4 6 --sft "$half/sft" --qnet "$half/qnet"
stage sft.py "${common[@]}" --run "$half-end" --n-expert 50
variant half-end "half of the demonstrations, 50 epochs" --method greedy sample --sft "$half-end/sft"
learn_q "$RUN/no-expert" "$RUN/sft" --no-expert  # trees of the whole agent
variant no-expert "trees without expert" --method qlass -M 4 --qnet "$RUN/no-expert/qnet"
report
