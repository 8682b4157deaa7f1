#!/usr/bin/env bash
# A QNet that ranks siblings (--rank-weight) beside the paper's, of the same trees, in worlds of their own: each seed has a
# catalogue or games of its own, an agent, trees and test tasks, on none of which a setting was chosen. FrozenLake's lakes
# are the same for all. Then the rows for results.csv (reporting/plans.py).
#   bash runs/ranking.sh [webshop|alfworld|frozenlake] [--seeds N]      (default: webshop, 5 worlds from seed 21 on)
#   HALF=1 bash runs/ranking.sh                                         50 of WebShop's demonstrations, no expert
# Run it again after a stop: finished stages are kept, the others resume.
set -eo pipefail
ENV=webshop SEEDS=5 ENVS="webshop alfworld frozenlake"
MAP=${MAP:-lakes2} RANK_WEIGHT=
. "$(dirname "$0")/common.sh"
of_hundred
no_flags "$@"
tasks+=(--limit 400) sizes=(4) episodes=(4 8) world=yes
agent="cloned${HALF:+, half of the demonstrations}"
rank=4 net=("${qnet[@]}")  # chosen, with --distinct and M = 4, on validation tasks of WebShop's worlds 11 and 12
case $ENV in
    webshop) sizes=(4 6) episodes=(4 10) ;;
    frozenlake) world= ;;
esac
same=("${common[@]:4}") runs=()  # without --env and --seed
[ -z "$HALF" ] || { demonstrations=(--n-expert 50) sft=(--epochs 25) && trees+=(--no-expert); }
for ((seed = 21; seed < 21 + SEEDS; seed++)); do
    RUN=${IN:-runs}/ranking-$ENV${HALF:+-half}-$seed
    common=(--env "$ENV" --seed "$seed" "${same[@]}")
    [ -z "$world" ] || common+=(--env-option "seed=$seed")
    clone
    qnet=("${net[@]}" --rank-weight 0)
    learn_q "$RUN" "$RUN/sft"
    qnet=("${net[@]}" --rank-weight $rank)
    another_qnet rank
    compare --label "$agent" --method greedy sample likeliest oracle_step -M "${sizes[@]}" --out "$RUN/results-agent.jsonl"
    paper=(--qnet "$RUN/qnet" --label "$agent, QNet by Eq. 11")
    new=(--qnet "$RUN/qnet-rank" --label "$agent, QNet with rank weight")
    search "${paper[@]}" --method qlass -M "${sizes[@]}" --out "$RUN/results-paper.jsonl"
    compare "${new[@]}, distinct draws" --method qlass -M 4 --distinct --out "$RUN/results-rank.jsonl"
    search "${new[@]}" --method qlass -M "${sizes[@]}" --out "$RUN/results-rank-plain.jsonl"
    search "${paper[@]}" --method best_of_n -N "${episodes[@]}" --out "$RUN/results-paper-best.jsonl"
    search "${new[@]}" --method best_of_n -N "${episodes[@]}" --out "$RUN/results-rank-best.jsonl"
    runs+=("$RUN")
done
[ ${#runs[@]} -lt 3 ] || stage -m reporting.plans --rows "${runs[@]}"
