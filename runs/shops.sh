#!/usr/bin/env bash
# WebShop in shops of their own, each with a catalogue, an agent of 100 demonstrations, trees on 1,000 other tasks,
# QNets and 400 test tasks; beside them QNets by Eq. 11 and by the last token alone, and agents of the same data. The
# comparisons are planned in runs/reference_output/plans.csv; their rows are played first, in all shops. Seeds 21 to 25
# were played before with other QNets, 31 to 35 were not.
#   bash runs/shops.sh [SEED ...]      (default: 21 to 25, 31 to 35)
# Run it again after a stop: finished stages are kept, the others resume.
set -eo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
of_hundred
numbers "$@"
[ $# -gt 0 ] || set -- 21 22 23 24 25 31 32 33 34 35
tasks+=(--limit 400)
with_qnet() {  # NAME WORDS FLAG...: a QNet, and its searches
    another_qnet "$1" "${@:3}"
    local with=(--qnet "$RUN/qnet-$1" --label "cloned, QNet $2")
    search "${with[@]}" --method qlass -M 2 4 6 --out "$RUN/results-$1.jsonl"
    search "${with[@]}" --method best_of_n -N 2 4 6 10 --out "$RUN/results-best-$1.jsonl"
}
with_agent() {  # METHOD WORDS: another agent of the same data
    clone_again "$1" --method "$1"
    variant "$1" "cloned from $2" --method greedy --sft "$RUN/sft-$1"
}
without_expert() {  # trees in which no branch is a demonstration
    local trees_own=$RUN/trees-own.jsonl labels_own=$RUN/q_labels-own.jsonl
    by_processes build_trees.py "${common[@]}" --run "$RUN" "${trees[@]}" --no-expert --out "$trees_own"
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}" --trees "$trees_own" --out "$labels_own"
    with_qnet own "with rank weight, trees without the expert" --labels "$labels_own"
}
for seed; do
    shop shop "$seed"
    clone
    by_processes build_trees.py "${common[@]}" --run "$RUN" "${trees[@]}"
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}"
    compare --method greedy sample likeliest -M 2 4 6 --label cloned --out "$RUN/results-agent.jsonl"
    with_qnet rank "with rank weight"
    with_qnet all "by Eq. 11" --loss-on all --rank-weight 0
    with_agent expert "all that QNet saw"
done
for seed; do
    shop shop "$seed"
    with_qnet last "by the last token" --rank-weight 0
    with_agent tree "the trees' best"
    with_agent rft "its own best"
    compare --method oracle_step -M 6 --label cloned --out "$RUN/results-value.jsonl"
    compare --method best_of_n -N 2 4 6 10 --select oracle --label cloned --out "$RUN/results-oracle.jsonl"
    without_expert
done
rows shop "$@"
