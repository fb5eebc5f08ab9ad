# "make help" lists what there is. Everything works on the modules that go.work
# names, and on no other list.

# Go, from wherever; in a workspace, whatever the caller's environment says.
GO := go
unexport GOWORK

# Folders of all modules of the workspace.
MODULES = $(shell $(GO) list -m -f '{{.Dir}}')
# The same as package patterns. An absolute path before /... names the packages
# of that module alone.
PACKAGES = $(addsuffix /...,$(MODULES))

# What tools/ pins, in modules of their own, outside the workspace.
# "go tool -n" builds a tool if need be and prints where it is.
tool = $$(GOWORK=off $(GO) -C tools$(1) tool -n $(2))

# Arguments for go test: make test TESTFLAGS='-run TestConformance -v'.
TESTFLAGS ?=
# How long "make torture" takes for each store.
FOR ?= 60s
# How often "make bench" runs each benchmark: benchstat wants 10.
COUNT ?= 6

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: test
test: servers-quick ## Run all tests on the servers there are (root on Debian: after installing the quick ones)
	@tools/test.sh -count=1 $(TESTFLAGS) $(PACKAGES)

.PHONY: race
race: servers-quick ## The same under the race detector
	@tools/test.sh -race -count=1 $(TESTFLAGS) $(PACKAGES)

.PHONY: conformance
conformance: servers-quick ## Run the conformance suite alone, on every store, and list its rules
	@tools/test.sh -v -count=1 -run '^TestConformance$$' $(TESTFLAGS) $(PACKAGES)

.PHONY: containers
containers: ## Run the conformance suite on servers in containers, of images made here
	@tools/containers.sh $(TESTFLAGS)

.PHONY: torture
torture: ## Try to break every store for FOR=60s each
	@tools/torture.sh $(FOR)

.PHONY: cover
cover: servers-quick ## Run all tests and write cover.out and cover.html
	@tools/test.sh -count=1 -coverpkg=github.com/leasekit/leasekit/... -coverprofile=cover.out $(TESTFLAGS) $(PACKAGES)
	@$(GO) tool cover -html=cover.out -o cover.html
	@$(GO) tool cover -func=cover.out | tail -n 1

.PHONY: bench
bench: SHELL := bash
bench: .SHELLFLAGS := -o pipefail -c
bench: servers-quick ## Run all benchmarks (COUNT=6 times each) and sum them up with benchstat
	@$(GO) test -run='^$$' -bench=. -benchmem -count=$(COUNT) -p=1 $(TESTFLAGS) $(PACKAGES) | tee bench.out
	@$(call tool,,benchstat) bench.out

.PHONY: bench-once
bench-once: servers-quick ## Run each benchmark once, to see that it works
	@tools/test.sh -run='^$$' -bench=. -benchtime=1x -count=1 $(TESTFLAGS) $(PACKAGES)

.PHONY: lint
lint: ## Run golangci-lint, as pinned in tools/lint, on all modules
	@lint=$(call tool,/lint,golangci-lint) && $$lint config verify && $$lint run $(PACKAGES) && \
		cd tools && GOWORK=off $$lint run ./...

.PHONY: format
format: ## Format all modules
	@lint=$(call tool,/lint,golangci-lint) && $$lint fmt $(MODULES) tools

.PHONY: vet
vet: ## Vet and build each module as a user gets it, without the workspace
	@tools/each.sh vet

.PHONY: tidy
tidy: ## Tidy every go.mod
	@tools/each.sh tidy

.PHONY: tidy-check
tidy-check: ## Fail if a go.mod is not tidy
	@tools/each.sh tidy-check

.PHONY: release-check
release-check: ## Play the release of HEAD: get, build and install the modules as users will
	@GOWORK=off $(GO) -C tools test ./...
	@GOWORK=off $(GO) -C tools run ./releasecheck ..

.PHONY: release-tags
release-tags: ## Print the tags of the first step of a release, see CONTRIBUTING.md
	@GOWORK=off $(GO) -C tools run ./releasecheck -tags ..

.PHONY: servers
servers: ## Get Redis, PostgreSQL, PgBouncer (root on Debian) and etcd (built, a minute)
	@tools/servers.sh quick etcd

.PHONY: servers-mongo
servers-mongo: ## Build the stand-in for mongod, unless there is a mongod (7 minutes)
	@tools/servers.sh mongo

.PHONY: servers-quick
servers-quick:
	@tools/servers.sh quick

.PHONY: clean
clean: ## Delete what make has written here; the tool cache stays
	@rm -f cover.out cover.html bench.out
