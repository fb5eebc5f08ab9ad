package conformance

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// mutant is a store with one mistake, which the reference store makes when it
// is told the name.
type mutant struct {
	name string
	// rule that must be broken by it, always.
	rule string
	// story says what the mistake is.
	story string
	// sometimes are rules that it breaks by chance.
	sometimes []string
}

var mutants = []mutant{
	{name: "ReadThenWriteAcquire", rule: "OneWinnerAmongMany", story: "looks whether the key is free, and takes it in a second step"},
	{name: "ErrorForHeld", rule: "OneWinner", story: "inserts, and hands the duplicate key error to the caller"},
	{name: "TokenOfRefusedTry", rule: "OneWinner", story: "gives a refused caller the holder's token"},
	{name: "LeftInOtherUnit", rule: "OneWinner", story: "takes milliseconds for seconds in Grant.Left"},
	{name: "SameOwnerReenters", rule: "NotReentrant", story: "lets the owner of a live lease in again"},
	{name: "ResendKnownByOwner", rule: "NotReentrant", story: "takes every try of the same owner for a resend of the first"},
	{name: "HeldTryExtends", rule: "HeldTryChangesNothing", story: "upserts: a refused try pushes the holder's expiry"},
	{name: "HeldTryTakesOwnership", rule: "HeldTryChangesNothing", story: "upserts: a refused try overwrites the holder's id"},
	{name: "ReleaseEndsAllOfOwner", rule: "KeysAreIndependent", story: "deletes by owner, and forgets the key in the condition"},
	{name: "ExpiryByClientClock", rule: "ClientClockDoesNotMatter", story: "stores and compares the client's time"},
	{name: "LeasesLostByRestart", rule: "LeaseSurvivesRestart", story: "keeps leases in the server's memory"},

	{name: "RenewWithoutOwnerCheck", rule: "StrangerCannotRenew", story: "renews by key alone"},
	{name: "StrangersRenewPushes", rule: "StrangerCannotRenew", story: "pushes the expiry first, and compares the owner for the answer"},
	{name: "ReleaseWithoutOwnerCheck", rule: "StrangerCannotRelease", story: "releases by key alone"},
	{name: "ReleaseLeavesLeaseToExpire", rule: "ReleaseFreesKey", story: "stops renewing and lets the lease run out"},
	{name: "ReleaseTwiceIsError", rule: "ReleaseIsIdempotent", story: "returns an error when there was nothing to release"},
	{name: "LateReleaseRemovesSuccessor", rule: "LateReleaseSparesSuccessor", story: "compares the owner in the client, with what it won itself"},
	{name: "OwnerPrefixCompare", rule: "OwnersAreComparedWhole", story: "compares as many bytes as it was given"},
	{name: "OwnerCaseFolded", rule: "OwnersAreComparedWhole", story: "keeps owners in a column with a case-insensitive collation"},
	{name: "OwnerTrimmed", rule: "OwnersAreComparedWhole", story: "trims owners"},
	{name: "OwnerAsPattern", rule: "OwnersAreComparedWhole", story: "compares owners with LIKE"},
	{name: "RenewOfOwnClientOnly", rule: "OwnerIsNotTheClient", story: "renews only what the same client acquired"},
	{name: "LeaseBoundToClient", rule: "OwnerIsNotTheClient", story: "ends the leases of a client that is closed, as session locks do"},
	{name: "RenewRevivesReleased", rule: "ReleasedCannotRenew", story: "finds the owner in the record that the release left"},
	{name: "RenewInTwoSteps", rule: "RenewRacesRelease", story: "reads the record, and writes it back with a new expiry"},

	{name: "TokenResetOnRelease", rule: "TokenGrowsAfterRelease", story: "deletes the record, and the token with it"},
	{name: "TokenIsTime", rule: "TokenGrowsAfterRelease", story: "takes a clock of milliseconds for the token"},
	{name: "TokenResetOnExpiry", rule: "TokenGrowsAfterExpiry", story: "replaces an expired record, and begins again at 1"},
	{name: "RenewResetsToken", rule: "TokenGrowsAfterRenewal", story: "writes the whole record when it renews, with a new token of 1"},
	{name: "RenewBumpsToken", rule: "RenewKeepsToken", story: "takes a renewal for an acquisition, and draws a new token"},
	{name: "TokenDrawnEarly", rule: "TokensGrowUnderContention", story: "draws the token from a sequence before it has the row"},
	{name: "TokenCountedByClient", rule: "TokenSurvivesReopen", story: "counts in the client"},
	{name: "TokenCounterInServerMemory", rule: "TokenSurvivesRestart", story: "counts in the server's memory"},
	{name: "TokenIsCounter", rule: "TokenSurvivesDataLoss", story: "counts with INCR, in a key beside the lock's"},
	{name: "TokenCountedInRecord", rule: "TokenSurvivesPurge", story: "counts in the record, which is purged"},
	{name: "TokenInNanoseconds", rule: "TokenFitsJSON", story: "takes nanoseconds for the token"},

	{name: "StateKeptForever", rule: "StateIsBounded", story: "keeps the record of every key that was ever locked"},
	{name: "ReleasedKeptForever", rule: "StateIsBounded", story: "purges expired leases, and forgets the released ones"},
	{name: "PurgeByAge", rule: "PurgeSparesLiveLeases", story: "purges by the time of the acquisition"},
	{name: "PurgeHidesKey", rule: "PurgeHidesNoKey", story: "neither updates nor inserts when the record has just been purged"},
	{name: "HeldTryWrites", rule: "HeldTryIsARead", story: "locks the row before it looks"},

	{name: "EndsEarly", rule: "NotBeforeTTL", story: "ends leases after nine tenths of their time"},
	{name: "TTLTruncatedToSeconds", rule: "NotBeforeTTL", story: "cuts a ttl to whole seconds"},
	{name: "SubSecondTTLMeansForever", rule: "ExpiresOnTime", story: "sends a ttl below a second as EX 0"},
	{name: "ExpiryBySweeper", rule: "ExpiresOnTime", story: "leaves expiry to a job that runs once a minute"},
	{name: "ExpiryOnlyWhenRead", rule: "AcquireRightAfterExpiry", story: "deletes an expired lease when a try finds it, and refuses that try"},
	{name: "RenewRevivesExpired", rule: "ExpiredCannotRenew", story: "renews whatever record has the owner"},
	{name: "ExpiryTimerOfOldLease", rule: "OldExpirySparesSuccessor", story: "ends leases by a timer for each, which a release does not stop"},
	{name: "ExpirySetOnInsertOnly", rule: "UsedKeyExpires", story: "takes over a released record, and the expiry in it"},

	{name: "RenewDoesNothing", rule: "RenewPushesExpiry", story: "answers true, and writes nothing"},
	{name: "RenewAdds", rule: "RenewIsAbsolute", story: "adds ttl to the expiry"},
	{name: "RenewIgnoresTTL", rule: "RenewWithOtherTTL", story: "renews with the ttl of the acquisition"},
	{name: "RenewOnlyExtends", rule: "RenewWithOtherTTL", story: "never makes a lease shorter"},

	{name: "ZeroTTLMeansForever", rule: "InvalidArguments", story: "accepts a ttl of 0"},
	{name: "EmptyKeyAllowed", rule: "InvalidArguments", story: "accepts an empty key"},
	{name: "OwnerInError", rule: "InvalidArguments", story: "puts the owner, a secret, into an error"},
	{name: "InvalidIsDriverError", rule: "InvalidArguments", story: "returns an error of its own for invalid arguments"},
	{name: "KeyCaseFolded", rule: "OddKeys", story: "folds the case of keys"},
	{name: "KeyTrimmed", rule: "OddKeys", story: "trims keys"},
	{name: "KeyTruncated", rule: "OddKeys", story: "cuts keys after 255 bytes"},
	{name: "KeyAsPath", rule: "OddKeys", story: "takes keys for paths and cleans them"},
	{name: "OwnerColumnTooShort", rule: "OddOwners", story: "keeps owners in a column of 64 characters"},
	{name: "TTLFractionCutOff", rule: "OddTTLs", story: "cuts a ttl to quarters of a second"},
	{name: "YearOverflows", rule: "OddTTLs", story: "keeps the expiry in 32 bits of seconds"},
	{name: "RoundingOverflows", rule: "OddTTLs", story: "rounds a ttl up by adding before it divides"},

	{name: "ContextIgnored", rule: "EndedContext", story: "never looks at ctx"},
	{name: "OwnErrorForEndedContext", rule: "EndedContext", story: "returns the driver's time-out error"},
	{name: "WrongContextError", rule: "EndedContext", story: "says DeadlineExceeded for a cancel"},
	{name: "SlowToGiveUp", rule: "ContextEnds", story: "tries once more after ctx has ended"},
	{name: "ReleaseOfKnownOnly", rule: "ReleaseUndoesUnknownAcquire", story: "releases only what it knows that it won"},
	{name: "AcquireInTwoSteps", rule: "LateAcquireEndsByItself", story: "SETNX, and then EXPIRE"},

	{name: "ResendMeetsItself", rule: "DriverRetry", story: "tells a resent request that its first delivery holds the key"},
	{name: "LeakingGoroutine", rule: "NoLeaks", story: "leaves a goroutine for each call"},
	{name: "GoroutineOutlivesClose", rule: "NoLeaks", story: "has a goroutine that Close does not stop"},
	{name: "ConnectionPinned", rule: "ConnectionFreeWhileHeld", story: "keeps a connection for each lease"},
	{name: "RefusalMeansHeld", rule: "RefusalsAreErrors", story: "takes every failed write for a held key"},
	{name: "RefusalMeansNotYours", rule: "RefusalsAreErrors", story: "takes a refused renewal for a lost lease"},
	{name: "RefusalMeansReleased", rule: "RefusalsAreErrors", story: "swallows the error of a release"},
	{name: "ForeignValueOverwritten", rule: "ForeignValueIsAnError", story: "overwrites what is no lease"},
	{name: "ForeignValueMeansHeld", rule: "ForeignValueIsAnError", story: "takes what is no lease for somebody else's"},

	{name: "SignalsOfOwnClientOnly", rule: "SignalAfterRelease", story: "signals releases of the same process"},
	{name: "SubscribeReturnsEarly", rule: "SubscribedWhenItReturns", story: "returns before the server has confirmed"},
	{name: "SignalLostWhileBusy", rule: "SignalWaitsForReader", story: "signals on a channel without a buffer"},
	{name: "BusyWaiterBlocksOthers", rule: "SignalWaitsForReader", story: "stops at the first waiter that is not listening", sometimes: []string{"HandOvers"}},
	{name: "OneWaiterWoken", rule: "SignalReachesEveryWaiter", story: "wakes one waiter, dead or alive", sometimes: []string{"HandOvers"}},
	{name: "NobodyTellsExpiry", rule: "ExpiryIsAnnounced", story: "says neither when a lease ends nor that it has ended"},
	{name: "LeftTooEarly", rule: "ExpiryIsAnnounced", story: "says that the lease ends before it does"},
	{name: "SubscriptionEndsWithContext", rule: "SubscribeContext", story: "ends a subscription with the ctx of the call"},
	{name: "StopEndsAllOfKey", rule: "StopSparesOthers", story: "stops all subscriptions to the key"},
	{name: "StopLeaksGoroutine", rule: "StopLeavesNothing", story: "leaves a goroutine for each subscription"},
	{name: "SignalBeforeRelease", rule: "HandOvers", story: "signals just before the key is free"},
	{name: "SubscriptionDiesWithRestart", rule: "SignalAfterRestart", story: "does not subscribe again after it has connected again"},

	{name: "LeftIsUntilEpoch", rule: "ShowsLiveLease", story: "shows the end of a lease for the time that it has left"},
	{name: "LeasesShowExpired", rule: "ShowsNoDeadLease", story: "shows every record that has an owner"},
	{name: "LeasesShowReleased", rule: "ShowsNoDeadLease", story: "shows every record"},
	{name: "LabelIsOwner", rule: "HidesOwner", story: "shows the whole owner"},
	{name: "KeyTakenForPrefix", rule: "ShowsKeyAlone", story: "looks a key up as a prefix"},
	{name: "PrefixIsPattern", rule: "ShowsPrefix", story: "hands a prefix to a pattern match as it is"},
	{name: "LeasesFirstPageOnly", rule: "ShowsMany", story: "shows the first page"},
	{name: "LeasesTwiceAtPageEnd", rule: "ShowsMany", story: "begins a page with the last lease of the one before"},
	{name: "LookingRenews", rule: "LookingChangesNothing", story: "touches a record when it reads it"},
	{name: "LeasesSwallowErrors", rule: "LeasesContext", story: "shows nothing where there was an error"},

	{name: "BreakOnlyMarks", rule: "BreakFreesKey", story: "notes that the lease is to end"},
	{name: "BreakAlwaysTrue", rule: "BreakTellsWhatWas", story: "says that it broke a lease where there was none"},
	{name: "BrokenRenews", rule: "BrokenCannotRenew", story: "lets the owner of a broken lease renew it"},
	{name: "BreakDeletesRecord", rule: "TokenGrowsAfterBreak", story: "deletes the record, and counts tokens in it"},
	{name: "BreakByPrefix", rule: "BreakSparesOtherKeys", story: "breaks all leases below a key"},
	{name: "BreakInSilence", rule: "BreakSignalsWaiters", story: "forgets the waiters"},
	{name: "BreakIgnoresContext", rule: "BreakContext", story: "breaks a lease for somebody who has gone"},
}

