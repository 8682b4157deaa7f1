#!/usr/bin/env bash
# ScienceWorld through all five stages with the tiny model, on the 24 tasks that ETO and the paper have: two to three hours.
# 48 tasks of a test split are two variations of each task.
set -euo pipefail
ENV=sciworld
. "$(dirname "$0")/common.sh"

clone
learn_q "$RUN" "$RUN/sft"
search --limit 48 --method rule expert greedy sample random likeliest qlass -M 4
search --limit 48 --method best_of_n
report
