#!/usr/bin/env bash
# The full comparison on one environment: all methods, several seeds of all five stages, one report over them.
#
#   bash runs/reproduce.sh [webshop|alfworld|sciworld|frozenlake] [--seeds N]        (default: webshop, 3 seeds)
#
# Run it again after a stop: finished stages are kept, the others resume. Seed 0 has the run folder runs/ENV, the others
# runs/ENV-seed1, ...; the report over all is runs/ENV/seeds.html.
set -euo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
env=webshop seeds=3
while [ $# -gt 0 ]; do
    case $1 in
        webshop | alfworld | sciworld | frozenlake) env=$1 && shift ;;
        --seeds) seeds=${2:-} && shift $(($# > 1 ? 2 : 1)) ;;
        *) seeds= && break ;;
    esac
done
[[ $seeds =~ ^[1-9][0-9]*$ ]] || {
    echo "error: bash runs/reproduce.sh [webshop|alfworld|sciworld|frozenlake] [--seeds N]" >&2 && exit 2
}
scripts=("$env.sh")
[ "$env" != webshop ] || scripts=(quickstart.sh ablations.sh)
for script in "${scripts[@]}"; do  # the main comparison of all seeds comes first
    runs=()
    for ((seed = 0; seed < seeds; seed++)); do
        run=runs/$env
        [ $seed = 0 ] || run=$run-seed$seed
        runs+=("$run")
        SEED=$seed RUN=$run bash "runs/$script"
    done
done
stage report.py "${runs[@]}" --out "runs/$env/seeds.html"
