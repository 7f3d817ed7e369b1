# make demo: a node of four is lost, and comes back.   make test: everything that CI runs.
# Both need Python 3.11-3.13 and nothing else: .venv is made on the way.

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider -q --durations=5
STAMP := .venv/.installed
SOURCES := elastic_ft chaos tests benchmarks examples deploy docs/tables.py
ALONE := tidy core sim storage oneproc cli bench
TIERS := multiproc alone ray chaos observe
QUICK := tidy core storage
PARALLEL := -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo service-demo test test-alone test-quick test-cuda-wheel lint bench bench-peers gpu chaos chaos-ray chaos-others soak soak-in-charge fuzz mutants clean venv \
  test-tidy test-core test-sim test-storage test-oneproc test-multiproc test-observe test-cli \
  test-ray test-chaos test-bench

help:
	@sed -n '1,2s/^# //p' Makefile
	@echo "also: make service-demo | test-quick | lint | bench | bench-peers | gpu | chaos | soak | soak-in-charge | fuzz | mutants | test-cuda-wheel | clean | test-<tier>"

venv: $(STAMP)

# torch first and alone: what is installed after it can then pull no other build. pip would compile
# 17,000 files one after the other: they are compiled on all cores. (Some are for other Pythons.)
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	  sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python 3.11-3.13 is needed, found {v[0]}.{v[1]}: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	$(BIN)/python -m compileall -qq -j 0 $(CURDIR)/.venv/lib || true
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/elastic-ft demo

# Several jobs share a local cluster; an urgent one comes, and others make room in place.
service-demo: $(STAMP)
	$(BIN)/python benchmarks/service_demo.py

# Hundreds of processes import what is here: each would compile it again.
unexport PYTHONDONTWRITEBYTECODE

# Two tiers at a time, the longest first. Jobs of several processes mostly wait: what computes alone
# takes what they leave. A tier that fails ends no other.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target $(TIERS:%=test-%)

# No process of theirs starts a Ray cluster, or joins one, that nobody asked for.
test-alone: export RAY_ENABLE_AUTO_CONNECT := 0
test-alone: $(STAMP)
	nice -n 5 $(PYTEST) $(PARALLEL) --timeout=300 $(ALONE:%=tests/%)

# For the loop of a person at work.
test-quick: lint
	$(PYTEST) $(PARALLEL) --timeout=120 $(QUICK:%=tests/%)

# The core imports nothing else: mypy need not read what its package says of torch and Ray.
lint: $(STAMP)
	$(BIN)/ruff check --no-cache $(SOURCES)
	$(BIN)/ruff format --no-cache --check $(SOURCES)
	$(BIN)/mypy --strict --follow-imports=skip -p elastic_ft.core -m elastic_ft.errors

# Seconds for one test of the tier: on two cores each takes a small part of it.
test-tidy test-core: TIMEOUT_S := 60
test-sim test-storage test-oneproc: TIMEOUT_S := 120
test-multiproc test-observe test-cli test-bench: TIMEOUT_S := 180
test-ray test-chaos: TIMEOUT_S := 300
test-tidy test-core test-sim test-storage test-oneproc test-multiproc test-observe test-cli \
  test-ray test-chaos test-bench: test-%: $(STAMP)
	$(PYTEST) --timeout=$(TIMEOUT_S) tests/$*

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/core_scale.py
	$(BIN)/python benchmarks/forming.py
	$(BIN)/python benchmarks/fleets.py
	for what in reshard stall steps restart memory; do $(BIN)/python benchmarks/state.py $$what || exit 1; done
	-$(BIN)/python benchmarks/gpu_snapshot.py
	$(BIN)/python benchmarks/pause.py --strategy ddp --kill worker
	$(BIN)/python benchmarks/pause.py --strategy fsdp --kill worker
	$(BIN)/python benchmarks/pause.py --strategy fsdp --kill raylet

# The first half hour on one GPU, with whatever Python has torch: no Ray, nothing downloaded.
GPU_DEVICE ?= cuda
gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu/run.py --device $(GPU_DEVICE)

