package memstore

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// clock is a clock that stands still until it is moved.
type clock struct{ ns atomic.Int64 }

func newClock() *clock {
	c := &clock{}
	c.ns.Store(time.Date(2026, 11, 29, 0, 0, 0, 0, time.UTC).UnixNano())
	return c
}

func (c *clock) now() time.Time          { return time.Unix(0, c.ns.Load()) }
func (c *clock) advance(d time.Duration) { c.ns.Add(int64(d)) }

// check fails unless the shards' parts fit together.
func check(t testing.TB, s *Store) {
	t.Helper()
	for n := range s.shards {
		h := &s.shards[n]
		h.mu.Lock()
		used, free := 0, map[int32]bool{}
		for _, i := range h.free {
			free[i] = true
		}
		for i, l := range h.slots {
			if l.key == "" {
				if l != (slot{}) || !free[int32(i)] {
					t.Errorf("shard %d: slot %d is free, but not known as that", n, i)
				}
				continue
			}
			used++
			if at, ok := h.index[l.key]; !ok || int(at) != i {
				t.Errorf("shard %d: slot %d has key %q, the index says %d, %v", n, i, l.key, at, ok)
			}
		}
		if used != len(h.index) || used+len(h.free) != len(h.slots) {
			t.Errorf("shard %d: %d slots, %d used, %d in the index, %d free", n, len(h.slots), used, len(h.index), len(h.free))
		}
		h.mu.Unlock()
	}
}

// waiters counts the subscriptions, and the keys that any are kept for.
func waiters(s *Store) (subscriptions, keys int) {
	for n := range s.shards {
		h := &s.shards[n]
		h.mu.Lock()
		keys += len(h.waiting)
		for _, l := range h.waiting {
			subscriptions += l.Len()
		}
		h.mu.Unlock()
	}
	return subscriptions, keys
}

// TestAgainstAModel does a million things at random and compares every answer
// with that of a map, the simplest store there is. Keys come and go in bursts,
// so that shards grow, are swept, and shrink.
func TestAgainstAModel(t *testing.T) {
	t.Parallel()
	steps := 1_000_000
	if testing.Short() || raceEnabled {
		steps = 100_000
	}
	type lease struct {
		owner string
		until time.Time
		token int64
	}
	c := newClock()
	s := New(c.now)
	model := map[string]lease{}
	last := int64(0)
	live := func(key string) (lease, bool) {
		l, ok := model[key]
		return l, ok && c.now().Before(l.until)
	}
	r := rand.New(rand.NewPCG(1, 2))
	keys := 1
	for step := range steps {
		if step%20_000 == 0 {
			check(t, s)
			keys = []int{1, 10, 1000, 30_000}[r.IntN(4)]
		}
		key, owner := strconv.Itoa(r.IntN(keys)), strconv.Itoa(r.IntN(3))
		ttl := time.Duration(1+r.IntN(1000)) * time.Millisecond
		was, held := live(key)
		switch r.IntN(10) {
		case 0, 1, 2, 3:
			token, left := s.Acquire(key, owner, ttl)
			if held {
				if token != 0 || left != was.until.Sub(c.now()) {
					t.Fatalf("step %d: acquired a held key: token %d, left %v", step, token, left)
				}
				break
			}
			if want := max(last+1, c.now().UnixMicro()); token != want || left != 0 {
				t.Fatalf("step %d: token %d, left %v, want %d", step, token, left, want)
			}
			last = token
			model[key] = lease{owner, c.now().Add(ttl), token}
		case 4:
			renewed := s.Renew(key, owner, ttl)
			if want := held && was.owner == owner; renewed != want {
				t.Fatalf("step %d: renewed: %v, want %v", step, renewed, want)
			}
			if renewed {
				was.until = c.now().Add(ttl)
				model[key] = was
			}
		case 5, 6, 7:
			s.Release(key, owner)
			if held && was.owner == owner {
				delete(model, key)
			}
		case 8:
			c.advance(time.Duration(r.IntN(5)) * time.Millisecond) // often to the very end of a lease
		case 9:
			got, ok := s.Lease(key)
			if want := (Lease{key, was.owner, was.token, was.until.Sub(c.now())}); ok != held || ok && got != want {
				t.Fatalf("step %d: lease %+v, %v, want %+v, %v", step, got, ok, want, held)
			}
			if r.IntN(10) == 0 {
				broken, ok := s.Break(key)
				if ok != held || broken != got {
					t.Fatalf("step %d: broke %+v, %v, want %+v, %v", step, broken, ok, got, held)
				}
				delete(model, key)
			}
		}
		if step%20_000 == 0 {
			seen := map[string]bool{}
			s.Leases("", func(l Lease) bool {
				if want, ok := live(l.Key); !ok || seen[l.Key] || l != (Lease{l.Key, want.owner, want.token, want.until.Sub(c.now())}) {
					t.Fatalf("step %d: shows %+v, the model has %+v, %v", step, l, want, ok)
				}
				seen[l.Key] = true
				return true
			})
			for key := range model {
				if _, ok := live(key); ok != seen[key] {
					t.Fatalf("step %d: %q is shown: %v, live: %v", step, key, seen[key], ok)
				}
			}
		}
	}
	check(t, s)
}

