#!/usr/bin/env bash
# Fig. 4: self-training on WebShop with three process rewards from the same trees, beside rejection sampling. Needs the
# first four stages of webshop.sh, in the same run folder.
#
#   WEBSHOP=DIR ETO=DIR bash runs/paper/fig4.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/table5.sh"
RUN=${RUN:-runs/paper-webshop-$NAME}

env=("${webshop[@]}" --run "$RUN")
again=(--temperature 0.7 --limit 0)

evaluate() {  # NAME LABEL: the checkpoint RUN/sft-NAME, greedily
  $PYTHON q_search.py "${env[@]}" --method greedy --limit 0 --max-steps 5 \
    --sft "$RUN/sft-$1" --label "self-trained, $2" --out "$RUN/results-$1.jsonl"
}

for target in q avg reward; do
  labels=$RUN/q_labels-$target.jsonl net=$RUN/qnet-$target
  $PYTHON bellman.py "${env[@]}" "${bellman[@]}" --target $target --out "$labels"
  $TRAIN train_qnet.py "${env[@]}" "${qnet[@]}" --labels "$labels" --out "$net"
  # Each action the best of three, one trajectory a task (Q*Agent's setting).
  $PYTHON -m experiments.self_train "${env[@]}" "${again[@]}" --method qlass -M 3 -N 1 --qnet "$net" --name target-$target
  evaluate target-$target target=$target
done
$PYTHON -m experiments.self_train "${env[@]}" "${again[@]}" --method rft -N 3
evaluate rft RFT
$PYTHON -m experiments.self_train "${env[@]}" --method tree
evaluate tree "trees' best"
$PYTHON -m experiments.qval "${env[@]}" --references exact policy -K 8 \
  --scorers random logprob qnet-q qnet-avg qnet-reward
$PYTHON report.py --run "$RUN"