# torch's wheel for CUDA, which has NCCL's groups and the real torch.cuda, on a machine without a GPU:
# what asks the driver too soon, or another torch differently, fails here. By itself: it downloads
# 2.7 GB, and takes 4.7 GB in .venv-cuda. TORCH=2.11.0: the oldest that is supported.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
CUDA_PYTHON := .venv-cuda/$(TORCH)/bin/python
CUDA_STAMP := .venv-cuda/$(TORCH)/.installed
CUDA_TESTS := $(addprefix tests/oneproc/test_,cuda_on_cpu.py nccl_on_cpu.py kernels_on_cpu.py \
  device_events.py device_marks.py device_memory.py sick_device.py burn_in.py broken_step.py offloaded.py) \
  tests/tidy/test_torch_contract.py tests/bench/test_gpu_kit.py
$(CUDA_STAMP): $(STAMP)
	$(PYTHON) -m venv .venv-cuda/$(TORCH)
	$(CUDA_PYTHON) -m pip install --quiet --disable-pip-version-check --no-cache-dir 'torch===$(TORCH)'
	for site in .venv-cuda/$(TORCH)/lib/python*/site-packages; do \
	  echo $(CURDIR)/.venv/lib/$$(basename $$(dirname $$site))/site-packages > $$site/others.pth; done
	@touch $(CUDA_STAMP)

test-cuda-wheel: $(CUDA_STAMP)
	$(CUDA_PYTHON) -c 'import torch; assert torch.version.cuda, "this index has no wheel for CUDA"'
	$(CUDA_PYTHON) -m pytest -p no:cacheprovider -q --timeout=300 $(CUDA_TESTS)
	PYTHONPATH=. $(CUDA_PYTHON) benchmarks/gpu/run.py --device cpu --out .venv-cuda/kit --only train_fsdp_1 kill_fsdp

# Every fault there is, each on the highest tier that it can run on here.
# Two lanes share the machine, as both mostly wait: hence the patience.
chaos: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=line chaos-ray chaos-others

chaos-ray: $(STAMP)
	$(BIN)/elastic-ft chaos run --only ray --patience 2 --out runs/chaos/ray

chaos-others: $(STAMP)
	$(BIN)/elastic-ft chaos run --only network --only processes --only sim --patience 2 --out runs/chaos/others

# Faults put into the core, checks of the simulator that look away: the tests must notice each.
mutants: $(STAMP)
	$(BIN)/python tests/mutants

# What takes too long for every change: the tests marked soak, a tier at a time; then random faults in
# real clusters, round after round, from three seeds. Hours.
SOAK := sim storage oneproc multiproc ray cli
SOAK_MINUTES ?= 10
soak: $(STAMP)
	for tier in $(SOAK); do $(PYTEST) -m soak --timeout=7200 tests/$$tier || exit 1; done
	for seed in 1000 2000 3000; do \
	  $(BIN)/elastic-ft chaos soak --minutes $(SOAK_MINUTES) --seed $$seed || exit 1; done

# Whoever is in charge on Ray is killed or stopped, each way TIMES times in random order; with the
# figures, which benchmarks/results keeps. KIND: ddp, fsdp or fsdp-tp. COLD=1: without a standby.
TIMES ?= 20
soak-in-charge: $(STAMP)
	ELASTIC_FT_IN_CHARGE_TIMES=$(TIMES) ELASTIC_FT_IN_CHARGE_OUT=benchmarks/results/in-charge-ray-soak.json \
	  $(if $(COLD),ELASTIC_FT_IN_CHARGE_COLD=1) $(PYTEST) -s -m soak tests/ray/test_in_charge_soak.py $(if $(KIND),-k '[$(KIND)]')

# Beside Ray Train, torchft and torchrun; it goes on where it was interrupted. Then the table in
# docs/benchmarks.md is made anew.
bench-peers: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/peers/run.py --repeats 3

# Ten thousand mutations of everything that others may write: a minute or two.
fuzz: $(STAMP)
	$(PYTEST) -m fuzz --timeout=600 tests/core/test_parsers.py

# What the targets above made; runs/ is yours.
clean:
	rm -rf .venv .venv-cuda build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
