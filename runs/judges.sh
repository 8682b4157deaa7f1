#!/usr/bin/env bash
# Is it Q? The draws of one agent, and other judges that choose among them, in WebShop's shops of their own. Agent, trees and
# QNet are those of cloned.sh --one-epoch. The comparisons are planned in runs/reference_output/plans.csv; what they need is
# played first, in all shops, each on 400 test tasks.
#   bash runs/judges.sh [SEED ...]              (default: 181 to 196)
#   bash runs/judges.sh --beside [SEED ...]     what is not planned, once the plan is played: other M, second trainings
#   bash runs/judges.sh --others [SEED ...]     not planned either: other judges, one of them the next shop's QNet
#                                               (default: 184 to 188)
#   bash runs/judges.sh --free [SEED ...]       not planned: an agent of twelve epochs, which writes its actions (on 100
#                                               validation tasks of shop 207 it earns .27, of six epochs .15, of three
#                                               .00)    (default: 181 to 185)
#   bash runs/judges.sh --pilot [SEED ...]      demonstrators who err (experiments.demonstrators --kind halves) and an agent of
#                                               three epochs, on validation tasks: eight ways to grow trees and to play, of
#                                               which the best is that of --halves    (default: 207 208)
#   bash runs/judges.sh --halves [SEED ...]     the same on test tasks, beside cloning from the best paid or from the trees'
#                                               best branches, and RFT from the same trees    (default: 197 to 206)
#   KIND=mixed bash runs/judges.sh --halves 197 198 199    other errors: mixed, or noisy with agents of one epoch; not
#                                               planned, and without Eq. 11
#   bash runs/judges.sh --longer [SEED ...]     not planned, once --halves is played: its rivals for about as many training
#                                               tokens as agent and QNet    (default: 197 to 206)
#   bash runs/judges.sh --alone [SEED ...]      not planned, once --halves is played: a QNet on Q-values of trees without
#                                               demonstrations; KIND as above    (default: 197 to 199)
# The judges: QNets on Q-values with rank weight (rank) and by Eq. 11 (all); on these values permuted among siblings (placebo);
# on labels of imitation; on Q-values of trees without demonstrations (alone); and the agent cloned for three epochs (longer).
# Beside them stand an agent of five epochs, with some four fifths of the training tokens of agent and QNet, and best-of-4
# by `rank`.
# Run it again after a stop: trainings, trees and results that are there are kept, the others resume.
set -eo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
mode=planned name=judges agent="cloned from 1000, 1 epoch"
if [[ $1 == --* ]]; then
    mode=${1#--}
    [[ " beside others free pilot halves longer alone " == *" $mode "* ]] || fail "$1 is not expected"
    shift
fi
numbers "$@"
[ $mode != free ] || name=judges-free agent="cloned from 1000, 12 epochs, free text"
kind=${KIND:-halves}
case $#-$mode in
    0-others) set -- 184 185 186 187 188 ;;
    0-free) set -- 181 182 183 184 185 ;;
    0-pilot) set -- 207 208 ;;
    0-alone) set -- 197 198 199 ;;
    0-halves | 0-longer) set -- 197 198 199 200 201 202 203 204 205 206 ;;
    0-*) set -- 181 182 183 184 185 186 187 188 189 190 191 192 193 194 195 196 ;;
esac
tasks=(--temperature 0.7 --limit 400) demonstrations=(--n-expert 1000) episodes=()
trees=(--tasks cloned --limit 1000 --rollouts 6 --temperature 0.7)

