#!/usr/bin/env bash
# ALFWorld's row of Table 2 without training: the authors' published weights by their own protocol (docs/paper.md).
# The paper, seen games: SFT 60.0, QLASS 77.9.
#   pip install sentencepiece protobuf    # which the published tokenizers need
#   for part in sft Q; do hf download qlass/qlass-Llama-2-7b-chat-hf-alfworld-$part --local-dir data/release/$part; done
#   RELEASE=data/release ETO=DIR ALFWORLD_DATA=DIR bash runs/paper/release.sh    # 80 GB
# A GPU of 24 GB: PLAY="--load-in 4bit --cache-gb 0". A stopped script resumes when it is run again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/table5.sh"
RELEASE=${RELEASE:-data/release}
RUN=${RUN:-runs/paper-release}
[[ -e $RUN/qnet && -e $RUN/sft ]] ||
    $PYTHON -m integrations.qlass_release "$RELEASE/Q" --sft "$RELEASE/sft" --out "$RUN/qnet"
files=()
for episode in 0 1 2; do  # of each game
    files+=("$RUN/results-$episode.jsonl")
    $PYTHON -m experiments.compare --env integrations.qlass_evaluation:ALFWorld --preset paper --run "$RUN" --seed $episode \
        --env-option "data=$ALFWORLD_DATA" --env-option "instruction=$ETO/alfworld_inst.txt" \
        --env-option "example=$ETO/alfworld_icl.json" --split valid_seen "${long[@]}" \
        --method sample qlass oracle_lookahead -M 2 --out "${files[-1]}" "${search[@]}"
done
$PYTHON -m integrations.qlass_evaluation "${files[@]}"
