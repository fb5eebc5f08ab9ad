package redisstore

import (
	"context"
	"crypto/fips140"
	"crypto/sha1"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasekit/leasekit/internal/await"
)

var (
	//go:embed acquire.lua
	acquireSource string
	//go:embed renew.lua
	renewSource string
	//go:embed release.lua
	releaseSource string
	//go:embed inspect.lua
	inspectSource string
	//go:embed break.lua
	breakSource string
)

// script is a Lua script and the digest by which a server that has run it once
// knows it. Both are kept as values of type any, so that no call converts them.
type script struct{ source, digest any }

func newScript(source string) script {
	var digest string
	// A program held to FIPS 140-3 may not use SHA-1 for security; as the name
	// of a cached script it has nothing to do with that.
	fips140.WithoutEnforcement(func() {
		sum := sha1.Sum([]byte(source))
		digest = hex.EncodeToString(sum[:])
	})
	return script{source: source, digest: digest}
}

// call is one run of a script.
type call struct {
	ctx    context.Context
	client redis.UniversalClient
	script script
	words  [8]any // the command; the first two depend on the try
	length int
}

// run runs sc on the record of key and returns its integer. It returns as soon
// as ctx ends, with an error that matches ctx.Err(), and leaves the driver's
// call behind: that one ends by the client's own timeouts. go-redis needs this:
// it looks at a context between its tries only, so that a call whose context
// was cancelled while the server is silent comes back after its read timeout,
// 5 s later with the default options.
func (s *Store) run(ctx context.Context, sc script, key string, args ...any) (int64, error) {
	return await.Call(ctx, s.workers, s.call(ctx, sc, key, args).integer)
}

// runList is run for a script that returns a list.
func (s *Store) runList(ctx context.Context, sc script, key string, args ...any) ([]any, error) {
	return await.Call(ctx, s.workers, s.call(ctx, sc, key, args).list)
}

func (s *Store) call(ctx context.Context, sc script, key string, args []any) *call {
	c := &call{ctx: ctx, client: s.client, script: sc}
	c.words[2], c.words[3] = "1", s.prefix+key
	c.length = 4 + copy(c.words[4:], args)
	return c
}

func (c *call) integer() (int64, error) {
	return try(c, func(words []any) (int64, error) {
		cmd := redis.NewIntCmd(c.ctx, words...)
		_ = c.client.Process(c.ctx, cmd)
		return cmd.Result()
	})
}

func (c *call) list() ([]any, error) {
	return try(c, func(words []any) ([]any, error) {
		cmd := redis.NewSliceCmd(c.ctx, words...)
		_ = c.client.Process(c.ctx, cmd)
		return cmd.Result()
	})
}

// try runs the script of c by its digest, or else by its source. send reads the
// result from the command, not the error from Process: a client that batches
// commands may return from Process before the reply is there.
func try[T any](c *call, send func(words []any) (T, error)) (T, error) {
	c.words[0], c.words[1] = "evalsha", c.script.digest
	reply, err := send(c.words[:c.length])
	if err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
		// The server was restarted, replaced or flushed. EVAL runs the script
		// and caches it again, in one round trip.
		c.words[0], c.words[1] = "eval", c.script.source
		reply, err = send(c.words[:c.length])
	}
	if err != nil {
		record, _ := c.words[3].(string)
		err = explain(c.ctx, record, err)
	}
	return reply, err
}

// explain returns err, wrapped, as the error of a call for record.
func explain(ctx context.Context, record string, err error) error {
	ended := ctx.Err()
	if deadline, ok := ctx.Deadline(); ok && ended == nil && !time.Now().Before(deadline) {
		// The client's timer for the deadline was faster than the context's.
		ended = context.DeadlineExceeded
	}
	switch {
	case ended != nil && !errors.Is(err, ended):
		return fmt.Errorf("redis: %w: %w", ended, err)
	case redis.HasErrorPrefix(err, "FOREIGN"), redis.HasErrorPrefix(err, "WRONGTYPE"):
		kind := "value"
		if words := strings.Fields(err.Error()); len(words) == 2 {
			kind = words[1]
		}
		return fmt.Errorf("redis: key %q holds a %s that is no lock record, it was left as it is: %w", record, kind, err)
	case redis.HasErrorPrefix(err, "LATE"):
		return fmt.Errorf("redis: key %q was granted, but the answer was lost, and the lease is over since: %w", record, err)
	case strings.Contains(err.Error(), "unexpected symbol near '#'"):
		return fmt.Errorf("redis: this server is too old, Redis 7.0 or Valkey 7.2 is the oldest that will do: %w", err)
	}
	return fmt.Errorf("redis: %w", err)
}
