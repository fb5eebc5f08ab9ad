package etcdstore

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// fate is what becomes of a delivery of a request.
type fate struct {
	after time.Duration // of which the answer comes; 0: never
	err   error
}

func TestResend(t *testing.T) {
	const ms, silent = time.Millisecond, time.Duration(0)
	for _, test := range []struct {
		name    string
		fates   []fate // the last one is that of all further deliveries too
		bound   time.Duration
		answer  int // the delivery that is answered with yes; 0: none
		sent    int
		err     error
		elapsed time.Duration
	}{
		{name: "answered", fates: []fate{{after: 50 * ms}}, answer: 1, sent: 1, elapsed: 50 * ms},
		{name: "silent member, then another", fates: []fate{{after: silent}, {after: 50 * ms}}, answer: 2, sent: 2, elapsed: 150 * ms},
		{name: "two silent members, then another", fates: []fate{{after: silent}, {after: silent}, {after: 50 * ms}}, answer: 3, sent: 3, elapsed: 350 * ms},
		{name: "slow cluster", fates: []fate{{after: 250 * ms}}, answer: 1, sent: 2, elapsed: 250 * ms},
		{name: "overtaken", fates: []fate{{after: 250 * ms}, {after: 50 * ms}}, answer: 2, sent: 2, elapsed: 150 * ms},
		{name: "all silent", fates: []fate{{after: silent}}, sent: maxResends + 1, err: errSilent, elapsed: 36700 * ms},
		{name: "refused", fates: []fate{{after: 50 * ms, err: rpctypes.ErrLeaseNotFound}}, sent: 0, err: rpctypes.ErrLeaseNotFound, elapsed: 50 * ms},
		{name: "silent, then refused", fates: []fate{{after: silent}, {after: 50 * ms, err: rpctypes.ErrLeaseNotFound}}, sent: 1, err: rpctypes.ErrLeaseNotFound, elapsed: 150 * ms},
		{name: "unavailable, then answered", fates: []fate{{after: 50 * ms, err: rpctypes.ErrNoLeader}, {after: 50 * ms}}, answer: 2, sent: 2, elapsed: 150 * ms},
		{name: "silent, and another one unavailable", fates: []fate{{after: silent}, {after: 50 * ms, err: rpctypes.ErrNoLeader}, {after: 50 * ms}}, answer: 3, sent: 3, elapsed: 350 * ms},
		{name: "unavailable for good", fates: []fate{{after: ms, err: rpctypes.ErrNoLeader}}, sent: maxResends + 1, err: rpctypes.ErrNoLeader, elapsed: 2760 * ms},
		{name: "context ends", fates: []fate{{after: silent}}, bound: 200 * ms, sent: 2, err: context.DeadlineExceeded, elapsed: 200 * ms},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				clock := now()
				s := bare(&clock)
				ctx := t.Context()
				if test.bound > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.bound)
					defer cancel()
				}
				start, numbers := time.Now(), make(chan int, 100)
				for n := range 100 {
					numbers <- n
				}
				answer, sent, err := resend(ctx, s, patience, func(ctx context.Context) (int, error) {
					n := <-numbers
					f := test.fates[min(n, len(test.fates)-1)]
					answered := make(<-chan time.Time)
					if f.after > 0 {
						answered = time.After(f.after)
					}
					select {
					case <-answered:
						return n + 1, f.err
					case <-ctx.Done():
						return 0, ctx.Err()
					}
				})
				if err == nil != (test.err == nil) || !errors.Is(err, test.err) || err == nil && answer != test.answer {
					t.Errorf("answer to delivery %d, %v; want %d, %v", answer, err, test.answer, test.err)
				}
				if sent != test.sent {
					t.Errorf("sent = %d, want %d", sent, test.sent)
				}
				if elapsed := time.Since(start); elapsed != test.elapsed {
					t.Errorf("it took %v, want %v", elapsed, test.elapsed)
				}
				s.wg.Wait() // no delivery outlives the call for long
			})
		})
	}
}
