#!/usr/bin/env bash
# ALFWorld through all five stages with the tiny model: games that are made here, or the real ones with
#   RUN=runs/alfworld-real bash runs/alfworld.sh --alfworld-data DIR        (DIR holds json_2.1.1/, or is it)
# QNet learns at the last token of each action alone: over some 550 tokens a pair, the mean of Eq. (11) leaves a
# twentieth of the loss to the action, too little for so small a model and so few updates.
set -euo pipefail
ENV=alfworld
. "$(dirname "$0")/common.sh"
common+=("$@")

[ -d "$RUN/sft" ] || stage sft.py "${common[@]}"
stage build_trees.py "${common[@]}" --limit 300 --rollouts 10
[ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}"
[ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}" --loss-on last --epochs 4
for split in valid_unseen valid_seen; do
    stage q_search.py "${common[@]}" --split $split --method expert greedy sample qlass -M 4
done
for split in valid_unseen valid_seen; do
    stage q_search.py "${common[@]}" --split $split --method random best_of_n oracle_step -M 4
    stage q_search.py "${common[@]}" --split $split --method best_of_n --select oracle
done
stage report.py --run "$RUN" --out "$RUN/report.html"
