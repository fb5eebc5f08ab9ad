package main

import (
	"testing"
	"testing/synctest"
)

// The story that the README tells, in a bubble's time: run checks the balance,
// the loss and the refused write itself.
func TestQuickstart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if err := run(); err != nil {
			t.Fatal(err)
		}
	})
}
