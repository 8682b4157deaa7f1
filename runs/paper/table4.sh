#!/usr/bin/env bash
# Table 4: WebShop with Llama-2-13B-Chat as the agent and QNet's backbone.
#
#   WEBSHOP=DIR ETO=DIR bash runs/paper/table4.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=${MODEL:-meta-llama/Llama-2-13b-chat-hf} bash "$here/webshop.sh"
