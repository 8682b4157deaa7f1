#!/usr/bin/env bash
# All five stages on WebShop's bundled catalogue with the tiny model; the agent, log-probability, QLASS and best-of-N play
# 431 test tasks. Trees and results are made by as many processes as cores are idle, four at most.
#   bash runs/demo.sh              demonstrators who err, with the settings of judges.sh --halves, in runs/demo
#   bash runs/demo.sh --perfect    demonstrators who do not, and an agent of one epoch: the preset, in runs/webshop
#   bash runs/demo.sh --check      docs/walkthrough.md's lake of sixteen cells in its place: a minute, in runs/lake
set -eo pipefail
ENV=webshop given=$RUN
. "$(dirname "$0")/common.sh"
if [ "$1" = --check ]; then
    RUN=${given:-runs/lake} common=(--env frozenlake --env-option map=4x4 --seed 3)
    stage sft.py "${common[@]}" --run "$RUN" --epochs 6 --batch 7
    stage build_trees.py "${common[@]}" --run "$RUN" \
        --depth 2 --width 2 --rollouts 6 --steps 8 --prune branch --temperature 1
    stage bellman.py "${common[@]}" --run "$RUN"
    stage train_qnet.py "${common[@]}" --run "$RUN" --epochs 40 --batch 16
    stage q_search.py "${common[@]}" --run "$RUN" --method greedy qlass -M 4 --max-steps 8
    echo "All five stages ran: ok. On our machine the agent reaches the goal from none of four starts, QLASS from three."
    exit
fi
perfect=
[ "$1" != --perfect ] || { perfect=yes && shift; }
no_flags "$@"
[[ ! $perfect || ! -e $RUN/halves.meta.json ]] || fail "$RUN has demonstrators who err: name another RUN="
if [ ! "$perfect" ]; then
    RUN=${given:-runs/demo} EXPECTED=runs/reference_output/expected.csv
    [[ -e $RUN/halves.meta.json || ! -e $RUN/expert.meta.json ]] ||
        fail "$RUN has perfect demonstrators: move it away, or name another RUN="
    if [ ! -e "$RUN/settings.toml" ]; then  # the run begins with these
        mkdir -p "$RUN"
        sed "s/^seed = .*/seed = $SEED/" runs/trained/settings.toml > "$RUN/settings.new"
        mv "$RUN/settings.new" "$RUN/settings.toml"
    fi
    stage -m experiments.demonstrators "${common[@]}" --run "$RUN" --kind halves --out "$RUN/halves.jsonl"
    sft=(--expert "$RUN/halves.jsonl")
fi
PROCESSES=${PROCESSES:-$(threads)}
[ "$PROCESSES" -le 4 ] || PROCESSES=4
trees+=(--cache-gb 0.5) tasks+=(--cache-gb 0.5)  # of each process
clone                      # stage 1: behaviour cloning (sft.py)
learn_q "$RUN" "$RUN/sft"  # stages 2 to 4: exploration trees, Bellman backup, QNet (build_trees, bellman, train_qnet)
# Stage 5: Q-guided generation, and the baselines (q_search.py). runs/reproduce.sh plays every other policy, too.
compare --method greedy likeliest qlass best_of_n -M 2 4 6
report
bin=$(dirname "$PYTHON")
[ ! -e "$bin/activate" ] || echo "Enter the environment:  source $bin/activate"
echo "Watch QNet choose:      python -m reporting.show --run $RUN -M 4"
