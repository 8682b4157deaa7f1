#!/usr/bin/env bash
# FrozenLake through all five stages with the tiny model: 24 lakes of 4x4, every start, the exact Q* known.
# MAP=lakes2 for 24 others, MAP=4x4 or MAP=8x8 for one fixed lake.
set -euo pipefail
ENV=frozenlake
. "$(dirname "$0")/common.sh"
no_flags "$@"
clone
learn_q "$RUN" "$RUN/sft"
compare --method all
on_test_tasks -m experiments.lookup -M 4  # what QNet adds to its trees
stage -m experiments.qval "${common[@]}" --run "$RUN" --trajectories 8 --references exact --out "$RUN/qval-exact"
# The same QNet for an agent that was cloned on actions alone: the second loss costs an agent some of its reward.
stage sft.py "${common[@]}" --run "$RUN" --out "$RUN/sft-plain"
variant plain "agent cloned without" --sft "$RUN/sft-plain" --method greedy qlass likeliest -M 2 4 6
report
