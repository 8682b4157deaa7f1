#!/usr/bin/env bash
# The full comparison on one environment: all methods, several seeds of all five stages, one report over them.
#   bash runs/reproduce.sh [webshop|alfworld|sciworld|frozenlake] [--seeds N]        (default: webshop, 3 seeds)
# Run it again after a stop: finished stages are kept, the others resume. Seed 0 has the run folder runs/ENV, the others
# runs/ENV-seed1, ...; the report over all is runs/ENV/seeds.html.
set -euo pipefail
ENV=webshop SEEDS=3 ENVS="webshop alfworld sciworld frozenlake"
. "$(dirname "$0")/common.sh"
no_flags "$@"
scripts=("$ENV.sh")
[ "$ENV" != webshop ] || scripts=(quickstart.sh ablations.sh)
for script in "${scripts[@]}"; do  # the main comparison of all seeds comes first
    runs=()
    for ((seed = 0; seed < SEEDS; seed++)); do
        runs+=("$(folder_of "$ENV" $seed)")
        SEED=$seed RUN=${runs[-1]} bash "runs/$script"
    done
done
stage -m reporting "${runs[@]}" --out "runs/$ENV/seeds.html"
