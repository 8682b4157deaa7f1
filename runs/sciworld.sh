#!/usr/bin/env bash
# ScienceWorld through all five stages with the tiny model, on the 24 tasks that ETO and the paper have: about two hours.
# 96 tasks of a test split are one to six variations of each task; the first 48 had been played when this was set.
set -euo pipefail
ENV=sciworld
. "$(dirname "$0")/common.sh"
[ $# = 0 ] || { echo "error: $0 takes no arguments; SEED=1 RUN=FOLDER before it for another seed" >&2 && exit 2; }

clone
learn_q "$RUN" "$RUN/sft"
# A long episode of a random player is beyond the model's context.
search --limit 96 --truncate oldest --method rule expert greedy sample random likeliest qlass -M 4
search --limit 96 --truncate oldest --method best_of_n
report
