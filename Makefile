# `make smoke` and `make test` need nothing but Python 3.11 or 3.12: they make .venv and install the lane that fits.
SHELL := /bin/sh
PYTHON_IN := .venv/bin/python
LANES := requirements-stable-precompiled.txt $(wildcard requirements/*.txt) requirements/install.sh pyproject.toml

.PHONY: smoke test test-all test-unsloth test-torch27 lint bench faults lock clean

smoke: .venv/lane
	$(PYTHON_IN) -m cogumi.smoke

test: lint
	$(PYTHON_IN) -m pytest -m "not slow"

test-all: lint
	$(PYTHON_IN) -m pytest

# Not part of `make test`: a virtual environment of its own with unsloth, which runs on a CPU there.
test-unsloth: .venv-unsloth/lane
	UNSLOTH_ON_CPU=1 .venv-unsloth/bin/python -m pytest tests/test_unsloth.py

# Not part of `make test` either: a torch whose Dynamo cannot take a 4-bit layer, for the bottom of graph_break's ladder.
test-torch27: .venv-torch27/lane
	.venv-torch27/bin/python -m pytest --noconftest tests/test_graph_break_older_torch.py

lint: .venv/test
	$(PYTHON_IN) -m ruff check .
	$(PYTHON_IN) -m ruff format --check .
	$(PYTHON_IN) -m mypy

bench: .venv/test
	$(PYTHON_IN) -m benchmarks cpu

# A quarter of an hour and 10 GB in TMPDIR; as root, which mounting small disks takes.
faults: .venv/test
	$(PYTHON_IN) -m benchmarks faults

lock: .venv/lane
	$(PYTHON_IN) requirements/lock.py

.venv/lane: $(LANES)
	sh requirements/install.sh
	touch $@

.venv/test: $(LANES)
	sh requirements/install.sh test
	touch .venv/lane $@

.venv-unsloth/lane: $(LANES)
	sh requirements/install.sh unsloth
	touch $@

.venv-torch27/lane: requirements/torch-2.7.in
	python3 -m venv .venv-torch27
	echo '*' >.venv-torch27/.gitignore
	.venv-torch27/bin/python -m pip install --quiet --retries 1 -r $<
	touch $@

clean:
	rm -rf .venv .venv-unsloth .venv-torch27 runs
