#!/usr/bin/env bash
# ALFWorld through all four stages with the tiny model: games that are made here, or the real ones with
#   bash runs/alfworld.sh --alfworld-data DIR        (DIR holds json_2.1.1/, or is it)
# Run again after a stop: what is finished is kept, the rest goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SEED=${SEED:-0}
RUN=${RUN:-runs/alfworld}
common=(--env alfworld --run "$RUN" --seed "$SEED" "$@")
stage() { echo "[$((SECONDS / 60)) min $((SECONDS % 60)) s] $1"; "$PYTHON" "$@"; }

[ -d "$RUN/sft" ] || stage sft.py "${common[@]}" --n-expert 800
stage build_trees.py "${common[@]}" --limit 100 --rollouts 10
[ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}"
[ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}"
for split in valid_unseen valid_seen; do
    stage q_search.py "${common[@]}" --split $split --method all -M 4
done
stage report.py --run "$RUN" --out "$RUN/report.html"
