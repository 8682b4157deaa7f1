#!/usr/bin/env bash
# ALFWorld through all five stages with the tiny model: games that are made here, or the real ones with
#   RUN=runs/alfworld-real bash runs/alfworld.sh --alfworld-data DIR        (DIR holds json_2.1.1/, or is it)
# From 1,350 demonstrations the cloned agent is all but perfect (.96 on validation games) and leaves nothing to search
# for, so it gets 200, as in the paper's Table 3.
set -euo pipefail
ENV=alfworld
. "$(dirname "$0")/common.sh"
common+=("$@")

[ -d "$RUN/sft" ] || stage sft.py "${common[@]}"
stage build_trees.py "${common[@]}" --limit 300 --rollouts 10
[ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}"
[ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}" --epochs 4
for split in valid_unseen valid_seen; do
    stage q_search.py "${common[@]}" --split $split --method expert greedy sample qlass -M 4
done
for split in valid_unseen valid_seen; do
    stage q_search.py "${common[@]}" --split $split --method random best_of_n oracle_step -M 4
    stage q_search.py "${common[@]}" --split $split --method best_of_n --select oracle
done
stage report.py --run "$RUN" --out "$RUN/report.html"
