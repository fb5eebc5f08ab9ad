package core_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
)

func TestErrorMessages(t *testing.T) {
	t.Parallel()
	inner := errors.New("connection refused")
	for _, tt := range []struct {
		err  error
		want string
	}{
		{&core.NotAcquiredError{Key: "a\nb", Tries: 7, Waited: 2*time.Second + 49*time.Microsecond}, `lock "a\nb": not acquired: held elsewhere, tries: 7, waited: 2s`},
		{&core.NotAcquiredError{Key: "key", Reentrant: true}, `lock "key": not acquired: the calling context holds this key already, and leases are not reentrant`},
		{&core.NotAcquiredError{Key: "key", Tries: 1, Err: inner}, `lock "key": not acquired: connection refused, tries: 1, waited: 0s`},
		{&core.LostError{Key: "key", Token: 5}, `lock "key": lease lost`},
		{&core.LostError{Key: "key", Token: 5, Reason: inner}, `lock "key": lease lost: connection refused`},
		{&core.LostError{Key: "key", Token: 5, Reason: inner, Err: context.Canceled}, `lock "key": lease lost: connection refused: callback: context canceled`},
		{&core.StoreError{Op: "acquire", Key: "key", Err: inner}, `lock "key": acquire: connection refused`},
	} {
		if got := tt.err.Error(); got != tt.want {
			t.Errorf("got  %s\nwant %s", got, tt.want)
		}
	}
}

func TestErrorsMatchTheirSentinelsAlone(t *testing.T) {
	t.Parallel()
	mine, reason := errors.New("mine"), errors.New("reason")
	sentinels := []error{core.ErrInvalid, core.ErrNotAcquired, core.ErrLost, core.ErrReleased, core.ErrStore}
	for _, tt := range []struct {
		err   error
		is    error
		wraps []error
		code  string
	}{
		{&core.NotAcquiredError{Key: "key"}, core.ErrNotAcquired, nil, "LOCK_NOT_ACQUIRED"},
		{&core.NotAcquiredError{Key: "key", Err: reason}, core.ErrNotAcquired, []error{reason}, "LOCK_NOT_ACQUIRED"},
		{&core.LostError{Key: "key"}, core.ErrLost, nil, "LOCK_LOST"},
		{&core.LostError{Key: "key", Reason: reason}, core.ErrLost, []error{reason}, "LOCK_LOST"},
		{&core.LostError{Key: "key", Err: mine, Reason: reason}, core.ErrLost, []error{mine, reason}, "LOCK_LOST"},
		{&core.StoreError{Op: "renew", Key: "key", Err: reason}, core.ErrStore, []error{reason}, ""},
	} {
		for _, err := range []error{tt.err, fmt.Errorf("handler: %w", tt.err)} {
			for _, sentinel := range sentinels {
				if got, want := errors.Is(err, sentinel), sentinel == tt.is; got != want { //nolint:errorlint // the sentinel itself
					t.Errorf("errors.Is(%v, %v) is %v, want %v", err, sentinel, got, want)
				}
			}
			for _, inner := range tt.wraps {
				if !errors.Is(err, inner) {
					t.Errorf("%v does not wrap %v", err, inner)
				}
			}
			if got, want := core.IsRejection(err), tt.is == core.ErrNotAcquired; got != want { //nolint:errorlint // the sentinel itself
				t.Errorf("IsRejection(%v) is %v, want %v", err, got, want)
			}
		}
		if coded, ok := tt.err.(interface{ Code() string }); ok != (tt.code != "") || ok && coded.Code() != tt.code {
			t.Errorf("%v has not the code %q", tt.err, tt.code)
		}
	}
	if core.IsRejection(nil) {
		t.Error("nil is a rejection")
	}
}
