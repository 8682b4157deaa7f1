#!/usr/bin/env bash
# WebShop's real 1,000 products with the tiny model, its goals the synthetic ones (only 13 of the instructions that people
# wrote belong to these products):
#
#   bash runs/webshop_real.sh DIR [--seeds N]     DIR: items_shuffle_1000.json, items_ins_v2_1000.json, items_human_ins.json
#
# Seed 0 has the run folder runs/webshop_real, the others runs/webshop_real-seed1, ...
set -euo pipefail
DATA=${1:?the folder of WebShop\'s data files} SEEDS=1
[ "${2:-}" != --seeds ] || SEEDS=${3:?--seeds N}
ENV=webshop
. "$(dirname "$0")/common.sh"
plain=("${common[@]}" --webshop-data "$DATA") runs=()

for ((seed = 0; seed < SEEDS; seed++)); do
    SEED=$seed RUN=runs/webshop_real common=("${plain[@]}" --seed "$seed")
    [ "$seed" = 0 ] || RUN+=-seed$seed
    runs+=("$RUN")
    clone
    learn_q "$RUN" "$RUN/sft"
    search --method all
    [ -d "$RUN/sft-tree" ] || stage -m experiments.self_train "${common[@]}" --run "$RUN" --method tree
    variant tree "SFT on trees' best" --method greedy --sft "$RUN/sft-tree"
done
stage report.py "${runs[@]}" --out runs/webshop_real/report.html
