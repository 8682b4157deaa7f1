#!/usr/bin/env bash
# ScienceWorld through all four stages with the tiny model.
# Run again after a stop: what is finished is kept, the rest goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SEED=${SEED:-0}
RUN=${RUN:-runs/sciworld}
common=(--env sciworld --run "$RUN" --seed "$SEED" "$@")
stage() { echo "[$((SECONDS / 60)) min $((SECONDS % 60)) s] $1"; "$PYTHON" "$@"; }

[ -d "$RUN/sft" ] || stage sft.py "${common[@]}" --n-expert 300 --epochs 3
stage build_trees.py "${common[@]}" --limit 30 --rollouts 6  # few: a restore replays the episode
[ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}"
[ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}" --loss-on last  # as in alfworld.sh
for split in test_unseen test_seen; do
    stage q_search.py "${common[@]}" --split $split --limit 40 --method expert greedy sample random qlass -M 4
    stage q_search.py "${common[@]}" --split $split --limit 40 --method best_of_n
done
stage report.py --run "$RUN" --out "$RUN/report.html"
