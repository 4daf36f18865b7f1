#!/usr/bin/env bash
# Everything that needs a GPU, the most important first, in under 8 minutes:
#
#   bench/device.sh            results go to $OUT, by default bench/results/<card>-<date>/
#   bench/device.sh --smoke    the same in small, on the CPU
#
# Every part has a time limit of its own and leaves <part>.json as it goes; a part that fails stops no other. All output
# is in log.txt, with a summary at its end. The exit code is the number of failed parts. IMAGES is a folder of
# images for the input path (default: generated ones), PYTHON the interpreter (default: python3).
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
smoke=()
if [ "${1:-}" = --smoke ]; then
    smoke=(--smoke)
    export CUDA_VISIBLE_DEVICES=
elif [ $# -gt 0 ]; then
    echo "usage: bench/device.sh [--smoke]" >&2
    exit 2
fi
card=cpu
if [ ${#smoke[@]} = 0 ]; then
    card=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs '[:alnum:]\n' -)
    [ -n "$card" ] || { echo "bench/device.sh: nvidia-smi names no GPU; on a CPU: --smoke" >&2; exit 2; }
fi
out=${OUT:-bench/results/$card-$(date +%F)}
mkdir -p "$out"
: >"$out/log.txt"
images=()
[ -z "${IMAGES:-}" ] || images=(--images "$IMAGES")

deadline=$((SECONDS + 465)) # seconds; the parts' own limits add up to more, for they seldom need them
failed=0
summary=()

# part NAME SECONDS SUBJECT [OPTIONS]
part() {
    local name=$1 limit=$2 start=$SECONDS code state
    shift 2
    rm -f "$out/$name.json"
    [ $limit -le $((deadline - SECONDS)) ] || limit=$((deadline - SECONDS))
    if [ $limit -le 5 ]; then
        code=124
    else
        echo "== $name: python -m bench $*"
        timeout --kill-after=5 $limit "$python" -m bench "$@" ${smoke[@]+"${smoke[@]}"} --json "$out/$name.json" 2>&1
        code=$?
    fi
    case $code in
        0) state=ok ;;
        124 | 137) state="out of time" ;;
        *) state="failed, exit code $code" ;;
    esac
    if [ $code = 0 ] && grep -qs '^ "skipped": "' "$out/$name.json"; then
        state=$(sed -n 's/^ "skipped": "\(.*\)",*$/skipped: \1/p' "$out/$name.json")
    fi
    [ $code = 0 ] || failed=$((failed + 1))
    summary+=("$(printf '%-16s %4d s  %s' "$name" $((SECONDS - start)) "$state")")
}

{
    part machine 40 machine
    part gpu_tests 130 gpu_tests
    part kernels 80 kernels
    part step_vit_s 120 step --recipe imagenet-vit-s --batch-size 512
    part step_vit_b 120 step --recipe imagenet-vit-b --batch-size 512
    part pipeline 60 pipeline ${images[@]+"${images[@]}"}
    part train 60 train ${images[@]+"${images[@]}"}
    echo "== $SECONDS s, $failed failed, results in $out"
    printf '%s\n' "${summary[@]}"
    exit $failed
} | tee -a "$out/log.txt"
