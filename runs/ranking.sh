#!/usr/bin/env bash
# A QNet that ranks siblings (--rank-weight) beside the paper's, of the same trees, in worlds of their own: each seed has a
# catalogue or games of its own, an agent, trees and test tasks, on none of which a setting was chosen. FrozenLake's lakes
# are the same for all. Then the contrasts over the worlds (experiments/worlds.py).
#   bash runs/ranking.sh [webshop|alfworld|frozenlake] [--seeds N]      (default: webshop, 10 worlds from seed 21 on)
#   HALF=1 bash runs/ranking.sh                                         half of WebShop's demonstrations, no expert in the trees
# Run it again after a stop: finished stages are kept, the others resume.
set -euo pipefail
ENV=webshop SEEDS=10 ENVS="webshop alfworld frozenlake"
MAP=${MAP:-lakes2}
. "$(dirname "$0")/common.sh"
no_flags "$@"
splits=(test) tasks=(--limit 0) sizes=(4) episodes=(2 4 6 8) world=(seed) half=()
case $ENV in
    webshop) sizes=(4 6) ;;
    alfworld) splits=(valid_unseen) ;;
    frozenlake) world=() ;;
esac
same=("${common[@]:4}") runs=()  # without --env and --seed
for ((seed = 21; seed < 21 + SEEDS; seed++)); do
    RUN=runs/ranking-$ENV${HALF:+-half}-$seed
    common=(--env "$ENV" --seed "$seed" "${same[@]}" ${world:+--env-option "seed=$seed"})
    [ -z "${HALF:-}" ] || { sft=(--n-expert 50 --epochs 25) && trees+=(--no-expert); }
    clone
    learn_q "$RUN" "$RUN/sft"                                  # the QNet with the rank weight
    stage train_qnet.py "${common[@]}" --run "$RUN" "${qnet[@]}" --rank-weight 0 --out "$RUN/qnet-paper"
    compare --method greedy sample random likeliest oracle_step -M "${sizes[@]}" --out "$RUN/results-agent.jsonl"
    for name in rank paper; do
        label=() && [ $name = paper ] || label=(--label rank)
        net=(--qnet "$RUN/qnet$([ $name = rank ] || echo -paper)" "${label[@]}")
        search --out "$RUN/results-$name.jsonl" "${net[@]}" --method qlass -M "${sizes[@]}"
        search --out "$RUN/results-$name-best.jsonl" "${net[@]}" --method best_of_n -N "${episodes[@]}"
    done
    runs+=("$RUN")
done
stage -m experiments.worlds "${runs[@]}"
