#!/usr/bin/env bash
# WebShop in shops of their own, each with a catalogue, an agent, trees, QNets and 400 test tasks: the demo's settings, and
# beside them QNets by Eq. 11 and by the last token alone, and agents of the same data. The comparisons are planned in
# runs/reference_output/plans.csv; their rows are played first, in all shops. Seeds 21 to 25 were played before with other
# QNets, 31 to 35 were not.
#   bash runs/shops.sh [SEED ...]      (default: 21 to 25, 31 to 35)
# Run it again after a stop: finished stages are kept, the others resume.
set -euo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
[[ "$*" =~ ^[0-9\ ]*$ ]] || wrong
[ $# -gt 0 ] || set -- 21 22 23 24 25 31 32 33 34 35
tasks=(--skip 0 --limit 400)
declare -A loss=([rank]="" [all]="--loss-on all --rank-weight 0" [last]="--rank-weight 0"
    [own]="")
declare -A by=([rank]="with rank weight" [all]="by Eq. 11" [last]="by the last token"
    [own]="with rank weight, trees without the expert")
declare -A from=([tree]="the trees' best" [rft]="its own best" [expert]="all that QNet saw")
shop() {  # SEED
    SEED=$1 RUN=runs/shop-$1
    common=(--env webshop --seed "$1" --env-option "seed=$1")
}
with_qnet() {  # NAME FLAG...: a QNet, and its searches
    stage train_qnet.py "${common[@]}" --run "$RUN" "${qnet[@]}" ${loss[$1]} "${@:2}" --out "$RUN/qnet-$1"
    local with=(--qnet "$RUN/qnet-$1" --label "cloned, QNet ${by[$1]}")
    search "${with[@]}" --method qlass -M 2 4 6 --out "$RUN/results-$1.jsonl"
    search "${with[@]}" --method best_of_n -N 2 4 6 10 --out "$RUN/results-best-$1.jsonl"
}
with_agent() {  # METHOD: another agent of the same data
    stage -m experiments.self_train "${common[@]}" --run "$RUN" --method "$1"
    variant "$1" "cloned from ${from[$1]}" --method greedy --sft "$RUN/sft-$1"
}
without_expert() {  # trees in which no branch is a demonstration
    local trees_own=$RUN/trees-own.jsonl labels_own=$RUN/q_labels-own.jsonl
    stage build_trees.py "${common[@]}" --run "$RUN" "${trees[@]}" --no-expert --out "$trees_own"
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}" --trees "$trees_own" --out "$labels_own"
    with_qnet own --labels "$labels_own"
}
for seed; do
    shop "$seed"
    clone
    stage build_trees.py "${common[@]}" --run "$RUN" "${trees[@]}"
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}"
    compare --method greedy sample likeliest -M 2 4 6 --label cloned --out "$RUN/results-agent.jsonl"
    with_qnet rank
    with_qnet all
    with_agent expert
done
for seed; do
    shop "$seed"
    with_qnet last
    with_agent tree
    with_agent rft
    compare --method oracle_step -M 6 --label cloned --out "$RUN/results-value.jsonl"
    compare --method best_of_n -N 2 4 6 10 --select oracle --label cloned --out "$RUN/results-oracle.jsonl"
    without_expert
done
[ $# -lt 3 ] || stage -m experiments.plans --rows "${@/#/runs/shop-}"
