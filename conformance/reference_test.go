package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
)

// latency is the time that a request or an answer of the reference store is on
// its way.
const latency = 100 * time.Microsecond

// server is the backend of the reference store: what Redis or Postgres are to
// the real ones. It keeps every rule, unless it makes its one mistake, or its
// clients do.
type server struct {
	mistake   string
	retention time.Duration

	mu       sync.Mutex
	records  map[string]*record
	counter  int64 // of tokens, for those who count
	writes   int64
	refusing bool
	speaks   chan struct{} // closed while the server is not silent
	subs     map[string][]*subscription
}

type record struct {
	owner   string
	token   int64
	expires time.Time
	ttl     time.Duration // of the acquisition
	nonce   *int          // of the call that won
	client  *client
	foreign bool
	seen    bool   // after its end
	last    string // owner, before the release
}

type subscription struct {
	client *client
	ch     chan struct{}
}

func newServer(mistake string) *server {
	s := &server{
		mistake:   mistake,
		retention: time.Hour,
		records:   make(map[string]*record),
		subs:      make(map[string][]*subscription),
		speaks:    make(chan struct{}),
	}
	close(s.speaks)
	return s
}

var (
	errReadOnly = errors.New("server: read only")
	errForeign  = errors.New("server: not a lease")
)

func (s *server) makes(mistake string) bool { return s.mistake == mistake }

// live reports whether r excludes others at now, the server's time, and clock,
// the client's.
func (s *server) live(r *record, now, clock time.Time) bool {
	if r == nil || r.owner == "" {
		return false
	}
	switch s.mistake {
	case "ExpiryByClientClock":
		now = clock
	case "ExpiryBySweeper": // that comes once a minute
		now = now.Truncate(time.Minute)
	case "ExpiryOnlyWhenRead": // the first to see an expired lease cleans up
		if !now.Before(r.expires) {
			seen := r.seen
			r.seen = true
			return !seen
		}
	}
	return now.Before(r.expires)
}

// same compares owners.
func (s *server) same(a, b string) bool {
	switch s.mistake {
	case "OwnerPrefixCompare":
		return strings.HasPrefix(a, b)
	case "OwnerCaseFolded":
		return strings.EqualFold(a, b)
	case "OwnerTrimmed":
		return strings.TrimSpace(a) == strings.TrimSpace(b)
	case "OwnerAsPattern":
		return a == b || b == "%" || b == "*"
	}
	return a == b
}

func (s *server) key(key string) string {
	switch s.mistake {
	case "KeyCaseFolded":
		return strings.ToLower(key)
	case "KeyTrimmed":
		return strings.TrimSpace(key)
	case "KeyTruncated":
		return key[:min(len(key), 255)]
	case "KeyAsPath":
		return strings.TrimSuffix(strings.ReplaceAll(key, "//", "/"), "/")
	}
	return key
}

// keep is how long a lease of ttl is kept.
func (s *server) keep(ttl time.Duration) time.Duration {
	switch s.mistake {
	case "TTLTruncatedToSeconds":
		return ttl.Truncate(time.Second)
	case "SubSecondTTLMeansForever": // EX 0
		if ttl < time.Second {
			return 24 * 365 * time.Hour
		}
	case "TTLFractionCutOff":
		return max(ttl.Truncate(250*time.Millisecond), 250*time.Millisecond)
	case "YearOverflows": // 32 bits of seconds since 1970
		if time.Now().Add(ttl).Unix() > math.MaxInt32 {
			return -ttl
		}
	case "RoundingOverflows":
		return (ttl + time.Millisecond - 1) / time.Millisecond * time.Millisecond
	case "EndsEarly":
		return ttl * 9 / 10
	}
	return ttl
}

