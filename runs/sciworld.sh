#!/usr/bin/env bash
# ScienceWorld through all four stages with the tiny model.
set -euo pipefail
ENV=sciworld
. "$(dirname "$0")/common.sh"
common+=("$@")

[ -d "$RUN/sft" ] || stage sft.py "${common[@]}" --n-expert 300 --epochs 3
stage build_trees.py "${common[@]}" --limit 30 --rollouts 6  # few: a restore replays the episode
[ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}"
[ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}" --loss-on last  # as in alfworld.sh
for split in test_unseen test_seen; do
    stage q_search.py "${common[@]}" --split $split --limit 40 --method expert greedy sample random qlass -M 4
    stage q_search.py "${common[@]}" --split $split --limit 40 --method best_of_n
done
stage report.py --run "$RUN" --out "$RUN/report.html"
