#!/usr/bin/env bash
# Are the agent's own episodes better spent on a QNet or on more cloning? WebShop in shops of their own (seeds 121 to 130),
# with the demo's settings. An agent of 100 demonstrations plays 1,000 training tasks that it was not cloned from: with at
# most six rollouts on each for trees without the expert, from which a QNet learns, and with six whole episodes on each,
# of which the perfect ones are cloned (rejection-sampling fine-tuning, RFT), with sft.py's epochs for as many
# demonstrations. A tree's rollouts begin at inner nodes too, and it stops growing when none of them scores, so the trees
# have fewer steps. Then QLASS is played beside RFT's agent alone, and beside the best of three of its episodes by the
# same QNet, which costs the tokens of QLASS at M = 6. The comparisons are planned in runs/reference_output/plans.csv.
#   bash runs/equal_experience.sh [SEED ...]      (default: 121 to 130)
# IN=FOLDER for run folders elsewhere than in runs. Run it again after a stop: finished stages are kept, the others resume.
set -euo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
[[ "$*" =~ ^([0-9]+(\ |$))*$ ]] || wrong
[ $# -gt 0 ] || set -- 121 122 123 124 125 126 127 128 129 130
tasks=(--skip 0 --limit 400)
own="cloned, QNet with rank weight, trees without the expert"
rft="cloned from its own best of 6,000 episodes"
for seed; do
    SEED=$seed RUN=${IN:-runs}/experience-$seed
    common=(--env webshop --seed "$seed" --env-option "seed=$seed")
    clone
    learn_q "$RUN" "$RUN/sft" --no-expert
    stage -m experiments.self_train "${common[@]}" --run "$RUN" --method rft -N 6 --limit 1000 --no-train
    stage sft.py "${common[@]}" --run "$RUN" --expert "$RUN/self_train-rft.jsonl" --n-expert 6100 --out "$RUN/sft-rft"
    compare --method greedy likeliest -M 6 --label cloned --out "$RUN/results-agent.jsonl"
    search --label "$own" --method qlass -M 6 --out "$RUN/results-qlass.jsonl"
    variant rft "$rft" --sft "$RUN/sft-rft" --method greedy
    variant rft-best "$rft, QNet of trees without the expert" --sft "$RUN/sft-rft" --method best_of_n -N 3
done
[ $# -lt 3 ] || stage -m experiments.plans --rows "${@/#/${IN:-runs}/experience-}"
