#!/usr/bin/env bash
# Table 3 in WebShop's shops of their own (seeds 131 to 135): agents of 50 demonstrations, half of what shops.sh has,
# and trees without the expert on 1,000 training tasks that they were not cloned from. The other settings are those of
# shops.sh. 50 demonstrations are too few to hold some out, so the agent is trained for 25 epochs, about as many updates
# as the agent of 100 has. Beside it stand the same agent after 50 epochs, and an agent of all 100 demonstrations, both
# greedy. The comparisons are planned in runs/reference_output/plans.csv.
#   bash runs/half.sh [SEED ...]      (default: 131 to 135)
# Run it again after a stop: finished stages are kept, the others resume.
set -eo pipefail
ENV=webshop
. "$(dirname "$0")/common.sh"
of_hundred
numbers "$@"
[ $# -gt 0 ] || set -- 131 132 133 134 135
tasks+=(--limit 400)
half="cloned, half of the demonstrations"
for seed; do
    shop half "$seed"
    clone --n-expert 50 --epochs 25
    learn_q "$RUN" "$RUN/sft" --no-expert
    compare --method greedy likeliest -M 6 --label "$half" --out "$RUN/results-agent.jsonl"
    search --label "$half, QNet with rank weight" --method qlass -M 6 --out "$RUN/results-qlass.jsonl"
    search --label "$half, QNet with rank weight" --method best_of_n -N 6 --out "$RUN/results-best.jsonl"
    clone --n-expert 50 --epochs 50 --batch 13 --out "$RUN/sft-50"
    variant 50 "$half, 50 epochs" --sft "$RUN/sft-50" --method greedy
    RUN=$RUN/all clone
    variant all "cloned" --sft "$RUN/all/sft" --method greedy
done
rows half "$@"
