#!/usr/bin/env bash
# WebShop in shops of their own, each with a catalogue, an agent, trees, QNets and 400 test tasks: the demo's settings, and
# beside them QNets by Eq. 11 and by the last token alone, and agents of the same data. The comparisons are planned in
# runs/reference_output/plans.csv. Seeds 21 to 25 were played before with other QNets, 31 to 35 were not.
#   bash runs/shops.sh [SEED ...]      (default: 21 to 25, 31 to 35)
# Run it again after a stop: finished stages are kept, the others resume.
set -euo pipefail
ENV=webshop EPOCHS=${EPOCHS:-3} RANK_WEIGHT=0
. "$(dirname "$0")/common.sh"
[[ "$*" =~ ^[0-9\ ]*$ ]] || wrong
[ $# -gt 0 ] || set -- 21 22 23 24 25 31 32 33 34 35
tasks=(--limit 400)
for seed; do
    SEED=$seed RUN=runs/shop-$seed
    common=(--env webshop --seed "$seed" --env-option "seed=$seed")
    clone
    learn_q "$RUN" "$RUN/sft"
    stage train_qnet.py "${common[@]}" --run "$RUN" "${qnet[@]}" --rank-weight 4 --out "$RUN/qnet-rank"
    stage train_qnet.py "${common[@]}" --run "$RUN" "${qnet[@]}" --loss-on all --out "$RUN/qnet-all"
    compare --method greedy sample likeliest oracle_step -M 2 4 6 --label cloned --out "$RUN/results-agent.jsonl"
    compare --method best_of_n -N 2 4 6 10 --select oracle --label cloned --out "$RUN/results-oracle.jsonl"
    for name in rank all last; do
        declare -A by=([rank]="with rank weight" [all]="by Eq. 11" [last]="by the last token")
        with=(--qnet "$RUN/qnet-$name" --label "cloned, QNet ${by[$name]}")
        [ $name != last ] || with[1]=$RUN/qnet
        search "${with[@]}" --method qlass -M 2 4 6 --out "$RUN/results-$name.jsonl"
        search "${with[@]}" --method best_of_n -N 2 4 6 10 --out "$RUN/results-best-$name.jsonl"
    done
    for method in tree rft expert; do  # agents of the same data
        declare -A from=([tree]="the trees' best" [rft]="its own best" [expert]="all that QNet saw")
        stage -m experiments.self_train "${common[@]}" --run "$RUN" --method "$method"
        variant "$method" "cloned from ${from[$method]}" --method greedy --sft "$RUN/sft-$method"
    done
done
stage -m experiments.plans --rows "${@/#/runs/shop-}"
