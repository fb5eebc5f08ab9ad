package conformance

import (
	"slices"
	"testing"

	"github.com/leasekit/leasekit/core"
)

// Rules returns the rules of the contract, in the order of docs/contract.md.
// Rules of a new kind go into a group of their own: one function that returns
// them, named here, or in Config.Rules of the package that brings them.
func Rules() []Rule {
	return slices.Concat(
		exclusionRules(),
		ownershipRules(),
		fencingRules(),
		stateRules(),
		expiryRules(),
		renewalRules(),
		validationRules(),
		contextRules(),
		retryRules(),
		leftoverRules(),
		refusalRules(),
		notifierRules(),
		inspectorRules(),
		breakerRules(),
		faultRules(),
	)
}

// group sets the Group of rules.
func group(name string, rules ...Rule) []Rule {
	for i := range rules {
		rules[i].Group = name
	}
	return rules
}

// needs is the [Rule.Needs] of a rule that uses an optional field of [Config].
func needs(field string, has func(c *Config) bool) func(c *Config) string {
	return func(c *Config) string {
		if has(c) {
			return ""
		}
		return "set Config." + field
	}
}

// needsCapability is the [Rule.Needs] of a rule about C, an optional interface
// of stores that package core calls name.
func needsCapability[C any](name string) func(c *Config) string {
	return func(c *Config) string {
		if _, ok := core.Capability[C](c.first); ok {
			return ""
		}
		return "the store is no core." + name
	}
}

// capability returns the capability C of a client.
func capability[C any](t *T, store core.LockStore) C {
	t.Helper()
	c, ok := core.Capability[C](store)
	if !ok {
		t.Fatalf("this client (%T) lacks a capability that the first one has", store)
	}
	return c
}

// probe opens a first client, which tells whether there is a server at all, and
// what capabilities the store has.
func (c *Config) probe(t testing.TB) {
	s := &scope{TB: t}
	defer s.close()
	if c.first = c.Open(s); c.first == nil {
		t.Fatal("conformance: Config.Open returned nil")
	}
}
