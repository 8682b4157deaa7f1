#!/usr/bin/env bash
# ScienceWorld through all five stages with the tiny model, on the 24 tasks that ETO and the paper have.
# Few demonstrations of long episodes: small batches, so that the agent gets its updates. Few trees: a restore replays
# the episode. 48 tasks of a test split are two variations of each task.
set -euo pipefail
ENV=sciworld
. "$(dirname "$0")/common.sh"
common+=(--tasks eto "$@")

[ -d "$RUN/sft" ] || stage sft.py "${common[@]}" --n-expert 300 --epochs 5 --batch 4
stage build_trees.py "${common[@]}" --limit 60 --rollouts 6
[ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}"
[ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}" --epochs 4
for split in test_unseen test_seen; do
    stage q_search.py "${common[@]}" --split $split --limit 48 --method expert greedy sample random qlass -M 4
done
for split in test_unseen test_seen; do
    stage q_search.py "${common[@]}" --split $split --limit 48 --method best_of_n
done
stage report.py --run "$RUN" --out "$RUN/report.html"