// token returns the next token of a key.
func (s *server) token(c *client, last int64) int64 {
	now := time.Now()
	switch s.mistake {
	case "TokenIsCounter", "TokenCounterInServerMemory":
		s.counter++
		return s.counter
	case "TokenCountedInRecord", "BreakDeletesRecord", "TokenResetOnRelease", "TokenResetOnExpiry", "RenewResetsToken":
		return last + 1
	case "TokenCountedByClient":
		return c.counter.Add(1)
	case "TokenInNanoseconds":
		return now.UnixNano()
	case "TokenIsTime": // of a clock that is too coarse
		return now.UnixMilli()
	}
	return max(last+1, now.UnixMicro())
}

// acquire is the server's side of Acquire. early is a token that a client drew
// before, if it did.
func (s *server) acquire(c *client, key, owner string, ttl time.Duration, nonce *int, clock time.Time, early int64) (core.Grant, error) {
	key = s.key(key)
	r, now := s.records[key], time.Now()
	if s.refusing {
		if s.makes("RefusalMeansHeld") {
			return core.Grant{}, nil
		}
		return core.Grant{}, errReadOnly
	}
	if r != nil && r.foreign && !s.makes("ForeignValueOverwritten") {
		if s.makes("ForeignValueMeansHeld") {
			return core.Grant{}, nil
		}
		return core.Grant{}, errForeign
	}
	if s.live(r, now, clock) {
		switch {
		case r.nonce == nonce && s.same(r.owner, owner) && !s.makes("ResendMeetsItself"):
			return core.Grant{Acquired: true, Token: r.token}, nil
		case s.makes("SameOwnerReenters") && r.owner == owner:
			r.expires = now.Add(ttl)
			return core.Grant{Acquired: true, Token: r.token}, nil
		case s.makes("ResendKnownByOwner") && r.owner == owner:
			return core.Grant{Acquired: true, Token: r.token}, nil
		case s.makes("HeldTryExtends"):
			r.expires = now.Add(ttl)
		case s.makes("HeldTryTakesOwnership"):
			r.owner = owner
		case s.makes("HeldTryWrites"):
			s.writes++
		case s.makes("ErrorForHeld"):
			return core.Grant{}, errors.New("server: duplicate key")
		}
		left := r.expires.Sub(now)
		switch s.mistake {
		case "LeftInOtherUnit":
			left *= 1000
		case "LeftTooLate":
			left += time.Second
		case "LeftTooEarly":
			left /= 2
		case "NobodyTellsExpiry":
			left = 0
		case "TokenOfRefusedTry":
			return core.Grant{Token: r.token, Left: left}, nil
		}
		return core.Grant{Left: left}, nil
	}
	s.purge(now)
	if s.makes("PurgeHidesKey") && r != nil && s.records[key] == nil {
		return core.Grant{}, nil // neither updated nor inserted
	}
	var last int64
	if r != nil {
		last = r.token
		if s.makes("TokenResetOnExpiry") && r.owner != "" {
			last = 0
		}
	}
	next := &record{owner: owner, token: cmp.Or(early, s.token(c, last)), expires: now.Add(s.keep(ttl)), ttl: ttl, nonce: nonce, client: c}
	if s.makes("ExpiryByClientClock") {
		next.expires = clock.Add(ttl)
	}
	if s.makes("ExpirySetOnInsertOnly") && r != nil && r.owner == "" {
		next.expires = r.expires
	}
	if s.makes("ExpiryTimerOfOldLease") {
		time.AfterFunc(ttl, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if r := s.records[key]; r != nil && time.Since(r.expires) < 0 {
				r.owner = ""
			}
		})
	}
	s.records[key] = next
	s.writes++
	return core.Grant{Acquired: true, Token: next.token}, nil
}

// purge removes records of keys that nobody locks any more, two for each that
// is added.
func (s *server) purge(now time.Time) {
	if s.makes("StateKeptForever") {
		return
	}
	purged := 0
	for key, r := range s.records {
		if s.makes("ReleasedKeptForever") && r.owner == "" {
			continue
		}
		old := now.After(r.expires.Add(s.retention))
		if s.makes("PurgeByAge") { // of the acquisition
			old = now.After(time.UnixMicro(r.token).Add(s.retention))
		}
		if old && r.token < now.UnixMicro() {
			delete(s.records, key)
			s.writes++
			if purged++; purged == 2 {
				return
			}
		}
	}
}

