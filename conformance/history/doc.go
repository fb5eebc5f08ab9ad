// Package history proves, or disproves, that a store is linearizable: it
// records what concurrent clients did and were told, and looks for an order of
// the calls, each at one instant between its begin and its end, in which a
// single correct lock would have given the same answers.
//
//	func TestHistory(t *testing.T) {
//		history.Run(t, conformance.Config{Open: open})
//	}
//
// [Run] makes the calls itself: many clients, random keys and leases, calls
// that are given up, faults of the network if Config.Faults is set. [Drive]
// does the same for a program. A [Recorder] records whatever else uses a
// store, and [Check] judges what it recorded.
//
// # What is checked
//
// A key is free, or leased to one owner. A lease is alive for certain until ttl
// has passed since its request was sent, less 1 % for clocks that run at
// different speed, and gone for certain ttl and Options.Slack after the answer;
// in between it is whatever the answers make of it, but once gone it stays so.
// A lease that nobody was told of may be taken back at any time.
// A call that returned an error may have been executed or not, at once or at
// any later time, and more than once if the client library repeats requests.
// Tokens strictly increase. The search is that of package porcupine, key by
// key.
//
// Any answer that the contract allows is accepted. A violation names the first
// call that no order explains, and the rule of docs/contract.md whose breach
// explains it; [Violation.WriteFiles] draws a picture.
package history