func TestLeasesByPrefixAndUntilToldToStop(t *testing.T) {
	t.Parallel()
	s := New(nil)
	for i := range 1000 {
		s.Acquire(fmt.Sprintf("%c/%d", 'a'+i%2, i), "owner", time.Hour)
	}
	n := 0
	s.Leases("a/", func(l Lease) bool {
		if l.Key[:2] != "a/" {
			t.Errorf("shows %q", l.Key)
		}
		s.Release(l.Key, l.Owner) // no lock is held
		n++
		return n < 100
	})
	if n != 100 || s.Len() != 900 {
		t.Errorf("showed %d leases, %d are left, want 100 and 900", n, s.Len())
	}
	s.Leases("c/", func(l Lease) bool {
		t.Errorf("shows %q for another prefix", l.Key)
		return true
	})
}

func TestTryAllocatesNothing(t *testing.T) {
	many := make([]string, 10_000)
	for i := range many {
		many[i] = strconv.Itoa(i)
	}
	for _, tt := range []struct {
		name string
		keys []string
		live int // other leases
	}{
		{"one key", many[:1], 0},
		{"many keys", many, 0},
		{"many keys beside many leases", many, 100_000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := New(nil)
			for i := range tt.live {
				s.Acquire(fmt.Sprint("live ", i), "owner", time.Hour)
			}
			i := 0
			cycle := func() {
				key := tt.keys[i%len(tt.keys)]
				i++
				if token, _ := s.Acquire(key, "owner", time.Minute); token == 0 {
					t.Fatal("not acquired")
				}
				if token, left := s.Acquire(key, "other", time.Minute); token != 0 || left <= 0 {
					t.Fatal("acquired twice")
				}
				if !s.Renew(key, "owner", time.Minute) {
					t.Fatal("not renewed")
				}
				s.Release(key, "owner")
			}
			for range tt.keys {
				cycle() // what the first pass makes is used again
			}
			if n := testing.AllocsPerRun(20_000, cycle); n != 0 {
				t.Errorf("%v allocations in acquire, held try, renew, release", n)
			}
		})
	}
}

