#!/usr/bin/env bash
# FrozenLake through all five stages with the tiny model: a fixed 4x4 map, random starts, the exact Q* known. About a
# minute; MAP=8x8 for the larger lake takes more than five. The agent is cloned with few updates, so that it errs; the
# trees are wide and warm enough to meet every move from every cell, and QNet then knows what the agent did not.
set -euo pipefail
ENV=frozenlake
. "$(dirname "$0")/common.sh"
common+=(--env-option "map=${MAP:-4x4}")

[ -d "$RUN/sft" ] || stage sft.py "${common[@]}" --epochs 8
stage build_trees.py "${common[@]}" --depth 6 --width 4 --rollouts 600 --steps 20 --prune tail --temperature 1.5
[ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}"
[ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}" --batch 16 --epochs 200
stage q_search.py "${common[@]}" --method all -M 2 4 --temperature 1.5
stage -m experiments.qval "${common[@]}" --trajectories 8 --references exact  # agreement with Q*
stage report.py --run "$RUN" --out "$RUN/report.html"
