#!/usr/bin/env bash
# Everything about GPUs that is open: builds, tests and measures it, part by part.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=. PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
OUT=${OUT_DIR:-benchmarks/out}
LIMIT=${LIMIT:-540} # seconds of a part
MODELS=${MODELS:-resnet18 resnet50}
BATCH=${BATCH:-256}

usage() {
    cat <<'TEXT'
usage: benchmarks/gpu_check.sh PART

Run on a machine with a GPU, PyTorch and Triton; nothing is installed. Each part ends within nine
minutes and writes JSON and a log to benchmarks/out (OUT_DIR). In the order in which they answer:

  0  layers        dense convolutions of each model against fst's grad_weight, GEMM by GEMM
  1  tests         the Triton kernels' tests on the GPU; compute-sanitizer where there is one
  2  pruning       bandwidth of the pruning and folding kernels against a copy, torch and SDGP's
  3  grad_weight   the own weight gradient against cuDNN, dense and strided
  4  steps         whole training steps: dense, fst, srste, sdgp; of the first model compiled too
  5  kernel_steps  the same with the unverified pruning and grad_weight kernels
  6  sparse_tests  the 2:4 convolutions: build, tests, compute-sanitizer (needs nvcc and ninja)
  7  sparse        2:4 convolutions against cuDNN, layer by layer: go or no-go
  8  sparse_steps  training steps with 2:4 convolutions wherever they can run
  9  compiled      the kernels' registers and memory instructions, compiled for sm_80 and sm_90a

Environment: PYTHON (python3), OUT_DIR, MODELS ("resnet18 resnet50"), BATCH (256), LIMIT (540).
TEXT
}

# run NAME COMMAND...: within the part's time, with a log; a failure is reported and ends the part.
run() {
    local name=$1 left=$((LIMIT - SECONDS))
    shift
    if ((left <= 5)); then
        echo "$name: no time left in this part" | tee "$OUT/$name.log"
        return 1
    fi
    echo "== $name: $*"
    timeout --kill-after=30 "$left" "$@" 2>&1 | tee "$OUT/$name.log"
}

describe() {
    "$PYTHON" - >"$OUT/machine.json" <<'CODE'
import json, subprocess, sys, torch, triton
driver = subprocess.run(
    ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv"],
    capture_output=True, text=True,
).stdout
json.dump(
    {"python": sys.version, "torch": torch.__version__, "cuda": torch.version.cuda,
     "cudnn": torch.backends.cudnn.version(), "triton": triton.__version__, "driver": driver,
     "gpu": torch.cuda.get_device_name()},
    sys.stdout, indent=1,
)
CODE
    cat "$OUT/machine.json"
}

benchmark() { # NAME MODEL OPTIONS...
    local name=$1 model=$2
    shift 2
    run "$name" "$PYTHON" tools/benchmark.py --model "$model" --batch "$BATCH" --dtype bfloat16 \
        --device cuda --out "$OUT/$name" "$@"
}

part_layers() {
    for model in $MODELS; do
        benchmark "layers_$model" "$model" --no-steps --strategies dense fst
    done
}

# check NAME EXPRESSION TESTS...: pytest on the GPU, and what EXPRESSION selects in the sanitizer.
check() {
    local name=$1 selected=$2
    shift 2
    local tests=("$PYTHON" -m pytest -q -m gpu "$@" -p no:cacheprovider)
    run "$name" "${tests[@]}" --junitxml="$OUT/$name.xml"
    if command -v compute-sanitizer >/dev/null; then
        # Without torch's cache of freed memory every access outside a tensor is seen.
        for tool in memcheck racecheck; do
            PYTORCH_NO_CUDA_MEMORY_CACHING=1 run "${name}_$tool" compute-sanitizer \
                --tool "$tool" --error-exitcode 1 "${tests[@]}" -k "$selected"
        done
    else
        echo "compute-sanitizer is not installed" | tee "$OUT/${name}_sanitizer.log"
    fi
}

part_tests() {
    check tests "test_folds_like or test_bits_equal or bit_for_bit or depends_on_the_seed" \
        tests/kernels --ignore-glob='*sparse24*'
}

part_pruning() {
    run pruning "$PYTHON" benchmarks/gpu/pruning.py --batch "$BATCH" --out "$OUT/pruning.json"
}

part_grad_weight() {
    run grad_weight "$PYTHON" benchmarks/gpu/grad_weight.py --batch "$BATCH" \
        --out "$OUT/grad_weight.json"
    run grad_weight_tiles "$PYTHON" benchmarks/gpu/grad_weight.py --batch "$BATCH" --tiles \
        --kernel 3 --repeats 7 --out "$OUT/grad_weight_tiles.json"
}

part_steps() {
    for model in $MODELS; do # compiling takes minutes: the first model only
        local compile=--no-compile
        [[ $model == "${MODELS%% *}" ]] && compile=--compile
        benchmark "steps_$model" "$model" --no-layers --strategies dense fst srste sdgp $compile
    done
}

part_kernel_steps() {
    local kernels=prune_weight=triton,prune_grad_output=triton,fold_grad_output=triton
    for model in $MODELS; do
        benchmark "kernel_steps_$model" "$model" --no-layers --strategies fst srste sdgp \
            --no-compile --force-backends "$kernels,grad_weight=triton"
    done
}

part_sparse_tests() {
    run sparse_build "$PYTHON" -m fst.ops build
    check sparse_tests "test_repeats or meets_its_own or like_the_reference" \
        tests/kernels/test_sparse24.py tests/kernels/test_sparse24_layout.py \
        tests/kernels/test_sparse24_training.py
}

part_sparse() {
    run sparse "$PYTHON" benchmarks/gpu/sparse24.py --batch "$BATCH" --out "$OUT/sparse24.json" \
        --models $MODELS
    run sparse_ssd "$PYTHON" benchmarks/gpu/sparse24.py --batch 32 --models vgg16_300 \
        --out "$OUT/sparse24_vgg16.json"
}

part_sparse_steps() {
    local kernels=prune_weight=triton,grad_weight=triton
    for model in $MODELS; do
        benchmark "sparse_steps_$model" "$model" --no-layers --strategies fst fst_w \
            --no-compile --force-backends "$kernels,output=mma_sp,grad_input=mma_sp"
    done
}

part_compiled() {
    run compiled "$PYTHON" benchmarks/gpu/compiled.py --out "$OUT/compiled.json"
}

names=(layers tests pruning grad_weight steps kernel_steps sparse_tests sparse sparse_steps
    compiled)
case ${1:-} in
-h | --help)
    usage
    exit 0
    ;;
[0-9]) ;;
*)
    usage >&2
    exit 2
    ;;
esac
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: $PYTHON finds no CUDA device" >&2
    exit 1
fi
mkdir -p "$OUT"
SECONDS=0
describe
"part_${names[$1]}"
