# `make demo` and `make test` need nothing but Python 3.11 or newer and make; they set up .venv themselves.
# Packages are compiled when they are first imported: pip would compile every file of torch and the others.
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

WORKERS ?= auto
# The newest and the lowest versions are tried with these of torch, which for Linux on PyPI comes with gigabytes of CUDA:
# TORCH= takes the newest, TORCH_LOWEST= the lower bound in pyproject.toml. There is a wheel for CPUs of every version
# at PyTorch's own index, which PIP_EXTRA_INDEX_URL may name.
TORCH ?= 2.13.0
TORCH_LOWEST ?=
GPU_PYTHON ?= $(BIN)/python

.PHONY: demo test test-slow test-kernels test-deploy test-extended test-newest test-versions zoo lint docs notebooks results dist bench bench-peers bench-gpu-peers clean

demo: .venv/ready
	$(BIN)/kairosfl demo

test: .venv/ready
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

test-kernels: .venv/kernels  # interpreted, and compiled for GPUs; on one: pytest tests/engines/test_gpu.py
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/engines/test_kernels*.py -m "not slow" -n $(WORKERS)
	$(BIN)/python -m pytest tests/engines/test_kernels_compile.py tests/core/test_fields.py -k kernels -m "not slow" -n $(WORKERS)

test-deploy: .venv/full
	$(BIN)/python -m pytest tests/deploy -m "slow or not slow"

zoo: .venv/zoo  # models and data of other libraries; without them, tests of these are skipped

test-newest:  # installed without constraints, as by a user: every command is called
	$(PYTHON) .ci/versions.py newest --torch "$(TORCH)"

test-versions: test-newest  # the newest versions, the newest with Flower and Ray, and the lowest that pyproject.toml admits
	$(PYTHON) .ci/versions.py engines --torch "$(TORCH)"
	$(PYTHON) .ci/versions.py lowest --torch "$(TORCH_LOWEST)"
	$(PYTHON) .ci/versions.py lowest-flower --torch "$(TORCH)"

test-extended: test-kernels test-deploy  # what `make test` leaves out
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/engines/test_kernels*.py -m slow
	$(BIN)/python -m pytest -m slow --ignore=tests/deploy

docs: .venv/full
	$(BIN)/mkdocs build --strict --quiet

notebooks: .venv/full  # run them, and store what they show
	OMP_NUM_THREADS=1 $(BIN)/python .ci/execute.py docs/notebooks/*.ipynb

results: .venv/ready  # the page of results and a figure as a paper prints it, from the files in results/
	$(BIN)/python -m kairosfl_reproductions.page results docs/results.md
	$(BIN)/kairosfl figure results/alt-figure2.json -o docs/assets/alt-figure2-print.svg --font serif --y-range 55:73 \
		--only cifar10-fedavg --only cifar10-fedavg-alt --only 'cifar10-moon*'
	$(BIN)/python benchmarks/studies/moment.py --show results/studies/moment.json --draw docs/assets/moment.svg \
		--curves docs/assets/moment-curves.svg > /dev/null
	$(BIN)/python benchmarks/studies/moment_tables.py results/studies/moment.json docs/moment.md

dist: .venv/ready  # wheel and sdist, tried in an empty environment
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --outdir dist
	$(BIN)/python .ci/prove_dist.py

bench: .venv/ready
	$(BIN)/python benchmarks/speed/loop.py
	$(BIN)/python benchmarks/speed/adapting.py
	$(BIN)/python benchmarks/speed/aware.py

bench-peers: .venv/ready
	$(BIN)/python benchmarks/peers/run.py

bench-gpu-peers:  # pfl's CIFAR-10 workload on a GPU, with and without privacy; needs a torch for it, and pfl on PYTHONPATH
	$(GPU_PYTHON) benchmarks/speed/against_pfl.py --device cuda
	$(GPU_PYTHON) benchmarks/speed/against_pfl.py --device cuda --setting private

lint: .venv/full  # mypy reads what the extras install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/full: .venv/ready
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e ".[all]"
	@touch $@

.venv/kernels: .venv/ready
	$(BIN)/python -c "import triton" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check triton==3.9.0
	@touch $@

.venv/zoo: .venv/ready  # what asks for a torch of its own is installed without it
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
		transformers==5.22.2 pillow psutil pandas pyarrow dill multiprocess xxhash \
		onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.31.1
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps \
		torchvision==0.28.0 timm==1.0.30 peft==0.21.2 accelerate==1.15.0 datasets==5.2.0
	@touch $@

.venv/ready: pyproject.toml reproductions/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: Python 3.11, 3.12 or 3.13 is needed and was not found; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e ".[dev]" -e reproductions
	@touch $@

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache
