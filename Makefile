# `make smoke`, `make lab` and `make test` need nothing but Python 3.11 or 3.12: they create .venv and install the lane that fits.
SHELL := /bin/sh
PYTHON_IN := .venv/bin/python
LANES := requirements-stable-precompiled.txt $(wildcard requirements/*.txt) requirements/install.sh pyproject.toml

.PHONY: reference size smoke lab test test-slow test-both test-all golden test-stable test-unsloth test-vllm test-ecosystem test-torch27 test-skypilot real lint tools browser bubblewrap notebooks bench faults lock lock-check check-urls clean

smoke: .venv/lane
	$(PYTHON_IN) -m cogumi.smoke

lab: .venv/lane
	sh notebooks/lab.sh

# One process per core, or per thread of one, with one thread each, because more threads only wait for each other on tiny
# models. Idle processes take tests from others. Bytecode is kept, or every process would compile it again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTHON_IN) -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal

# Two tiers, both required: this one on every change, and test-slow.
test: lint
	$(PYTEST) -m "not slow and not sweep"

test-slow: .venv/test
	$(PYTEST) -m "slow and not sweep"

# Both in one session, which imports, collects, and trains the models that tests share, once.
test-both: .venv/test
	$(PYTEST) -m "not sweep"

test-all: lint
	$(PYTEST)

# Rewrite tests/golden/ from the tests of all tiers that use it; review the diff.
golden: .venv/test
	OMP_NUM_THREADS=1 $(PYTHON_IN) -m pytest --golden

STABLE_TESTS := $(addprefix tests/test_,$(addsuffix .py,patches_internals losses_without_gpu graph_break gspo gspo_references \
	rl_guards rl_watch config_signatures training training_unfinished checkpoints_resume checkpoints_protect)) $(wildcard tests/test_merge*.py)

# Not part of `make test`: patches, loss, merge and resume on the stable lane's TRL and transformers, in an environment of its own.
# Liger is in .venv/oracles.
test-stable: .venv/test .venv-stable/lane
	PYTHONPATH=tests/older_trl PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv-stable/bin/python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal \
		-m "not sweep" $(STABLE_TESTS)

# Not part of `make test`: unsloth on a CPU, in an environment of its own.
test-unsloth: .venv-unsloth/lane
	.venv-unsloth/bin/python -m pytest tests/test_unsloth.py

# Not part of `make test`: vLLM on a CPU, in an environment of its own.
test-vllm: .venv-vllm/lane
	.venv-vllm/bin/python -m pytest tests/test_vllm.py tests/test_vllm_parity.py tests/test_vllm_sizing.py

# Not part of `make test`: reasoning-gym and verifiers, in an environment of their own.
test-ecosystem: .venv-ecosystem/lane
	.venv-ecosystem/bin/python -m pytest tests/test_task_packages.py tests/test_trackers.py

# Not part of `make test`: torch 2.7, whose Dynamo cannot trace a 4-bit layer, for graph_break's last strategy.
test-torch27: .venv-torch27/lane
	.venv-torch27/bin/python -m pytest --noconftest tests/test_graph_break_older_torch.py

# Not part of `make test`: SkyPilot's command with a catalogue of its format, in an environment of its own.
test-skypilot: .venv/test .venv-skypilot/lane
	PATH="$$PATH:$(CURDIR)/.venv-skypilot/bin" $(PYTHON_IN) -m pytest tests/test_launch.py

# Not part of `make test`: the whole path on SmolLM2-135M, about half an hour on two cores (docs/real-model.md).
real: .venv/test .real/packages
	PYTHONPATH=.real $(PYTHON_IN) -m benchmarks real

lint: .venv/test
	$(PYTHON_IN) -m ruff check .
	$(PYTHON_IN) -m ruff format --check .
	$(PYTHON_IN) -m mypy
	.venv/bin/lint-imports --no-logo --no-cache

# docs/reference.md: every name, command and key, from signatures and docstrings.
reference: .venv/test
	$(PYTHON_IN) docs/reference.py

# Files and lines of each part. The small base's training script is not part of the package.
size:
	@for part in cogumi benchmarks tests; do \
		git ls-files "$$part/*.py" ":!cogumi/models/small-base/*" | xargs wc -l | sort -n | awk -v part=$$part '$$2 != "total" { lines[n++] = $$1; all += $$1; name = $$2 } \
			END { printf "%-10s %3d files, %6d lines; median %d, longest %d (%s)\n", part, n, all, lines[int(n / 2)], lines[n - 1], name }'; \
	done

# Debian packages that tests use.
tools: browser bubblewrap

# chromium, for the browser tests. Without it they are skipped, and fail where CI is set.
browser:
	@command -v chromium >/dev/null || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; } || \
		echo "chromium cannot be installed here (it takes Debian or Ubuntu, and root): the browser tests will say so"

# bubblewrap, for the sandbox's strongest level. Without it those tests are skipped, and fail where CI is set.
bubblewrap:
	@command -v bwrap >/dev/null || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends bubblewrap; } || \
		echo "bubblewrap cannot be installed here (it takes Debian or Ubuntu, and root): the sandbox's tests will say so"

# Each .ipynb from its .py, with the outputs of a run on this machine (15 minutes).
notebooks: .venv/test
	$(PYTHON_IN) notebooks/generate.py

bench: .venv/test
	$(PYTHON_IN) -m benchmarks cpu

# 15 minutes and 10 GB in TMPDIR; needs root, to mount small disks.
faults: .venv/test
	$(PYTHON_IN) -m benchmarks faults

# Resolve every pinned file from requirements/lanes.toml and *.in. `make lock UPGRADE=--upgrade` takes newer versions where they are open.
lock: .venv/test
	$(PYTHON_IN) requirements/lock.py $(UPGRADE)

lock-check: .venv/test
	$(PYTHON_IN) requirements/lock.py --check

check-urls: .venv/test
	$(PYTHON_IN) -m pytest -rs tests/test_requirements_resolve.py -k url

.venv/lane: $(LANES)
	sh requirements/install.sh
	touch $@

.venv/test: $(LANES)
	sh requirements/install.sh test
	touch .venv/lane $@

.venv-stable/lane: $(LANES)
	sh requirements/install.sh stable
	touch $@

.venv-unsloth/lane: $(LANES)
	sh requirements/install.sh unsloth
	touch $@

.venv-vllm/lane: $(LANES)
	sh requirements/install.sh vllm
	touch $@

.real/packages: requirements/real.in
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target .real -r $<
	echo '*' >.real/.gitignore
	touch $@

.venv-ecosystem/lane: $(LANES) requirements/ecosystem.in
	sh requirements/install.sh ecosystem
	touch $@

.venv-torch27/lane: requirements/torch-2.7.in
	python3 -m venv .venv-torch27
	echo '*' >.venv-torch27/.gitignore
	.venv-torch27/bin/python -m pip install --quiet --retries 1 -r $<
	touch $@

.venv-skypilot/lane: requirements/skypilot.in
	python3 -m venv .venv-skypilot
	echo '*' >.venv-skypilot/.gitignore
	.venv-skypilot/bin/python -m pip install --quiet -r $<
	touch $@

clean:
	rm -rf .venv .venv-stable .venv-unsloth .venv-vllm .venv-ecosystem .venv-torch27 .venv-skypilot .real runs
