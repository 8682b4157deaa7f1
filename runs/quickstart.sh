#!/usr/bin/env bash
# All five stages on WebShop's bundled catalogue with the tiny model, then every policy on 400 test tasks, on two cores.
# Chosen on validation tasks: trees at temperature 2, since the cloned agent is nearly deterministic; gamma .98, since with
# the paper's .9 the ten steps of a careful purchase are worth less than buying the first product at once.
set -euo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"

[ -d "$RUN/sft" ] || stage sft.py "${common[@]}"                      # stage 1: behaviour cloning
stage build_trees.py "${common[@]}" --limit 200 --rollouts 16 --temperature 2   # stage 2: exploration trees
[ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}" --gamma 0.98   # stage 3: Bellman backup
[ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}" --epochs 3   # stage 4: QNet
stage q_search.py "${common[@]}" --method all             # stage 5: Q-guided generation and its baselines

# Control: the same agent cloned from the demonstrations and the trees' best branches (rejection sampling).
[ -d "$RUN/sft-tree" ] || stage -m experiments.self_train "${common[@]}" --method tree
stage q_search.py "${common[@]}" --method greedy --sft "$RUN/sft-tree" --label "SFT on trees' best" \
    --out "$RUN/results-tree.jsonl"
stage report.py --run "$RUN" --out "$RUN/report.html"
