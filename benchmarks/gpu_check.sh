#!/usr/bin/env bash
# Everything about GPUs that is open, in calls of at most nine minutes, the most valuable first.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/out}
LIMIT=${LIMIT:-540} # seconds of a call
BATCH=${BATCH:-256}
WORK=${WORK:-work_dirs/cifar10_resnet18}
DATA=${DATA:-data/cifar10}

usage() {
    cat <<'TEXT'
usage: benchmarks/gpu_check.sh 1|2|3

Run on a machine with a GPU, PyTorch, torchvision, Triton, MMEngine, pytest and hypothesis; nothing
is installed. Each call ends within nine minutes and leaves logs, JSON and charts in one archive,
OUT/callN.tgz:

  1  steps      packing of 2:4 weights; what the host costs eager, captured and compiled steps of
                ResNet-18, and ResNet-50
  2  trainings  tests of kernels and strategies; whole trainings on CIFAR-10, as many as fit: the
                same call goes on with the rest, as long as WORK stays
  3  rest       bandwidth of pruning; steps of VGG16-SSD; machine code

Environment: OUT (benchmarks/out), PYTHON (python3), BATCH (256), LIMIT (540 seconds), WORK
(work_dirs/cifar10_resnet18), DATA (data/cifar10).
TEXT
}

# run NAME SECONDS COMMAND...: with a log of all and the end on screen; the next one runs anyway.
run() {
    local name=$1 seconds=$2 left=$((LIMIT - SECONDS))
    shift 2
    if ((left <= 5)); then
        echo "== $name: no time left" | tee "$LOGS/$name.log"
        FAILED+=("$name")
        return
    fi
    echo "== $name ($(date +%T)): $*"
    timeout --kill-after=10 "$((seconds < left ? seconds : left))" "$@" >"$LOGS/$name.log" 2>&1
    local code=$?
    tail -n 40 "$LOGS/$name.log"
    if ((code)); then
        echo "== $name ended with $code" | tee -a "$LOGS/$name.log"
        FAILED+=("$name")
    fi
}

steps() { # NAME SECONDS MODEL OPTIONS...
    local name=$1 seconds=$2 model=$3
    shift 3
    run "$name" "$seconds" "$PYTHON" tools/benchmark.py --model "$model" --dtype bfloat16 \
        --out "$LOGS/$name" "$@"
}

tests() { # NAME SECONDS PROCESSES TESTS...
    local name=$1 seconds=$2 processes=$3
    shift 3
    local split=(-n "$processes" --dist worksteal)
    "$PYTHON" -c 'import xdist' 2>/dev/null || split=()
    run "$name" "$seconds" "$PYTHON" -m pytest -q -m gpu "${split[@]}" -p no:cacheprovider \
        --junitxml="$LOGS/$name.xml" "$@"
}

call_1() {
    run versions 20 "$PYTHON" -m torch.utils.collect_env
    run packing 20 "$PYTHON" benchmarks/gpu/packing.py --out "$LOGS/packing.json"
    steps compiled_resnet18 150 resnet18 --batch "$BATCH" --strategies srste fst_w sdgp fst \
        --measure steps compiled
    run captured_resnet18 50 "$PYTHON" benchmarks/gpu/captured.py --batch "$BATCH" \
        --out "$LOGS/captured.json"
    steps steps_resnet50 60 resnet50 --batch "$BATCH" --strategies srste --measure steps
}

call_2() {
    tests tests 130 14 tests/kernels tests/strategies
    local root="dataset.data_root=$DATA" seconds=$((LIMIT - SECONDS - 30))
    run trainings "$((seconds + 20))" "$PYTHON" benchmarks/trainings.py \
        configs/ablation/cifar10_resnet18.yaml --work-dir "$WORK" --seconds "$seconds" \
        --cfg-options "train_dataloader.$root" "val_dataloader.$root" "test_dataloader.$root"
    mkdir -p "$WORK"
    tar cf "$LOGS/trainings.tar" -C "$WORK" --exclude='*.pth' .
}

call_3() {
    run pruning 100 "$PYTHON" benchmarks/gpu/pruning.py --repeats 7 --batch "$BATCH" \
        --out "$LOGS/pruning.json"
    local of_ssd=(vgg16 --size 300) # its trunk, where mmdet is not installed
    if "$PYTHON" -c 'import mmdet' 2>/dev/null; then
        of_ssd=(configs/detection/fst_ssd300_voc0712.py)
    fi
    steps steps_ssd 100 "${of_ssd[@]}" --batch 32 --strategies dense srste fst \
        --measure steps
    run compiled 60 "$PYTHON" benchmarks/gpu/compiled.py --out "$LOGS/compiled.json"
}

case ${1:-} in
-h | --help)
    usage
    exit 0
    ;;
[123]) ;;
*)
    usage >&2
    exit 2
    ;;
esac
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: $PYTHON finds no CUDA device" >&2
    exit 1
fi
SCRATCH=$(mktemp -d)
LOGS=$SCRATCH/call$1
FAILED=()
mkdir -p "$LOGS" "$OUT"
trap 'tar czf "$OUT/call$1.tgz" -C "$SCRATCH" "call$1"; rm -rf "$SCRATCH"' EXIT
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 FST_CACHE_DIR=$SCRATCH/cache
export TORCHINDUCTOR_COMPILE_THREADS=12 MAX_JOBS=12
SECONDS=0
"call_$1"
echo "== done after $SECONDS s; failed: ${FAILED[*]:-nothing}"
exit $((${#FAILED[@]} > 0))
