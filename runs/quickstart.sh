#!/usr/bin/env bash
# All five stages on WebShop's bundled catalogue with the tiny model, then every policy on 431 test tasks, on two cores.
set -euo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
no_flags "$@"
clone                      # stage 1: behaviour cloning (sft.py)
learn_q "$RUN" "$RUN/sft"  # stages 2 to 4: exploration trees, Bellman backup, QNet (build_trees, bellman, train_qnet)
compare --method all       # stage 5: Q-guided generation (q_search.py), and every other policy beside it
report
bin=$(dirname "$PYTHON")
[ ! -e "$bin/activate" ] || echo "Enter the environment:  source $bin/activate"
echo "Watch QNet choose:      python q_search.py --run $RUN -M 4 --show"
