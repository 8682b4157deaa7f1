#!/usr/bin/env bash
# ALFWorld in sets of games of their own, each with an agent, trees, QNets and 134 test games: what do the same four
# candidates hold? oracle_step takes the one of the highest true value. The comparisons are planned in
# runs/reference_output/plans.csv (three of them with `oracle_belief`, which the rows' commit has). Nobody had played
# seeds 41 to 43 before.
#   bash runs/games.sh [SEED ...]      (default: 41 to 43)
# Run it again after a stop: finished stages are kept, the others resume.
set -eo pipefail
ENV=alfworld
. "$(dirname "$0")/common.sh"
numbers "$@"
[ $# -gt 0 ] || set -- 41 42 43
splits=(test)
with_qnet() {  # NAME LABEL FLAG...
    another_qnet "$1" "${@:3}"
    compare --qnet "$RUN/qnet-$1" --label "cloned, QNet $2" --method qlass untried_qlass -M 4 --out "$RUN/results-$1.jsonl"
}
games() {  # SEED
    SEED=$1 RUN=${IN:-runs}/games-$1
    common=(--env alfworld --seed "$1" --env-option "seed=$1")
}
for seed; do
    games "$seed"
    clone
    by_processes build_trees.py "${common[@]}" --run "$RUN" "${trees[@]}"
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}"
    searches=(greedy likeliest untried_likeliest oracle_step)
    compare --method "${searches[@]}" -M 4 --label cloned --out "$RUN/results-agent.jsonl"
    with_qnet rank "with rank weight" --loss-on last --rank-weight 4
done
for seed; do
    games "$seed"
    with_qnet all "by Eq. 11" --loss-on all
done
rows games "$@"
