#!/usr/bin/env bash
# The paper's experiments with a pretrained model on a GPU (docs/models.md: data, memory, hours). A run that begins with a
# pretrained --model has the paper's settings (Table 5, App. A.2: qlass/presets/paper); here is what our means change.
#   bash runs/paper.sh webshop      Table 2 and Fig. 3. The paper: SFT 63.1, best-of-N 67.9, QLASS 70.3 (tasks reworded by
#                                   GPT-3.5; 65.3 without, in its first version). The same here with
#                                   PARAPHRASER=https://api.openai.com/v1#gpt-3.5-turbo and OPENAI_API_KEY.
#   bash runs/paper.sh alfworld     Table 2, seen / unseen: SFT 60.0 / 67.2, best-of-N 62.1 / 69.4, QLASS 77.9 / 82.8
#   bash runs/paper.sh sciworld     Table 2, seen / unseen: SFT 67.4 / 53.0, best-of-N 70.2 / 57.6, QLASS 75.3 / 66.4
#   bash runs/paper.sh table3       1,000 of WebShop's demonstrations in stage 1, trees over all training tasks. These have no
#                                   branch of the expert, which would show QNet tasks that have no demonstration here.
#   bash runs/paper.sh table4       ScienceWorld with Llama-2-13B-Chat
#   bash runs/paper.sh fig4         self-training on WebShop with three process rewards of the same trees, beside rejection
#                                   sampling; behind `webshop`, in its run folder
#   bash runs/paper.sh release      ALFWorld's row of Table 2 without training: the authors' weights by their own protocol
#   bash runs/paper.sh gpu_check    what only a GPU can show, in ten minutes by estimate: a Llama-2-7B of random weights
#                                   through all stages, and speed and peak memory of QNet's training; writes gpu_check.md
# By default LoRA, where the paper trains all weights: Llama-2-7B is trained in 20 GB of a GPU and plays in 36, 13B in 34 and
# 65 (with PLAY="--cache-gb 0"). All weights, as in the paper, divided among GPUs of 48 GB, which share trees and test tasks,
# too (docs/models.md: memory by number of GPUs):
#   GPUS=4 PLAY="--cache-gb 0" bash runs/paper.sh webshop
#   GPUS=8 PLAY="--load-in 4bit --cache-gb 0" bash runs/paper.sh table4
# A stopped script resumes when it is run again. SEED=1 makes a run folder of its own (not of release and gpu_check).
set -eo pipefail
ENV= ENVS="webshop alfworld sciworld table3 table4 fig4 release gpu_check" run=$RUN
. "$(dirname "$0")/common.sh"
[ -n "$ENV" ] || fail "name an experiment: $ENVS"
no_flags "$@"
train=("$PYTHON")
[ -z "$GPUS" ] || unset "${!MALLOC_@}"  # of processes that divide weights they only cost memory
PROCESSES=${GPUS:-1}
if [ "$GPUS" ]; then  # a state is 12 bytes a weight: 81 GB of 7B
    train=("$PYTHON" -m torch.distributed.run --nproc_per_node "$GPUS" --)
    FITS=${FITS:---gradient-checkpointing --save-every 500}
fi
[ "$ENV" != table4 ] || MODEL=${MODEL:-meta-llama/Llama-2-13b-chat-hf}
MODEL=${MODEL:-meta-llama/Llama-2-7b-chat-hf}  # any HuggingFace name or folder
NAME=${NAME:-$(basename "$MODEL")-$SEED}       # names the run folder
ETO=${ETO:-data/eto}                           # ETO's: webshop_sft.json, webshop_inst.txt, train_indices.json, ...
WEBSHOP=${WEBSHOP:-data/webshop}               # WebShop's: items_shuffle.json, items_ins_v2.json, items_human_ins.json
ALFWORLD_DATA=${ALFWORLD_DATA:-data/alfworld}  # what `alfworld-download` fetches
RELEASE=${RELEASE:-data/release}               # the authors' weights, as sft/ and Q/
SIMULATORS=${SIMULATORS:-32}  # of ScienceWorld, per process, 0.5 GB each: as many episodes are side by side
ROLLOUTS=${ROLLOUTS:-64}  # of a tree; the paper names no bound, and W^(D+1) is 2,187 on ScienceWorld, 19,683 on ALFWorld
# FITS is of stages 1 and 4, PLAY of stages 2 and 5: "--load-in 4bit --cache-gb 0" on a GPU of 24 GB.
read -ra fits <<< "${FITS:---gradient-checkpointing --lora 16}"
read -ra play <<< "$PLAY"
sft=(--model "$MODEL" "${fits[@]}")
trees=("${play[@]}")  # of all tasks that were cloned (of ALFWorld's games a tenth is the split "val")
qnet=("${fits[@]}" "${qnet[@]}")
searches=("${play[@]}") M=(2) N=(2 4 6)

