PYTHON ?= python3
BIN := .venv/bin
# On a CPU, threads that spin at barriers halve the speed as soon as anything else wants a core (bench/LOG.md).
export OMP_WAIT_POLICY ?= PASSIVE

demo: .venv/installed  ## set up, then pretrain, evaluate and export on the embedded dataset, and look at the encoder
	@echo '[1/2] Pretraining on 4,000 images, which are drawn first; minutes on two cores. Ctrl-C saves, make demo goes on.'
	@$(BIN)/python train.py --recipe toy --knn-every 1 --output runs/demo
	@echo '[2/2] What the encoder attends to, and which images it takes for alike.'
	@$(BIN)/python -m bench attention runs/demo runs/toy-data/test/[sw]*/0000.jpg --bank runs/toy-data/train \
		--output runs/demo/attention.png
	@echo "$$NEXT"

define NEXT

Pictures: runs/demo/curves.png (loss, spread, k-NN accuracy, speed), runs/demo/attention.png (attention, neighbours).
Next, pretrain on images of your own; load the encoder in timm; see what it is worth with labels:

  $(BIN)/python train.py --recipe imagenet-vit-s --data IMAGES --output RUN
  $(BIN)/python -c 'import timm; print(timm.create_model("local-dir:runs/demo/encoder", pretrained=True))'
  $(BIN)/python finetune.py --encoder runs/demo --probe linear
endef
export NEXT

test: .venv/installed lint  ## set up, then lint and test
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/installed: setup.cfg pyproject.toml
	@echo 'Installing into .venv, once: 6 GB on disk, most of it torch with CUDA; at 100 Mbit/s up to 9 minutes.'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[test,bench,coco,parquet,s3]'
	@touch $@

.PHONY: demo test lint
