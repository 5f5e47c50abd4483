# Every target but gpu runs in .venv; the first target that needs it creates it.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check -qq install -c constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test laws lint docs wheel bench gpu gpu-wheels sweep fuzz survivors clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s%s\n", $$1, $$2}' Makefile

demo: .venv/demo.stamp  ## train a small checkpoint, load it, generate text, refuse damage
	$(BIN)/vllm-module demo

# Not `python -m pytest`, which would put the root's models/ and kernels/ on sys.path.
# Three workers on two cores: some tests wait for other processes.
# Programs that tests start would compile the package anew each, where no byte code may be written.
test: .venv/dev.stamp  ## run the tests; ARGS="tests/layers -x" chooses
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n 3 --dist worksteal $(ARGS)

laws: .venv/dev.stamp  ## check each law of loading on EXAMPLES=200 cases, and faults; and what tests do in part
	AT_LENGTH=1 $(BIN)/pytest -q -n 2 -m at_length
	AT_LENGTH=1 $(BIN)/pytest -q -n 2 -m "not at_length" tests/kernels/test_compiled.py tests/server/test_many_clients.py tests/adapters/test_laws.py tests/laws/test_processes.py tests/layers/test_experts_that_move.py tests/distributed/test_rearranged_experts.py tests/distributed/test_many_ranks.py tests/distributed/test_pipeline.py tests/distributed/test_moves.py tests/distributed/test_moves_that_fail.py tests/distributed/test_together.py tests/runtime/test_warm_up.py tests/runtime/test_sampling_params.py "tests/adapters/test_memory.py::test_drawn_requests[plain]"
	SPLITS=100000 $(BIN)/pytest -q -n 2 tests/server/test_parsers.py -k every_split
	$(BIN)/python tests/laws/table.py --examples $(or $(EXAMPLES),200)

lint: .venv/dev.stamp  ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: .venv/docs.stamp  ## build the documentation into build/docs; a warning is an error
	$(BIN)/mkdocs build --strict

wheel: .venv/dev.stamp  ## install the wheel in empty environments, each extra alone, and try it
	$(BIN)/python tests/try_wheel.py

bench: .venv/dev.stamp  ## measure and draw docs/figures.svg; about 45 minutes, on an idle machine
	for name in load memory cold sharded formats stores cooperative routing plan layout digest quantization host \
		wrapped; do \
		$(BIN)/python tests/bench/$$name.py --out tests/bench/results/$$name.json || exit 1; \
	done
	$(BIN)/python tests/bench/engine.py --shapes 3M 58M 0.6B mamba2 hybrid --out tests/bench/results/engine.json
	$(BIN)/python tests/bench/figures.py
	$(BIN)/python tests/bench/draw.py

# On a GPU not in .venv: with the packages of that machine, and this tree.
OUT ?= build/gpu
gpu: $(if $(DRY),.venv/dev.stamp)  ## check and measure on a GPU, into OUT=build/gpu; DRY=1: small, on a CPU
	@cd tests/bench && $(if $(DRY),$(abspath $(BIN))/python,$(PYTHON)) -m gpu --out $(abspath $(OUT)) $(if $(DRY),--dry) \
		$(if $(COMPUTE_SANITIZER),--sanitize) $(ARGS)

# A machine with a GPU may have torch and no pydantic, and no network to fetch it.
FOR ?= 3.12
WHEELS := build/gpu-wheels/$(FOR)
gpu-wheels: .venv/torch.stamp  ## collect the packages that `make gpu` may lack there, for Python FOR=3.12
	rm -rf $(WHEELS)
	$(BIN)/python -m pip --disable-pip-version-check -qq download -c constraints.txt -d $(WHEELS)/files \
		--only-binary=:all: --python-version $(FOR) --platform manylinux_2_17_x86_64 pydantic
	for wheel in $(WHEELS)/files/*.whl; do $(BIN)/python -m zipfile -e $$wheel $(WHEELS) || exit 1; done
	rm -rf $(WHEELS)/files

SECONDS ?= 60
sweep: .venv/dev.stamp  ## try every causal language model of transformers, tiny; TYPES="llama opt" chooses
	@mkdir -p build
	$(BIN)/python -P tests/models/sweep.py --sizes 1 2 4 --out build/sweep.json $(TYPES)

fuzz: .venv/fuzz.stamp  ## fuzz the reading of checkpoints and requests, for SECONDS=60 in all
	@mkdir -p build/fuzz
	for kind in file folder config torch npcache gguf dcp manifest quant_state http request; do \
		$(BIN)/python tests/fuzz/fuzz.py $$kind $$(($(SECONDS) / 11)) build/fuzz || exit 1; \
	done

survivors: .venv/survivors.stamp  ## plant COUNT=40 small faults, drawn by SEED=0, and say which the tests miss; ARGS="--rooms core"
	OMP_NUM_THREADS=1 $(BIN)/python tests/survivors/search.py --count $(or $(COUNT),40) --seed $(or $(SEED),0) $(ARGS)

clean:  ## remove builds and caches; .venv stays
	rm -rf build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find kernels models tests vllm_module -name __pycache__ -prune -exec rm -rf {} +

.venv/torch.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 10) and sys.exit("Python >= 3.10 is needed, got " + sys.version.split()[0] + ": name one with make PYTHON=...")'
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "installing $$(grep '^torch==' constraints.txt)"
	@$(INSTALL) torch  # before anything that depends on it could choose another, gigabytes large
	@touch $@

.venv/demo.stamp: .venv/torch.stamp pyproject.toml
	@echo "installing vllm-module with what the demo needs"
	@$(INSTALL) -e '.[demo]'
	@touch $@

.venv/dev.stamp: .venv/torch.stamp pyproject.toml
	@echo "installing vllm-module with what tests and linters need"
	@$(INSTALL) -e '.[test,lint]'
	@touch $@

.venv/docs.stamp: .venv/dev.stamp
	@echo "installing what the documentation is built with"
	@$(INSTALL) -e '.[docs]'
	@touch $@

.venv/fuzz.stamp: .venv/dev.stamp
	@echo "installing what fuzzing needs"
	@$(INSTALL) -e '.[fuzz]'
	@touch $@

.venv/survivors.stamp: .venv/dev.stamp
	@echo "installing what the search for survivors needs"
	@$(INSTALL) -e '.[survivors]'
	@touch $@
