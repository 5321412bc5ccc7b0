PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup test test-processes test-portable test-versions test-oldest test-newest test-eformer test-easydel test-hf test-keras test-orbax test-torch test-wheel
.PHONY: check docs docs-serve notebooks demo bench bench-quick bench-step bench-buckets bench-devices bench-orbax bench-scale faults faults-peers fuzz-parsers soak fixtures-torch format clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The tests of several processes once more, with four of them.
test-processes: setup
	$(BIN)/python -m pytest -m processes4 tests/multiprocess

# Much of the suite on a simulated macOS. Left out: faults made with what only Linux has, what looks at /proc, and a script
# that chooses JAX's devices.
ELSEWHERE := $(addprefix tests/,test_roundtrip.py test_golden.py test_catalog.py cli/test_checking.py cli/test_converting.py \
	loading/test_load.py loading/test_verify.py runs/test_run.py saving/test_save.py targets/test_publishing.py targets/test_transaction.py)

test-portable: setup
	SHARDKEEP_TEST_AS=macos JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 PYTHONPATH=$(CURDIR)/tests/portable/site:$(CURDIR)/tests \
		$(BIN)/python -m pytest -k 'not emory and not leak and not script and not its_threads and not a_failed_first_save' $(ELSEWHERE)

# The suite on the oldest and on the newest JAX and Python that are supported, in environments of their own.
# TESTS= runs a part of it; PYTHON= chooses the interpreter of the newest, OLDEST_PYTHON= that of the oldest.
OLDEST := .venv-oldest
NEWEST := .venv-newest
OLDEST_PYTHON ?= PYENV_VERSION=3.11 python3.11
NEWEST_PYTHON := $(if $(filter file,$(origin PYTHON)),PYENV_VERSION=3.13 python3.13,$(PYTHON))
TESTS ?= tests

test-versions: test-oldest test-newest

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile $(TESTS)

test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadfile $(TESTS)