func (s *server) renew(key, owner string, ttl time.Duration, clock time.Time) (bool, error) {
	key = s.key(key)
	r, now := s.records[key], time.Now()
	if s.refusing {
		if s.makes("RefusalMeansNotYours") {
			return false, nil
		}
		return false, errReadOnly
	}
	if r != nil && r.foreign && !s.makes("ForeignValueMeansHeld") {
		return false, errForeign
	}
	mine := r != nil && s.same(r.owner, owner)
	switch {
	case s.makes("RenewWithoutOwnerCheck"):
		mine = r != nil && r.owner != ""
	case s.makes("StrangersRenewPushes") && r != nil && s.live(r, now, clock):
		r.expires = now.Add(ttl) // before it compares
	}
	live := s.live(r, now, clock)
	switch s.mistake {
	case "RenewRevivesExpired":
		live = r != nil && r.owner != ""
	case "RenewRevivesReleased", "BrokenRenews":
		if r != nil && r.owner == "" && r.last == owner {
			mine, live = true, true
			r.owner = owner
		}
	}
	if !mine || !live {
		return false, nil
	}
	switch s.mistake {
	case "RenewBumpsToken":
		r.expires, r.token = now.Add(ttl), r.token+1
	case "RenewAdds":
		r.expires = r.expires.Add(ttl)
	case "RenewDoesNothing":
	case "RenewIgnoresTTL":
		r.expires = now.Add(r.ttl)
	case "RenewOnlyExtends":
		if end := now.Add(ttl); end.After(r.expires) {
			r.expires = end
		}
	case "RenewResetsToken":
		r.expires, r.token = now.Add(ttl), 1
		s.writes++
		return true, nil
	case "ExpiryByClientClock":
		r.expires = clock.Add(ttl)
	default:
		r.expires = now.Add(s.keep(ttl))
	}
	s.writes++
	return true, nil
}

func (s *server) release(c *client, key, owner string, clock time.Time) error {
	key = s.key(key)
	r, now := s.records[key], time.Now()
	if s.refusing {
		if s.makes("RefusalMeansReleased") {
			return nil
		}
		return errReadOnly
	}
	if r != nil && r.foreign {
		return errForeign
	}
	mine := r != nil && s.same(r.owner, owner)
	switch s.mistake {
	case "ReleaseWithoutOwnerCheck":
		mine = r != nil
	case "LateReleaseRemovesSuccessor": // the client remembers, by key alone
		mine = mine || r != nil && c.won[key] == owner
	case "ReleaseTwiceIsError":
		if !mine || !s.live(r, now, clock) {
			return errors.New("server: no such lease")
		}
	}
	if s.makes("ReleaseEndsAllOfOwner") {
		for _, other := range s.records {
			if other.owner == owner {
				other.owner = ""
			}
		}
	}
	if !mine || !s.live(r, now, clock) {
		return nil
	}
	r.last = r.owner
	switch s.mistake {
	case "ReleaseLeavesLeaseToExpire":
		r.nonce = nil
		return nil
	case "TokenResetOnRelease":
		delete(s.records, key)
	case "ExpirySetOnInsertOnly":
		r.owner, r.nonce = "", nil
	default:
		r.owner, r.nonce, r.expires = "", nil, now
	}
	s.writes++
	s.notify(c, key)
	return nil
}

func (s *server) notify(c *client, key string) {
	for _, sub := range s.subs[key] {
		switch s.mistake {
		case "SignalsOfOwnClientOnly":
			if sub.client != c {
				continue
			}
		case "OneWaiterWoken":
			sub.signal()
			s.subs[key] = append(s.subs[key][1:], sub) // the next one's turn
			return
		case "BusyWaiterBlocksOthers":
			select {
			case sub.ch <- struct{}{}:
			default:
				return
			}
		}
		sub.signal()
	}
}

