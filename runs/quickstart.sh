#!/usr/bin/env bash
# All four stages on WebShop's bundled catalogue with the tiny model, then every policy on 400 test tasks, on two cores.
# Run again after a stop: finished stages are kept, unfinished ones go on. SEED=1 RUN=runs/webshop-seed1 for another seed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SEED=${SEED:-0}
RUN=${RUN:-runs/webshop}
common=(--env webshop --run "$RUN" --seed "$SEED")

[ -d "$RUN/sft" ] || $PYTHON sft.py "${common[@]}"        # Stage 1: behaviour cloning
$PYTHON build_trees.py "${common[@]}"                      # Stage 2: exploration trees
[ -f "$RUN/q_labels.jsonl" ] || $PYTHON bellman.py "${common[@]}"   # Stage 3: Bellman backup
[ -d "$RUN/qnet" ] || $PYTHON train_qnet.py "${common[@]}" # Stage 4: QNet
$PYTHON q_search.py "${common[@]}" --method all            # Q-guided generation and its baselines
$PYTHON report.py --run "$RUN"
