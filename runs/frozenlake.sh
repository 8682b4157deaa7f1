#!/usr/bin/env bash
# FrozenLake through all four stages with the tiny model: a fixed 8x8 map, random starts, the exact Q* known.
# The agent is cloned with few updates, so that it errs; the trees then teach QNet what it did not know.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SEED=${SEED:-0}
RUN=${RUN:-runs/frozenlake}
common=(--env frozenlake --run "$RUN" --seed "$SEED")
stage() { echo "[$((SECONDS / 60)) min $((SECONDS % 60)) s] $1"; "$PYTHON" "$@"; }

[ -d "$RUN/sft" ] || stage sft.py "${common[@]}" --epochs 10
stage build_trees.py "${common[@]}" --depth 8 --width 4 --rollouts 16 --steps 40
[ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}"
[ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}" --epochs 3
stage q_search.py "${common[@]}" --method all -M 2 4
stage frozenlake.py "$RUN/results.jsonl"   # rank agreement with Q*
stage report.py --run "$RUN" --out "$RUN/report.html"
