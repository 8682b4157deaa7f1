#!/usr/bin/env bash
# Is a token better spent in training or in search, and do the two add up? The cloned agent against what learned from its
# trees (Tree-GRPO, chain GRPO), from its failures (ETO, RFT) and from siblings by q, at equal training tokens and at equal
# environment steps; then QLASS on top of each, with the old QNet and with one of the new agent's own trees.
#
#   bash runs/tree_grpo.sh [webshop|alfworld|frozenlake] [--seeds N] [--environment FLAG...]     (webshop, 3 seeds)
#
# Settings were chosen on validation tasks; the test tasks are played once. A run that was stopped is run again. Seed 0 has
# the run folder runs/tree_grpo/ENV-0; the report over all seeds is runs/tree_grpo/ENV.html.
set -euo pipefail
ENV=webshop SEEDS=3
case ${1:-} in webshop | alfworld | frozenlake) ENV=$1 && shift ;; esac
[ "${1:-}" != --seeds ] || { SEEDS=${2:?--seeds N} && shift 2; }
case $ENV in
    webshop) tokens=1000000 env_steps=40000 splits=(test) trees=() qnet=() rl=() ;;
    alfworld) tokens=1000000 env_steps=60000 splits=(valid_unseen valid_seen) qnet=(--loss-on last --epochs 4) rl=()
        trees=(--limit 300 --rollouts 10) ;;
    frozenlake) tokens=10000 env_steps=20000 splits=(test) qnet=(--epochs 40) rl=(--entropy 0.02 --every 2)
        trees=(--rollouts 60 --width 4) ;;
esac
. "$(dirname "$0")/common.sh"

play() {  # NAME LABEL FLAG...: test tasks with what the flags say
    for split in "${splits[@]}"; do
        stage q_search.py "${common[@]}" --split "$split" --out "$RUN/results-$1.jsonl" --label "$2" "${@:3}"
    done
}
agent() {  # NAME: a trained agent, alone and searched with the cloned agent's QNet
    play "$1" "$1" --method greedy sample --sft "$RUN/sft-$1"
    play "$1-old" "$1, old QNet" --method qlass -M 2 4 6 --sft "$RUN/sft-$1"
}
own_qnet() {  # NAME: ... and with a QNet of its own trees
    local own=(--env "$ENV" --run "$RUN/$1" --seed "$SEED" "${given[@]}")
    stage build_trees.py "${own[@]}" --sft "$RUN/sft-$1" "${trees[@]}"
    [ -f "$RUN/$1/q_labels.jsonl" ] || stage bellman.py "${own[@]}"
    [ -d "$RUN/$1/qnet" ] || stage train_qnet.py "${own[@]}" --sft "$RUN/sft-$1" "${qnet[@]}"
    play "$1-own" "$1, own QNet" --method qlass -M 2 4 6 --sft "$RUN/sft-$1" --qnet "$RUN/$1/qnet"
}
learn() {  # MODULE NAME FLAG...: at equal tokens as NAME, at equal environment steps as NAME-steps
    stage -m "experiments.$1" "${common[@]}" --budget $tokens --name "$2" "${@:3}"
    stage -m "experiments.$1" "${common[@]}" --budget $env_steps --budget-in env_steps --name "$2-steps" "${@:3}"
    agent "$2"
    play "$2-steps" "$2, equal steps" --method greedy sample --sft "$RUN/sft-$2-steps"
}

given=("$@") runs=()
for ((SEED = 0; SEED < SEEDS; SEED++)); do
    RUN=runs/tree_grpo/$ENV-$SEED
    runs+=("$RUN")
    common=(--env "$ENV" --run "$RUN" --seed "$SEED" "${given[@]}")
    [ -d "$RUN/sft" ] || stage sft.py "${common[@]}"
    stage build_trees.py "${common[@]}" "${trees[@]}"
    [ -f "$RUN/q_labels.jsonl" ] || stage bellman.py "${common[@]}"
    [ -d "$RUN/qnet" ] || stage train_qnet.py "${common[@]}" "${qnet[@]}"
    for split in "${splits[@]}"; do
        stage q_search.py "${common[@]}" --split "$split" --method greedy sample qlass -M 2 4 6
    done

    learn tree_grpo tree_grpo "${rl[@]}"                                # (2, 2, 1)
    learn tree_grpo grpo --rounds 0 -M 4 "${rl[@]}"                     # chains at the same nominal budget
    learn eto eto
    learn eto eto-siblings --pairs siblings
    [ -d "$RUN/sft-rft" ] || stage -m experiments.self_train "${common[@]}" --method rft
    agent rft
    own_qnet tree_grpo
    own_qnet grpo

    # Which advantage, and does a tree gain more where the budget a task is small? Greedy only.
    for kind in inter intra states; do
        stage -m experiments.tree_grpo "${common[@]}" --budget $tokens --name tree-$kind --advantage $kind "${rl[@]}"
        play tree-$kind "tree_grpo, $kind" --method greedy --sft "$RUN/sft-tree-$kind"
    done
    for shape in "1 2 1" "4 5 1"; do
        read -r M N L <<< "$shape"
        chains=$((M + M * N * L / 2))  # of the same nominal budget
        stage -m experiments.tree_grpo "${common[@]}" --budget $tokens --name tree-$M$N$L -M $M --draws $N --rounds $L "${rl[@]}"
        stage -m experiments.tree_grpo "${common[@]}" --budget $tokens --name grpo-$chains -M $chains --rounds 0 "${rl[@]}"
        play tree-$M$N$L "tree_grpo ($M, $N, $L)" --method greedy --sft "$RUN/sft-tree-$M$N$L"
        play grpo-$chains "grpo, $chains chains" --method greedy --sft "$RUN/sft-grpo-$chains"
    done
done
stage report.py "${runs[@]}" --out "runs/tree_grpo/$ENV.html"
