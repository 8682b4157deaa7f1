#!/usr/bin/env bash
# ScienceWorld, Table 2, seen / unseen. The paper: SFT 67.4 / 53.0, best-of-N 70.2 / 57.6, QLASS 75.3 / 66.4.
#   ETO=DIR bash runs/paper/sciworld.sh    # with ETO's eval_agent/data/sciworld, its splits, as DIR/sciworld
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/table5.sh"
RUN=${RUN:-runs/paper-sciworld-$NAME}
env=(--env sciworld --run "$RUN" --seed "$SEED"
    --env-option "split_file=$ETO/sciworld" --env-option "instruction=$ETO/sciworld_inst.txt")
sft+=(--expert "$ETO/sciworld_sft.json")
trees+=(--rollouts "$ROLLOUTS" "${long[@]}") qnet+=("${long[@]}")
pipeline
for split in test_seen test_unseen; do policies --split $split "${long[@]}"; done
$PYTHON -m reporting --run "$RUN"
