.DEFAULT_GOAL := help
.PHONY: help test lowest accuracy images check lint types imports system run demo fleet docs format
# Remove the target of a recipe that fails.
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# One stamp for each set of packages: `all` runs the service, `demo` adds its images, `dev` adds the test tools.
RUN := $(VENV)/.installed-all
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev

# The first interpreter that is new enough; evaluated only when .venv has to be created.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: system lint imports ## lint, types and every test (creates .venv when it is absent)
	# Many tests wait for processes: two cores have use for four workers, and for mypy beside them. With several threads
	# each, torch and BLAS would wait for each other; where there are two, they wait passively. The tests start many
	# processes: bytecode is compiled once.
	@$(BIN)/mypy & types=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 \
		$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types || { echo "The types are wrong: make types" >&2; exit 1; }; \
	exit $$tests

# Without the tests of the console, of the containers and of whole systems, which are slow and need other programs.
FAST := tests/models tests/tasks tests/trainer tests/service tests/openworld --ignore=tests/service/console

lowest: ## the fast tests with the lowest versions of all dependencies that pyproject.toml allows, in .venv-lowest
	@UV_RESOLUTION=lowest-direct $(MAKE) --no-print-directory VENV=.venv-lowest .venv-lowest/.installed-dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 .venv-lowest/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder $(FAST)

# On generated images, or on the image sets in DATA. It fails if a figure drops by more than its spread.
accuracy: $(DEV) ## the short suite of the accuracy benchmark, in minutes
	$(BIN)/python -m benchmarks.accuracy --data $(or $(DATA),.) --out $(VENV)/accuracy --suite short

images: $(DEV) ## build the server's image with buildah, as root, and run it (TARGETS="server trainer": both)
	sh deploy/images.sh $(or $(TARGETS),server)
	$(BIN)/pytest -q tests/deploy/test_built_images.py

check: lint types imports ## lint, types and import contracts only

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

imports: $(DEV)
	$(BIN)/lint-imports

system: ## install Debian's chromium, prometheus, nginx, Redis with Sentinel and buildah for the tests (as root on Debian)
	@sh tests/support/install_tools.sh

run: $(RUN) ## start everything on this machine: server, trainer and queue (Ctrl-C stops it)
	$(BIN)/openworld up

demo: $(DEMO) ## run the whole loop on the running service: teach, detect novel images, label them
	$(BIN)/openworld demo

fleet: $(DEV) ## start a fleet of real parts on this machine and run the demo through its balancer (Ctrl-C stops it)
	$(BIN)/python -m deploy.fleet

docs: $(DEV) ## regenerate the generated parts of docs/ and deploy/
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/package_graph.py
	$(BIN)/python docs/accuracy_figures.py
	$(BIN)/python deploy/kubernetes/prometheus_rules.py

format: $(DEV) ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# venv writes pip last: without it the environment is incomplete and is created again.
$(BIN)/pip:
	@python='$(PYTHON)'; \
	if [ -z "$$python" ] || ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
		echo "Python 3.11 or newer is needed and was not found." >&2; \
		echo "Install it, or name it: make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi; \
	"$$python" -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml | $(BIN)/pip
	@sh deploy/install.sh $(VENV) $*
	@touch $@
