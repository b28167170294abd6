# One command per job. Each target that needs the virtual environment makes it if it is not there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A pip requirement, such as torch==2.11.0. Without it scripts/choose_torch.py chooses what fits.
TORCH ?=
# What `make check` runs: the command line, the client, configuration, and the engine over scripted and real models.
SMOKE := tests/backend/cache tests/backend/cli tests/backend/config tests/backend/engine/test_engine.py \
	tests/backend/engine/test_real_models.py tests/backend/models/test_eagle3_drafts.py tests/backend/scheduler \
	tests/backend/types tests/client tests/docs
STAMP := $(VENV)/.installed

# Modules of tests are rewritten as they are imported. Kept, they cost a process 13 s instead of 19, in images too that
# tell Python to keep nothing.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo drafts setup lint fmt check test soak test-gpu generated docs clean

setup: $(STAMP)  ## make the virtual environment and install everything the tests need

$(STAMP): pyproject.toml
	PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' ./scripts/setup.sh
	@touch $(STAMP)

demo: $(STAMP)  ## the real Triton Server, one prompt with speculation and without
	$(BIN)/kimi demo

drafts: $(STAMP)  ## train the drafts of kimi-nano that do not ship, into out/drafts; minutes on a GPU, hours on a CPU
	PYTHONPATH=demo $(BIN)/python -m kimi_nano prepare out/nano-data --tokenizer demo/kimi-nano
	PYTHONPATH=demo $(BIN)/python -m kimi_nano drafts demo/kimi-nano out/nano-data out/drafts --recipe nano-deep --kinds mla31 mha --draft-steps 2500

fmt: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generated: $(STAMP)  ## rewrite what is declared in code and repeated in docs/ and config.pbtxt, and what kernels compile to
	$(BIN)/python scripts/write_generated_files.py
	PYTHONPATH=tests $(BIN)/python -m support.compile_record

docs: $(STAMP)  ## the pages of README and docs/ as a site in out/site, every link checked
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	$(BIN)/python scripts/build_site.py

lint: $(STAMP)  ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## in a minute: lint, types, and the tests that most mistakes fail
	$(BIN)/pytest -q -n $(or $(JOBS),2) $(SMOKE)

test: $(STAMP)  ## everything that runs on a CPU, but for soak tests
	$(BIN)/pytest -n $(or $(JOBS),4)

soak: $(STAMP)  ## long loads on a real server: nothing grows, no text is wrong
	$(BIN)/pytest -m soak

test-gpu:  ## on a CUDA host, with its own torch and triton; needs no virtual environment; tests/server where its packages are
	PYTHONPATH=$(CURDIR)/backend:$(CURDIR)/kernels:$(CURDIR)/client $(PYTHON) -m pytest -m gpu -p no:cacheprovider \
		$$(grep -rl 'mark\.gpu' tests --include='test_*.py' \
		$$($(PYTHON) -c 'import pytriton, tritonclient' 2>/dev/null || echo --exclude-dir=server))

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
