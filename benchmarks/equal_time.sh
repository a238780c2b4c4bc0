#!/usr/bin/env bash
# Trainings of equal time, and the frontier of sparse, narrow and wide networks, command by command.
# Each goes on where it stopped, so the script may be killed and started again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
WORK=${WORK:-work_dirs}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
DATA="cifar10 imagenette bccd"
declare -A RATES=([cifar10]="0.1 0.2 0.4" [imagenette]="0.05 0.1 0.2" [bccd]="0.01 0.02 0.04")
declare -A SIZE=([cifar10]=32 [imagenette]=128 [bccd]=192)

usage() {
    cat <<'TEXT'
usage: benchmarks/equal_time.sh times|choices|train|frontier|pages [cifar10|imagenette|bccd ...]

  times     on a quiet machine, first: a step of each contestant, and of each packed network
  choices   three learning rates for each contestant, on a validation split, one seed
  train     equal time: three seeds of all, five of the main rows
  frontier  narrow, sparse, wide and sparse
  pages     tables and figures of what is there

A rate that choices found for a setting goes into its options in configs/ablation/*_equal_time.yaml.
Data lie in data/{cifar10,imagenette,bccd}. For low priority: nice -n 15 benchmarks/equal_time.sh ...
TEXT
    exit 2
}

equal_time() { "$PYTHON" benchmarks/equal_time.py "configs/ablation/$1.yaml" "${@:2}"; }

pareto() {
    "$PYTHON" benchmarks/pareto.py "configs/ablation/$1_frontier.yaml" \
        --threads "$OMP_NUM_THREADS" --batch-size 16 --size "${SIZE[$1]}" \
        --work-dir "$WORK/$1_frontier" "${@:2}"
}

what=${1:-}
shift || usage
for data in ${@:-$DATA}; do
    grid=${data}_equal_time
    case $what in
    times)
        equal_time "$grid" --work-dir "$WORK/$grid" --dry-run
        pareto "$data" --measure-only
        ;;
    choices)
        for rate in ${RATES[$data]}; do
            equal_time "${grid}_choices" --work-dir "$WORK/${grid}_choices_$rate" \
                --times "$WORK/$grid/equal_time.json" --cfg-options "optim_wrapper.optimizer.lr=$rate"
        done
        "$PYTHON" benchmarks/choices.py "$WORK/${grid}"_choices_* --out "$WORK/${grid}_choices"
        ;;
    train)
        equal_time "$grid" --work-dir "$WORK/$grid"
        equal_time "$grid" --work-dir "$WORK/$grid" --only dense sparsetrain sampled srste \
            --seeds 0 1 2 3 4
        ;;
    frontier)
        "$PYTHON" -m fst ablate "configs/ablation/${data}_frontier.yaml" --work-dir "$WORK/${data}_frontier"
        ;;
    pages)
        equal_time "$grid" --work-dir "$WORK/$grid" --report-only
        pareto "$data" --out "$WORK/${data}_frontier/pareto"
        ;;
    *) usage ;;
    esac
done
