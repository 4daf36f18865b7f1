#!/usr/bin/env bash
# What pretraining is worth: APS against training from scratch, against uniform sampling and against one group, on labelled
# images, with several seeds. About an hour on two cores, with CIFAR-10 as class folders of images:
#
#   DATA=cifar10/train EVAL=cifar10/test bench/learning.sh
#   python -m bench learning runs/learning          the table, also while the runs go on
#
# All arms take the same number of optimizer steps of pretraining (one group: from four times as many loaded images) and
# the same fine-tuning. "scratch" is the fine-tuning alone, "scratch-long" takes as much arithmetic as pretraining (a pair
# is 2 x 17 tokens, an image 65) and fine-tuning together. Not among the default ARMS: window-N takes the groups of N
# batches in turn, redeal-N deals their images anew for each step; key-gelu and fp8-keys are pretraining with these variants
# of the step (bench/variants), whose momentum networks compute in another form (--ema has to be given).
# Runs that are complete are left alone and others continued, so the same command goes on after a stop.
# Settings by the environment: OUT, SEEDS, ARMS, JOBS (runs at a time), TRAIN_IMAGES and EVAL_IMAGES (as many of each class, evenly
# spaced; 0: all), KNN_IMAGES (a quarter as many queries), EPOCHS of pretraining, TUNE_EPOCHS (0: none) and LONG_EPOCHS of
# fine-tuning, MODEL and TUNE (further options).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
OUT=${OUT:-runs/learning}
: "${DATA:?a folder of training images in class folders}" "${EVAL:?a folder of evaluation images in the same classes}"
SEEDS=${SEEDS:-0 1 2} JOBS=${JOBS:-2} ARMS=${ARMS:-aps uniform one-group scratch scratch-long}
EPOCHS=${EPOCHS:-3} TUNE_EPOCHS=${TUNE_EPOCHS:-3} LONG_EPOCHS=${LONG_EPOCHS:-$((TUNE_EPOCHS + 2 * EPOCHS))}
MODEL=${MODEL:---depth 4 --patch-size 4 --batch-size 128 --head-hidden 512}
# A few epochs are too short for the regularisation of a hundred.
TUNE=${TUNE:---lr 1e-3 --warmup-epochs 0.5 --mixup 0 --cutmix 0 --erasing 0 --operations 1 --drop-path 0 --ema 0 --batch-size 64}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"
"$python" -m bench learning "$OUT" --list "$DATA" --images "${TRAIN_IMAGES:-10000}" >"$OUT/train.txt"
"$python" -m bench learning "$OUT" --list "$EVAL" --images "${EVAL_IMAGES:-2000}" >"$OUT/eval.txt"

data="--data $OUT/train.txt --eval-data $OUT/eval.txt --threads 1 --log-every 50"
program=train.py
pretrain() { # ARM SEED EPOCHS [OPTIONS]: pretraining by $program, then fine-tuning
    local run=$OUT/$1-$2
    echo "[ -e $run/encoder/config.json ] || $python $program --recipe cifar-vit-t $data --seed $2 --output $run --epochs $3" \
        "--warmup-epochs $(awk "BEGIN { print $3 / 10 }") --knn-images ${KNN_IMAGES:-${TRAIN_IMAGES:-10000}} $MODEL ${*:4} >$run.log 2>&1;" \
        "$(tune "$1" "$2" "$TUNE_EPOCHS" --encoder "$run")"
}
tune() { # ARM SEED EPOCHS [OPTIONS]: fine-tuning alone
    local run=$OUT/$1-$2-tuned
    [ "$3" = 0 ] && echo : && return
    echo "[ -e $run/model/config.json ] || $python finetune.py --recipe cifar $data --eval-every 100 --seed $2 --output $run" \
        "--epochs $3 $TUNE ${*:4} >$run.log 2>&1"
}
shape=$(echo "$MODEL" | grep -oE -- '--(depth|patch-size) [0-9]+' | tr '\n' ' ')
for seed in $SEEDS; do
    for arm in $ARMS; do
        case $arm in
            aps) pretrain "$arm" "$seed" "$EPOCHS" ;;
            uniform) pretrain "$arm" "$seed" "$EPOCHS" --power 0 ;;
            one-group) pretrain "$arm" "$seed" $((4 * EPOCHS)) --groups 1 ;;
            window-*) pretrain "$arm" "$seed" "$EPOCHS" --window "${arm#*-}" ;;
            key-gelu | fp8-keys) program="-m bench.variants.pretrain $arm" pretrain "$arm" "$seed" "$EPOCHS" ;;
            redeal-*) pretrain "$arm" "$seed" "$EPOCHS" --window "${arm#*-}" --redeal ;;
            scratch) tune "$arm" "$seed" "$TUNE_EPOCHS" --encoder none $shape ;;
            scratch-long) tune "$arm" "$seed" "$LONG_EPOCHS" --encoder none $shape ;;
            *) echo "ARMS: $arm is none; expected some of aps, uniform, one-group, window-N, redeal-N, key-gelu, fp8-keys, scratch, scratch-long" >&2 && exit 2 ;;
        esac
    done
done | xargs -P "$JOBS" -d '\n' -n 1 bash -c
"$python" -m bench learning "$OUT" --json "$OUT/learning.json"