// inBubble runs a rule on fake time, and lets everything that it left behind
// come to its end.
func inBubble(t *testing.T, rule func(t *testing.T)) {
	synctest.Test(t, func(t *testing.T) {
		rule(t)
		time.Sleep(2 * time.Hour)
	})
}

// mutantConfig is that of the store with the mistake, on fake time.
func mutantConfig(t *testing.T, mistake string) (*Config, []Rule) {
	t.Helper()
	c := referenceConfig(mistake)
	c.Around = inBubble
	c.first = (*client)(nil)
	rules, err := c.prepare()
	if err != nil {
		t.Fatal(err)
	}
	return &c, slices.DeleteFunc(rules, func(r Rule) bool { return c.why(&r) != "" })
}

// failing returns the rules that the store with the mistake fails, and how.
func failing(t *testing.T, mistake string) []outcome {
	t.Helper()
	c, rules := mutantConfig(t, mistake)
	var failing []outcome
	for _, rule := range rules {
		if s, text := runRule(t, c, rule); s != passed {
			failing = append(failing, outcome{rule: rule, status: s, text: text})
		}
	}
	return failing
}

// Each mutant is caught by its own rule. Which others it fails is in the table
// of docs/conformance.md, which TestMutantTable checks.
func TestMutants(t *testing.T) {
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			c, rules := mutantConfig(t, m.name)
			i := slices.IndexFunc(rules, func(r Rule) bool { return r.Name == m.rule })
			if i < 0 {
				t.Fatalf("there is no rule %s", m.rule)
			}
			if s, text := runRule(t, c, rules[i]); s != broken {
				t.Errorf("a store that %s keeps the rule %s; got status %d: %s", m.story, m.rule, s, text)
			}
		})
	}
}

// The reference store, which makes no mistake, is what makes a mutant's failure
// the mistake's own.
func TestReferenceKeepsAllRules(t *testing.T) {
	for _, o := range failing(t, "") {
		t.Error(o.text)
	}
}
