#!/usr/bin/env bash
# WebShop: Table 2 and Fig. 3 (score against tokens). The paper: SFT 63.1, best-of-N 67.9, QLASS 70.3.
#   WEBSHOP=DIR ETO=DIR bash runs/paper/webshop.sh
# With PARAPHRASER=https://api.openai.com/v1#gpt-3.5-turbo and OPENAI_API_KEY a language model rewords the tasks.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/table5.sh"
RUN=${RUN:-runs/paper-webshop-$NAME}
env=("${webshop[@]}" --run "$RUN")
sft+=(--expert "$ETO/webshop_sft.json")
[ -z "${N_EXPERT:-}" ] || sft+=(--n-expert "$N_EXPERT") trees+=(--no-expert --tasks new)  # of all tasks
pipeline
# Perturbed as in App. A.3.2, all methods alike: by a language model where there is one, else by the bundled rules.
M=(2 4 6) N=(2 4 6 8 10) perturbed=(--paraphrase 0)
[ -z "${PARAPHRASER:-}" ] || perturbed=(--paraphrase-server "$PARAPHRASER")
SEARCHER="-m experiments.compare" policies "${perturbed[@]}" --label perturbed --out "$RUN/results-perturbed.jsonl"
policies  # the same without perturbation
$PYTHON -m reporting --run "$RUN"
