# The one entry to the project: `make` lists the targets, and each one makes what it needs first.
#
#   PYTHON=python3.13   the interpreter for a new environment (default: the newest one that works)
#   VENV=.venv-3.13     where that environment lives
#   ARGS="-k redis"     further arguments for pytest, or for the benchmarks
#   KILLS=50 MINUTES=5  how much of a soak, or of a simulation, is enough (also MESSAGES=, OUTAGES=)
#   CI=true             a server that cannot be had is a failure, not a skipped test

VENV ?= .venv
# More than half of its time a test waits, for a lease to end or a server to start: five of them keep
# two cores busy.
JOBS ?= 5
ARGS ?=
# Every branch has a test, and what only a race would reach has one that brings the race about. The
# rest is for what is not known yet to be one: the report names it, and it gets its test.
COVERAGE_MIN ?= 99.95
COVERED := src/semel/*

RUN := $(VENV)/bin/python -m
READY := $(VENV)/.ready
BENCH_VENV ?= .venv-bench
BENCH_READY := $(BENCH_VENV)/.ready
LOWEST_VENV ?= .venv-lowest
LOWEST_READY := $(LOWEST_VENV)/.ready

# pyright's wheel holds all it needs; without this it would still ask the network for news.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# The theme announces its successor at each build.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-svg dashboard-svg servers test test-more test-lowest test-galera test-clients quick busy check lint types layers docs prose package bench bench-smoke bench-paired bench-purge bench-tally bench-linear bench-web-memory diagram generate reference walk constraints clean soak-transactions soak-sessions soak-queues soak-outages simulate fuzz-http fuzz-queues

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

setup: $(READY)  ## make the virtual environment

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh $(VENV)
	@touch $@

$(BENCH_READY): pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh $(BENCH_VENV) bench
	@touch $@

# Not every one of the lowest versions has wheels for a newer Python.
$(LOWEST_READY): pyproject.toml constraints.txt constraints-lowest.txt scripts/setup.sh
	PYTHON="$(or $(PYTHON),python3.11 python3.12)" LOWEST=constraints-lowest.txt \
	    scripts/setup.sh $(LOWEST_VENV) test
	@touch $@

demo: $(READY)  ## see it work: 15 seconds, or a minute or two with a new environment
	$(RUN) examples.demo

demo-svg: $(READY)  ## record the demo as docs/assets/demo.svg
	$(VENV)/bin/python scripts/demo_svg.py

servers: $(READY)  ## find or install the servers that the tests talk to
	$(VENV)/bin/python scripts/servers.py

# A file is the unit that the workers share: its servers are then started once. The longest come first
# (tests/conftest.py), which the plugin would sort by the number of their tests.
SHARED := -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: servers  ## run the tests, and insist on the coverage of the core, engines and stores
	$(RUN) coverage erase
	$(RUN) coverage run -m pytest $(SHARED) $(ARGS)
	$(RUN) coverage combine --quiet
	$(RUN) coverage report --include='$(COVERED)' --omit='src/semel/testing/*' --precision=2 --fail-under=$(COVERAGE_MIN)

test-more: servers  ## run all tests, in half an hour: also those of which `make test` runs only some
	ALL_TESTS=yes $(RUN) pytest $(SHARED) --session-timeout=2400 $(ARGS)

# What the versions of drivers and frameworks can change. A session limit bounds it to 20 minutes.
LOWEST_TESTS ?= tests/contract tests/core tests/stores tests/adapters tests/web tests/faults tests/transactions tests/observe tests/schedules

test-lowest: $(LOWEST_READY)  ## run contract, adapters, faults and transactions with the lowest versions supported
	$(LOWEST_VENV)/bin/python scripts/servers.py
	$(LOWEST_VENV)/bin/python -m pytest $(SHARED) --session-timeout=1200 $(LOWEST_TESTS) $(ARGS)

quick: $(READY)  ## run the tests without coverage, stopping at the first failure
	$(RUN) pytest -x $(SHARED) $(ARGS)

busy: servers  ## run the tests beside a load that keeps every core busy
	$(VENV)/bin/python scripts/busy.py $(RUN) pytest $(SHARED) $(ARGS)

test-galera: $(READY)  ## run the tests of a Galera cluster with three nodes, within 10 minutes
	$(VENV)/bin/python scripts/servers.py --galera
	GALERA_TESTS=yes $(RUN) pytest --session-timeout=600 tests/galera $(ARGS)

test-clients: $(READY)  ## run the clients in Go and Java, beside the one in JavaScript, against a service
	$(VENV)/bin/python scripts/servers.py --clients
	CLIENTS_TESTS=yes $(RUN) pytest --session-timeout=900 tests/clients $(ARGS)

soak-transactions: servers  ## kill transactions at random, KILLS=500 times on each database, within MINUTES=30
	PYTHONPATH=tests $(VENV)/bin/python tests/transactions/soak.py

soak-sessions: servers  ## kill web servers with session= endpoints, KILLS=250 times on each database and kind, within MINUTES=30
	PYTHONPATH=tests $(VENV)/bin/python tests/adapters/soak_sessions.py

soak-queues: servers  ## kill workers of Celery and aio-pika at random, MESSAGES=10000 with duplicates in each mode, within MINUTES=30
	PYTHONPATH=tests $(VENV)/bin/python -m queues.soak

soak-outages: servers  ## kill Redis while consumers of pika and aio-pika handle messages, OUTAGES=500 times, within MINUTES=60
	PYTHONPATH=tests $(VENV)/bin/python scripts/busy.py $(VENV)/bin/python -m queues.outages

simulate: $(READY)  ## simulate engines with faults, new seeds for MINUTES=1 (or from FIRST=42 on, COUNT=1 of them)
	PYTHONPATH=tests $(RUN) proof.sim.hunt --minutes $(or $(MINUTES),1) $(if $(FIRST),--first $(FIRST)) $(if $(COUNT),--count $(COUNT))

fuzz-http: $(READY)  ## send COUNT=10000 odd requests to every web door, within MINUTES=10
	PYTHONPATH=tests $(VENV)/bin/python -m web.fuzz

fuzz-queues: servers  ## send COUNT=10000 broken messages to each consumer of a queue, within MINUTES=15
	PYTHONPATH=tests $(VENV)/bin/python -m queues.fuzz

check: lint types layers  ## everything that is checked without running it

lint: $(READY)  ## style
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/python scripts/generate_sync.py --check

types: $(READY)  ## mypy and pyright, of the examples in the documentation, too
	$(RUN) mypy
	$(RUN) pyright --pythonpath $(VENV)/bin/python
	PYTHONPATH=tests $(VENV)/bin/python scripts/doc_types.py

layers: $(READY)  ## imports go downward only
	$(VENV)/bin/lint-imports

docs: prose  ## build the documentation into site/; a warning is an error
	$(RUN) mkdocs build --strict

prose: $(READY)  ## find what our voice doesn't say in the public text, and check its spelling
	$(VENV)/bin/python scripts/prose.py

package: $(READY)  ## build the package into dist/, check it and try the installed wheel; RELEASE=yes insists on real URLs
	$(VENV)/bin/python scripts/package.py $(if $(RELEASE),--release)

# In an environment of its own: the alternatives bring much along that the tests must not need.
bench: $(BENCH_READY)  ## measure semel beside floors and alternatives, in about 20 minutes (twice: ARGS=--twice)
	$(BENCH_VENV)/bin/python scripts/servers.py
	$(BENCH_VENV)/bin/python -m benchmarks $(ARGS)

bench-smoke: servers  ## try that every benchmark runs, in about three minutes
	BENCH_SMOKE=yes $(RUN) pytest tests/benchmarks $(ARGS)

bench-paired: servers  ## compare the speed with another commit: BASE=... ARGS="--only redis"
	$(RUN) benchmarks.paired $(BASE) $(ARGS)

bench-purge: servers  ## measure how long claims wait during a purge
	$(VENV)/bin/python benchmarks/purge.py

bench-tally: $(READY)  ## measure what counting events adds to a call on memory: at most 2.5 us
	$(RUN) benchmarks --only tally

bench-linear: $(READY)  ## measure whether parsing grows linearly with what a client sends
	$(RUN) benchmarks.linear

bench-web-memory: servers  ## measure the memory of 200 requests of a megabyte at once
	$(RUN) benchmarks.web_memory

generate: $(READY)  ## write the code for threads again, from the code for tasks
	$(VENV)/bin/python scripts/generate_sync.py

dashboard-svg: servers  ## draw the Grafana dashboard anew, from real data
	$(VENV)/bin/python scripts/dashboard_svg.py

reference: $(READY)  ## write the reference of the command line again, from the help of its commands
	$(VENV)/bin/python scripts/cli_reference.py

walk: servers  ## show which files a call on Redis and a request to FastAPI on PostgreSQL pass through
	PYTHONPATH=tests $(RUN) scripts.walk

diagram: $(READY)  ## draw the states anew after a change of the table in semel.core.judge
	$(VENV)/bin/python scripts/diagram.py

constraints:  ## pin the newest versions of everything, found with a fresh environment
	scripts/constraints.sh

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) $(BENCH_VENV) $(LOWEST_VENV) .servers site build dist .coverage .coverage.* .hypothesis \
	    .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
