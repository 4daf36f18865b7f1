PYTHON ?= python3
BIN := .venv/bin
# On a CPU, threads that spin at barriers halve the speed as soon as anything else wants a core (bench/LOG.md).
export OMP_WAIT_POLICY ?= PASSIVE

demo: .venv/installed  ## set up, then pretrain, evaluate and export on the embedded dataset
	$(BIN)/python train.py --recipe toy --output runs/demo

test: .venv/installed lint  ## set up, then lint and test
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test,bench,coco,parquet]'
	touch $@

.PHONY: demo test lint
