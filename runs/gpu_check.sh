#!/usr/bin/env bash
# What only a GPU can show, in under ten minutes by estimate on one with 80 GB or more: a Llama-2-7B with random weights
# through all stages on WebShop, decoding against the memory's bandwidth, and model FLOP utilisation and peak memory of
# QNet's training by option. Writes OUT/gpu_check.md.
#
#   bash runs/gpu_check.sh                    # PYTHON=... for the machine's own torch and transformers; needs no network
#
# Without a GPU a small model takes the same path: that shows that this script works, and its figures mean nothing.
set -euo pipefail
[ "${1:-}" != --help ] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python}
OUT=${OUT:-runs/gpu-check}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
common=(--env webshop --run "$OUT")
few=(--epochs 1 --batch 4 --micro-tokens 4096 --gradient-checkpointing --overwrite)
short=(--max-new-tokens 16 --in-flight 16)

$PYTHON -m experiments.gpu_check model "$OUT"
lora=()
$PYTHON -c "import peft" 2>/dev/null && lora=(--lora 8)  # else all weights are trained
time {
  $PYTHON sft.py "${common[@]}" --model "$OUT/base" --n-expert 8 "${few[@]}" "${lora[@]}"
  $PYTHON build_trees.py "${common[@]}" --limit 3 --rollouts 4 --depth 1 --steps 4 "${short[@]}" --overwrite
  $PYTHON bellman.py --run "$OUT" --overwrite
  $PYTHON train_qnet.py "${common[@]}" "${few[@]}" "${lora[@]}"
  $PYTHON q_search.py "${common[@]}" --method greedy qlass -M 2 --limit 4 --max-steps 4 "${short[@]}" --overwrite
  $PYTHON -m experiments.tree_grpo --env webshop --run "$OUT/grpo" --sft "$OUT/sft" --env-option max_steps=2 \
    --batch-tasks 1 -M 1 --val 1 --budget 1 --gradient-checkpointing "${lora[@]}" --overwrite
}
$PYTHON -m experiments.gpu_check figures "$OUT"
