#!/usr/bin/env bash
# What does QLASS add as its agent learns more? WebShop in shops of their own (seeds 101 to 110), with the demo's settings.
# The agent, its trees and QNet share SIZE demonstrations, 100, 300 or 1,000; the trees have at most 6,000 rollouts in all:
# sixty, twenty or six on each task that the agent was cloned from, as in the paper. The comparisons are planned in
# runs/reference_output/plans.csv; what they need is played first, in all shops.
#   bash runs/equal_data.sh SIZE [SEED ...]      (default: 101 to 110, of 1,000 demonstrations 101 to 105)
# IN=FOLDER for run folders elsewhere than in runs. Run it again after a stop: finished stages are kept, the others resume.
set -euo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
[[ "$*" =~ ^(100|300|1000)(\ [0-9]+)*$ ]] || wrong
size=$1 && shift
seeds=("$@")
[ $# -gt 0 ] || seeds=(101 102 103 104 105 106 107 108 109 110)
[ $# -gt 0 ] || [ "$size" != 1000 ] || seeds=(101 102 103 104 105)
agent="cloned from $size"
tasks=(--skip 0 --limit 400) sft=(--n-expert "$size")
trees=(--tasks cloned --limit "$size" --rollouts $((6000 / size)))
declare -A loss=([rank]="" [all]="--loss-on all --rank-weight 0" [last]="--rank-weight 0")
declare -A by=([rank]="with rank weight" [all]="by Eq. 11" [last]="by the last token")
shop() {  # SEED
    SEED=$1 RUN=${IN:-runs}/equal-$size-$1
    common=(--env webshop --seed "$1" --env-option "seed=$1")
}
with_qnet() {  # NAME: a QNet, and its searches
    stage train_qnet.py "${common[@]}" --run "$RUN" "${qnet[@]}" ${loss[$1]} --out "$RUN/qnet-$1"
    local with=(--qnet "$RUN/qnet-$1" --label "$agent, QNet ${by[$1]}")
    search "${with[@]}" --method qlass -M 6 --out "$RUN/results-$1.jsonl"
    [ "$1" != rank ] || search "${with[@]}" --method best_of_n -N 6 --out "$RUN/results-best-$1.jsonl"
}
for seed in "${seeds[@]}"; do
    shop "$seed"
    clone
    stage build_trees.py "${common[@]}" --run "$RUN" "${trees[@]}"
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}"
    compare --method greedy sample likeliest -M 6 --label "$agent" --out "$RUN/results-agent.jsonl"
    with_qnet rank
done
for seed in "${seeds[@]}"; do
    shop "$seed"
    with_qnet all
    with_qnet last
    compare --method oracle_step -M 6 --label "$agent" --out "$RUN/results-value.jsonl"
done
[ ${#seeds[@]} -lt 3 ] || stage -m experiments.plans --rows "${seeds[@]/#/${IN:-runs}/equal-$size-}"
