#!/usr/bin/env bash
# Table 4: ScienceWorld with Llama-2-13B-Chat as the agent and QNet's backbone.
#
#   ETO=DIR bash runs/paper/table4.sh
#
# All weights in bf16 with their moments would take 163 GB: by default LoRA, where the paper trains them all. Over
# four GPUs of 80 GB: TRAIN="torchrun --nproc-per-node 4 --" FITS="--gradient-checkpointing --fsdp".
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export FITS=${FITS:---gradient-checkpointing --lora 16 --lr 2e-4}
MODEL=${MODEL:-meta-llama/Llama-2-13b-chat-hf} bash "$here/sciworld.sh"
