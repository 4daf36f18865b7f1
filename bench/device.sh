#!/usr/bin/env bash
# Everything that needs a GPU, the most important first, in under 8 minutes:
#
#   bench/device.sh            results go to $OUT, by default bench/results/<card>-<date>/
#   bench/device.sh --smoke    the same in small, on the CPU
#
# It is `python -m bench all --quick` with a time limit and without the tests of each part but those marked gpu. IMAGES is
# a folder of images for the input path (default: generated ones), PYTHON the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -gt 1 ] || [ "${1:---smoke}" != --smoke ]; then
    echo "usage: bench/device.sh [--smoke]" >&2
    exit 2
fi
if [ $# = 0 ] && ! nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null; then
    echo "bench/device.sh: nvidia-smi names no GPU; on a CPU: --smoke" >&2
    exit 2
fi
# 465 s: the parts' own limits add up to more, for they seldom need them
exec "${PYTHON:-python3}" -m bench all --quick --no-tests --seconds 465 \
    ${OUT:+--out "$OUT"} ${IMAGES:+--images "$IMAGES"} "$@"
