# Sourced by the scripts beside it, which name the environment ENV: where a run's files lie, and how a stage is called.
# Run a stopped script again: finished stages are kept, the others resume.
# SEED=1 RUN=runs/webshop-seed1 bash runs/quickstart.sh for another seed; PYTHON=... for another Python.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python}
SEED=${SEED:-0}
RUN=${RUN:-runs/$ENV}
common=(--env "$ENV" --run "$RUN" --seed "$SEED")
stage() { echo "[$((SECONDS / 60)) min $((SECONDS % 60)) s] $([ "$1" = -m ] && echo "$2" || echo "$1")"; "$PYTHON" "$@"; }
