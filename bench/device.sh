#!/usr/bin/env bash
# Everything that needs a GPU, in stages of four minutes, the most important first, in each of them too:
#
#   bench/device.sh STAGE [--limit SECONDS] [--parts NAME...]    results: $OUT, by default bench/results/<card>-<date>/
#   bench/device.sh STAGE --smoke                                the same in small, on the CPU
#
# Seconds are what is expected on an H100 or H200 with 16 cores, compiling included. Those of stage 1 but for passes,
# of stage 3, of step_vit_b and waits an H200 has measured; eight variants took it 340. A network compiles in 45 s, in
# 15 where runs/compiled has it from a stage before, and a process takes 8 s until it begins.
#
#   1  machine 12: clocks, ceilings; gpu_tests 85: the step and its kernels against the reference, in 8 processes;
#      step_vit_s 65: batch 512 as a CUDA graph, with a trace; kernels 37; passes 35: what lies between
#      the products                                                                                         234 s
#   2  variants 235: what should save more of a step, alone and together                                    235 s
#   3  data_tests 93: the decoder's memory, loader, train.py; train 54: train.py end to end; pipeline 45    192 s
#   4  products 60; sanitizer 90; counters 45; collectives 45                                                240 s
#   5  program_tests 60: resuming, fine-tuning, detection; step_vit_b 80; kinds 50: kinds of JPEG;
#      step_vit_s_compiled 35                                                                               225 s
#   6  waits 105: what train.py waits for, in several ways and with a trace; variants_later 125             230 s
#
# 3, 5 and 6 need DALI and tyro (program_tests pycocotools too), the others torch, triton, timm, rich and pytest. IMAGES
# is a folder of images for the input path (default: generated ones; batches of 512), PYTHON the interpreter (default:
# python3). Exit code 0: all of it has run, and passed. What the limit cut off is "out of time"; --parts takes it up,
# and stands behind no tests but those that it names.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ! "${1:-}" =~ ^[1-6]$ ]]; then
    echo "usage: bench/device.sh 1|2|3|4|5|6 [--smoke] [--limit SECONDS] [--parts NAME...]" >&2
    exit 2
fi
if [[ " $* " != *" --smoke "* ]] && ! nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null; then
    echo "bench/device.sh: nvidia-smi names no GPU; on a CPU: --smoke" >&2
    exit 2
fi
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/runs/compiled/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/runs/compiled/triton}"
exec "${PYTHON:-python3}" -m bench all ${OUT:+--out "$OUT"} ${IMAGES:+--images "$IMAGES"} --stage "$@"
