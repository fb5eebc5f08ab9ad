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
}

var mutants = []mutant{
	{"ReadThenWriteAcquire", "OneWinnerAmongMany", "looks whether the key is free, and takes it in a second step"},
	{"ErrorForHeld", "OneWinner", "inserts, and hands the duplicate key error to the caller"},
	{"TokenOfRefusedTry", "OneWinner", "gives a refused caller the holder's token"},
	{"LeftInOtherUnit", "OneWinner", "takes milliseconds for seconds in Grant.Left"},
	{"SameOwnerReenters", "NotReentrant", "lets the owner of a live lease in again"},
	{"ResendKnownByOwner", "NotReentrant", "takes every try of the same owner for a resend of the first"},
	{"HeldTryExtends", "HeldTryChangesNothing", "upserts: a refused try pushes the holder's expiry"},
	{"HeldTryTakesOwnership", "HeldTryChangesNothing", "upserts: a refused try overwrites the holder's id"},
	{"ReleaseEndsAllOfOwner", "KeysAreIndependent", "deletes by owner, and forgets the key in the condition"},
	{"ExpiryByClientClock", "ClientClockDoesNotMatter", "stores and compares the client's time"},
	{"LeasesLostByRestart", "LeaseSurvivesRestart", "keeps leases in the server's memory"},

	{"RenewWithoutOwnerCheck", "StrangerCannotRenew", "renews by key alone"},
	{"StrangersRenewPushes", "StrangerCannotRenew", "pushes the expiry first, and compares the owner for the answer"},
	{"ReleaseWithoutOwnerCheck", "StrangerCannotRelease", "releases by key alone"},
	{"ReleaseLeavesLeaseToExpire", "ReleaseFreesKey", "stops renewing and lets the lease run out"},
	{"ReleaseTwiceIsError", "ReleaseIsIdempotent", "returns an error when there was nothing to release"},
	{"LateReleaseRemovesSuccessor", "LateReleaseSparesSuccessor", "compares the owner in the client, with what it won itself"},
	{"OwnerPrefixCompare", "OwnersAreComparedWhole", "compares as many bytes as it was given"},
	{"OwnerCaseFolded", "OwnersAreComparedWhole", "keeps owners in a column with a case-insensitive collation"},
	{"OwnerTrimmed", "OwnersAreComparedWhole", "trims owners"},
	{"OwnerAsPattern", "OwnersAreComparedWhole", "compares owners with LIKE"},
	{"RenewOfOwnClientOnly", "OwnerIsNotTheClient", "renews only what the same client acquired"},
	{"LeaseBoundToClient", "OwnerIsNotTheClient", "ends the leases of a client that is closed, as session locks do"},
	{"RenewRevivesReleased", "ReleasedCannotRenew", "finds the owner in the record that the release left"},
	{"RenewInTwoSteps", "RenewRacesRelease", "reads the record, and writes it back with a new expiry"},

	{"TokenResetOnRelease", "TokenGrowsAfterRelease", "deletes the record, and the token with it"},
	{"TokenIsTime", "TokenGrowsAfterRelease", "takes a clock of milliseconds for the token"},
	{"TokenResetOnExpiry", "TokenGrowsAfterExpiry", "replaces an expired record, and begins again at 1"},
	{"RenewResetsToken", "TokenGrowsAfterRenewal", "writes the whole record when it renews, with a new token of 1"},
	{"TokenDrawnEarly", "TokensGrowUnderContention", "draws the token from a sequence before it has the row"},
	{"TokenCountedByClient", "TokenSurvivesReopen", "counts in the client"},
	{"TokenCounterInServerMemory", "TokenSurvivesRestart", "counts in the server's memory"},
	{"TokenIsCounter", "TokenSurvivesDataLoss", "counts with INCR, in a key beside the lock's"},
	{"TokenCountedInRecord", "TokenSurvivesPurge", "counts in the record, which is purged"},
	{"TokenInNanoseconds", "TokenFitsJSON", "takes nanoseconds for the token"},

	{"StateKeptForever", "StateIsBounded", "keeps the record of every key that was ever locked"},
	{"ReleasedKeptForever", "StateIsBounded", "purges expired leases, and forgets the released ones"},
	{"PurgeByAge", "PurgeSparesLiveLeases", "purges by the time of the acquisition"},
	{"PurgeHidesKey", "PurgeHidesNoKey", "neither updates nor inserts when the record has just been purged"},
	{"HeldTryWrites", "HeldTryIsARead", "locks the row before it looks"},

	{"EndsEarly", "NotBeforeTTL", "ends leases after nine tenths of their time"},
	{"TTLTruncatedToSeconds", "NotBeforeTTL", "cuts a ttl to whole seconds"},
	{"SubSecondTTLMeansForever", "ExpiresOnTime", "sends a ttl below a second as EX 0"},
	{"ExpiryBySweeper", "ExpiresOnTime", "leaves expiry to a job that runs once a minute"},
	{"ExpiryOnlyWhenRead", "AcquireRightAfterExpiry", "deletes an expired lease when a try finds it, and refuses that try"},
	{"RenewRevivesExpired", "ExpiredCannotRenew", "renews whatever record has the owner"},
	{"ExpiryTimerOfOldLease", "OldExpirySparesSuccessor", "ends leases by a timer for each, which a release does not stop"},
	{"ExpirySetOnInsertOnly", "UsedKeyExpires", "takes over a released record, and the expiry in it"},

	{"RenewDoesNothing", "RenewPushesExpiry", "answers true, and writes nothing"},
	{"RenewAdds", "RenewIsAbsolute", "adds ttl to the expiry"},
	{"RenewIgnoresTTL", "RenewWithOtherTTL", "renews with the ttl of the acquisition"},
	{"RenewOnlyExtends", "RenewWithOtherTTL", "never makes a lease shorter"},

	{"ZeroTTLMeansForever", "InvalidArguments", "accepts a ttl of 0"},
	{"EmptyKeyAllowed", "InvalidArguments", "accepts an empty key"},
	{"OwnerInError", "InvalidArguments", "puts the owner, a secret, into an error"},
	{"InvalidIsDriverError", "InvalidArguments", "returns an error of its own for invalid arguments"},
	{"KeyCaseFolded", "OddKeys", "folds the case of keys"},
	{"KeyTrimmed", "OddKeys", "trims keys"},
	{"KeyTruncated", "OddKeys", "cuts keys after 255 bytes"},
	{"KeyAsPath", "OddKeys", "takes keys for paths and cleans them"},
	{"OwnerColumnTooShort", "OddOwners", "keeps owners in a column of 64 characters"},
	{"TTLFractionCutOff", "OddTTLs", "cuts a ttl to quarters of a second"},
	{"YearOverflows", "OddTTLs", "keeps the expiry in 32 bits of seconds"},

	{"ContextIgnored", "EndedContext", "never looks at ctx"},
	{"OwnErrorForEndedContext", "EndedContext", "returns the driver's time-out error"},
	{"WrongContextError", "EndedContext", "says DeadlineExceeded for a cancel"},
	{"SlowToGiveUp", "ContextEnds", "tries once more after ctx has ended"},
	{"ReleaseOfKnownOnly", "ReleaseUndoesUnknownAcquire", "releases only what it knows that it won"},
	{"AcquireInTwoSteps", "LateAcquireEndsByItself", "SETNX, and then EXPIRE"},

	{"ResendMeetsItself", "DriverRetry", "tells a resent request that its first delivery holds the key"},
	{"LeakingGoroutine", "NoLeaks", "leaves a goroutine for each call"},
	{"GoroutineOutlivesClose", "NoLeaks", "has a goroutine that Close does not stop"},
	{"ConnectionPinned", "ConnectionFreeWhileHeld", "keeps a connection for each lease"},
	{"RefusalMeansHeld", "RefusalsAreErrors", "takes every failed write for a held key"},
	{"RefusalMeansNotYours", "RefusalsAreErrors", "takes a refused renewal for a lost lease"},
	{"RefusalMeansReleased", "RefusalsAreErrors", "swallows the error of a release"},
	{"ForeignValueOverwritten", "ForeignValueIsAnError", "overwrites what is no lease"},
	{"ForeignValueMeansHeld", "ForeignValueIsAnError", "takes what is no lease for somebody else's"},

	{"SignalsOfOwnClientOnly", "SignalAfterRelease", "signals releases of the same process"},
	{"SubscribeReturnsEarly", "SubscribedWhenItReturns", "returns before the server has confirmed"},
	{"SignalLostWhileBusy", "SignalWaitsForReader", "signals on a channel without a buffer"},
	{"BusyWaiterBlocksOthers", "SignalWaitsForReader", "stops at the first waiter that is not listening"},
	{"OneWaiterWoken", "SignalReachesEveryWaiter", "wakes one waiter, dead or alive"},
	{"NobodyTellsExpiry", "ExpiryIsAnnounced", "says neither when a lease ends nor that it has ended"},
	{"LeftTooEarly", "ExpiryIsAnnounced", "says that the lease ends before it does"},
	{"SubscriptionEndsWithContext", "SubscribeContext", "ends a subscription with the ctx of the call"},
	{"StopEndsAllOfKey", "StopSparesOthers", "stops all subscriptions to the key"},
	{"StopLeaksGoroutine", "StopLeavesNothing", "leaves a goroutine for each subscription"},
	{"SignalBeforeRelease", "HandOvers", "signals just before the key is free"},
	{"SubscriptionDiesWithRestart", "SignalAfterRestart", "does not subscribe again after it has connected again"},
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
	c.probed.notifier = true
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
		if o := runRule(t, c, rule); o.status != passed {
			failing = append(failing, o)
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
			if o := runRule(t, c, rules[i]); o.status != broken {
				t.Errorf("a store that %s keeps the rule %s; got status %d: %s", m.story, m.rule, o.status, o.text)
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
