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
	lists  bool // the script returns a list, not an integer

	n    int64
	list []any
	err  error
}

// run runs sc on the record of key and returns its integer. It returns as soon
// as ctx ends, with an error that matches ctx.Err(), and leaves the driver's
// call behind: that one ends by the client's own timeouts.
func (s *Store) run(ctx context.Context, sc script, key string, args ...any) (int64, error) {
	c := &call{ctx: ctx, client: s.client, script: sc}
	if err := c.run(s.prefix+key, args); err != nil {
		return 0, err
	}
	return c.n, nil
}

// runList is run for a script that returns a list.
func (s *Store) runList(ctx context.Context, sc script, key string, args ...any) ([]any, error) {
	c := &call{ctx: ctx, client: s.client, script: sc, lists: true}
	if err := c.run(s.prefix+key, args); err != nil {
		return nil, err
	}
	return c.list, nil
}

// run returns the error of c. Its results may be read after a nil error only,
// because after another they may still be written.
func (c *call) run(record string, args []any) error {
	if err := c.ctx.Err(); err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	c.words[2], c.words[3] = "1", record
	c.length = 4 + copy(c.words[4:], args)
	c.err = errNoResult
	if !await(c.ctx, c.try) {
		return fmt.Errorf("redis: %w", c.ctx.Err())
	}
	if c.err != nil {
		return explain(c.ctx, record, c.err)
	}
	return nil
}

func (c *call) try() {
	c.send("evalsha", c.script.digest)
	if c.err != nil && redis.HasErrorPrefix(c.err, "NOSCRIPT") {
		// The server was restarted, replaced or flushed. EVAL runs the script
		// and caches it again, in one round trip.
		c.send("eval", c.script.source)
	}
}

// send reads the result from the command, not the error from Process: a client
// that batches commands may return from Process before the reply is there.
func (c *call) send(command, script any) {
	c.words[0], c.words[1] = command, script
	words := c.words[:c.length]
	if c.lists {
		cmd := redis.NewSliceCmd(c.ctx, words...)
		_ = c.client.Process(c.ctx, cmd)
		c.list, c.err = cmd.Result()
		return
	}
	cmd := redis.NewIntCmd(c.ctx, words...)
	_ = c.client.Process(c.ctx, cmd)
	c.n, c.err = cmd.Result()
}

var errNoResult = errors.New("the client's call ended without a result")

// await calls fn and returns true when it is done, or false as soon as ctx ends:
// fn goes on then, on a goroutine of its own.
//
// go-redis needs this: it looks at a context between its tries only, so that a
// call whose context was cancelled while the server is silent comes back after
// its read timeout, 5 s later with the default options.
func await(ctx context.Context, fn func()) bool {
	if ctx.Done() == nil {
		fn()
		return true
	}
	done := make(chan struct{})
	go func() {
		// Deferred: a hook of the client that ends its goroutine must not leave
		// the caller waiting.
		defer close(done)
		growStack(0)
		fn()
	}()
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	// An answer that is there already is better than an unknown outcome.
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// growStack makes the stack of a new goroutine as large as go-redis needs it, in
// one step and while there is nothing on it to copy: 2 of the 5 µs that the
// goroutine costs.
//
//go:noinline
func growStack(i int) byte {
	var frame [7 << 10]byte
	frame[i] = 1
	return frame[len(frame)-1-i]
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
	case strings.Contains(err.Error(), "unexpected symbol near '#'"):
		return fmt.Errorf("redis: this server is too old, Redis 7.0 or Valkey 7.2 is the oldest that will do: %w", err)
	}
	return fmt.Errorf("redis: %w", err)
}
