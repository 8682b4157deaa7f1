# Sourced by the scripts beside it, which name the environment ENV: where a run's files lie, and how stages are called.
# The settings are those of qlass/presets; a script says what it sets otherwise, in the arrays below. A script that names
# `ENVS` of environments or a number of SEEDS takes them as arguments.
# Run a stopped script again: finished stages are kept, the others resume.
# SEED=1 RUN=runs/demo-1 bash runs/demo.sh for another seed; PYTHON=... for another Python; EPOCHS=8 for a longer
# training of QNet; PROCESSES=4 for trees and results by four processes (not in paper.sh); RANK_WEIGHT=0 for the paper's
# QNet; IN=FOLDER for the run folders of shops elsewhere than in runs.
# All scripts run under bash 3.2, which macOS has: an empty array is an error there under `set -u`, so no script sets it.
[ "$1" != --help ] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
fail() { echo "error: $1 (bash runs/$(basename "$0") --help)" >&2 && exit 2; }
no_flags() { [ $# = 0 ] || fail "$1 is not expected"; }
numbers() { [[ "$*" =~ ^[0-9\ ]*$ ]] || fail "$*: whole numbers are expected, which are seeds"; }
if [[ -n $ENVS && -n $1 && $1 != --* ]]; then
    [[ " $ENVS " == *" $1 "* ]] || fail "$1: choose one of $ENVS"
    ENV=$1 && shift
fi
if [[ -n $SEEDS && $1 == --seeds ]]; then
    [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "--seeds $2: a number of seeds is expected"
    SEEDS=$2 && shift 2
fi
unset CDPATH  # in which bash looks first
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "${PYTHON:-python}: is not Python 3.11 or newer: PYTHON= names one"
SEED=${SEED:-0}
RUN=${RUN:-runs/$RUN_PREFIX$ENV}
common=(--env "$ENV" --seed "$SEED")
# glibc hands large blocks back to the kernel at once, and asks for them again at the next update.
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_TOP_PAD_=67108864
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-20000}  # threads wait asleep, not spinning, where others need the cores too

# demonstrations: which of them the agent is cloned from. again: of an agent that is cloned again from all of its file
bundled=webshop  # the name of run folders of WebShop's bundled shop
tasks=() demonstrations=() sft=() trees=() labels=() again=()
qnet=(${EPOCHS:+--epochs "$EPOCHS" --patience "$EPOCHS"} ${RANK_WEIGHT:+--rank-weight "$RANK_WEIGHT"})
splits=("")  # the preset's
of_hundred() {  # On WebShop: agents of 100 demonstrations, warm trees on other tasks, and run folders apart from the preset's
    [ "$ENV" = webshop ] || return 0
    demonstrations=(--n-expert 100) sft=(--epochs 34) trees=(--tasks new --temperature 1.5) tasks=(--temperature 1)
    again=(--epochs 12)  # fewer epochs of more demonstrations make about as many updates
    bundled=webshop-100
    [ "$RUN" != runs/webshop ] || RUN=runs/$bundled
}
[ "$ENV" != frozenlake ] || [ -z "$MAP" ] || common+=(--env-option "map=$MAP")

folder_of() {  # NAME SEED
    local name=$1
    [ "$1" != webshop ] || name=$bundled
    [ "$2" = 0 ] && echo "runs/$name" || echo "runs/$name-seed$2"
}
shop() {  # NAME SEED: one of WebShop's shops, with a catalogue and tasks of its own
    SEED=$2 RUN=${IN:-runs}/$1-$2
    common=(--env webshop --seed "$2" --env-option "seed=$2")
}
rows() {  # NAME SEED...: the rows for results.csv
    local name=$1 folders=() seed
    shift
    for seed in "$@"; do folders+=("${IN:-runs}/$name-$seed"); done
    [ $# -lt 2 ] || stage -m reporting.plans --rows "${folders[@]}"
}
threads() {  # as many as cores are idle now: one that waits for a core keeps all the others waiting
    local a b i all=0
    [ -r /proc/stat ] || { getconf _NPROCESSORS_ONLN && return; }
    { read -ra a && sleep 0.3 && read -ra b < /proc/stat; } < /proc/stat
    for i in 1 2 3 4 5 6 7 8; do all=$((all + b[i] - a[i])); done
    i=$((all > 0 ? ((b[4] - a[4]) * $(getconf _NPROCESSORS_ONLN) + all / 2) / all : 1))
    echo $((i > 0 ? i : 1))
}
own_over_usual() {  # WORD...: in `words` all but a flag, with its values, that stands there again
    local i later again=
    words=()
    for ((i = 1; i <= $#; i++)); do
        if [[ ${!i} = -* ]]; then
            again=
            for later in "${@:i+1}"; do [[ ${!i} = --env-option || $later != "${!i}" ]] || again=yes; done
        fi
        [ "$again" ] || words+=("${!i}")
    done
}
stage() {
    local words
    own_over_usual "$@" && set -- "${words[@]}"
    echo "[$((SECONDS / 60)) min $((SECONDS % 60)) s] $([ "$1" = -m ] && echo "$2" || echo "$1")"
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(threads)} "$PYTHON" "$@"
}
by_processes() {  # as `stage`: trees or results, whose tasks PROCESSES of one thread each share
    local n=${PROCESSES:-1} i others=() words  # LOCAL_RANK: with GPUS= each process has one of its own
    own_over_usual "$@" && set -- "${words[@]}"
    if [ "$n" = 1 ]; then stage "$@"; return; fi  # behind && its failure would not end the script
    mkdir -p "$RUN"
    for ((i = 1; i < n; i++)); do
        RANK=$i LOCAL_RANK=${GPUS:+$i} WORLD_SIZE=$n OMP_NUM_THREADS=1 "$PYTHON" "$@" > "$RUN/process-$i.log" 2>&1 &
        others+=($!)
    done
    RANK=0 WORLD_SIZE=$n OMP_NUM_THREADS=1 stage "$@"
    for ((i = 1; i < n; i++)); do
        wait "${others[i - 1]}" || { tail -n 5 "$RUN/process-$i.log" >&2 && exit 1; }
        rm "$RUN/process-$i.log"
    done
}
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT  # Ctrl-C ends the first of the processes only
clone() {  # FLAG...: stage 1, behaviour cloning; on FrozenLake with a second loss, else QNet cannot tell moves apart
    local cloning=(sft.py)
    [ "$ENV" != frozenlake ] || cloning=(-m experiments.clone_answers)
    stage "${cloning[@]}" "${common[@]}" --run "$RUN" "${demonstrations[@]}" "${sft[@]}" "$@"
}
clone_again() {  # NAME FLAG...: RUN/sft-NAME, the agent cloned from its demonstrations and trajectories of its own
    local demonstrations=()
    stage -m experiments.self_train "${common[@]}" --run "$RUN" --name "$1" "${@:2}"
    clone --expert "$RUN/self_train-$1.jsonl" "${again[@]}" --out "$RUN/sft-$1"
}
learn_q() {  # FOLDER SFT FLAG...: stages 2 to 4, exploration trees of an agent, their Bellman backup and a QNet, in FOLDER
    local here=("${common[@]}" --run "$1") agent=(--sft "$2")
    by_processes build_trees.py "${here[@]}" "${agent[@]}" "${trees[@]}" "${@:3}"
    stage bellman.py "${here[@]}" "${labels[@]}"
    stage train_qnet.py "${here[@]}" "${agent[@]}" "${qnet[@]}"
}
other_labels() {  # TARGET: RUN/q_labels-TARGET.jsonl, of the same trees
    stage -m experiments.targets "${common[@]}" --run "$RUN" "${labels[@]}" --target "$1" --out "$RUN/q_labels-$1.jsonl"
}
another_qnet() {  # NAME FLAG...: RUN/qnet-NAME, of the same trees
    stage train_qnet.py "${common[@]}" --run "$RUN" "${qnet[@]}" "${@:2}" --out "$RUN/qnet-$1"
}
search() { on_test_tasks q_search.py "$@"; }                # FLAG...: stage 5, Q-guided generation
compare() { on_test_tasks -m experiments.compare "$@"; }  # FLAG...: beside it rules, experts, oracles
on_test_tasks() {
    local command=("$1") split && shift
    [ "${command[0]}" != -m ] || { command+=("$1") && shift; }
    for split in "${splits[@]}"; do
        by_processes "${command[@]}" "${common[@]}" --run "$RUN" ${split:+--split "$split"} "${tasks[@]}" "$@"
    done
}
variant() {  # NAME LABEL FLAG...: test tasks with another agent or QNet, distinguished by the label
    search --out "$RUN/results-$1.jsonl" --label "$2" "${@:3}"
}
trees_best() {  # FLAG...: the agent cloned again from its demonstrations and the best branches that it ended in the trees
    clone_again tree --method tree
    variant tree "SFT on trees' best" "$@" --method greedy --sft "$RUN/sft-tree"
}
report() {  # EXPECTED: a file of ranges, of which each is said to hold the run's reward or not
    stage -m reporting --run "$RUN" --out "$RUN/report.html" ${EXPECTED:+--expected "$EXPECTED"}
}
