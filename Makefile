# shunt: an LLM endpoint picker that runs inside Envoy.
SHELL := /bin/bash
.DEFAULT_GOAL := help

OUT   := build/out
CACHE := build/.cache

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X github.com/shuntproxy/shunt/filter.Version=$(VERSION)
MODULE  := go build -trimpath -buildmode=c-shared -ldflags="$(LDFLAGS)"
STATIC  := CGO_ENABLED=0 go build -trimpath -ldflags="$(LDFLAGS)"

ABI_PKG := github.com/envoyproxy/envoy/source/extensions/dynamic_modules/abi
ABI     := filter/dynmod/abi.h

LINT_VERSION := v2.15.0
LINT         := $(CACHE)/bin/golangci-lint-$(LINT_VERSION)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# The hooks' header comes from the module cache, so that plain go build, vet
# and test, gopls and golangci-lint need no environment variable.
$(ABI): go.mod
	@dir=$$(go list -f '{{.Dir}}' $(ABI_PKG)) && test -n "$$dir" && install -m 0644 "$$dir/abi.h" $@

.PHONY: build
build: $(ABI) ## libshunt.so, shunt and enginesim, in build/out
	@mkdir -p $(OUT)
	$(MODULE) -o $(OUT)/libshunt.so ./build/libshunt
	$(STATIC) -o $(OUT)/shunt ./cmd/shunt
	$(STATIC) -o $(OUT)/enginesim ./cmd/enginesim
	@rm -f $(OUT)/libshunt.h

$(LINT):
	@mkdir -p $(CACHE)/bin
	GOBIN=$(CURDIR)/$(CACHE)/bin go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(LINT_VERSION)
	@mv $(CACHE)/bin/golangci-lint $@

.PHONY: vet
vet: $(ABI) ## go vet, in both builds
	go vet ./...
	go vet -tags shunttest ./filter/... ./build/...

.PHONY: lint
lint: $(ABI) $(LINT) ## golangci-lint: the import rules of the layout, and more
	$(LINT) run ./...

.PHONY: clean
clean: ## remove what was built, but not the caches
	rm -rf $(OUT)
