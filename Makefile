# shunt: an LLM endpoint picker that runs inside Envoy.
SHELL := /bin/bash
.DEFAULT_GOAL := help

OUT   := build/out
CACHE := build/.cache

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X github.com/shuntproxy/shunt/filter.Version=$(VERSION)
MODULE  := go build -trimpath -buildmode=c-shared -ldflags="$(LDFLAGS)"
STATIC  := CGO_ENABLED=0 go build -trimpath -ldflags="$(LDFLAGS)"

# The module that hosts the contrib door in a stock Envoy, for tests.
API_PKG  := github.com/envoyproxy/envoy/contrib/golang/common/go/api
HOST     := $(OUT)/libgolanghost.so
HOST_SRC := $(wildcard e2e/golanghost/*.c e2e/golanghost/*.h)

ABI_PKG := github.com/envoyproxy/envoy/source/extensions/dynamic_modules/abi
ABI     := filter/dynmod/abi.h

LINT_VERSION := v2.15.0
LINT         := $(CACHE)/bin/golangci-lint-$(LINT_VERSION)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

# The hooks' header comes from the module cache, so that plain go build, vet
# and test, gopls and golangci-lint need no environment variable.
$(ABI): go.mod
	@dir=$$(go list -f '{{.Dir}}' $(ABI_PKG)) && test -n "$$dir" && install -m 0644 "$$dir/abi.h" $@

.PHONY: build
build: $(ABI) ## libshunt.so, libshunt_contrib.so, shunt and enginesim, in build/out
	@mkdir -p $(OUT)
	$(MODULE) -o $(OUT)/libshunt.so ./build/libshunt
	$(MODULE) -o $(OUT)/libshunt_contrib.so ./build/libshunt_contrib
	$(STATIC) -o $(OUT)/shunt ./cmd/shunt
	$(STATIC) -o $(OUT)/enginesim ./cmd/enginesim
	@rm -f $(OUT)/*.h

$(HOST): $(HOST_SRC) $(ABI)
	@mkdir -p $(OUT)
	@abi=$$(go list -f '{{.Dir}}' $(ABI_PKG)) && api=$$(go list -f '{{.Dir}}' $(API_PKG)) && test -n "$$abi" && test -n "$$api" && \
	$(CC) -std=c11 -Wall -Wextra -Werror -O1 -g -fvisibility=hidden -pthread -fPIC -shared -I"$$abi" -I"$$api" -o $@ e2e/golanghost/*.c -ldl

$(LINT):
	@mkdir -p $(CACHE)/bin
	GOBIN=$(CURDIR)/$(CACHE)/bin go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	@mv $(CACHE)/bin/golangci-lint $@

.PHONY: vet
vet: $(ABI) ## go vet, in all builds
	go vet ./...
	go vet -tags shunttest ./filter/... ./build/...
	go vet -tags nokubernetes ./...

.PHONY: lint
lint: $(ABI) $(LINT) ## golangci-lint: the import rules of the layout, and more
	$(LINT) run ./...

.PHONY: unit
unit: $(ABI) ## unit tests, with -race
	go test -race $$(go list ./... | grep -vE '/e2e$$|/e2e/hosttest$$')
	go test -race -tags shunttest ./filter
	go test -tags nokubernetes ./filter ./internal/discovery
	go test -run Alloc ./filter ./scorer ./metricsync # -race has allocations of its own

# The modules of the e2e suite can be told to panic and to wait.
E2E_MODULE := go build -trimpath -buildmode=c-shared -tags shunttest -ldflags="$(LDFLAGS)"
.PHONY: e2e
e2e: build $(HOST) ## the e2e suite in a real Envoy (ENVOY, PATH, else PyPI's 1.39.3), through both doors
	@mkdir -p $(OUT)/e2e
	$(E2E_MODULE) -o $(OUT)/e2e/libshunt.so ./build/libshunt
	$(E2E_MODULE) -o $(OUT)/e2e/libshunt_contrib.so ./build/libshunt_contrib
	@cp $(HOST) $(OUT)/shunt $(OUT)/e2e/
	go test -race -count=1 -timeout 30m -parallel 4 ./e2e -modules $(CURDIR)/$(OUT)/e2e $(E2EFLAGS)

.PHONY: test-kubernetes
test-kubernetes: build $(HOST) ## the kubernetes source against a real API server, through both doors (about 2 minutes, and 6 to 9 to build the server once; E2EFLAGS="-away 2m")
	@mkdir -p $(OUT)/e2e
	$(E2E_MODULE) -o $(OUT)/e2e/libshunt.so ./build/libshunt
	$(E2E_MODULE) -o $(OUT)/e2e/libshunt_contrib.so ./build/libshunt_contrib
	@cp $(HOST) $(OUT)/e2e/
	dir=$$(build/kubernetes.sh) && go test -count=1 -timeout 20m ./e2e -run TestKubernetes -v -modules $(CURDIR)/$(OUT)/e2e -kubernetes "$$dir" $(E2EFLAGS)

.PHONY: mutants
mutants: $(ABI) ## take each rule of the scorer out in turn: its test has to notice (about 4 minutes; ONLY=prefix narrows)
	go run ./build/mutants -only "$(ONLY)"

.PHONY: spec
spec: build $(HOST) ## every sentence of the specification on headers and endpoints, with its test and result through both doors
	@mkdir -p $(OUT)/e2e
	$(E2E_MODULE) -o $(OUT)/e2e/libshunt.so ./build/libshunt
	$(E2E_MODULE) -o $(OUT)/e2e/libshunt_contrib.so ./build/libshunt_contrib
	@cp $(HOST) $(OUT)/shunt $(OUT)/e2e/
	go run ./e2e/spec -modules $(CURDIR)/$(OUT)/e2e

.PHONY: e2e-host
e2e-host: build $(HOST) ## the contrib door's host against misuse, sanitizers and contrib's sources; the compose demo
	go test -count=1 -timeout 20m ./e2e/hosttest
	go test -race -count=1 ./e2e/compose -out $(CURDIR)/$(OUT)

.PHONY: test
test: vet lint unit e2e e2e-host ## everything: vet, lint, unit tests with -race, e2e in a real Envoy

.PHONY: test-matrix
test-matrix: build ## the e2e suite of the stock door on Envoy 1.38, 1.39 and 1.40
	@set -e; for v in 1.38.3 1.39.3 1.40.0; do echo "== Envoy $$v"; $(MAKE) --no-print-directory e2e E2EFLAGS="-envoy $$v -door stock"; done

FUZZTIME ?= 20s
.PHONY: fuzz
fuzz: $(ABI) ## each fuzz target for FUZZTIME (20s)
	@build/fuzz.sh $(FUZZTIME)

REQUESTS ?= 1000000
.PHONY: stress
stress: ## flow control under -race: REQUESTS (1,000,000) that arrive, leave and expire while all else changes
	go test -race -count=1 -timeout 30m -run TestStress -v ./internal/flowcontrol -requests $(REQUESTS)

DEMO       := $(OUT)/demo/demo
DEMO_FLAGS = $(if $(DOOR),--door $(DOOR)) $(if $(POLICY),--policy $(POLICY)) $(ARGS)

# A built binary, not go run: a signal would end go run and orphan the demo.
.PHONY: demo-tool
demo-tool: build $(HOST)
	@mkdir -p $(OUT)/demo
	@CGO_ENABLED=0 go build -trimpath -o $(DEMO) ./e2e/demo

.PHONY: demo up down
demo: demo-tool ## 300 chat requests through Envoy with shunt inside, and what became of them
	@$(DEMO) show $(DEMO_FLAGS)
up: demo-tool ## leave it running on 127.0.0.1:8080, 9901, 9902 (ARGS="--listen IP:port ...")
	@$(DEMO) up $(DEMO_FLAGS)
down: ## end what make up started
	@if [ -x $(DEMO) ]; then $(DEMO) down; else echo "Nothing is up."; fi

.PHONY: bench
bench: build $(HOST) ## CPU, throughput and latency beside bare Envoy and an empty Go module
	$(MODULE) -o $(OUT)/libfloor.so ./build/floor
	$(CC) -std=c11 -O2 -Wall -Wextra -Werror -fPIC -shared -I$(dir $(ABI)) -o $(OUT)/libhold.so build/hold/hold.c
	go run ./e2e/bench

.PHONY: bench-go
bench-go: $(ABI) ## the Go benchmarks
	go test -run '^$$' -bench . -benchmem ./...

.PHONY: clean
clean: down ## remove what was built, but not the caches
	rm -rf $(OUT)
