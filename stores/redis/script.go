package redisstore

import (
	"context"
	"crypto/fips140"
	"crypto/sha1" //nolint:gosec // the name that Redis gives a script, no secret
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
)

// script is a Lua script and the digest by which a server that has run it once
// knows it. Both are kept as values of type any, so that no call converts them.
type script struct{ source, digest any }

func newScript(source string) script {
	var digest string
	// A program held to FIPS 140-3 may not use SHA-1 for security; as the name
	// of a cached script it has nothing to do with that.
	fips140.WithoutEnforcement(func() {
		sum := sha1.Sum([]byte(source)) //nolint:gosec // see above
		digest = hex.EncodeToString(sum[:])
	})
	return script{source: source, digest: digest}
}

// call is one run of a script. It has a goroutine of its own and outlives the
// caller when ctx ends first: go-redis looks at a context between its tries
// only, so that a call whose context was cancelled while the server is silent
// comes back after its read timeout, 5 s with the default options.
type call struct {
	ctx    context.Context
	client redis.UniversalClient
	script script
	words  [8]any // the command; the first two depend on the try
	length int

	n    int64
	err  error
	done chan struct{} // closed when n and err are there
}

// run runs sc on the record of key and returns its integer. It returns as soon
// as ctx ends, with an error that matches ctx.Err(), and leaves the driver's
// call behind: that one ends by the client's own timeouts.
func (s *Store) run(ctx context.Context, sc script, key string, args ...any) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("redis: %w", err)
	}
	record := s.prefix + key
	c := &call{ctx: ctx, client: s.client, script: sc, err: errNoResult}
	c.words[2], c.words[3] = "1", record
	c.length = 4 + copy(c.words[4:], args)
	if ctx.Done() == nil {
		c.try()
	} else if !c.start() {
		return 0, fmt.Errorf("redis: %w", ctx.Err())
	}
	if c.err != nil {
		return 0, explain(ctx, record, c.err)
	}
	return c.n, nil
}

// start runs c and waits for its end or that of the context. It returns whether
// there is a result.
func (c *call) start() bool {
	c.done = make(chan struct{})
	go func() {
		// Deferred: a hook of the client that ends its goroutine must not leave
		// the caller waiting.
		defer close(c.done)
		c.try()
	}()
	select {
	case <-c.done:
		return true
	case <-c.ctx.Done():
	}
	// An answer that is there already is better than an unknown outcome.
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

func (c *call) try() {
	c.send("evalsha", c.script.digest)
	if c.err != nil && redis.HasErrorPrefix(c.err, "NOSCRIPT") {
		// The server was restarted, replaced or flushed. EVAL runs the script
		// and caches it again, in one round trip.
		c.send("eval", c.script.source)
	}
}

func (c *call) send(command, script any) {
	c.words[0], c.words[1] = command, script
	cmd := redis.NewIntCmd(c.ctx, c.words[:c.length]...)
	// The result, not the error of Process: a client that batches commands may
	// return from Process before the reply is there.
	_ = c.client.Process(c.ctx, cmd)
	c.n, c.err = cmd.Result()
}

var errNoResult = errors.New("the client's call ended without a result")

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
