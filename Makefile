# The front door: every target first does the set-up that is missing. See docs/building.md.
SHELL := /bin/bash
BUILD ?= build
# Files that include libtorch take about 1.5 GB to compile: fewer at a time where memory is short.
JOBS ?= $(shell awk -v cores=$$(nproc) '/^MemAvailable/ { fit = int($$2 / 1500000); \
    print (fit < 1) ? 1 : (fit < cores) ? fit : cores }' /proc/meminfo)

.PHONY: help setup configure build demo test lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build  ## train a small hybrid on real text over 4 ranks, then check it against one rank
	@tools/demo.sh $(BUILD)/hcp

test: build  ## build, then run all tests
	@ctest --test-dir $(BUILD) --output-on-failure -j2

build: configure  ## compile build/hcp
	@ninja -C $(BUILD) -j $(JOBS)

lint: configure  ## check format, file lengths and clang-tidy on files without libtorch; FULL=1: on all
	@tools/setup.sh lint
	@tools/lint.sh $(BUILD) $(if $(FULL),--full)

setup:  ## install all that is missing: Debian packages, libtorch, the lint tools
	@tools/setup.sh lint

clean:  ## remove the build folder (set-up stays in .deps)
	@rm -rf $(BUILD)

# Configured anew each time (a second): the choice of libtorch follows the environment.
configure:
	@tools/setup.sh build
	@mkdir -p $(BUILD)
	@cmake -G Ninja -B $(BUILD) -DHCP_LIBTORCH="$(HCP_LIBTORCH)" $(CMAKE_FLAGS) > $(BUILD)/configure.log || \
	    { cat $(BUILD)/configure.log; exit 1; }