// heap is the memory in use.
func heap() int64 {
	runtime.GC()
	runtime.GC() // what finalizers freed
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func size(full, small int) int {
	if testing.Short() || raceEnabled {
		return small
	}
	return full
}

// wantHeap fails if more memory is in use than before, but for a little that a
// store keeps to work with.
func wantHeap(t *testing.T, before int64, what string) {
	t.Helper()
	if grown := heap() - before; grown > 1<<20 {
		t.Errorf("%s: %d kB more than in the beginning", what, grown>>10)
	}
}

// A counter for each key ever locked was 25 million counters in the end.
func TestReleasedKeysLeaveNothing(t *testing.T) {
	s := New(nil)
	before := heap()
	for i := range size(10_000_000, 200_000) {
		key := strconv.Itoa(i)
		if token, _ := s.Acquire(key, key, time.Hour); token == 0 {
			t.Fatal("not acquired")
		}
		s.Release(key, key)
	}
	if n := s.Len(); n != 0 {
		t.Errorf("%d leases are kept", n)
	}
	wantHeap(t, before, "after the last release")
	runtime.KeepAlive(s)
}

// Holders crash, nobody asks for their keys again: the acquisitions of other
// keys sweep up, and more than they leave.
func TestExpiredLeasesAreSwept(t *testing.T) {
	c := newClock()
	s := New(c.now)
	before := heap()
	const live = 1000 // at any time: a ttl of a second, one a millisecond
	most := 0
	for i := range size(2_000_000, 200_000) {
		key := strconv.Itoa(i)
		s.Acquire(key, key, live*time.Millisecond)
		c.advance(time.Millisecond)
		if i%1000 == 0 {
			most = max(most, s.Len())
		}
	}
	if most > 2*live {
		t.Errorf("%d leases were kept at a time, %d of them live", most, live)
	}
	wantHeap(t, before, "while 1000 leases live")
	check(t, s)
}

func TestMemoryShrinksAfterABurst(t *testing.T) {
	for _, how := range []string{"released", "broken", "expired, swept by one busy key"} {
		t.Run(how, func(t *testing.T) {
			c := newClock()
			s := New(c.now)
			before := heap()
			burst := size(200_000, 50_000)
			for i := range burst {
				key := strconv.Itoa(i)
				s.Acquire(key, key, time.Hour)
			}
			if grown := heap() - before; grown < int64(burst)*100 {
				t.Errorf("%d leases take only %d bytes", burst, grown)
			}
			for i := range burst {
				key := strconv.Itoa(i)
				switch how {
				case "released":
					s.Release(key, key)
				case "broken":
					s.Break(key)
				default:
					c.advance(time.Hour)
					s.Acquire("busy", "owner", time.Minute)
					s.Release("busy", "owner")
				}
			}
			if n := s.Len(); n != 0 {
				t.Errorf("%d of %d leases are kept", n, burst)
			}
			wantHeap(t, before, how)
			check(t, s)
			runtime.KeepAlive(s)
		})
	}
}

func TestSubscriptionsLeaveNothing(t *testing.T) {
	s := New(nil)
	before := heap()
	var stops []func()
	for i := range size(200_000, 20_000) {
		_, stop := s.Subscribe(strconv.Itoa(i))
		stops = append(stops, stop)
	}
	for _, stop := range stops {
		stop()
		stop()
	}
	clear(stops) // what is measured must not be kept alive here
	if n, keys := waiters(s); n != 0 || keys != 0 {
		t.Errorf("%d subscriptions for %d keys are left", n, keys)
	}
	wantHeap(t, before, "after the last stop")
	runtime.KeepAlive(s)
}

// One sequence for the store, max(last + 1, clock), whatever the clock does and
// however many ask at once.
func TestTokensGrowWhateverTheClockDoes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		step func(c *clock, n int)
	}{
		{"clock stands still", func(*clock, int) {}},
		{"clock runs", func(c *clock, _ int) { c.advance(7 * time.Microsecond) }},
		{"clock runs backwards", func(c *clock, _ int) { c.advance(-time.Minute) }},
		{"clock jumps", func(c *clock, n int) {
			c.advance([]time.Duration{time.Hour, -time.Hour, -time.Minute, time.Microsecond}[n%4])
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := newClock()
			s := New(c.now)
			first := c.now().UnixMicro()
			const workers, rounds = 8, 2000
			tokens := make([][]int64, workers)
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					own := strconv.Itoa(w)
					for n := range rounds {
						tt.step(c, n)
						key := own
						if n%2 == 0 {
							key = "shared"
						}
						if token, _ := s.Acquire(key, own, time.Hour); token != 0 {
							tokens[w] = append(tokens[w], token)
							s.Release(key, own)
						}
						s.Break("shared") // whoever was faster
					}
				})
			}
			wg.Wait()
			var all []int64
			for w, own := range tokens {
				if !slices.IsSorted(own) {
					t.Errorf("the tokens that worker %d got do not grow", w)
				}
				all = append(all, own...)
			}
			slices.Sort(all)
			if n := len(all); len(slices.Compact(all)) != n {
				t.Error("a token was granted twice")
			}
			if len(all) < workers*rounds/2 || all[0] < first && tt.name != "clock runs backwards" {
				t.Errorf("%d tokens, the first is %d, the clock said %d", len(all), all[0], first)
			}
		})
	}
}

// A process that is restarted does not begin at 1.
func TestTokensGoOnInANewStore(t *testing.T) {
	t.Parallel()
	c := newClock()
	last := int64(0)
	for range 10 {
		s := New(c.now)
		for range 100 {
			token, _ := s.Acquire("key", "owner", time.Hour)
			if token <= last {
				t.Fatalf("token %d after %d", token, last)
			}
			last = token
			s.Release("key", "owner")
		}
		c.advance(time.Millisecond) // a restart takes longer than the tokens ran ahead
	}
}