begin() {  # ENVIRONMENT FLAG...: a run folder of the experiment
    RUN=${run:-runs/paper-$1-$NAME}
    env=(--env "$1" --run "$RUN" --seed "$SEED" "${@:2}")
}
webshop() {  # ETO's goals, which people wrote, on the whole catalogue; its splits, 200 of them for tests; its instruction
    begin webshop --env-option "data=$WEBSHOP" --env-option human_goals=true \
        --env-option "split_file=$ETO" --env-option "instruction=$ETO/webshop_inst.txt"
    sft+=(--expert "$ETO/webshop_sft.json")
}
pipeline() {  # stages 1 to 4 for the environment in `env`; what is there stays
    "${train[@]}" sft.py "${env[@]}" "${sft[@]}"
    by_processes build_trees.py "${env[@]}" "${trees[@]}"
    "$PYTHON" bellman.py "${env[@]}"
    "${train[@]}" train_qnet.py "${env[@]}" "${qnet[@]}"
}
policies() {  # FLAG...: Table 2's rows, QLASS with M candidates beside the agent and its best of N
    local ask=(by_processes ${SEARCHER:-q_search.py} "${env[@]}" "${searches[@]}" "$@") by
    "${ask[@]}" --method greedy qlass -M "${M[@]}" -N 1
    for by in oracle q; do "${ask[@]}" --method best_of_n -N "${N[@]}" --select $by; done
}
self_trained() {  # NAME LABEL FLAG...: an agent cloned again with its own trajectories, RUN/sft-NAME, greedily
    "$PYTHON" -m experiments.self_train "${env[@]}" --name "$1" "${@:3}"
    "${train[@]}" sft.py "${env[@]}" --model "$MODEL" "${fits[@]}" --expert "$RUN/self_train-$1.jsonl" --out "$RUN/sft-$1"
    "$PYTHON" q_search.py "${env[@]}" --method greedy "${play[@]}" \
        --sft "$RUN/sft-$1" --label "self-trained, $2" --out "$RUN/results-$1.jsonl"
}

