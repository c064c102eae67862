# The one list of commands, for people and for CI.
#   make up     brings the whole mesh up on this machine with a real small model
#   make test   passes all tests

VENV   ?= .venv
PYTHON ?= python3.11
BIN    := $(VENV)/bin
export PATH := $(HOME)/.cargo/bin:$(PATH)
# Without the vision and chat-server parts of llama.cpp, which we don't use: a third less to compile.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/deploy/llama.cpp/patch.cmake
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt
# pip keeps what it compiled by name and release alone, so what is compiled otherwise is kept elsewhere.
LLAMA_PATCHES := $(wildcard deploy/llama.cpp/*)
LLAMA_CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/headrace/llama.cpp-$(shell cat $(LLAMA_PATCHES) | cksum | cut -d' ' -f1)

RUST_SOURCES   := $(shell find gateway_rs proto -name '*.rs' -o -name '*.proto' -o -name Cargo.toml)
EXTENSION      := services/headrace/_gateway.abi3.so
PYTEST         := $(BIN)/python -m pytest

.PHONY: help up build test test-fast test-slow test-rust test-python lint format proto bench clean

help:
	@sed -n 's/^#   //p' Makefile

up: build
	$(BIN)/headrace up

# A fresh machine: a virtual environment with the engine and the development tools, and the extension in it.
build: $(VENV)/.extension

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "make: needs $(PYTHON) (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# llama.cpp is compiled for this machine's CPU here, once: some six minutes on two cores.
$(VENV)/.llama: $(VENV)/.python $(VENV)/requirements.txt $(LLAMA_PATCHES)
	@echo "installing llama.cpp (the first time compiles it: some minutes)"
	$(PIP) --cache-dir $(LLAMA_CACHE) --no-deps --force-reinstall $$(grep '^llama-cpp-python' $(VENV)/requirements.txt)
	touch $@

$(VENV)/requirements.txt: $(VENV)/.python pyproject.toml .ci/requirements.py
	$(BIN)/python .ci/requirements.py > $@

$(VENV)/.packages: $(VENV)/.llama $(VENV)/requirements.txt .ci/constraints.txt
	@echo "installing Python packages"
	$(PIP) --requirement $(VENV)/requirements.txt
	touch $@

$(VENV)/.extension: $(VENV)/.packages $(RUST_SOURCES) Cargo.toml Cargo.lock
	@command -v cargo >/dev/null || { echo "make: needs a Rust toolchain (cargo)" >&2; exit 1; }
	@echo "building the extension (the first time: some minutes)"
	@VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --release > $(VENV)/maturin.log 2>&1 \
		|| { cat $(VENV)/maturin.log; exit 1; }
	touch $@

test: lint test-rust test-python

# Under two minutes once built: no real model, no long properties.
test-fast: build
	$(PYTEST) -m "not model and not slow" tests/unit tests/contract

# Every property and soak in its long profile.
test-slow: build
	HEADRACE_PROPTEST_CASES=20000 cargo test --release --quiet
	$(PYTEST) --slow

test-rust: build
	cargo test --release --quiet

test-python: build
	$(PYTEST)

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cargo fmt --check
	cargo clippy --release --all-targets --quiet -- -D warnings
	$(BIN)/mypy
	cd services && ../$(BIN)/python -m mypy.stubtest headrace._gateway --mypy-config-file ../pyproject.toml
	$(BIN)/buf lint proto
	$(BIN)/python .ci/generate.py --check

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cargo fmt

# Regenerates the committed Python code of the contracts.
proto: $(VENV)/.packages
	$(BIN)/python .ci/generate.py

bench: build
	@echo "see benchmarks/README.md: each benchmark is one command"

clean:
	rm -rf $(VENV) target $(EXTENSION)
