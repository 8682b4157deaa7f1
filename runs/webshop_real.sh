#!/usr/bin/env bash
# WebShop's real 1,000 products with the tiny model, its goals the synthetic ones (only 13 of the instructions that people
# wrote belong to these products): WEBSHOP=DIR bash runs/webshop_real.sh [--seeds N]
# DIR (data/webshop) holds items_shuffle_1000.json, items_ins_v2_1000.json and items_human_ins.json. Seed 0 has the run folder
# runs/webshop_real, the others runs/webshop_real-seed1, ...
set -euo pipefail
ENV=webshop SEEDS=3
. "$(dirname "$0")/common.sh"
no_flags "$@"
# A product has a goal for each of its combinations of options: without a limit two products are a third of the test tasks.
plain=("${common[@]}" --env-option "data=${WEBSHOP:-data/webshop}" --env-option per_product=16) runs=()
# Warm trees, since the agent's own draws hardly differ.
tasks=(--skip 0) sft=(--n-expert 400 --epochs 16) trees=(--limit 700 --rollouts 5 --temperature 2)
qnet=(--patience 2 --rank-weight 0)
for ((seed = 0; seed < SEEDS; seed++)); do
    SEED=$seed RUN=$(folder_of webshop_real $seed) common=("${plain[@]}" --seed "$seed")
    runs+=("$RUN")
    clone
    learn_q "$RUN" "$RUN/sft"
    compare --method all
done
stage -m reporting "${runs[@]}" --out runs/webshop_real/report.html
