#!/usr/bin/env bash
# Which scores of a step are aligned with Q, and does alignment predict what search gains? Small agents on FrozenLake's
# random maps (dry and slippery), ALFWorld and WebShop, each with the QNets of its trees; then every score against
# reference labels, and every score steering search. It was not timed whole; JUDGE=URL#MODEL adds the language
# models' judgements: bash runs/qval.sh
set -euo pipefail
ENV=frozenlake
. "$(dirname "$0")/common.sh"
RUN=runs/qval-seed$SEED
judges=(direct direct_16 batched sequential ranking verifier delta_belief gvl codegen codegen_16 eureka)

nets() {  # FLAG...: QNets of the same trees on five targets
    for target in q avg reward td mc; do
        labels=$folder/q_labels-$target.jsonl net=$folder/qnet-$target
        [ $target = q ] && labels=$folder/q_labels.jsonl net=$folder/qnet
        case $target in
            td | mc) [ -f "$labels" ] || stage -m experiments.qval.targets "${env[@]}" --target $target --out "$labels" ;;
            *) [ -f "$labels" ] || stage bellman.py "${env[@]}" --target $target --out "$labels" ;;
        esac
        [ -d "$net" ] || stage train_qnet.py "${env[@]}" --labels "$labels" --out "$net" "$@"
    done
}
begin() {  # ENV FLAG...: the folder and the flags of an environment
    folder=$RUN/$1
    env=(--env "$1" --run "$folder" --seed "$SEED" "${@:2}")
}
qval() {  # FLAG...
    stage -m experiments.qval "${env[@]}" --base "$folder/base" "$@"
    [ -z "${JUDGE:-}" ] || stage -m experiments.qval "${env[@]}" --judge "$JUDGE" --scorers "${judges[@]}" "$@"
}

begin frozenlake --env-option map=random8
[ -d "$folder/sft" ] || stage sft.py "${env[@]}" --n-expert 200 --epochs 6
[ -d "$folder/base" ] || stage sft.py "${env[@]}" --n-expert 200 --epochs 2 --out "$folder/base"  # for log_ratio
stage build_trees.py "${env[@]}" --limit 120 --rollouts 16 --depth 10 --width 4 --steps 30 --prune tail
nets --loss-on last --epochs 4
qval --references exact expert policy --play 100
qval --env-option slippery=true --env-option stray=0 --references exact expert policy --play 100 --out "$folder/qval-slippery"
# QVAL's own design: the shortest way but for one move in ten. The step index alone has a global rho there.
qval --env-option stray=0 --actor expert --epsilon 0.1 --references exact --out "$folder/qval-shortest"

begin alfworld
[ -d "$folder/sft" ] || stage sft.py "${env[@]}" --n-expert 400
[ -d "$folder/base" ] || stage sft.py "${env[@]}" --n-expert 400 --epochs 2 --out "$folder/base"
stage build_trees.py "${env[@]}" --limit 60 --rollouts 8
nets --loss-on last --epochs 3
qval --trajectories 2 --references planner expert policy -K 4 --play 60 -M 4

begin webshop
[ -d "$folder/sft" ] || stage sft.py "${env[@]}" --n-expert 400
[ -d "$folder/base" ] || stage sft.py "${env[@]}" --n-expert 100 --out "$folder/base"
stage build_trees.py "${env[@]}" --limit 60 --rollouts 12
nets
qval --points 300 --references exact policy -K 4 --play 100 -M 4
