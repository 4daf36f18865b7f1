#!/usr/bin/env bash
# Everything that needs a GPU, the most important first, in three stages of under ten minutes each:
#
#   bench/device.sh 1|2|3            results go to $OUT, by default bench/results/<card>-<date>/
#   bench/device.sh 1|2|3 --smoke    the same in small, on the CPU
#
#   1  ceilings and clocks; the tests of the step and its kernels; compute-sanitizer; ViT-S at 512, 1,024 and 2,048.
#      Needs torch, triton, timm and pytest, no DALI and no tyro.
#   2  every change of the step that waits for its proof (bench/variants); products; Nsight Compute; ViT-B; collectives
#   3  with DALI and tyro: tests of the input path and of whole runs; kinds of JPEG; threads; train.py end to end
#
# What was compiled is kept in runs/compiled for the stages that follow. IMAGES is a folder of images for the input path
# (default: generated ones), PYTHON the interpreter (default: python3). Exit code 0: all of it has run, and passed.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ! "${*:-}" =~ ^[123](\ --smoke)?$ ]]; then
    echo "usage: bench/device.sh 1|2|3 [--smoke]" >&2
    exit 2
fi
if [ $# = 1 ] && ! nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null; then
    echo "bench/device.sh: nvidia-smi names no GPU; on a CPU: --smoke" >&2
    exit 2
fi
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/runs/compiled/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/runs/compiled/triton}"
exec "${PYTHON:-python3}" -m bench all --stage "$@" ${OUT:+--out "$OUT"} ${IMAGES:+--images "$IMAGES"}
