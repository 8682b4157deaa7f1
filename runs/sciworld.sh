#!/usr/bin/env bash
# ScienceWorld through all five stages with the tiny model, on the 24 tasks that ETO and the paper have: two to three hours.
# 48 tasks of a test split are one to three variations of nearly every task.
set -euo pipefail
ENV=sciworld
. "$(dirname "$0")/common.sh"

clone
learn_q "$RUN" "$RUN/sft"
# A long episode of a random player is beyond the model's context.
search --limit 48 --truncate oldest --method rule expert greedy sample random likeliest qlass -M 4
search --limit 48 --truncate oldest --method best_of_n
report
