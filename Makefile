# make sweep   replay a request trace under every strategy; table, JSON and pictures in sweep-results/
# make test    the whole test suite
# make lint    ruff, mypy and the import contracts
# make bench   the speed and memory targets, written to benchmarks/results/
# make proof   real numbers under 50 schedules a cell; goes on where an earlier run stopped, an hour at most
# make sanitize  compute-sanitizer over the CUDA kernels, on a GPU machine that has it
#
# The first use makes .venv and installs into it. With `PYTHON=python3 NO_INSTALL=1` the given interpreter is used as it
# is: no virtual environment, no network.

PYTHON ?= python3
VENV ?= .venv
# Installed first where there is no torch: left to the version range alone, pip would fetch the newest CUDA build.
TORCH ?= torch==2.13.0
SWEEP_ARGS ?=
PROOF_ARGS ?=
# As many as there are cores, 14 at most: each holds a model, and on a GPU machine a context.
WORKERS := $(shell cores=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((cores < 14 ? cores : 14)))
PYTEST_ARGS ?= -n $(WORKERS)
SOURCES = $(wildcard workspace dsv4 benchmarks examples tests)

ifdef NO_INSTALL
RUN = $(PYTHON)
READY = workspace.egg-info/entry_points.txt build/steady_path.stamp
LINT_READY = $(READY)
else
RUN = $(VENV)/bin/python
READY = $(VENV)/.ready
LINT_READY = $(VENV)/.lint-ready
endif

# The steady path in C++; without a compiler its Python form runs.
STEADY_PATH = setup.py $(wildcard csrc/workspace/*)

.PHONY: sweep test lint bench proof sanitize clean

sweep: $(READY)
	$(RUN) -m workspace.cli sweep --execute $(SWEEP_ARGS)

test: $(READY)
	$(RUN) -m pytest $(PYTEST_ARGS)

lint: $(LINT_READY)
	$(RUN) -m ruff check $(SOURCES)
	$(RUN) -m mypy $(filter-out tests,$(SOURCES))
	$(RUN) -c "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"

bench: $(READY)
	$(RUN) -m benchmarks

proof: $(READY)
	$(RUN) -m benchmarks.proof $(PROOF_ARGS)

sanitize: $(READY)
	$(RUN) -m pytest -m slow -n 3 -rP tests/dsv4/cuda/test_sanitized.py

clean:
	rm -rf $(VENV) build workspace.egg-info sweep-results workspace/_native.*.so

# A torch of the base interpreter is used where it is in range, so that a GPU machine keeps its own build.
$(VENV)/bin/python:
	if $(PYTHON) -c "$(TORCH_IN_RANGE)" 2>/dev/null; then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi

$(VENV)/.ready: pyproject.toml $(STEADY_PATH) | $(VENV)/bin/python
	$(RUN) -c "$(TORCH_IN_RANGE)" 2>/dev/null || $(RUN) -m pip install -q '$(TORCH)'
	$(RUN) -m pip install -q -e '.[test]'
	touch $@

$(VENV)/.lint-ready: pyproject.toml | $(VENV)/.ready
	$(RUN) -m pip install -q -e '.[test,dev]'
	touch $@

# Entry points are found through this folder when the package is not installed.
workspace.egg-info/entry_points.txt: pyproject.toml
	$(RUN) -c "import setuptools; setuptools.setup()" -q egg_info
	touch $@

# In the working tree, where nothing is installed.
build/steady_path.stamp: $(STEADY_PATH)
	DSV4_KERNELS=off $(RUN) setup.py -q build_ext --inplace
	touch $@

define TORCH_IN_RANGE
from importlib.metadata import version; v = tuple(map(int, version('torch').split('.')[:2])); assert (2, 11) <= v < (2, 15)
endef
