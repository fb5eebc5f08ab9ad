package conformance

import "testing"

func run(t *testing.T, c Config) { t.Fatal("conformance: not written yet") }

func benchmark(b *testing.B, c Config) { b.Fatal("conformance: not written yet") }

// T is what a rule works with.
type T struct{ testing.TB }
