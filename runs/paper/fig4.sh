#!/usr/bin/env bash
# Fig. 4: self-training on WebShop with three process rewards from the same trees, beside rejection sampling. Needs the
# first four stages of webshop.sh, in the same run folder. WEBSHOP=DIR ETO=DIR bash runs/paper/fig4.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/table5.sh"
RUN=${RUN:-runs/paper-webshop-$NAME}
env=("${webshop[@]}" --run "$RUN") again=(--limit 0 "${play[@]}")

self_trained() {  # NAME LABEL FLAG...: an agent cloned again with its own trajectories, RUN/sft-NAME, greedily
    $PYTHON -m experiments.self_train "${env[@]}" --name "$1" --no-train "${@:3}"
    $TRAIN sft.py "${env[@]}" "${sft[@]}" --expert "$RUN/self_train-$1.jsonl" --out "$RUN/sft-$1"
    $PYTHON q_search.py "${env[@]}" --method greedy "${play[@]}" \
        --sft "$RUN/sft-$1" --label "self-trained, $2" --out "$RUN/results-$1.jsonl"
}
for target in q avg reward; do
    labels=$RUN/q_labels-$target.jsonl net=$RUN/qnet-$target
    $PYTHON bellman.py "${env[@]}" --target $target --out "$labels"
    $TRAIN train_qnet.py "${env[@]}" "${qnet[@]}" --labels "$labels" --out "$net"
    # Each action the best of three, one trajectory a task (Q*Agent's setting).
    self_trained target-$target target=$target "${again[@]}" --method qlass -M 3 -N 1 --qnet "$net"
done
self_trained rft RFT "${again[@]}" --method rft -N 3
self_trained tree "trees' best" --method tree
$PYTHON -m experiments.qval "${env[@]}" "${play[@]}" --references exact policy -K 8 \
    --scorers random logprob qnet-q qnet-avg qnet-reward
$PYTHON -m reporting --run "$RUN"
