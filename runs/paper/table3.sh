#!/usr/bin/env bash
# Table 3: 1,000 of WebShop's demonstrations in stage 1, trees over all training tasks. These have no branch of the
# expert, which would show QNet the tasks that have no demonstration here. WEBSHOP=DIR ETO=DIR as for webshop.sh.
# Beside webshop.sh's: python -m reporting runs/paper-webshop-Llama-2-7b-chat-hf-0 "half of the demonstrations=runs/paper-webshop-1000-0"
set -euo pipefail
N_EXPERT=1000 RUN=${RUN:-runs/paper-webshop-1000-${SEED:-0}} bash "$(dirname "${BASH_SOURCE[0]}")/webshop.sh"