func (sub *subscription) signal() {
	select {
	case sub.ch <- struct{}{}:
	default:
	}
}

// client is the reference store.
type client struct {
	srv     *server
	skew    time.Duration
	resends bool
	conns   chan struct{} // one token for each connection, nil: any number

	counter atomic.Int64
	won     map[string]string // guarded by srv.mu
	stop    chan struct{}
}

var (
	_ core.LockStore = (*client)(nil)
	_ core.Notifier  = (*client)(nil)
	_ core.Inspector = (*client)(nil)
	_ core.Breaker   = (*client)(nil)
)

func newClient(t testing.TB, s *server) *client {
	c := &client{srv: s, won: make(map[string]string), stop: make(chan struct{})}
	t.Cleanup(func() { c.close() })
	if s.makes("GoroutineOutlivesClose") {
		go func() { time.Sleep(time.Hour) }()
	}
	return c
}

func (c *client) close() {
	close(c.stop)
	if !c.srv.makes("LeaseBoundToClient") {
		return
	}
	c.srv.mu.Lock()
	defer c.srv.mu.Unlock()
	for _, r := range c.srv.records {
		if r.client == c {
			r.owner = ""
		}
	}
}

// call lets the server execute f, which takes a while there and back. When ctx
// ends meanwhile, the server may do it all the same, before or later.
func (c *client) call(ctx context.Context, f func()) error {
	s := c.srv
	if err := ctx.Err(); err != nil && !s.makes("ContextIgnored") {
		return c.ended(err)
	}
	if c.conns != nil {
		select {
		case c.conns <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	done := make(chan struct{})
	go func() {
		if c.conns != nil && !s.makes("ConnectionPinned") {
			defer func() { <-c.conns }()
		}
		defer close(done)
		time.Sleep(latency)
		s.mu.Lock()
		for {
			speaks := s.speaks
			s.mu.Unlock()
			<-speaks
			s.mu.Lock()
			if speaks == s.speaks {
				break
			}
		}
		f()
		s.mu.Unlock()
		if c.resends {
			s.mu.Lock()
			f()
			s.mu.Unlock()
		}
		time.Sleep(latency)
	}()
	if s.makes("LeakingGoroutine") {
		go func() {
			select {
			case <-c.stop:
			case <-time.After(time.Hour):
			}
		}()
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		switch s.mistake {
		case "ContextIgnored": // the driver's own time-out comes first
			select {
			case <-done:
				return nil
			case <-time.After(5 * time.Second):
			}
		case "SlowToGiveUp":
			time.Sleep(100 * time.Millisecond)
		}
		return c.ended(ctx.Err())
	}
}

func (c *client) ended(err error) error {
	switch c.srv.mistake {
	case "OwnErrorForEndedContext":
		return errors.New("client: timed out")
	case "WrongContextError":
		return context.DeadlineExceeded
	}
	return fmt.Errorf("client: %w", err)
}

// clock is what the client takes for the time.
func (c *client) clock() time.Time { return time.Now().Add(c.skew) }

func (c *client) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (core.Grant, error) {
	s := c.srv
	// Not named results: when ctx ends the server may still write to these.
	var grant core.Grant
	var err error
	if err := c.check(key, owner, ttl); err != nil {
		return core.Grant{}, err
	}
	clock, nonce := c.clock(), new(int)
	var early int64
	switch s.mistake {
	case "ReadThenWriteAcquire":
		held := false
		if err := c.call(ctx, func() { held = s.live(s.records[key], time.Now(), clock) }); err != nil {
			return core.Grant{}, err
		}
		if held {
			return core.Grant{}, nil
		}
		callErr := c.call(ctx, func() {
			if r := s.records[key]; r != nil {
				r.owner = ""
			}
			grant, err = s.acquire(c, key, owner, ttl, nonce, clock, 0)
		})
		if callErr != nil {
			return core.Grant{}, callErr
		}
		return grant, err
	case "TokenDrawnEarly":
		if callErr := c.call(ctx, func() { s.counter++; early = s.counter }); callErr != nil {
			return core.Grant{}, callErr
		}
		// As long as a row lock may keep a statement waiting.
		time.Sleep(latency * time.Duration(early%7))
	case "AcquireInTwoSteps": // SETNX, then EXPIRE
		callErr := c.call(ctx, func() { grant, err = s.acquire(c, key, owner, 24*365*time.Hour, nonce, clock, 0) })
		if callErr != nil {
			return core.Grant{}, callErr
		}
		if err != nil || !grant.Acquired {
			return grant, err
		}
		callErr = c.call(ctx, func() {
			if r := s.records[key]; r != nil {
				r.expires, r.ttl = time.Now().Add(ttl), ttl
			}
		})
		if callErr != nil {
			return core.Grant{}, callErr
		}
		return grant, nil
	}
	callErr := c.call(ctx, func() {
		grant, err = s.acquire(c, key, owner, ttl, nonce, clock, early)
	})
	if callErr != nil {
		return core.Grant{}, callErr
	}
	if grant.Acquired {
		s.mu.Lock()
		c.won[key] = owner
		s.mu.Unlock()
	}
	return grant, err
}

func (c *client) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	s := c.srv
	var renewed bool
	var err error
	if err := c.check(key, owner, ttl); err != nil {
		return false, err
	}
	clock := c.clock()
	switch s.mistake {
	case "RenewOfOwnClientOnly":
		s.mu.Lock()
		known := c.won[key] == owner
		s.mu.Unlock()
		if !known {
			return false, nil
		}
	case "RenewInTwoSteps": // reads the record, and writes all of it
		var read *record
		callErr := c.call(ctx, func() {
			if r := s.records[key]; r != nil && r.owner == owner && s.live(r, time.Now(), clock) {
				copied := *r
				read = &copied
			}
		})
		if callErr != nil {
			return false, callErr
		}
		if read == nil {
			return false, nil
		}
		callErr = c.call(ctx, func() { read.expires = time.Now().Add(ttl); s.records[key] = read })
		return callErr == nil, callErr
	}
	callErr := c.call(ctx, func() { renewed, err = s.renew(key, owner, ttl, clock) })
	if callErr != nil {
		return false, callErr
	}
	return renewed, err
}

func (c *client) Release(ctx context.Context, key, owner string) error {
	s := c.srv
	var err error
	if err := c.check(key, owner, time.Second); err != nil {
		return err
	}
	clock := c.clock()
	switch s.mistake {
	case "ReleaseOfKnownOnly": // it knows those whose grant it has seen
		s.mu.Lock()
		known := c.won[key] == owner
		s.mu.Unlock()
		if !known {
			return c.call(ctx, func() {})
		}
	case "SignalBeforeRelease":
		if err := c.call(ctx, func() { s.notify(c, s.key(key)) }); err != nil {
			return err
		}
		time.Sleep(5 * latency)
		callErr := c.call(ctx, func() {
			subs := s.subs
			s.subs = nil
			err = s.release(c, key, owner, clock)
			s.subs = subs
		})
		if callErr != nil {
			return callErr
		}
		return err
	}
	if callErr := c.call(ctx, func() { err = s.release(c, key, owner, clock) }); callErr != nil {
		return callErr
	}
	if c.conns != nil && s.makes("ConnectionPinned") {
		<-c.conns // that of the acquire, and its own
		<-c.conns
	}
	return err
}

// check validates.
func (c *client) check(key, owner string, ttl time.Duration) error {
	err := core.CheckAll(key, owner, ttl)
	switch c.srv.mistake {
	case "ZeroTTLMeansForever":
		if ttl == 0 && err != nil {
			return cmp.Or(core.CheckKey(key), core.CheckOwner(owner))
		}
	case "EmptyKeyAllowed":
		if key == "" {
			return nil
		}
	case "OwnerInError":
		if err != nil {
			return fmt.Errorf("owner %s: %w", owner, err)
		}
	case "OwnerColumnTooShort":
		if err == nil && len(owner) > 64 {
			return errors.New("client: value too long for type character varying(64)")
		}
	case "InvalidIsDriverError":
		if err != nil {
			return errors.New(err.Error())
		}
	}
	return err
}

func (c *client) Subscribe(ctx context.Context, key string) (<-chan struct{}, func(), error) {
	s := c.srv
	if err := core.CheckKey(key); err != nil {
		return nil, nil, err
	}
	sub := &subscription{client: c, ch: make(chan struct{}, 1)}
	if s.makes("SignalLostWhileBusy") {
		sub.ch = make(chan struct{})
	}
	key = s.key(key)
	register := func() { s.subs[key] = append(s.subs[key], sub) }
	if s.makes("SubscribeReturnsEarly") {
		go func() {
			time.Sleep(5 * latency)
			s.mu.Lock()
			defer s.mu.Unlock()
			register()
		}()
	} else if err := c.call(ctx, register); err != nil {
		return nil, nil, err
	}
	unsubscribe := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.subs[key] = slices.DeleteFunc(s.subs[key], func(other *subscription) bool {
			return other == sub || s.makes("StopEndsAllOfKey") && other.client == c
		})
		if len(s.subs[key]) == 0 {
			delete(s.subs, key)
		}
	}
	switch s.mistake {
	case "SubscriptionEndsWithContext":
		context.AfterFunc(ctx, unsubscribe)
	case "StopLeaksGoroutine":
		go func() { time.Sleep(time.Hour) }()
	}
	return sub.ch, unsubscribe, nil
}

