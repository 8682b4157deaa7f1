#!/usr/bin/env bash
# Which scores of a step are aligned with Q, and does alignment predict what search gains? In the run folder of
# reproduce.sh, with its agent, trees and QNet: QNets on four more targets, every score as the one that search follows, and
# every score against reference labels, on test tasks.
#
#   bash runs/qval.sh webshop|alfworld|frozenlake
#   JUDGE=FOLDER bash runs/qval.sh webshop    also a language model's judgements: a checkpoint's or URL#MODEL's
set -eo pipefail
ENV=webshop ENVS="webshop alfworld frozenlake"
. "$(dirname "$0")/common.sh"
no_flags "$@"
of_hundred

nets() {  # the agent, its QNet, and nets of the same trees on other targets
    learn_q "$RUN" "$RUN/sft"
    for target in avg reward td mc; do
        other_labels $target
        another_qnet $target --labels "$RUN/q_labels-$target.jsonl"
    done
}
play() {  # NAME FLAG...: search with every score that can steer it, at one budget
    played=(--results "$RUN/$1/results.jsonl")  # apart from the run's own: on slippery ice they are of another environment
    local judges=(random untried code tree_bellman tree_average tree_plain logprob logprob_token vote_share value_gain
        self_distillation "qnet=$RUN/qnet" "qnet=$RUN/qnet-avg" "qnet=$RUN/qnet-reward" "qnet=$RUN/qnet-td" "qnet=$RUN/qnet-mc")
    stage -m experiments.judges "${common[@]}" --run "$RUN" "${tasks[@]}" --judge "${judges[@]}" \
        --out "${played[1]}" "${@:2}"
}
qval() {  # NAME FLAG...: every score against reference labels
    stage -m experiments.qval "${common[@]}" --run "$RUN" --out "$RUN/$1" "${@:2}"
}
judge() {  # FLAG...: every score and those of JUDGE, where there is one; a small model's replies are short
    [ -n "$JUDGE" ] || return 0
    local flags=("$@" --references exact --judge "$JUDGE" --cache-gb 5)
    qval judge "${flags[@]}" --precision float32 --scorers random verifier delta_belief  # bf16 is coarse
    local short=(--precision bf16 --judge-tokens)
    qval judge "${flags[@]}" "${short[@]}" "${JUDGE_TOKENS:-8}" --scorers random direct sequential direct_16
    qval judge "${flags[@]}" "${short[@]}" "${JUDGE_TOKENS:-24}" --scorers random batched ranking
    qval judge "${flags[@]}"
}

clone
case $ENV in
    webshop)
        nets
        play qval --limit 100 -M 4
        qval qval --points 300 --trajectories 3 "${played[@]}" --references exact policy -K 4
        judge --points 100 --trajectories 3 ;;
    alfworld)
        nets
        play qval --limit 70 -M 4
        qval qval --points 200 --trajectories 2 "${played[@]}" --references exact policy -K 2 ;;
    frozenlake)
        nets
        play qval -M 6
        qval qval --points 200 --trajectories 8 "${played[@]}" --references exact policy -K 32
        judge --points 200 --trajectories 8
        slippery=(--env-option slippery=true --env-option stray=0)
        play slippery -M 6 "${slippery[@]}"
        qval slippery --points 200 --trajectories 8 "${played[@]}" "${slippery[@]}" --references exact ;;
esac
