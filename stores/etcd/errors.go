package etcdstore

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
)

// wrap makes err, of a call with ctx, an error of this package: it matches
// ctx.Err() if ctx has ended, whatever became of the request meanwhile.
func (s *Store) wrap(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, ErrClosed) {
		return err
	}
	if cerr := ctx.Err(); cerr != nil && !errors.Is(err, cerr) {
		err = fmt.Errorf("%w: %w", cerr, err)
	}
	if code, etcd := codeOf(err); !etcd && (ctx.Err() != nil || code == codes.Unavailable || errors.Is(err, errSilent)) && s.unreachable() {
		// The client goes on trying, and does not say that this is why.
		return fmt.Errorf("etcd: no connection to %s: %w", strings.Join(s.client.Endpoints(), ", "), err)
	}
	return fmt.Errorf("etcd: %w", err)
}

// unreachable reports whether the client could not connect to any member.
func (s *Store) unreachable() bool {
	return s.client.ActiveConnection().GetState() == connectivity.TransientFailure
}

// codeOf returns the code of an error of etcd or of gRPC, and whether it was
// etcd that made it.
func codeOf(err error) (code codes.Code, etcd bool) {
	if e, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		return e.Code(), true
	}
	// A status that the client has not translated. An etcd error is known by
	// its text.
	if e, ok := errors.AsType[rpctypes.EtcdError](rpctypes.Error(err)); ok {
		return e.Code(), true
	}
	if st, ok := status.FromError(err); ok {
		return st.Code(), false
	}
	return codes.Unknown, false
}

// isRefusal reports whether etcd itself answered that it will not execute the
// request: not found, no permission, too many requests. "No space" is none: the
// request that fills the quota is executed, and answered so (quotaApplierV3).
func isRefusal(err error) bool {
	if errors.Is(rpctypes.Error(err), rpctypes.ErrNoSpace) {
		return false
	}
	switch code, etcd := codeOf(err); code {
	case codes.InvalidArgument, codes.NotFound, codes.PermissionDenied, codes.Unauthenticated,
		codes.ResourceExhausted, codes.FailedPrecondition, codes.OutOfRange:
		return etcd
	default:
		return false
	}
}

// isTransient reports whether the cluster may do what was asked a moment later:
// a member was stopped, a leader is being elected, a connection broke.
func isTransient(err error) bool {
	code, _ := codeOf(err)
	return code == codes.Unavailable
}

func isLeaseNotFound(err error) bool {
	code, etcd := codeOf(err)
	return err != nil && etcd && code == codes.NotFound
}

// watchError gives the error of a watch its type back: when a watch is refused
// the server sends its error as a text, "rpc error: code = PermissionDenied desc
// = etcdserver: permission denied", and the client leaves it at that.
func watchError(err error) error {
	if err == nil {
		return nil
	}
	if _, desc, ok := strings.Cut(err.Error(), " desc = "); ok {
		if known, ok := errors.AsType[rpctypes.EtcdError](rpctypes.Error(errors.New(desc))); ok {
			return known
		}
	}
	return err
}