// referenceConfig is the configuration of the reference store, with every
// optional field but Env, for its server is a value in this process.
func referenceConfig(mistake string) Config {
	backend := PerRule(func(testing.TB) *server { return newServer(mistake) })
	open := func(t testing.TB) *client { return newClient(t, backend(t)) }
	return Config{
		HandOvers: 100,
		Open:      func(t testing.TB) core.LockStore { return open(t) },
		Restart: func(t testing.TB) {
			s := backend(t)
			s.mu.Lock()
			defer s.mu.Unlock()
			switch mistake {
			case "TokenCounterInServerMemory":
				s.counter = 0
			case "LeasesLostByRestart":
				for _, r := range s.records {
					r.owner = ""
				}
			case "SubscriptionDiesWithRestart":
				clear(s.subs)
			}
		},
		Pause: func(t testing.TB) func() {
			s := backend(t)
			s.mu.Lock()
			defer s.mu.Unlock()
			speaks := make(chan struct{})
			s.speaks = speaks
			return func() { close(speaks) }
		},
		Flush: func(t testing.TB) {
			s := backend(t)
			s.mu.Lock()
			defer s.mu.Unlock()
			clear(s.records)
			s.counter = 0
		},
		Writes: func(t testing.TB) int64 {
			s := backend(t)
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.writes
		},
		OpenRetention: func(t testing.TB, retention time.Duration) (core.LockStore, func() int) {
			s := newServer(mistake)
			s.retention = retention
			return newClient(t, s), func() int {
				s.mu.Lock()
				defer s.mu.Unlock()
				return len(s.records)
			}
		},
		OpenOneConnection: func(t testing.TB) core.LockStore {
			c := open(t)
			c.conns = make(chan struct{}, 1)
			return c
		},
		OpenResending: func(t testing.TB) core.LockStore {
			c := open(t)
			c.resends = true
			return c
		},
		OpenSkewed: func(t testing.TB, skew time.Duration) core.LockStore {
			c := open(t)
			c.skew = skew
			return c
		},
		Foreign: func(t testing.TB, key string) func() bool {
			s, r := backend(t), &record{foreign: true}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.records[key] = r
			return func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				return s.records[key] == r
			}
		},
		Refusals: []Refusal{{Name: "ReadOnly", Begin: func(t testing.TB) (core.LockStore, func()) {
			s := backend(t)
			set := func(refusing bool) {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.refusing = refusing
			}
			set(true)
			return open(t), func() { set(false) }
		}}},
	}
}
