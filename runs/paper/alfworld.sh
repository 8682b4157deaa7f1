#!/usr/bin/env bash
# ALFWorld, Table 2, seen / unseen. The paper: SFT 60.0 / 67.2, best-of-N 62.1 / 69.4, QLASS 77.9 / 82.8.
#   ALFWORLD_DATA=DIR ETO=DIR bash runs/paper/alfworld.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/table5.sh"
RUN=${RUN:-runs/paper-alfworld-$NAME}
env=(--env alfworld --run "$RUN" --seed "$SEED"
    --env-option "data=$ALFWORLD_DATA" --env-option "instruction=$ETO/alfworld_inst.txt")
sft+=(--expert "$ETO/alfworld_sft.json")
trees+=(--rollouts "$ROLLOUTS" "${long[@]}") qnet+=("${long[@]}")
pipeline
for split in valid_seen valid_unseen; do policies --split $split "${long[@]}"; done
$PYTHON -m reporting --run "$RUN"
