package mongostore_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasekit/leasekit/internal/testserver"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

// A client in a bubble lives in the year 2000, and there its clock stands still,
// because time does not pass in a bubble while a goroutine waits for the network.
func TestClientClockIsNotRead(t *testing.T) {
	coll := newCollection(t)
	outside := newStore(t, coll, mongostore.Options{})
	mustAcquire(t, outside, "ours", "outside", time.Minute)
	mustAcquire(t, outside, "short", "outside", 100*time.Millisecond)
	url := testserver.Mongo(t).URL
	synctest.Test(t, func(t *testing.T) {
		if year := time.Now().Year(); year != 2000 {
			t.Fatalf("the bubble's year is %d, want 2000", year)
		}
		inside := newStore(t, through(t, coll, url), mongostore.Options{})
		if g := mustBeHeld(t, inside, "ours"); g.Left <= 0 || g.Left > time.Minute+time.Millisecond {
			t.Errorf("Left %v of a lease of a minute", g.Left)
		}
		g := mustAcquire(t, inside, "theirs", "inside", time.Minute)
		if year := time.UnixMicro(g.Token).Year(); year < 2020 {
			t.Errorf("token %d is of the year %d, the client's", g.Token, year)
		}
		if ok, err := inside.Renew(t.Context(), "theirs", "inside", time.Minute); !ok || err != nil {
			t.Errorf("Renew returned %v, %v, want true, nil", ok, err)
		}
		for { // until the server says that it has ended
			g, err := inside.Acquire(t.Context(), "short", "inside", time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if g.Acquired {
				break
			}
		}
	})
	if g := mustBeHeld(t, outside, "theirs"); g.Left < 30*time.Second {
		t.Errorf("Left %v of a lease of a minute that has just been renewed", g.Left)
	}
	mustBeHeld(t, outside, "short")
	mustRelease(t, outside, "theirs", "inside")
	mustAcquire(t, outside, "theirs", "outside", time.Minute)
}