judges() {  # NAME M... -- JUDGE...: search by each; lines in RUN/results-NAME.jsonl, and the table in RUN/NAME.md
    local file=$1 sizes=()
    shift
    while [ "$1" != -- ]; do sizes+=("$1") && shift; done
    mkdir -p "$RUN"
    set -- -m experiments.judges --label "$agent" --judge "${@:2}" -M "${sizes[@]}" --out "$RUN/results-$file.jsonl"
    [ "${PROCESSES:-1}" = 1 ] || on_test_tasks "$@"  # the table needs the lines of all
    PROCESSES=1 on_test_tasks "$@" > >(tee "$RUN/$file.md")  # behind a pipe a failure would leave processes
}
qnet_of() {  # NAME TARGET: RUN/qnet-NAME with rank weight, on another target than Q
    other_labels "$2"
    another_qnet "$1" --labels "$RUN/q_labels-$2.jsonl"
}
grow() {  # [NAME FLAG...]: trees and their labels, RUN/trees-NAME.jsonl and RUN/q_labels-NAME.jsonl
    local to=${1:+-$1}
    by_processes build_trees.py "${common[@]}" --run "$RUN" "${trees[@]}" "${@:2}" --out "$RUN/trees$to.jsonl"
    stage bellman.py "${common[@]}" --run "$RUN" "${labels[@]}" --trees "$RUN/trees$to.jsonl" --out "$RUN/q_labels$to.jsonl"
}
best_of() {  # N
    search --qnet "$RUN/qnet-rank" --label "$agent, QNet with rank weight" --method best_of_n -N "$1" \
        --out "$RUN/results-best.jsonl"
}

begin() {  # FLAG...: agent, trees and QNet
    clone --epochs 1 "$@"
    grow
    another_qnet rank
}
begin_alone() {  # trees without demonstrations, and their QNet
    grow alone --no-expert
    another_qnet alone --labels "$RUN/q_labels-alone.jsonl"
}

planned() {
    begin
    another_qnet all --loss-on all --rank-weight 0
    qnet_of placebo placebo
    qnet_of imitation imitation
    begin_alone
    clone --epochs 3 --out "$RUN/sft-longer"
    clone --epochs 5 --out "$RUN/sft-five"
    judges judges 6 -- "qnet=$RUN/qnet-rank" "qnet=$RUN/qnet-all" "qnet=$RUN/qnet-placebo" "qnet=$RUN/qnet-imitation" \
        "qnet=$RUN/qnet-alone" "agent=$RUN/sft-longer"
    variant agent "$agent" --method greedy
    variant five "cloned from 1000, 5 epochs" --method greedy --sft "$RUN/sft-five"
    best_of 4
}
beside() {
    local again=$((SEED + 1000))
    variant longer "cloned from 1000, 3 epochs" --method greedy --sft "$RUN/sft-longer"
    variant sample "$agent" --method sample likeliest -M 6
    judges fewer 2 4 -- "qnet=$RUN/qnet-rank" "qnet=$RUN/qnet-all" "qnet=$RUN/qnet-imitation" "agent=$RUN/sft-longer"
    another_qnet rank-again --seed $again
    clone --expert "$RUN/expert.jsonl" --epochs 3 --seed $again --out "$RUN/sft-longer-again"
    judges again 6 -- "qnet=$RUN/qnet-rank-again" "agent=$RUN/sft-longer-again"
}
others() {
    shop $name $((SEED + 1))
    begin
    shop $name $((SEED - 1))
    begin
    mkdir -p "$RUN/qnet-other"  # the QNet of the next shop, under a name of its own
    cp "${IN:-runs}/judges-$((SEED + 1))/qnet-rank/"* "$RUN/qnet-other"
    another_qnet last --rank-weight 0
    another_qnet rank-9 --rank-weight 9  # among siblings Q differs by less than labels of imitation do
    qnet_of mc mc
    stage -m experiments.tree_grpo "${common[@]}" --run "$RUN" --val 200 --budget 400000 --rounds 0 -M 4 --name grpo
    variant grpo "$agent, chain GRPO" --method greedy --sft "$RUN/sft-grpo"
    judges others 6 -- "qnet=$RUN/qnet-rank" "qnet=$RUN/qnet-last" "qnet=$RUN/qnet-rank-9" "qnet=$RUN/qnet-mc" \
        "qnet=$RUN/qnet-other" "gain=$RUN/sft-grpo,$RUN/sft" "agent=$RUN/sft-grpo" vote chance true_value
}
free() {
    begin --epochs 12 --candidates free
    variant agent "$agent" --method greedy
    judges judges 6 -- "qnet=$RUN/qnet-rank"
    best_of 4
}

