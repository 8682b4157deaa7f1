#!/usr/bin/env bash
# The full comparison on one environment: all methods, several seeds of all five stages, one report over them.
#   bash runs/reproduce.sh [webshop|alfworld|sciworld|frozenlake|webshop_real|alfworld_real] [--seeds N]
# By default WebShop's bundled shop, with agents of 100 demonstrations, and 3 seeds; SEED=10 begins with seed 10. Seed 0
# has the run folder runs/ENV, the others runs/ENV-seed1, ..., on WebShop runs/webshop-100, ...; the report over all is
# seeds.html in the first of them.
#   ALFWORLD_DATA=DIR bash runs/reproduce.sh alfworld_real     the real games: DIR holds json_2.1.1/, or is it
#   WEBSHOP=DIR bash runs/reproduce.sh webshop_real            the real 1,000 products, with their synthetic goals
#   MAP=lakes2 bash runs/reproduce.sh frozenlake               24 other lakes; MAP=4x4 or 8x8: one fixed lake
# On WebShop each seed also has the ablations: process rewards (Fig. 4), half of the demonstrations (Table 3), trees
# without the expert. Run it again after a stop: finished stages are kept, the others resume.
set -eo pipefail
ENV=webshop SEEDS=3 ENVS="webshop alfworld sciworld frozenlake webshop_real alfworld_real"
. "$(dirname "$0")/common.sh"
no_flags "$@"
name=$ENV flags=()
of_hundred
case $name in
    alfworld) splits=(valid_unseen valid_seen) ;;
    alfworld_real)
        ENV=alfworld splits=(valid_unseen valid_seen)
        flags=(--env-option "data=${ALFWORLD_DATA:-data/alfworld}") ;;
    sciworld)  # half of the preset's trees and of its epochs, which take hours
        splits=(test_unseen test_seen) trees=(--limit 150) qnet=(--epochs 2 "${qnet[@]}") ;;
    webshop_real)
        # DIR holds items_shuffle_1000.json, items_ins_v2_1000.json and items_human_ins.json. A product has a goal for each
        # of its combinations of options: without a limit two products are a third of the test tasks.
        ENV=webshop tasks=(--temperature 1)
        flags=(--env-option "data=${WEBSHOP:-data/webshop}" --env-option per_product=16)
        # Warm trees, since the agent's own draws hardly differ.
        demonstrations=(--n-expert 400) sft=(--epochs 16) trees=(--tasks new --limit 700 --rollouts 5 --temperature 2)
        qnet=(--patience 2 --rank-weight 0 "${qnet[@]}") ;;
esac
[ "$ENV" != frozenlake ] || [ -z "$MAP" ] || flags=(--env-option "map=$MAP")

begin() {  # SEED
    SEED=$1 RUN=$(folder_of $name "$1")
    common=(--env "$ENV" --seed "$1" "${flags[@]}")
}
main() {  # every policy on the test tasks
    clone
    learn_q "$RUN" "$RUN/sft"
    case $name in
        alfworld*)
            compare --limit 0 --method all -M 2 4
            trees_best --limit 0 ;;
        sciworld)  # a fair sample of the variations of ETO's 24 tasks
            tasks=(--limit 48)
            compare --method greedy sample likeliest qlass best_of_n -M 4
            search --method qlass -M 2
            another_qnet all --loss-on all
            variant all "cloned, QNet by Eq. 11" --method qlass -M 2 4 --qnet "$RUN/qnet-all" ;;
        frozenlake)
            compare --method all
            stage -m experiments.qval "${common[@]}" --run "$RUN" --trajectories 8 --references exact --out "$RUN/qval-exact"
            # The same QNet for an agent cloned on actions alone: the second loss costs an agent some of its reward.
            stage sft.py "${common[@]}" --run "$RUN" --out "$RUN/sft-plain"
            variant plain "agent cloned without" --sft "$RUN/sft-plain" --method greedy qlass likeliest -M 2 4 6 ;;
        *) compare --method all ;;
    esac
    [ $name = webshop_real ] || report
}
with_qnet() {  # NAME LABEL FLAG...: another QNet of the same trees
    another_qnet "$1" "${@:3}"
    variant "$1" "$2" --method qlass -M 4 --qnet "$RUN/qnet-$1"
}
retrained() {  # NAME LABEL FLAG...: the agent cloned again with its own trajectories, played greedily
    clone_again "$1" "${@:3}"
    variant "$1" "$2" --method greedy --sft "$RUN/sft-$1"
}
ablations() {  # QLASS with M = 4 each time. 300 trees would take a third of the time, but teach QNet too little.
    trees_best
    # Fig. 4: three process rewards of the same trees, to search with and to self-train with, with the loss on the last
    # token and as in Eq. (11) on all tokens. Q on the last token is the run's own QNet.
    local target q
    for target in avg reward; do
        q=$RUN/q_labels-$target.jsonl
        other_labels $target
        with_qnet $target "target=$target" --labels "$q"
        with_qnet $target-all "target=$target, loss on all tokens" --labels "$q" --loss-on all
        retrained self-$target "self-trained, target=$target" --method qlass --qnet "$RUN/qnet-$target"
    done
    with_qnet all "target=q, loss on all tokens" --loss-on all
    retrained self-q "self-trained, target=q" --method qlass
    retrained self-q-perfect "self-trained, target=q, the perfect ones" --method qlass --threshold 1  # as RFT filters
    retrained self-rft "self-trained, RFT" --method rft
    # Table 3: half of the demonstrations, and trees without the expert, whose branches would be further demonstrations.
    # 50 are too few to hold some out, so this agent gets about as many updates as the one of all demonstrations: with more
    # its draws agree more often, and QLASS has less to choose from. half-end, after 50 epochs, shows what QLASS makes up for.
    local half=$RUN/half
    stage sft.py "${common[@]}" --run "$half" --n-expert 50 --epochs 25
    learn_q "$half" "$half/sft" --no-expert
    RUN=$half compare --method all  # this agent's own table: python -m reporting RUN/half
    variant half "half of the demonstrations" --method qlass -M 2 4 6 --sft "$half/sft" --qnet "$half/qnet"
    stage sft.py "${common[@]}" --run "$half-end" --n-expert 50 --epochs 50 --batch 13
    variant half-end "half of the demonstrations, 50 epochs" --method greedy sample --sft "$half-end/sft"
    learn_q "$RUN/no-expert" "$RUN/sft" --no-expert  # trees of the whole agent
    variant no-expert "trees without expert" --method qlass -M 4 --qnet "$RUN/no-expert/qnet"
    report
}

first=$SEED runs=() parts="main"
[ $name != webshop ] || parts="main ablations"
for part in $parts; do  # the main comparison of all seeds comes first
    runs=()
    for ((seed = first; seed < first + SEEDS; seed++)); do
        begin $seed
        runs+=("$RUN")
        $part
    done
done
stage -m reporting "${runs[@]}" --out "${runs[0]}/seeds.html"
[ $name != sciworld ] || stage -m reporting.plans --rows "${runs[@]}"
