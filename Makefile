# make train    install, fetch Fashion-MNIST, train the quickstart network on 2 ranks
# make test     the whole suite: one process, then 2, 3 and 4 ranks
# make check    lint, types, import contract, single-process tests
# make test-N   the tests that need N ranks
# make grid-matrix   whole networks on every grid and plan, on virtual ranks, against one rank
# make parity   compare with PyTorch (installs its CPU build into the virtual environment)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
RANKS ?= 2
TEST_RANKS ?= 2 3 4

# Two cores and more ranks than cores in tests: one thread a rank, unless said otherwise.
TEST_ENV := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: train test check lint unit grid-matrix parity parity-install clean

$(VENV)/installed: requirements.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

data/fashion-mnist/train.h5: | $(VENV)/installed
	$(PY) -m hpctrain data fetch fashion-mnist --out data/fashion-mnist

train: $(VENV)/installed data/fashion-mnist/train.h5
	$(BIN)/mpiexec -n $(RANKS) $(PY) -m mpi4py -m hpctrain train configs/quickstart.yaml

lint: $(VENV)/installed-dev
	$(BIN)/ruff check hpctrain tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/installed-dev
	$(TEST_ENV) $(PY) -m pytest -m "parallel[1]"

test-%: $(VENV)/installed-dev
	$(TEST_ENV) $(BIN)/mpiexec -n $* $(PY) -m mpi4py -m pytest -m "parallel[$*]" tests/mpi

test: $(addprefix test-,$(TEST_RANKS)) unit

check: lint unit

grid-matrix: $(VENV)/installed-dev
	$(TEST_ENV) $(PY) -m hpctrain.testing.grid_matrix

parity-install: $(VENV)/installed-dev
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0

parity: parity-install
	$(PY) -m pytest -m torch tests
	$(PY) benchmarks/parity.py

clean:
	rm -rf build runs .mypy_cache .ruff_cache .hypothesis