func TestSignals(t *testing.T) {
	t.Parallel()
	s := New(nil)
	signals, stop := s.Subscribe("key")
	others, stopOthers := s.Subscribe("key")
	want := func(what string, c <-chan struct{}, want bool) {
		t.Helper()
		select {
		case _, ok := <-c:
			if !want || !ok {
				t.Errorf("%s: a signal, or closed", what)
			}
		default:
			if want {
				t.Errorf("%s: no signal", what)
			}
		}
	}
	s.Acquire("key", "owner", time.Hour)
	want("acquired", signals, false)
	s.Release("key", "stranger")
	want("released by a stranger", signals, false)
	s.Acquire("another", "owner", time.Hour)
	s.Release("another", "owner")
	want("another key released", signals, false)
	s.Renew("key", "owner", time.Hour)
	want("renewed", signals, false)
	s.Release("key", "owner")
	want("released", signals, true)
	want("released, the other one", others, true)
	want("once only", signals, false)

	for range 3 { // nobody reads: nothing blocks, signals merge
		s.Acquire("key", "owner", time.Hour)
		s.Release("key", "owner")
	}
	want("merged", signals, true)
	want("merged into one", signals, false)

	s.Acquire("key", "owner", time.Hour)
	s.Break("key")
	want("broken", signals, true)
	s.Break("key")
	want("nothing to break", signals, false)

	stop()
	stop()
	<-others
	s.Acquire("key", "owner", time.Hour)
	s.Release("key", "owner")
	want("stopped", signals, false)
	want("not stopped", others, true)
	stopOthers()

	// A subscription after the last one was stopped is a new one.
	signals, stop = s.Subscribe("key")
	stopOthers()
	s.Acquire("key", "owner", time.Hour)
	s.Release("key", "owner")
	want("new", signals, true)
	stop()
	if n, keys := waiters(s); n != 0 || keys != 0 {
		t.Errorf("%d subscriptions for %d keys are left", n, keys)
	}
}

// Subscribers come and go while the key is released again and again: each
// release after a Subscribe has returned, and before its stop, gives a signal.
func TestSubscribeAndStopRaceWithRelease(t *testing.T) {
	t.Parallel()
	s := New(nil)
	const workers, rounds = 16, 300
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			owner := strconv.Itoa(w)
			for range rounds {
				signals, stop := s.Subscribe("key")
				for {
					if token, _ := s.Acquire("key", owner, time.Hour); token != 0 {
						break
					}
					<-signals // hangs if one is lost
				}
				s.Release("key", owner)
				go stop()
				stop()
			}
		})
	}
	wg.Wait()
	if n, keys := waiters(s); n != 0 || keys != 0 {
		t.Errorf("%d subscriptions for %d keys are left", n, keys)
	}
	check(t, s)
}

// All methods at once, for the race detector.
func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	s := New(nil)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			owner := strconv.Itoa(w)
			r := rand.New(rand.NewPCG(uint64(w), 0))
			for range size(20_000, 3000) {
				key := strconv.Itoa(r.IntN(500))
				switch r.IntN(8) {
				case 0, 1, 2:
					s.Acquire(key, owner, time.Duration(r.IntN(1_000_000)))
				case 3:
					s.Renew(key, owner, time.Millisecond)
				case 4, 5:
					s.Release(key, owner)
				case 6:
					s.Break(key)
				default:
					s.Lease(key)
					if r.IntN(100) == 0 {
						s.Leases("1", func(Lease) bool { return true })
						s.Len()
					}
				}
			}
		})
	}
	wg.Wait()
	check(t, s)
}

// BenchmarkScaling is acquire and release from all cores, on keys of their own
// and on one key.
func BenchmarkScaling(b *testing.B) {
	for _, keys := range []string{"own", "one"} {
		b.Run("keys="+keys, func(b *testing.B) {
			s := New(nil)
			var worker atomic.Int64
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				owner := strconv.FormatInt(worker.Add(1), 10)
				key := owner
				if keys == "one" {
					key = "one"
				}
				for pb.Next() {
					if token, _ := s.Acquire(key, owner, time.Minute); token != 0 {
						s.Release(key, owner)
					}
				}
			})
		})
	}
}
