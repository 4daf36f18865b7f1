#!/usr/bin/env bash
# What pretraining is worth where labels are few: encoders pretrained on all images without labels, then a linear and a k-NN
# probe and fine-tuning with some labels of each class, against training from scratch with the same ones. With CIFAR-10 as
# class folders of images, a few hours of two cores:
#
#   DATA=cifar10/train EVAL=cifar10/test bench/labels.sh
#   python -m bench labels runs/labels              the table, also while the runs go on
#
# Each draw of labels is a random choice of images, the same for all. Fine-tuning and scratch have the same augmentation and
# optimizer, and each is tried at two lengths, of which the plot shows the one that is better on the mean of the draws.
# "untrained" is the network as pretraining begins with it. All arms take as many optimizer steps of pretraining; those beside
# aps are fine-tuned at the first length only, with 100 labels a class and more.
# What is complete is left alone and what is not is continued, so the same command goes on after a stop.
# Settings by the environment: OUT, COUNTS (labels a class, each with the epochs of tuning), DRAWS, ARMS, JOBS (runs at a
# time), EVAL_IMAGES (evenly spaced; 0: all), EPOCHS of pretraining, LONGER (the second length over the first), MODEL and TUNE.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
OUT=${OUT:-runs/labels}
: "${DATA:?a folder of training images in class folders}" "${EVAL:?a folder of evaluation images in the same classes}"
COUNTS=${COUNTS:-10:80 40:40 100:24 400:12} DRAWS=${DRAWS:-0 1 2} ARMS=${ARMS:-aps uniform one-group window-16} JOBS=${JOBS:-2}
EPOCHS=${EPOCHS:-5} LONGER=${LONGER:-4}
MODEL=${MODEL:---depth 2 --patch-size 4 --batch-size 128 --head-hidden 512}
# The recipe's regularisation is that of a hundred epochs; its RandAugment stays.
TUNE=${TUNE:---lr 1e-3 --mixup 0 --cutmix 0 --erasing 0 --drop-path 0 --ema 0 --batch-size 50}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"
"$python" -m bench learning "$OUT" --list "$DATA" --images 0 >"$OUT/train.txt"
"$python" -m bench learning "$OUT" --list "$EVAL" --images "${EVAL_IMAGES:-2000}" >"$OUT/eval.txt"
for count in $COUNTS; do
    for draw in $DRAWS; do
        "$python" -m bench labels "$OUT" --draw "$draw" --count "${count%:*}" >"$OUT/labels-${count%:*}-$draw.txt"
    done
done

common="--eval-data $OUT/eval.txt --threads 1 --log-every 50"
shape=$(echo "$MODEL" | grep -oE -- '--(depth|patch-size) [0-9]+' | tr '\n' ' ')
pretrain() { # ARM EPOCHS [OPTIONS]: pretraining, then the probes
    local run=$OUT/$1
    echo "[ -e $run/encoder ] || $python train.py --recipe cifar-vit-t --data $OUT/train.txt $common --output $run --epochs $2" \
        "--warmup-epochs $(awk "BEGIN { print $2 / 10 }") $MODEL ${*:3} >$run.log 2>&1; [ -e $run.json ] ||" \
        "$python -m bench labels $OUT --probe $run >>$run.log 2>&1"
}
tune() { # NAME COUNT DRAW EPOCHS [OPTIONS]: fine-tuning
    local run=$OUT/$1-$2-$3-$4
    echo "[ -e $run/model ] || $python finetune.py --recipe cifar --data $OUT/labels-$2-$3.txt $common --eval-every" \
        "100000 --seed $3 --output $run --epochs $4 --warmup-epochs $(awk "BEGIN { print $4 / 10 }") $TUNE ${*:5} >$run.log 2>&1"
}
together() { xargs -r -P "$JOBS" -d '\n' -n 1 bash -c; }
pretrain aps "$EPOCHS" | together
for draw in $DRAWS; do
    for count in $COUNTS; do
        for longer in 1 "$LONGER"; do
            epochs=$((longer * ${count#*:}))
            tune tuned "${count%:*}" "$draw" "$epochs" --encoder "$OUT/aps"
            tune scratch "${count%:*}" "$draw" "$epochs" --encoder none $shape
        done
    done | together
done
for arm in $ARMS; do
    case $arm in
        aps) ;;
        uniform) pretrain "$arm" "$EPOCHS" --power 0 ;;
        one-group) pretrain "$arm" $((4 * EPOCHS)) --groups 1 ;;
        window-16) pretrain "$arm" "$EPOCHS" --window 16 ;;
        *) echo "ARMS: $arm is none; expected some of aps, uniform, one-group, window-16" >&2 && exit 2 ;;
    esac
done | together
for arm in ${ARMS/aps/}; do
    for draw in $DRAWS; do
        for count in $COUNTS; do
            [ "${count%:*}" -lt 100 ] || tune "$arm" "${count%:*}" "$draw" "${count#*:}" --encoder "$OUT/$arm"
        done
    done
done | together
"$python" -m bench labels "$OUT" --json "$OUT/labels.json"