case $ENV in
    webshop | table3)
        if [ "$ENV" = table3 ]; then
            run=${run:-runs/paper-webshop-1000-$NAME}
            sft+=(--n-expert 1000) trees+=(--no-expert --tasks new)  # of all tasks
        fi
        webshop
        pipeline
        M=(2 4 6) N=(2 4 6 8 10)
        if [ -n "$PARAPHRASER" ]; then  # App. A.3.2: tasks reworded, for all methods alike
            SEARCHER="-m experiments.compare" policies --paraphrase-server "$PARAPHRASER" \
                --label reworded --out "$RUN/results-reworded.jsonl"
        fi
        policies
        "$PYTHON" -m reporting --run "$RUN" ;;
    alfworld)
        begin alfworld --env-option "data=$ALFWORLD_DATA" --env-option "instruction=$ETO/alfworld_inst.txt"
        sft+=(--expert "$ETO/alfworld_sft.json")
        trees+=(--rollouts "$ROLLOUTS")
        pipeline
        for split in valid_seen valid_unseen; do policies --split $split; done
        "$PYTHON" -m reporting --run "$RUN" ;;
    sciworld | table4)  # with ETO's eval_agent/data/sciworld, its splits, as ETO/sciworld
        begin sciworld --env-option "split_file=$ETO/sciworld" --env-option "instruction=$ETO/sciworld_inst.txt" \
            --env-option "simulators=$SIMULATORS"
        sft+=(--expert "$ETO/sciworld_sft.json")
        trees+=(--rollouts "$ROLLOUTS")
        pipeline
        for split in test_seen test_unseen; do policies --split $split; done
        "$PYTHON" -m reporting --run "$RUN" ;;
    fig4)
        webshop
        for target in q avg reward; do
            net=$RUN/qnet  # of target q
            if [ $target != q ]; then
                labels=$RUN/q_labels-$target.jsonl net=$RUN/qnet-$target
                "$PYTHON" -m experiments.targets "${env[@]}" --target $target --out "$labels"
                "${train[@]}" train_qnet.py "${env[@]}" "${qnet[@]}" --labels "$labels" --out "$net"
            fi
            # Each action the best of three, one trajectory a task (Q*Agent's setting).
            self_trained target-$target target=$target --limit 0 "${play[@]}" --method qlass -M 3 -N 1 --qnet "$net"
        done
        self_trained rft RFT --limit 0 "${play[@]}" --method rft -N 3
        self_trained tree "trees' best" --method tree
        nets=(qnet qnet-avg qnet-reward)
        for names in "${nets[@]}" "random logprob ${nets[*]}"; do  # one by one first: all at once may fill a GPU
            read -ra scorers <<< "$names"
            "$PYTHON" -m experiments.qval "${env[@]}" "${play[@]}" --references exact policy -K 8 --scorers "${scorers[@]}"
        done
        "$PYTHON" -m reporting --run "$RUN" ;;
    release)
        RUN=${run:-runs/paper-release}
        [[ -e $RUN/qnet && -e $RUN/sft ]] ||
            "$PYTHON" -m integrations.qlass_release "$RELEASE/Q" --sft "$RELEASE/sft" --out "$RUN/qnet"
        files=()
        for episode in 0 1 2; do  # of each game
            files+=("$RUN/results-$episode.jsonl")
            "$PYTHON" -m experiments.compare --env experiments.qlass_evaluation:ALFWorld --preset paper --run "$RUN" \
                --seed $episode --env-option "data=$ALFWORLD_DATA" --env-option "instruction=$ETO/alfworld_inst.txt" \
                --env-option "example=$ETO/alfworld_icl.json" --split valid_seen \
                --method sample qlass oracle_lookahead -M 2 --out "$RUN/results-$episode.jsonl" "${searches[@]}"
        done
        "$PYTHON" -m experiments.qlass_evaluation "${files[@]}" ;;
    gpu_check)  # without a GPU a small model takes the same path: that shows that this works, and its figures mean nothing
        RUN=${run:-runs/gpu-check}
        export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
        env=(--env webshop --run "$RUN")
        few=(--epochs 1 --batch 4 --micro-tokens 4096 --gradient-checkpointing --lora 8 --overwrite)
        short=(--max-new-tokens 16 --in-flight 16 --overwrite)
        "$PYTHON" -m experiments.bench model "$RUN"
        time {
            "$PYTHON" sft.py "${env[@]}" --model "$RUN/base" --n-expert 8 "${few[@]}"
            "$PYTHON" build_trees.py "${env[@]}" --limit 3 --rollouts 4 --depth 1 --steps 4 "${short[@]}"
            "$PYTHON" bellman.py --run "$RUN" --overwrite
            "$PYTHON" train_qnet.py "${env[@]}" "${few[@]}"
            "$PYTHON" q_search.py "${env[@]}" --method greedy qlass -M 2 --limit 4 --max-steps 4 "${short[@]}"
            "$PYTHON" -m experiments.tree_grpo --env webshop --preset paper --run "$RUN/grpo" --sft "$RUN/sft" \
                --env-option max_steps=2 --batch-tasks 1 -M 1 --val 1 --budget 1 --gradient-checkpointing --lora 8 --overwrite
        }
        "$PYTHON" -m experiments.bench gpu "$RUN" ;;
esac
