# make serve       install, fetch the demo model, serve it        PORT= HOST= CONFIG= LORA_PATH= DASHBOARD=1
# make test        the tests of every commit, in parallel: twenty minutes on two cores   PYTEST_ARGS= WORKERS=
# make test-nightly   the tests that `make test` omits, and property and fuzz tests twenty times as long: hours
# make test-browser   the console in Chromium (apt install chromium fonts-inter npm): minutes
# make test-vllm   the tests of engine.vllm with vLLM's CPU build, in an environment of 3 GB of its own: an hour
# make lint        ruff, mypy and the links of the documentation
# make docs        the generated pages of docs/reference, and the site in build/site
#
# All files are in .venv and in the caches of pip and polylora. A finished step writes a stamp file, so an interrupted step
# runs again.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
CONFIG ?= configs/serve.yaml
DASHBOARD ?=
PYTEST_ARGS ?=
# More than four workers need more memory than they save time.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || sysctl -n hw.ncpu); echo $$((n < 4 ? n : 4)))

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Without this variable the theme prints a warning about MkDocs 2 at each run.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

.PHONY: serve fetch install test test-nightly test-browser test-vllm vllm soak lint docs clean

# A configuration with a section `cuda:` or `xla:` needs the packages of that engine.
has_section = $(shell grep -sE '(^|[{,]) *$(1) *:' $(CONFIG))
EXTRAS := $(if $(call has_section,cuda),$(VENV)/.installed-cuda) $(if $(call has_section,xla),$(VENV)/.installed-jax)

# `polylora serve` downloads the model and shows its progress.
serve: install $(EXTRAS)
	@exec $(BIN)/polylora serve --config $(CONFIG) --host $(HOST) --port $(PORT) $(if $(DASHBOARD),--dashboard)

fetch: install
	@$(BIN)/polylora download --config $(CONFIG)

install: $(VENV)/.installed

test: $(VENV)/.installed-test
	@$(BIN)/polylora download --config $(CONFIG)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations 25 --durations-min 10 --max-worker-restart 1 $(PYTEST_ARGS)

BROWSER := $(VENV)/browser
# Tests of the console run in a browser if these name its parts.
WITH_BROWSER := POLYLORA_BROWSER_PYTHON=$(BROWSER)/bin/python POLYLORA_AXE=$(BROWSER)/axe.min.js
ifneq ($(wildcard $(BROWSER)/.installed),)
test-nightly: export POLYLORA_BROWSER_PYTHON=$(abspath $(BROWSER))/bin/python
test-nightly: export POLYLORA_AXE=$(abspath $(BROWSER))/axe.min.js
endif

# SCREENSHOTS=docs/how-to/console takes the documentation's pictures again.
test-browser: $(VENV)/.installed-test $(BROWSER)/.installed
	$(WITH_BROWSER) POLYLORA_SCREENSHOTS=$(SCREENSHOTS) $(BIN)/python -m pytest --nightly -o timeout=1800 -o faulthandler_timeout=1860 tests/deployments/ingress/console/test_browser.py tests/e2e/demo/test_console.py $(PYTEST_ARGS)

test-nightly:
	@$(MAKE) test PYTEST_ARGS="--nightly -o timeout=7200 -o faulthandler_timeout=7260 $(PYTEST_ARGS)"
	$(BIN)/python -m pytest tests/e2e/service --engine xla

# The environment also serves `make test-nightly POLYLORA_VLLM_PYTHON=$PWD/.venv/vllm/bin/python`.
test-vllm: vllm
	@POLYLORA_VLLM_PYTHON=$(CURDIR)/$(VENV)/vllm/bin/python $(MAKE) test WORKERS=1 PYTEST_ARGS="--nightly -m vllm -o timeout=7200 -o faulthandler_timeout=7260 $(PYTEST_ARGS)"

vllm: $(VENV)/.installed-vllm

# Two hours; MINUTES=10 for less.
soak: $(VENV)/.installed-test
	$(BIN)/python -m load_tests.soak --minutes $(or $(MINUTES),120)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MKDOCS) --site-dir build/checked-site

docs: $(VENV)/.installed-test
	$(BIN)/python -m docs.generate
	$(MKDOCS)

clean:
	rm -rf $(VENV)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "polylora needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --quiet --upgrade pip
	@touch $@

$(BROWSER)/.installed: $(VENV)/.created
	@command -v chromium >/dev/null || { echo "the browser tests need Chromium: apt install chromium fonts-inter" >&2; exit 1; }
	@$(PYTHON) -m venv $(BROWSER)
	@$(BROWSER)/bin/python -m pip --disable-pip-version-check install --quiet playwright==1.65.2 pillow
	@cd $(BROWSER) && tar xzf "$$(npm pack --silent axe-core@4.14.1)" --strip-components 1 package/axe.min.js
	@touch $@

# Ray is half of what is installed, and no kernel needs it: meanwhile the model is downloaded and kernels are compiled, which
# goes on while the service starts. If that fails, the start does it again and says what is wrong.
$(VENV)/.installed: pyproject.toml $(VENV)/.created
	@echo "installing polylora and what it needs, and compiling kernels (a minute or two the first time)"
	@sed -n '/^dependencies = /,/^]/s/^ *"\([^"]*\)",$$/\1/p' pyproject.toml | grep -v '^ray' >$(VENV)/no-ray.txt
	@$(PIP) install --quiet --requirement $(VENV)/no-ray.txt
	@$(BIN)/python -m app.cli.main download --compile --config $(CONFIG) >$(VENV)/download.log 2>&1 & \
	  $(PIP) install --editable .
	@touch $@

$(VENV)/.installed-jax: $(VENV)/.installed
	@echo "installing JAX"
	@$(PIP) install --editable '.[jax]'
	@touch $@

# torch is installed first and alone, so that later installations keep the build that the index offers.
$(VENV)/.installed-torch: $(VENV)/.installed
	@echo "installing torch (minutes the first time)"
	@$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.installed-cuda: $(VENV)/.installed-torch
	@$(PIP) install --editable '.[cuda]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-torch
	@echo "installing what the tests need"
	@$(PIP) install --editable '.[test]'
	@touch $@

$(VENV)/.installed-vllm: .ci/vllm_environment $(VENV)/.created
	@echo "installing vLLM's CPU build (minutes the first time)"
	@PYTHON=$(PYTHON) .ci/vllm_environment $(VENV)/vllm
	@touch $@
