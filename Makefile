# make demo   virtual environment, packages, all five stages on WebShop with the tiny model, table and plots, in runs/demo
# make test   the same set-up, then the test suite; with COVER=--cov it reports the lines that it covers
# make test-slow   what takes minutes: kills, mutated inputs, long runs
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint clean

demo: $(VENV)/.installed
	RUN=runs/demo EPOCHS=3 EXPECTED=runs/reference_output/expected.csv PYTHON=$(BIN)/python bash runs/quickstart.sh

test: $(VENV)/.installed $(VENV)/.textworld
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile $(COVER)

test-slow: $(VENV)/.installed $(VENV)/.textworld $(VENV)/.serve
	$(BIN)/python -m pytest -q -m slow

# torch first and alone: its CPU build where one is at hand, and nothing later may replace it.
$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $$(grep '^torch==' requirements.txt)
	$(BIN)/pip install -q -r requirements.txt
	touch $@

# The original ALFWorld engine compiles C++; without a compiler its parity tests are skipped.
$(VENV)/.textworld: requirements-alfworld.txt $(VENV)/.installed
	$(BIN)/pip install -q -r requirements-alfworld.txt || echo "TextWorld did not install: its parity tests are skipped"
	touch $@

# `transformers serve`, a real server to sample on.
$(VENV)/.serve: requirements-serve.txt $(VENV)/.installed
	$(BIN)/pip install -q -r requirements-serve.txt
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) data/generated
