#!/usr/bin/env bash
# Which scores of a step are aligned with Q, and does alignment predict what search gains? Small agents on FrozenLake's
# random maps (dry and slippery), ALFWorld, WebShop and ScienceWorld (reduced, and noisy), all but the last with the
# QNets of their trees; then every score against reference labels, and every score steering search. 82 minutes on one
# core, with the other one busy.
#
#   bash runs/qval.sh [frozenlake|alfworld|webshop|sciworld]...        (default: all)
#
# JUDGE=URL#MODEL adds the judgements of a language model; SMOKE=1 tries every line with a few tasks each.
set -euo pipefail
environments=("$@")
[ $# -gt 0 ] || environments=(frozenlake alfworld webshop sciworld)
for environment in "${environments[@]}"; do
    case $environment in frozenlake | alfworld | webshop | sciworld) continue ;; esac
    echo "error: $environment: bash runs/qval.sh [frozenlake|alfworld|webshop|sciworld]..." >&2 && exit 2
done
ENV=frozenlake
. "$(dirname "$0")/common.sh"
RUN=runs/qval-seed$SEED
[ -z "${SMOKE:-}" ] || RUN=runs/qval-smoke
judges=(direct direct_16 batched sequential ranking verifier delta_belief gvl codegen codegen_16 eureka)

n() { [ -z "${SMOKE:-}" ] && echo "$1" || echo "$2"; }  # NUMBER, what a trial makes of it
begin() {  # ENV FLAG...: the folder and the flags of an environment
    folder=$RUN/$1
    env=(--env "$1" --run "$folder" --seed "$SEED" "${@:2}")
}
agents() {  # FLAG...: the agent, and one of few epochs that log_ratio holds it against
    [ -z "${SMOKE:-}" ] || set -- "$@" --n-expert 10 --epochs 1
    stage sft.py "${env[@]}" "$@"
    stage sft.py "${env[@]}" "$@" --epochs 2 --out "$folder/base"
}
nets() {  # GAMMA FLAG...: QNets of the same trees on five targets
    for target in q avg reward td mc; do
        values=$folder/q_labels-$target.jsonl net=$folder/qnet-$target
        [ $target = q ] && values=$folder/q_labels.jsonl net=$folder/qnet
        maker=bellman.py
        case $target in td | mc) maker="-m experiments.qval.targets" ;; esac
        # shellcheck disable=SC2086
        stage $maker "${env[@]}" --gamma "$1" --target $target --out "$values"
        stage train_qnet.py "${env[@]}" --labels "$values" --out "$net" "${@:2}"
    done
}
play() {  # TASKS FLAG...: search with every score that can steer it, at one budget
    stage q_search.py "${env[@]}" --limit "$(n "$1" 3)" --method greedy random qlass scorer "${@:2}"
    [ -z "${JUDGE:-}" ] || stage q_search.py "${env[@]}" --limit "$(n "$1" 3)" --method scorer \
        --scorer "${judges[@]/%/=$JUDGE}" "${@:2}"
}
qval() {  # POINTS FLAG...
    stage -m experiments.qval "${env[@]}" --points "$(n "$1" 12)" "${@:2}"
    [ -z "${JUDGE:-}" ] ||
        stage -m experiments.qval "${env[@]}" --points "$(n "$1" 12)" "${@:2}" --judge "$JUDGE" --scorers "${judges[@]}"
}

frozenlake() {
    begin frozenlake --env-option map=random8
    agents --n-expert 200 --epochs 6
    stage build_trees.py "${env[@]}" --limit "$(n 120 4)" --rollouts 16 --depth 10 --width 4 --steps 30 --prune tail
    nets 0.95 --loss-on last --epochs "$(n 4 1)"
    play 100 -M 6 --temperature 1.5
    qval 200 --references exact expert policy -K "$(n 32 2)" --results "$folder/results.jsonl"
    slippery=(--env-option slippery=true --env-option stray=0)
    play 60 -M 6 --temperature 1.5 "${slippery[@]}" --out "$folder/results-slippery.jsonl" --label slippery
    qval 200 "${slippery[@]}" --references exact expert -K "$(n 32 2)" \
        --results "$folder/results-slippery.jsonl" --out "$folder/qval-slippery"
    # QVAL's own design: the shortest way but for one move in ten. The step index alone has a global rho there.
    qval 200 --env-option stray=0 --actor expert --epsilon 0.1 --references exact --out "$folder/qval-shortest"
}
alfworld() {
    begin alfworld
    agents
    stage build_trees.py "${env[@]}" --limit "$(n 40 2)" --rollouts 8
    nets 0.98 --loss-on last --epochs "$(n 2 1)"
    play 30 -M 4
    qval 200 --trajectories 2 --references planner expert policy -K "$(n 2 1)" --results "$folder/results.jsonl"
}
webshop() {  # trees, discount and epochs as in common.sh, on fewer tasks
    begin webshop
    agents
    stage build_trees.py "${env[@]}" --limit "$(n 160 2)" --rollouts 6 --temperature 2
    nets 0.98 --epochs "$(n 3 1)"
    play 60 -M 4
    qval 300 --trajectories 3 --references exact policy -K "$(n 4 1)" --results "$folder/results.jsonl"
}
sciworld() {  # no reference but the agent's own few rollouts from few states: a look, not a measurement
    begin sciworld --tasks eto
    stage sft.py "${env[@]}" --n-expert "$(n 60 6)" --epochs "$(n 4 1)" --batch 4
    # Controls alone, so that the report has its page: a restore replays the episode.
    stage q_search.py "${env[@]}" --split test_unseen --limit "$(n 24 2)" --method greedy random -M 4
    qval 20 --split test_unseen --references policy -K "$(n 2 1)" --candidates 3
}

for environment in "${environments[@]}"; do "$environment"; done
results=("$RUN"/*/results*.jsonl)
[ ! -f "${results[0]}" ] || stage report.py "${results[@]}" --out "$RUN/report.html"
folders=()
for record in "$RUN"/*/qval*/alignment.json; do
    [ -f "$record" ] || continue
    case $record in *shortest* | *sciworld*) ;; *) folders+=("$(dirname "$record")") ;; esac
done
[ ${#folders[@]} = 0 ] || stage -m experiments.qval.downstream "${folders[@]}" --out "$RUN/downstream.md"