demonstrators() {  # FLAG...: demonstrations by people who err
    stage -m experiments.demonstrators "${common[@]}" --run "$RUN" --kind "$kind" "${episodes[@]}" "$@"
}
err() {  # an agent cloned from them
    if [ "$kind" = noisy ]; then  # episodes of an agent of three epochs
        clone --epochs 3 --out "$RUN/sft-longer"
        episodes=(--episodes "$RUN/episodes.jsonl")
        search --sft "$RUN/sft-longer" --split train --limit 1000 --method sample --out "${episodes[1]}"
    fi
    demonstrators --out "$RUN/$kind.jsonl"
    clone --expert "$RUN/$kind.jsonl" --epochs "$epochs"
}
pilot() {
    local warmth rollouts prune of
    err
    variant agent "$agent" --method greedy sample --split val --limit 200
    for rollouts in 6 12; do
        for prune in branch tail; do
            of=$rollouts-$prune
            grow "$of" --rollouts "$rollouts" --prune "$prune" --temperature 1
            another_qnet "$of" --labels "$RUN/q_labels-$of.jsonl"
            for warmth in 0.7 1; do
                variant "$of-$warmth" "$agent, $of, $warmth" --qnet "$RUN/qnet-$of" --method qlass -M 6 --split val \
                    --limit 200 --temperature $warmth
            done
        done
    done
}
halves() {
    local judged=("qnet=$RUN/qnet-rank") half
    err
    grow
    another_qnet rank
    if [ "$kind" = halves ]; then
        another_qnet all --loss-on all --rank-weight 0
        judged+=("qnet=$RUN/qnet-all")
    fi
    qnet_of imitation imitation
    judged+=("qnet=$RUN/qnet-imitation")
    demonstrators --best 400 --out "$RUN/$kind-best.jsonl"
    clone --expert "$RUN/$kind-best.jsonl" --epochs $(((epochs * 5 + 1) / 2)) --patience 9 --out "$RUN/sft-best"
    demonstrators --trees "$RUN/trees.jsonl" --out "$RUN/$kind-branches.jsonl"
    clone --expert "$RUN/$kind-branches.jsonl" --epochs "$epochs" --out "$RUN/sft-branches"
    again=(--epochs "$epochs")
    clone_again tree --method tree
    variant agent "$agent" --method greedy sample
    judges judges 2 6 -- "${judged[@]}"
    variant best-paid "cloned from the best paid, $kind" --method greedy --sft "$RUN/sft-best"
    variant branches "cloned from the trees' best branches, $kind" --method greedy --sft "$RUN/sft-branches"
    variant tree "$agent, and from the trees' best" --method greedy --sft "$RUN/sft-tree"
    best_of 6
    case $kind in
        halves)  # not planned: the draws alone, and what each half earns on the test tasks
            variant draws "$agent" --method random likeliest -M 6
            for half in careful careless; do demonstrators --split test --kind $half --out "$RUN/$kind-$half.jsonl"; done ;;
        noisy)  # a longer cloning averages noise away
            clone --expert "$RUN/$kind.jsonl" --epochs 3 --patience 9 --out "$RUN/sft-three"
            variant three "$agent, 3 epochs" --method greedy --sft "$RUN/sft-three" ;;
    esac
}
longer() {  # an agent alone has had 1.1 M tokens, one with trees 1.1 M before the trees, agent and QNet 3.0 M
    clone --expert "$RUN/$kind-branches.jsonl" --epochs 5 --patience 9 --out "$RUN/sft-branches-five"
    variant branches-five "cloned from the trees' best branches, $kind, 5 epochs" --method greedy \
        --sft "$RUN/sft-branches-five"
    clone --expert "$RUN/self_train-tree.jsonl" --epochs 4 --patience 9 --out "$RUN/sft-tree-four"
    variant tree-four "$agent, and from the trees' best, 4 epochs" --method greedy --sft "$RUN/sft-tree-four"
    clone --expert "$RUN/$kind.jsonl" --epochs 8 --patience 9 --out "$RUN/sft-eight"
    variant eight "$agent, 8 epochs" --method greedy --sft "$RUN/sft-eight"
}
alone() {
    begin_alone
    judges alone 2 6 -- "qnet=$RUN/qnet-alone"
}
case $mode in
    pilot | halves | longer | alone)
        epochs=3 name=$kind
        [ "$kind" != noisy ] || epochs=1
        agent="cloned from 1000, $kind" tasks=(--temperature 1 --limit 400)
        trees=(--tasks cloned --limit 1000 --rollouts 6 --prune tail --temperature 1) ;;  # the best of the pilot
esac
for seed; do
    shop $name "$seed"
    $mode
done
rows $name "$@"
