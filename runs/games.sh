#!/usr/bin/env bash
# ALFWorld in sets of games of their own, each with an agent, trees, QNets and 134 test tasks: how far does a score come that
# knows what was seen? oracle_belief draws what the pages hide, oracle_step knows it. The comparisons are planned in
# runs/reference_output/plans.csv. Nobody had played seeds 41 to 43 before.
#   bash runs/games.sh [SEED ...]      (default: 41 to 43)
# Run it again after a stop: finished stages are kept, the others resume.
set -euo pipefail
ENV=alfworld
. "$(dirname "$0")/common.sh"
[[ "$*" =~ ^[0-9\ ]*$ ]] || wrong
[ $# -gt 0 ] || set -- 41 42 43
splits=(test) tasks=(--limit 0)
with_qnet() {  # NAME LABEL FLAG...
    stage train_qnet.py "${common[@]}" --run "$RUN" "${qnet[@]}" "${@:3}" --out "$RUN/qnet-$1"
    compare --qnet "$RUN/qnet-$1" --label "cloned, QNet $2" --method qlass untried_qlass -M 4 --out "$RUN/results-$1.jsonl"
}
games() {  # SEED
    RUN=runs/games-$1
    common=(--env alfworld --seed "$1" --env-option "seed=$1")
}
for seed; do
    games "$seed"
    clone
    stage build_trees.py "${common[@]}" --run "$RUN" "${trees[@]}"
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}"
    searches=(greedy likeliest untried_likeliest oracle_belief oracle_step)
    compare --method "${searches[@]}" -M 4 --label cloned --out "$RUN/results-agent.jsonl"
    with_qnet rank "with rank weight" --loss-on last --rank-weight 4
done
for seed; do
    games "$seed"
    with_qnet all "by Eq. 11" --loss-on all
done
[ $# -lt 3 ] || stage -m experiments.plans --rows "${@/#/runs/games-}"
