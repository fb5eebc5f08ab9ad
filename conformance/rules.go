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

// capability returns the capability C of store; its absence is for
// [Rule.Needs] to find.
func capability[C any](t *T, store core.LockStore) C {
	t.Helper()
	c, ok := core.Capability[C](store)
	if !ok {
		t.Fatalf("%T has not the capability that the first client had", store)
	}
	return c
}

// needsCapability is the [Rule.Needs] of a rule about an optional interface of
// stores. has is found out once, when the run begins.
func needsCapability(name string, has func(c *Config) bool) func(c *Config) string {
	return func(c *Config) string {
		if has(c) {
			return ""
		}
		return "the store is no core." + name
	}
}

// probed is what a first client of the backend told about itself.
type probed struct{ notifier bool }

func (c *Config) probe(t testing.TB) {
	s := &scope{TB: t}
	defer s.close()
	store := c.Open(s)
	if store == nil {
		t.Fatal("conformance: Config.Open returned nil")
	}
	_, c.probed.notifier = core.Capability[core.Notifier](store)
}
