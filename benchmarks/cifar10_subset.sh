#!/usr/bin/env bash
# Trains every strategy with every seed on a CIFAR-10 subset, two runs at a time, and tabulates them.
#   benchmarks/cifar10_subset.sh DATA_ROOT OUT      (PYTHON, STRATEGIES, SEEDS can be set)
# A strategy is a name, with options after commas: STRATEGIES="dense fst,phase=random".
set -euo pipefail
data=${1:?DATA_ROOT: the folder of CIFAR-10} out=${2:?OUT: the folder to write to}
python=${PYTHON:-python}
cd "$(dirname "$0")/.."
mkdir -p "$out"

train() {
  strategy=$1 seed=$2
  run="$out/$strategy-seed$seed"
  [ -e "$run/done" ] && return
  OMP_NUM_THREADS=1 "$python" tools/train.py configs/cifar10_subset.py --work-dir "$run" --seed "$seed" \
    --resume --cfg-options "sparsity.strategy=${strategy%%,*}" $(tr , '\n' <<<"$strategy" | sed '1d; s/^/sparsity./') {train,val,test}_dataloader.dataset.data_root="$data" \
    >"$run.log" 2>&1 && touch "$run/done"
}
export -f train
export out data python
for seed in ${SEEDS:-0 1}; do
  for strategy in ${STRATEGIES:-dense fst fst_w srste sdgp}; do echo "$strategy $seed"; done
done | xargs -P 2 -L 1 bash -c 'train "$@"' _
"$python" benchmarks/tabulate.py "$out" | tee "$out/table.md"
