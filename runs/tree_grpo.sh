#!/usr/bin/env bash
# Is a token better spent in training or in search, and do the two add up? The cloned agent against what learned from its
# trees (Tree-GRPO, chain GRPO), from its failures (ETO, RFT) and from siblings by q, at equal training tokens and at equal
# environment steps; then QLASS on top of each, with the old QNet and with one of the new agent's own trees.
#
#   bash runs/tree_grpo.sh [webshop|alfworld|frozenlake] [--seeds N] [--environment FLAG...]     (webshop, 3 seeds)
#
# Seed 0 goes on in the run folder runs/ENV of reproduce.sh, the others in runs/ENV-seed1, ...; the report over all of them
# is runs/ENV/tree_grpo.html. Settings were chosen on validation tasks; the test tasks are played once.
set -euo pipefail
ENV=webshop SEEDS=3
case ${1:-} in webshop | alfworld | frozenlake) ENV=$1 && shift ;; esac
[ "${1:-}" != --seeds ] || { SEEDS=${2:?--seeds N} && shift 2; }
. "$(dirname "$0")/common.sh"
plain=("${common[@]}") runs=()
case $ENV in
    webshop) tokens=400000 env_steps=6000 rl=() ;;
    alfworld) tokens=1000000 env_steps=20000 rl=() ;;
    frozenlake) tokens=100000 env_steps=20000 rl=(--entropy 0.02 --every 2) ;;
esac

agent() {  # NAME: a trained agent, alone and searched with the cloned agent's QNet
    variant "$1" "$1" --method greedy sample --sft "$RUN/sft-$1"
    variant "$1-old" "$1, old QNet" --method qlass -M 2 4 6 --sft "$RUN/sft-$1"
}
own_qnet() {  # NAME: ... and with a QNet of its own trees
    learn_q "$RUN/$1" "$RUN/sft-$1"
    variant "$1-own" "$1, own QNet" --method qlass -M 2 4 6 --sft "$RUN/sft-$1" --qnet "$RUN/$1/qnet"
}
train() {  # MODULE NAME FLAG...: a learner at equal tokens
    stage -m "experiments.$1" "${common[@]}" --run "$RUN" --budget $tokens --name "$2" "${@:3}"
}
learn() {  # MODULE NAME FLAG...: at equal tokens as NAME, at equal environment steps as NAME-steps
    train "$@"
    agent "$2"
    stage -m "experiments.$1" "${common[@]}" --run "$RUN" --budget $env_steps --budget-in env_steps --name "$2-steps" "${@:3}"
    variant "$2-steps" "$2, equal steps" --method greedy sample --sft "$RUN/sft-$2-steps"
}
begin() {  # SEED
    SEED=$1 RUN=runs/$ENV
    [ "$1" = 0 ] || RUN+=-seed$1
    common=("${plain[@]}" --seed "$1" "${given[@]}")
}

given=("$@")
for ((seed = 0; seed < SEEDS; seed++)); do  # the main comparison of all seeds comes first
    begin $seed
    runs+=("$RUN")
    clone
    learn_q "$RUN" "$RUN/sft"
    search --method greedy sample qlass -M 2 4 6
    learn tree_grpo tree_grpo "${rl[@]}"                                # (2, 2, 1)
    learn tree_grpo grpo --rounds 0 -M 4 "${rl[@]}"                     # chains at the same nominal budget
    learn eto eto --tasks 30
    learn eto eto-siblings --pairs siblings --tasks 30
    stage -m experiments.self_train "${common[@]}" --run "$RUN" --method rft
    agent rft
done
for ((seed = 0; seed < SEEDS; seed++)); do  # does a QNet of the new agent's own trees serve it better?
    begin $seed
    own_qnet tree_grpo
    own_qnet grpo
    own_qnet eto-siblings
done
for ((seed = 0; seed < SEEDS; seed++)); do  # which advantage, and does a tree gain more where the budget a task is small?
    begin $seed
    for kind in inter intra states; do
        train tree_grpo tree-$kind --advantage $kind "${rl[@]}"
        variant tree-$kind "tree_grpo, $kind" --method greedy --sft "$RUN/sft-tree-$kind"
    done
    for shape in "1 2 1" "4 5 1"; do
        read -r M N L <<< "$shape"
        chains=$((M + M * N * L / 2))  # of the same nominal budget
        train tree_grpo tree-$M$N$L -M $M --draws $N --rounds $L "${rl[@]}"
        train tree_grpo grpo-$chains -M $chains --rounds 0 "${rl[@]}"
        variant tree-$M$N$L "tree_grpo ($M, $N, $L)" --method greedy --sft "$RUN/sft-tree-$M$N$L"
        variant grpo-$chains "grpo, $chains chains" --method greedy --sft "$RUN/sft-grpo-$chains"
    done
done
stage report.py "${runs[@]}" --out "runs/$ENV/tree_grpo.html"
