#!/usr/bin/env bash
# Is a token better spent in training or in search, and do the two add up? The cloned agent against what learned by
# reinforcement (Tree-GRPO, chain GRPO, GiGPO, PPO), from its failures (ETO) and from siblings by q, at equal training
# tokens (beside those of the critic's warm-up) and at equal environment steps, and from its successes (RFT, cloned anew); then QLASS on top of each, with the old
# QNet and, but for GiGPO and PPO, with one of the new agent's own trees.
#
#   bash runs/tree_grpo.sh [webshop|alfworld|frozenlake] [--seeds N] [an environment's FLAG...]  (webshop, 3 seeds)
#
# SEED=10 begins with seed 10. The agents and the run folders are those of reproduce.sh; the report over all of them is
# tree_grpo.html in the first. The settings were chosen on validation tasks.
set -eo pipefail
ENV=webshop SEEDS=3 ENVS="webshop alfworld frozenlake"
. "$(dirname "$0")/common.sh"
[[ -z $1 || $1 == --* ]] || fail "$1 is not expected"
of_hundred
[ "$ENV" != alfworld ] || splits=(valid_unseen valid_seen)
plain=("${common[@]:0:2}" "${common[@]:4}" "$@") runs=() rl=() gigpo=() siblings=(--batch-tasks 30 --every 2)
case $ENV in  # env_steps: few enough to be spent before tokens; the best checkpoint is chosen by val validation tasks
    webshop) tokens=400000 env_steps=4000 val=200 gigpo=(--normalise mean) ;;  # as in its release
    alfworld) tokens=1000000 env_steps=10000 val=100 ;;
    frozenlake)  # its trees are large, so fewer of them are a batch of siblings
        tokens=100000 env_steps=10000 val=0 rl=(--entropy 0.02 --every 2 --lr 1e-4) siblings=(--batch-tasks 10) ;;
esac

agent() {  # NAME SFT: a trained agent, alone and searched with the cloned agent's QNet
    variant "$1" "$1" --method greedy sample --sft "$2"
    variant "$1-old" "$1, old QNet" --method qlass -M 2 4 6 --sft "$2"
}
own_qnet() {  # NAME SFT: ... and with a QNet of its own trees
    learn_q "$RUN/$1" "$2"
    variant "$1-own" "$1, own QNet" --method qlass -M 2 4 6 --sft "$2" --qnet "$RUN/$1/qnet"
}
train() {  # MODULE NAME BUDGET FLAG...: a learner until `tokens` or `env_steps` are spent, continuing what is there
    stage -m "experiments.$1" "${common[@]}" --run "$RUN" --val $val --budget "${!3}" --budget-in "$3" --name "$2" "${@:4}"
}
keep() {  # NAME COPY: the agent as it is now
    rm -rf "$RUN/sft-$2" && cp -r "$RUN/sft-$1" "$RUN/sft-$2"
    cp "$RUN/sft-$1.meta.json" "$RUN/sft-$2.meta.json"  # last, since it says that the copy is complete
}
learn() {  # MODULE NAME FLAG...: one training, as NAME-tokens and NAME-env_steps what it is at either budget
    local budget
    for budget in env_steps tokens; do  # as they are spent
        [ ! "$RUN/sft-$2-$budget.meta.json" -nt "$RUN/sft.meta.json" ] || continue  # an agent cloned since is refused
        train "$1" "$2" "$budget" "${@:3}"
        keep "$2" "$2-$budget"
    done
    agent "$2" "$RUN/sft-$2-tokens"
    variant "$2-steps" "$2, equal steps" --method greedy sample --sft "$RUN/sft-$2-env_steps"
}
begin() {  # SEED
    SEED=$1 RUN=$(folder_of "$ENV" "$1")
    common=("${plain[@]}" --seed "$1")
}

first=$SEED
for ((seed = first; seed < first + SEEDS; seed++)); do  # the main comparison of all seeds comes first
    begin $seed
    runs+=("$RUN")
    clone
    learn_q "$RUN" "$RUN/sft"
    search --method greedy sample qlass -M 2 4 6
    search --method best_of_n -N 4  # search too: the same QNet picks a trajectory
    learn tree_grpo tree_grpo "${rl[@]}"                                # (2, 2, 1)
    learn tree_grpo grpo --rounds 0 -M 4 "${rl[@]}"                     # chains at the same nominal budget
    learn tree_grpo gigpo --rounds 0 -M 4 --advantage states "${gigpo[@]}" "${rl[@]}"
    learn ppo ppo "${rl[@]}"
    learn eto eto-siblings --pairs siblings "${siblings[@]}"
    learn eto eto --batch-tasks 30 --every 3
    clone_again rft --method rft
    agent rft "$RUN/sft-rft"
done
for ((seed = first; seed < first + SEEDS; seed++)); do  # does a QNet of the new agent's own trees serve it better?
    begin $seed
    for name in tree_grpo grpo eto-siblings eto; do own_qnet $name "$RUN/sft-$name-tokens"; done
    own_qnet rft "$RUN/sft-rft"
done
for ((seed = first; seed < first + SEEDS; seed++)); do  # which advantage, and does a tree gain more where the budget a task is small?
    begin $seed
    for kind in inter intra states; do
        train tree_grpo tree-$kind tokens --advantage $kind --discount 1 "${rl[@]}"
        variant tree-$kind "tree_grpo, $kind" --method greedy --sft "$RUN/sft-tree-$kind"
    done
    for shape in "1 2 1" "4 5 1"; do
        read -r M N L <<< "$shape"
        chains=$((M + M * N * L / 2))  # of the same nominal budget
        train tree_grpo tree-$M$N$L tokens -M $M --draws $N --rounds $L "${rl[@]}"
        train tree_grpo grpo-$chains tokens -M $chains --rounds 0 "${rl[@]}"
        variant tree-$M$N$L "tree_grpo ($M, $N, $L)" --method greedy --sft "$RUN/sft-tree-$M$N$L"
        variant grpo-$chains "grpo, $chains chains" --method greedy --sft "$RUN/sft-grpo-$chains"
    done
done
stage -m reporting "${runs[@]}" --out "${runs[0]}/tree_grpo.html"
