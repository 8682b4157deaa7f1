#!/usr/bin/env bash
# Table 4: ScienceWorld with Llama-2-13B-Chat as the agent and QNet's backbone. ETO=DIR bash runs/paper/table4.sh
set -euo pipefail
MODEL=${MODEL:-meta-llama/Llama-2-13b-chat-hf} bash "$(dirname "${BASH_SOURCE[0]}")/sciworld.sh"
