#!/usr/bin/env bash
# ALFWorld through all five stages with the tiny model: games that are made here, or the real ones with
#   RUN=runs/alfworld-real bash runs/alfworld.sh --env-option data=DIR     (DIR holds json_2.1.1/, or is it)
# From 600 demonstrations the cloned agent is about as good as the paper's (.67 unseen, .60 seen); from 1,350, .82.
set -euo pipefail
ENV=alfworld
. "$(dirname "$0")/common.sh"
common+=("$@") splits=(valid_unseen valid_seen)
clone
learn_q "$RUN" "$RUN/sft"
compare --limit 0 --method all -M 2 4
trees_best --limit 0
report
