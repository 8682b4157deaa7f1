# Sourced by the other scripts: the paper's experiment with a pretrained model, and where its data is. A run that begins with
# a pretrained --model has the paper's settings (Table 5, App. A.2: qlass/presets.py); here is what our means change.
#
# By default LoRA, where the paper trains all weights: Llama-2-7B takes 20 GB of a GPU, 13B 34 GB. All weights of 7B on
# eight GPUs of 80 GB, each of which holds the whole model (docs/scale.md):
#   TRAIN="torchrun --nproc-per-node 8" FITS="--gradient-checkpointing --optim adamw8bit" bash runs/paper/webshop.sh
# A stopped script resumes when it is run again. SEED=1 makes a run folder of its own.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python}
TRAIN=${TRAIN:-$PYTHON}
SEED=${SEED:-0}
MODEL=${MODEL:-meta-llama/Llama-2-7b-chat-hf}  # any HuggingFace name or folder
NAME=${NAME:-$(basename "$MODEL")-$SEED}       # names the run folder
ETO=${ETO:-data/eto}                           # ETO's: webshop_sft.json, webshop_inst.txt, train_indices.json, ...
WEBSHOP=${WEBSHOP:-data/webshop}               # WebShop's: items_shuffle.json, items_ins_v2.json, items_human_ins.json
ALFWORLD_DATA=${ALFWORLD_DATA:-data/alfworld}  # what `alfworld-download` fetches
FITS=${FITS:---gradient-checkpointing --lora 16}
PLAY=${PLAY:-}            # of stages 2 and 5 on a GPU of 24 GB: "--load-in 4bit --cache-gb 0"
ROLLOUTS=${ROLLOUTS:-64}  # of a tree; the paper names no bound, and W^(D+1) is 2,187 on ScienceWorld, 19,683 on ALFWorld

read -ra fits <<<"$FITS"
read -ra play <<<"$PLAY"
sft=(--model "$MODEL" "${fits[@]}")
trees=("${play[@]}")  # of all tasks that were cloned (of ALFWorld's games a tenth is the split "val")
qnet=("${fits[@]}")
search=("${play[@]}") M=(2) N=(2 4 6)
long=(--truncate oldest)  # 40 steps, a demonstration's in a tree too, may be more than Llama-2's 4,096 tokens
# ETO's goals, which people wrote, on the whole catalogue; its splits of 1,824 and 200 goal indices; its instruction.
webshop=(--env webshop --seed "$SEED" --env-option "data=$WEBSHOP" --env-option human_goals=true
    --env-option "split_file=$ETO" --env-option "instruction=$ETO/webshop_inst.txt")

pipeline() {  # stages 1 to 4 for the environment in `env`; what is there stays
    $TRAIN sft.py "${env[@]}" "${sft[@]}"
    $PYTHON build_trees.py "${env[@]}" "${trees[@]}"
    $PYTHON bellman.py "${env[@]}"
    $TRAIN train_qnet.py "${env[@]}" "${qnet[@]}"
}
policies() {  # FLAG...: Table 2's rows, QLASS with M candidates beside the agent and its best of N
    local ask=($PYTHON ${SEARCHER:-q_search.py} "${env[@]}" "${search[@]}" "$@") by
    "${ask[@]}" --method greedy qlass -M "${M[@]}" -N 1
    for by in oracle q; do "${ask[@]}" --method best_of_n -N "${N[@]}" --select $by; done
}
