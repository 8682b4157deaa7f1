#!/usr/bin/env bash
# What should one do with a step-level value? On one agent and one QNet: QLASS, the agent's log-probability, best-of-N,
# look-ahead, beam, MCTS, particles, retry, and QLASS by Math-Shepherd's target (`avg`), every token and step counted.
#
#   bash runs/tree_search.sh [webshop|alfworld|frozenlake] [--seeds N]        (webshop, 3 seeds)
#
# Trees, QNets and test tasks are fewer than elsewhere, so that a seed takes minutes; seed 0 has the run folder
# runs/ENV-searches-seed0, and so on. -c, -k and --tau were chosen on validation tasks of one seed, on ALFWorld not at all.
# Its rows of results.csv are of the agent "cloned, small", and have the splits "test 400-499" of WebShop, "valid_unseen,
# first 100" of ALFWorld, and "lakes" of FrozenLake.
set -eo pipefail
ENV=webshop SEEDS=3 ENVS="webshop alfworld frozenlake"
. "$(dirname "$0")/common.sh"
no_flags "$@"
of_hundred
c=1 k=4 tau=0.1 stop=0.9
case $ENV in
    webshop)
        c=0.3 tasks+=(--limit 100) trees+=(--limit 300) qnet=(--epochs 2 --patience 2 --rank-weight 0 "${qnet[@]}") ;;
    alfworld) tasks=(--limit 100) trees=(--limit 120) qnet=(--epochs 2 --patience 2 "${qnet[@]}") ;;
    frozenlake)
        tau=0.03 trees=(--rollouts 100) qnet=(--batch 1000 --epochs 15 --patience 15 "${qnet[@]}") ;;
esac
walk() {  # MODULE FLAG...
    by_processes -m "experiments.$1" "${common[@]}" --run "$RUN" "${tasks[@]}" "${@:2}"
}

runs=()
for ((SEED = 0; SEED < SEEDS; SEED++)); do
    RUN=runs/$ENV-searches-seed$SEED common[3]=$SEED
    runs+=("$RUN")
    clone
    learn_q "$RUN" "$RUN/sft"
    search --method greedy likeliest -M 4
    search --method qlass -M 2 4 8
    search --method best_of_n -N 2 4 8
    walk tree_search --method lookahead mcts -M 4 -S 4 8 16 -c $c
    walk tree_search --method beam -M 4 -k $k
    walk tree_search --method particles -N 4 8 --tau $tau
    walk retry -N 4 --until oracle $stop
    other_labels avg
    another_qnet avg --labels "$RUN/q_labels-avg.jsonl"
    variant avg "target=avg" --method qlass -M 4 --qnet "$RUN/qnet-avg"
done
stage -m reporting "${runs[@]}" --out "${runs[0]}/searches.html"
