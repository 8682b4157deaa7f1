#!/usr/bin/env bash
# The same demonstrations for agent, trees and QNet, as in the paper, in WebShop's shops of their own: the trees grow on the
# tasks that the agent was cloned from. The comparisons are planned in runs/reference_output/plans.csv; what they need is
# played first, in all shops, each on 400 test tasks.
#   bash runs/cloned.sh [SEED ...]                    1,000 demonstrations and the paper's three epochs, so that the agent
#                                                     still errs on its own tasks    (default: 161 to 170)
#   bash runs/cloned.sh --one-epoch [SEED ...]        one epoch, and trees at the paper's temperature, so that the agent
#                                                     errs about as often as the paper's    (default: 171 to 180)
#   bash runs/cloned.sh --by-heart SIZE [SEED ...]    100, 300 or 1,000 demonstrations, cloned until the agent knows its
#                                                     tasks    (default: 101 to 110, of 1,000 demonstrations 101 to 105)
# The trees have at most 6,000 rollouts in all: sixty, twenty or six on each task.
# Run it again after a stop: finished stages are kept, the others resume.
set -eo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
size=1000 name=cloned epochs=(--epochs 3) agent="cloned from 1000, 3 epochs" mode=three-epochs warmth=1.5
if [ "$1" = --by-heart ]; then
    mode=by-heart size=$2 name=equal-$2 agent="cloned from $2" epochs=(--epochs 12)
    [[ " 100 300 1000 " == *" $2 "* ]] || fail "--by-heart $2: 100, 300 or 1000 is expected"
    shift 2
    [ "$size" != 100 ] || epochs=(--epochs 34)
elif [ "$1" = --one-epoch ]; then
    mode=one-epoch name=cloned-once epochs=(--epochs 1) agent="cloned from 1000, 1 epoch" warmth=0.7
    shift
fi
numbers "$@"
case $#-$mode-$size in
    0-three-epochs-*) set -- 161 162 163 164 165 166 167 168 169 170 ;;
    0-one-epoch-*) set -- 171 172 173 174 175 176 177 178 179 180 ;;
    0-by-heart-1000) set -- 101 102 103 104 105 ;;
    0-by-heart-*) set -- 101 102 103 104 105 106 107 108 109 110 ;;
esac
tasks=(--temperature 1 --limit 400) demonstrations=(--n-expert "$size")
trees=(--tasks cloned --limit "$size" --rollouts $((6000 / size)) --temperature $warmth)
play=(--temperature 0.7)  # for QLASS the best of .5, .7 and 1 on validation tasks of shops 143 and 144
[ $mode != by-heart ] || play=()
with_qnet() {  # NAME WORDS M... -- FLAG...: a QNet, and QLASS by it
    local qnet_of=$1 label="$agent, QNet $2" sizes=()
    shift 2
    while [ "$1" != -- ]; do sizes+=("$1") && shift; done
    another_qnet "$qnet_of" "${@:2}"
    search --qnet "$RUN/qnet-$qnet_of" --label "$label" --method qlass -M "${sizes[@]}" \
        "${play[@]}" --out "$RUN/results-$qnet_of.jsonl"
}
of_rank=(--label "$agent, QNet with rank weight")
for seed; do  # what is planned
    shop $name "$seed"
    clone "${epochs[@]}"
    by_processes build_trees.py "${common[@]}" --run "$RUN" "${trees[@]}"
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}"
    compare --method greedy sample likeliest -M 6 --label "$agent" "${play[@]}" --out "$RUN/results-agent.jsonl"
    if [ $mode = three-epochs ]; then
        with_qnet rank "with rank weight" 2 4 6 --
        with_qnet all "by Eq. 11" 2 6 -- --loss-on all --rank-weight 0
        compare --qnet "$RUN/qnet-rank" "${of_rank[@]}, candidates that differ" --method qlass -M 4 --distinct \
            "${play[@]}" --out "$RUN/results-distinct.jsonl"
    else
        with_qnet rank "with rank weight" 6 --
    fi
    if [ $mode = one-epoch ]; then
        with_qnet all "by Eq. 11" 2 6 -- --loss-on all --rank-weight 0
        clone --epochs 3 --out "$RUN/sft-longer"
        variant longer "cloned from 1000, 3 epochs" --method greedy --sft "$RUN/sft-longer"
    fi
    search --qnet "$RUN/qnet-rank" "${of_rank[@]}" --method best_of_n -N 6 "${play[@]}" \
        --out "$RUN/results-best-rank.jsonl"
done
for seed; do  # beside it
    shop $name "$seed"
    [ $mode != by-heart ] || with_qnet all "by Eq. 11" 6 -- --loss-on all --rank-weight 0
    [ $mode != one-epoch ] || with_qnet rank "with rank weight" 4 --
    with_qnet last "by the last token" 6 -- --rank-weight 0
    compare --method oracle_step -M 6 --label "$agent" "${play[@]}" --out "$RUN/results-value.jsonl"
    if [ $mode != by-heart ]; then  # RFT by the trees' own steps
        again=("${epochs[@]}")
        clone_again tree --method tree
        variant tree "$agent, and from the trees' best" --method greedy --sft "$RUN/sft-tree"
    fi
done
rows $name "$@"