$(OLDEST)/.installed: pyproject.toml
	test -x $(OLDEST)/bin/python || $(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check 'jax==0.8.0' 'jaxlib==0.8.0' -e '.[dev]'
	touch $@

$(NEWEST)/.installed: pyproject.toml
	test -x $(NEWEST)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade jax jaxlib -e '.[dev]'
	touch $@

# Real eFormer beside this package: each reads what the other writes. It needs its own environment (it brings ray).
EFORMER := .venv-eformer
EFORMER_STAMP := $(EFORMER)/.installed

test-eformer: $(EFORMER_STAMP)
	$(EFORMER)/bin/python tests/eformer/run.py

$(EFORMER_STAMP): pyproject.toml
	test -x $(EFORMER)/bin/python || $(PYTHON) -m venv $(EFORMER)
	$(EFORMER)/bin/python -m pip install --quiet --disable-pip-version-check eformer==0.0.101 -e .
	touch $(EFORMER_STAMP)

# Real EasyDeL with this package in the place of eFormer's serialization: models, states, a trainer that is resumed.
# It needs its own environment, with pillow and torch, without which its modules are not imported.
EASYDEL := .venv-easydel
EASYDEL_STAMP := $(EASYDEL)/.installed

test-easydel: $(EASYDEL_STAMP)
	$(EASYDEL)/bin/python tests/easydel/run.py

$(EASYDEL_STAMP): pyproject.toml
	test -x $(EASYDEL)/bin/python || $(PYTHON) -m venv $(EASYDEL)
	$(EASYDEL)/bin/python -m pip install --quiet --disable-pip-version-check easydel==0.3.0 pillow torch==2.13.0 -e .
	touch $(EASYDEL_STAMP)

# Real transformers beside this package: each reads what the other writes. It needs its own environment (it brings torch).
HF := .venv-hf
ORBAX := .venv-orbax
ORBAX_OLDEST := .venv-orbax-oldest
HF_STAMP := $(HF)/.installed

# Orbax 0.5.8 is the oldest that saves sharded arrays with a JAX that is supported.
test-orbax: $(ORBAX)/.installed $(ORBAX_OLDEST)/.installed
	$(ORBAX_OLDEST)/bin/python tests/orbax/run.py
	$(ORBAX)/bin/python tests/orbax/run.py

$(ORBAX)/.installed: pyproject.toml
	test -x $(ORBAX)/bin/python || $(PYTHON) -m venv $(ORBAX)
	$(ORBAX)/bin/python -m pip install --quiet --disable-pip-version-check 'orbax-checkpoint==0.12.8' flatbuffers -e .
	touch $@

$(ORBAX_OLDEST)/.installed: pyproject.toml
	test -x $(ORBAX_OLDEST)/bin/python || $(PYTHON) -m venv $(ORBAX_OLDEST)
	$(ORBAX_OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check 'orbax-checkpoint==0.5.8' 'jax==0.8.0' 'jaxlib==0.8.0' flatbuffers -e .
	touch $@

test-hf: $(HF_STAMP)
	$(HF)/bin/python tests/huggingface/run.py

$(HF_STAMP): pyproject.toml
	test -x $(HF)/bin/python || $(PYTHON) -m venv $(HF)
	$(HF)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' 'transformers>=5,<6' -e .
	touch $(HF_STAMP)

# Real Keras 3 beside this package: what it writes is loaded. `FIXTURES=1` writes the files in tests/fixtures/keras anew.
KERAS := .venv-keras
KERAS_STAMP := $(KERAS)/.installed

test-keras: $(KERAS_STAMP)
	KERAS_BACKEND=jax $(KERAS)/bin/python tests/keras/run.py $(if $(FIXTURES),--fixtures)

$(KERAS_STAMP): pyproject.toml
	test -x $(KERAS)/bin/python || $(PYTHON) -m venv $(KERAS)
	$(KERAS)/bin/python -m pip install --quiet --disable-pip-version-check 'keras>=3' h5py -e .
	touch $(KERAS_STAMP)

# Files that the real torch writes, in an environment of its own. `make fixtures-torch` writes tests/fixtures/torch anew.
TORCH := .venv-torch
TORCH_STAMP := $(TORCH)/.installed

test-torch: $(TORCH_STAMP)
	$(TORCH)/bin/python tests/pytorch/run.py

fixtures-torch: $(TORCH_STAMP)
	$(TORCH)/bin/python tests/pytorch/make_fixtures.py

$(TORCH_STAMP): pyproject.toml
	test -x $(TORCH)/bin/python || $(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' -e .
	touch $(TORCH_STAMP)

# The wheel and the sdist, into dist/, installed into fresh environments for each of these Pythons that is present.
BUILD := .venv-build
BUILD_STAMP := $(BUILD)/.installed
PYTHONS ?= 3.11 3.12 3.13

test-wheel: $(BUILD_STAMP)
	$(BUILD)/bin/python tests/distribution/run.py $(PYTHONS)

$(BUILD_STAMP): pyproject.toml
	test -x $(BUILD)/bin/python || $(PYTHON) -m venv $(BUILD)
	$(BUILD)/bin/python -m pip install --quiet --disable-pip-version-check 'build>=1.2' 'packaging>=25'
	touch $(BUILD_STAMP)

check: setup docs
	$(BIN)/ruff check src tests faults bench examples docs/tools docs/notebooks
	$(BIN)/ruff format --check src tests faults bench examples docs/tools docs/notebooks
	$(BIN)/basedpyright
	$(BIN)/basedpyright --pythonplatform Darwin
	$(BIN)/basedpyright --pythonplatform Windows

format: setup
	$(BIN)/ruff check --fix src tests faults bench examples docs/tools docs/notebooks
	$(BIN)/ruff format src tests faults bench examples docs/tools docs/notebooks

# The site, in site/. A broken link, anchor or reference fails.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

docs: setup
	$(MKDOCS) build

docs-serve: setup
	$(MKDOCS) serve --dev-addr 127.0.0.1:8000

# Run the notebooks of the site and write what they show into them.
notebooks: setup
	JAX_PLATFORMS=cpu $(BIN)/python docs/tools/notebooks.py run docs/notebooks/*.ipynb

demo: setup
	$(BIN)/python examples/demo.py

# Other libraries beside this one, on the same trees in one run. They need their own environment.
BENCH := .venv-bench
BENCH_STAMP := $(BENCH)/.installed
PEERS := orbax-checkpoint==0.12.8 safetensors==0.8.0 eformer==0.0.101 torch==2.13.0

bench: $(BENCH_STAMP) bench-step
	$(BENCH)/bin/python bench/run.py

# What a step of a run costs when nothing is due, and the lines of a loop.
bench-step: $(BENCH_STAMP)
	$(BENCH)/bin/python bench/step.py

bench-quick: $(BENCH_STAMP)
	$(BENCH)/bin/python bench/run.py --quick

# What saves to buckets cost, on servers started for it.
bench-buckets: setup
	$(BIN)/python bench/buckets.py

# A load of a sharded Orbax checkpoint beside Orbax's own restore.
bench-orbax: $(BENCH_STAMP)
	$(BENCH)/bin/python bench/orbax_loads.py

# What one checkpoint of 16 to 10,000 processes costs: the real functions, without the data. About seven minutes.
bench-scale: $(BENCH_STAMP)
	$(BENCH)/bin/python bench/scale.py

# What saves and loads cost on accelerators, on a simulated one.
bench-devices: setup
	$(BIN)/python bench/devices.py

$(BENCH_STAMP): pyproject.toml
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check $(PEERS) -e .
	touch $(BENCH_STAMP)

# Every fault that can be made here; the results go to docs/reliability.md. About an hour and a quarter on two cores.
faults: setup
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(BIN)/python -m faults

# Hostile files, 200,000 for each parser of other programs' files; the counts go to docs/reliability.md.
fuzz-parsers: setup
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(BIN)/python -m faults.parsers

# A training that is killed, stopped and damaged for 30 minutes, while an evaluator reads its steps.
soak: setup
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests JAX_PLATFORMS=cpu $(BIN)/python -m faults.soak

# The same kill in other libraries.
faults-peers: $(BENCH_STAMP)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(BENCH)/bin/python -m faults.peers

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(EFORMER) $(EASYDEL) $(HF) $(KERAS) $(ORBAX) $(ORBAX_OLDEST) $(BENCH) $(BUILD) build dist site src/*.egg-info .pytest_cache .ruff_cache .hypothesis
