# Every command by name; `make` prints them. What a target does stands in tools/ or ci/run.
# PYTHON=/path/to/python runs any of them with that interpreter in place of .venv.
in_environment = python3 tools/environment.py run
given = $(or $($1),$(error $1= must be given: see `make`))

help: ## this list
	@sed -n 's/^\([a-z%-]*\):.*## \(.*\)/\1|\2/p' Makefile | sed 's/%/<system>/' | awk -F'|' '{printf "make %-20s %s\n", $$1, $$2}'
demo: ## every system does its headline job; one table, and a page in out/demo/index.html
	$(in_environment) tools/demo.py
test: ## lint, types, tests, kernels, install-alone checks, examples, smoke experiments
	ci/run
test-shared: ## the tests of septet-shared
	$(in_environment) -m pytest shared
test-%: ## the tests of one system
	$(in_environment) -m pytest packages/$*
check: ## lint, formatting and types only
	ci/run lint format types
format: ## mends lint and formatting where a tool can
	$(in_environment) -m ruff check --fix . && $(in_environment) -m ruff format .
install-%: ## one system, with septet-shared, into the active environment
	python3 tools/environment.py install $*
bench-%: ## the benchmarks of one system, or of shared; JSON rows
	@$(in_environment) tools/bench.py $* --json
reproduce: ## SYSTEM= EXPERIMENT= SCALE= (smoke, cpu, gpu or paper): a paper's experiment
	$(in_environment) tools/reproduce.py $(if $(SYSTEM),--system $(SYSTEM)) $(if $(EXPERIMENT),--experiment $(EXPERIMENT)) --scale $(or $(SCALE),smoke)
kernels: ## builds every GPU kernel ahead of time, no GPU needed
	$(in_environment) tools/compile_kernels.py
gpu: ## everything that wants a GPU, within 10 minutes, as JSON
	$(in_environment) tools/gpu_check.py
dist: ## wheels and source archives of every distribution, in dist/
	$(in_environment) -m hatch build --all "$(CURDIR)/dist"
lock: ## resolves the versions in ci/constraints-cpu.txt anew
	python3 tools/lock.py
new-system: ## NAME=: the skeleton of a new system
	$(in_environment) tools/new_system.py $(call given,NAME)
release: ## SYSTEM=: checks, builds and tags a release of one system
	$(in_environment) tools/release.py $(call given,SYSTEM)
clean: ## removes what commands made: .venv, out, dist and caches
	rm -rf .venv out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

.PHONY: help demo test test-shared check format reproduce kernels gpu dist lock new-system release clean
