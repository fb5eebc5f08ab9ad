package mongostore_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
)

// recorder notes the commands that a client sends.
type recorder struct {
	mu       sync.Mutex
	commands []bson.Raw
}

func (r *recorder) option() *options.ClientOptions {
	return options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.commands = append(r.commands, bytes.Clone(e.Command))
	}})
}

// take returns what was sent since the last call.
func (r *recorder) take() []bson.Raw {
	r.mu.Lock()
	defer r.mu.Unlock()
	commands := r.commands
	r.commands = nil
	return commands
}

// names returns the names of what was sent since the last call.
func (r *recorder) names() string {
	var names []string
	for _, c := range r.take() {
		names = append(names, commandName(c))
	}
	return strings.Join(names, " ")
}

func commandName(c bson.Raw) string {
	elements, err := c.Elements()
	if err != nil || len(elements) == 0 {
		return ""
	}
	return elements[0].Key()
}

func TestNewRefusesBadArguments(t *testing.T) {
	coll := connect(t, "mongodb://127.0.0.1:1").Database("d").Collection("c")
	for name, c := range map[string]struct {
		coll *mongo.Collection
		o    mongostore.Options
	}{
		"no collection":      {nil, mongostore.Options{}},
		"negative retention": {coll, mongostore.Options{Retention: -1}},
		"NUL in prefix":      {coll, mongostore.Options{Prefix: "a\x00"}},
		"prefix not UTF-8":   {coll, mongostore.Options{Prefix: "\xff"}},
		"long prefix":        {coll, mongostore.Options{Prefix: strings.Repeat("x", core.MaxKeyLen+1)}},
	} {
		if s, err := mongostore.New(c.coll, c.o); s != nil || !errors.Is(err, core.ErrInvalid) {
			t.Errorf("%s: New returned %v, %v, want an error that matches ErrInvalid", name, s, err)
		}
	}
	if err := mongostore.EnsureIndexes(t.Context(), nil); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("EnsureIndexes(nil) returned %v, want an error that matches ErrInvalid", err)
	}
}

// The layout is API: processes of different versions exclude each other by it.
func TestLayout(t *testing.T) {
	coll := newCollection(t)
	s := newStore(t, coll, mongostore.Options{Prefix: "app/"})
	before := time.Now().Add(-time.Second)
	g := mustAcquire(t, s, "k", "me", 30*time.Second)
	doc := document(t, coll, "app/k")
	if len(doc) != 6 || doc["owner"] != "me" || doc["token"] != g.Token {
		t.Errorf("document %v, want _id, owner, call, token %d, until, purge", doc, g.Token)
	}
	if _, ok := doc["call"].(int64); !ok {
		t.Errorf("call is %T, want int64", doc["call"])
	}
	until, purge := date(t, doc, "until"), date(t, doc, "purge")
	if got := until.Sub(time.UnixMicro(g.Token)); got != 30*time.Second+time.Millisecond {
		t.Errorf("until is %v after the token, want ttl and a millisecond", got)
	}
	if got := time.UnixMicro(g.Token); got.Before(before) || got.After(time.Now().Add(time.Second)) {
		t.Errorf("token is the time %v, want now", got)
	}
	if d := purge.Sub(until); d < time.Hour || d > time.Hour+8*time.Minute {
		t.Errorf("purge is %v after until, want an hour and up to an eighth of it", d)
	}
	mustRelease(t, s, "k", "me")
	if doc := document(t, coll, "app/k"); len(doc) != 6 || doc["owner"] != "" || doc["token"] != g.Token {
		t.Errorf("released document %v, want owner \"\" and token %d", doc, g.Token)
	}
}

func date(t testing.TB, doc bson.M, field string) time.Time {
	t.Helper()
	d, ok := doc[field].(bson.DateTime)
	if !ok {
		t.Fatalf("%s is %T, want a date", field, doc[field])
	}
	return d.Time()
}

// What begins with $ is an expression to the server, unless it is told otherwise.
func TestTextIsNotAnExpression(t *testing.T) {
	coll := newCollection(t)
	for _, text := range []string{"$$NOW", "$owner", "$$ROOT", "$", "$$owner", "a.b", "$literal", "{\"$ne\":1}", "$where"} {
		s := newStore(t, coll, mongostore.Options{Prefix: text})
		mustAcquire(t, s, text, text, time.Minute)
		if renewed, err := s.Renew(t.Context(), text, "$owner "+text, time.Minute); renewed || err != nil {
			t.Errorf("%q: Renew by a stranger returned %v, %v, want false, nil", text, renewed, err)
		}
		mustRelease(t, s, text, "$owner "+text)
		mustBeHeld(t, s, text)
		if renewed, err := s.Renew(t.Context(), text, text, time.Minute); !renewed || err != nil {
			t.Errorf("%q: Renew by its owner returned %v, %v, want true, nil", text, renewed, err)
		}
		mustRelease(t, s, text, text)
		mustAcquire(t, s, text, "x", time.Minute)
	}
}

// 64 upserts of a fresh key: the losers' E11000 is no error, it means held.
func TestUpsertRaceHasOneWinner(t *testing.T) {
	coll := newCollection(t)
	stores := make([]*mongostore.Store, 4)
	var duplicates atomic.Int64
	for i := range stores {
		monitor := options.Client().SetMonitor(&event.CommandMonitor{Failed: func(_ context.Context, e *event.CommandFailedEvent) {
			if mongo.IsDuplicateKeyError(e.Failure) {
				duplicates.Add(1)
			}
		}})
		stores[i] = newStore(t, through(t, coll, testserver.Mongo(t).URL, monitor), mongostore.Options{})
	}
	const contenders, rounds = 64, 60
	for range rounds {
		key := rand.Text()
		var winners atomic.Int64
		start := make(chan struct{})
		var wg sync.WaitGroup
		for i := range contenders {
			wg.Go(func() {
				<-start
				g, err := stores[i%len(stores)].Acquire(t.Context(), key, rand.Text(), time.Minute)
				if err != nil {
					t.Errorf("Acquire: %v", err)
				}
				if g.Acquired {
					winners.Add(1)
				}
			})
		}
		close(start)
		wg.Wait()
		if n := winners.Load(); n != 1 {
			t.Fatalf("%d winners among %d contenders, want 1", n, contenders)
		}
	}
	t.Logf("%d duplicate keys in %d tries", duplicates.Load(), rounds*contenders)
}

var duplicateKey = bson.D{
	{Key: "ok", Value: 0.0}, {Key: "code", Value: int32(11000)}, {Key: "codeName", Value: "DuplicateKey"},
	{Key: "errmsg", Value: "E11000 duplicate key error collection: d.c index: _id_ dup key: { _id: \"k\" }"},
	{Key: "keyPattern", Value: bson.D{{Key: "_id", Value: 1}}}, {Key: "keyValue", Value: bson.D{{Key: "_id", Value: "k"}}},
}

var noDocument = bson.D{
	{Key: "ok", Value: 1.0}, {Key: "value", Value: nil},
	{Key: "lastErrorObject", Value: bson.D{{Key: "n", Value: int32(0)}, {Key: "updatedExisting", Value: false}}},
}

func TestLostUpsertIsTriedAgain(t *testing.T) {
	for name, answer := range map[string]bson.D{"duplicate key": duplicateKey, "no document": noDocument} {
		t.Run(name, func(t *testing.T) {
			coll := newCollection(t)
			var left, sent atomic.Int64
			w := newWire(t, testserver.Mongo(t), func(command string, _ bson.Raw) trick {
				if command == "findAndModify" {
					sent.Add(1)
					if left.Add(-1) >= 0 {
						return trick{instead: answer}
					}
				}
				return trick{}
			})
			s := newStore(t, through(t, coll, w.url), mongostore.Options{})
			left.Store(3)
			mustAcquire(t, s, "k", "me", time.Minute)
			if n := sent.Load(); n != 4 {
				t.Errorf("%d findAndModify, want 4", n)
			}
			// One that goes on for ever is no race: a foreign unique index, say.
			sent.Store(0)
			left.Store(1 << 30)
			g, err := s.Acquire(t.Context(), "other", "me", time.Minute)
			if err == nil || g.Acquired {
				t.Errorf("Acquire returned %+v, %v, want an error", g, err)
			}
			if n := sent.Load(); n != 10 {
				t.Errorf("%d findAndModify, want 10", n)
			}
		})
	}
}

// A client may have any defaults.
func TestClientDefaultsAreOverruled(t *testing.T) {
	var r recorder
	coll := newCollection(t)
	weak := through(t, coll, testserver.Mongo(t).URL, r.option(), options.Client().
		SetWriteConcern(writeconcern.Unacknowledged()).
		SetReadConcern(readconcern.Linearizable()).
		SetReadPreference(readpref.SecondaryPreferred()).
		SetBSONOptions(&options.BSONOptions{UseJSONStructTags: true, ObjectIDAsHexString: true, IntMinSize: true, OmitZeroStruct: true}).
		SetRegistry(shoutingRegistry()))
	s := newStore(t, weak, mongostore.Options{})
	if err := mongostore.EnsureIndexes(t.Context(), weak); err != nil {
		t.Fatal(err)
	}
	mustAcquire(t, s, "k", "me", time.Minute)
	mustBeHeld(t, s, "k")
	mustBeHeld(t, newStore(t, coll, mongostore.Options{}), "k")
	if ok, err := s.Renew(t.Context(), "k", "me", time.Minute); !ok || err != nil {
		t.Errorf("Renew returned %v, %v, want true, nil", ok, err)
	}
	mustRelease(t, s, "k", "me")
	seen := map[string]int{}
	for _, c := range r.take() {
		name := commandName(c)
		seen[name]++
		switch name {
		case "findAndModify", "update":
			wc := c.Lookup("writeConcern")
			w, _ := wc.Document().Lookup("w").StringValueOK()
			j, _ := wc.Document().Lookup("j").BooleanOK()
			if w != "majority" || !j {
				t.Errorf("%s with write concern %v, want majority and journaled", name, wc)
			}
		case "aggregate":
			if level, _ := c.Lookup("readConcern", "level").StringValueOK(); level != "local" {
				t.Errorf("aggregate with read concern %q, want local", level)
			}
		}
		if mode, _ := c.Lookup("$readPreference", "mode").StringValueOK(); strings.HasPrefix(mode, "secondary") {
			t.Errorf("%s with read preference %s", name, mode)
		}
	}
	if seen["findAndModify"] == 0 || seen["update"] == 0 || seen["aggregate"] == 0 {
		t.Errorf("sent %v, want findAndModify, update and aggregate among them", seen)
	}
}

// shoutingRegistry writes every string in capitals.
func shoutingRegistry() *bson.Registry {
	registry := bson.NewRegistry()
	registry.RegisterTypeEncoder(reflect.TypeFor[string](), bson.ValueEncoderFunc(
		func(_ bson.EncodeContext, w bson.ValueWriter, v reflect.Value) error {
			return w.WriteString(strings.ToUpper(v.String()))
		}))
	return registry
}

// callAll calls every method as owner "me".
func callAll(t *testing.T, s core.LockStore, key string) map[string]error {
	t.Helper()
	_, acquire := s.Acquire(t.Context(), key, "me", time.Minute)
	_, renew := s.Renew(t.Context(), key, "me", time.Minute)
	return map[string]error{"Acquire": acquire, "Renew": renew, "Release": s.Release(t.Context(), key, "me")}
}

// The write was done, but not replicated in time: it may yet be rolled back.
func TestWriteConcernErrorIsUnknownOutcome(t *testing.T) {
	coll := newCollection(t)
	var failing atomic.Bool
	w := newWire(t, testserver.Mongo(t), func(command string, _ bson.Raw) trick {
		if !failing.Load() || command != "findAndModify" && command != "update" {
			return trick{}
		}
		return trick{answer: func(reply bson.D) bson.D {
			return append(reply, bson.E{Key: "writeConcernError", Value: bson.D{
				{Key: "code", Value: int32(64)}, {Key: "codeName", Value: "WriteConcernFailed"},
				{Key: "errmsg", Value: "waiting for replication timed out"},
				{Key: "errInfo", Value: bson.D{{Key: "wtimeout", Value: true}}},
			}})
		}}
	})
	s := newStore(t, through(t, coll, w.url), mongostore.Options{})
	mustAcquire(t, s, "k", "me", time.Minute)
	mustRelease(t, s, "k", "me")
	failing.Store(true)
	for call, err := range callAll(t, s, "k") {
		if err == nil || !strings.Contains(err.Error(), "waiting for replication timed out") {
			t.Errorf("%s returned the error %v, want the write concern's", call, err)
		}
		if e := mongo.ServerError(nil); !errors.As(err, &e) || !e.HasErrorCode(64) {
			t.Errorf("%s: errors.As finds no mongo.ServerError with code 64 in %v", call, err)
		}
	}
}

// Nothing that a server answers instead of doing what it was told is "not
// yours", "held" or "released".
func TestServerErrorsAreErrors(t *testing.T) {
	coll := newCollection(t)
	for name, code := range map[string]int32{
		"NotWritablePrimary": 10107, "PrimarySteppedDown": 189, "InterruptedAtShutdown": 11600,
		"Unauthorized": 13, "OutOfDiskSpace": 14031, "WriteConflict": 112, "MaxTimeMSExpired": 50, "ExceededMemoryLimit": 146,
	} {
		for call, do := range map[string]func(core.LockStore) error{
			"Acquire": func(s core.LockStore) error { _, err := s.Acquire(t.Context(), "k", "me", time.Minute); return err },
			"Renew":   func(s core.LockStore) error { _, err := s.Renew(t.Context(), "k", "me", time.Minute); return err },
			"Release": func(s core.LockStore) error { return s.Release(t.Context(), "k", "me") },
		} {
			w := newWire(t, testserver.Mongo(t), func(command string, _ bson.Raw) trick {
				if command != "findAndModify" && command != "update" {
					return trick{}
				}
				return trick{instead: bson.D{{Key: "ok", Value: 0.0}, {Key: "code", Value: code}, {Key: "codeName", Value: name}, {Key: "errmsg", Value: "what " + name + " means"}}}
			})
			// A client of its own: after some of these it takes time to trust
			// the server again.
			err := do(newStore(t, through(t, coll, w.url), mongostore.Options{}))
			if err == nil || !strings.Contains(err.Error(), "what "+name+" means") {
				t.Errorf("%s: %s returned the error %v, want the server's", name, call, err)
			}
		}
	}
}

// Errors of the server may quote the command, and the owner is a secret.
func TestErrorsDoNotContainOwner(t *testing.T) {
	coll := newCollection(t)
	owner := "secret-" + rand.Text()
	w := newWire(t, testserver.Mongo(t), func(command string, _ bson.Raw) trick {
		if command != "findAndModify" && command != "update" {
			return trick{}
		}
		return trick{instead: bson.D{{Key: "ok", Value: 0.0}, {Key: "code", Value: int32(9)}, {Key: "codeName", Value: "FailedToParse"}, {Key: "errmsg", Value: "cannot parse {owner: \"" + owner + "\"}"}}}
	})
	s := newStore(t, through(t, coll, w.url), mongostore.Options{})
	_, acquire := s.Acquire(t.Context(), "k", owner, time.Minute)
	_, renew := s.Renew(t.Context(), "k", owner, time.Minute)
	for call, err := range map[string]error{"Acquire": acquire, "Renew": renew, "Release": s.Release(t.Context(), "k", owner)} {
		if err == nil || strings.Contains(err.Error(), owner) || !strings.Contains(err.Error(), "cannot parse") {
			t.Errorf("%s returned the error %v, want the server's without the owner", call, err)
		}
		if e, ok := errors.AsType[mongo.CommandError](err); ok && e.Code != 9 {
			t.Errorf("%s: code %d, want 9", call, e.Code)
		}
	}
}

// A document that this package did not write is an error of every call, and is
// left as it is.
func TestForeignDocumentsAreErrors(t *testing.T) {
	coll := newCollection(t)
	now, token := bson.NewDateTimeFromTime(time.Now()), time.Now().UnixMicro()
	past := bson.NewDateTimeFromTime(time.Now().Add(-time.Hour))
	for name, fields := range map[string]bson.M{
		"another application's":  {"state": "done"},
		"owner missing":          {"token": token, "until": past},
		"owner a number":         {"owner": 1, "token": token, "until": past},
		"owner null":             {"owner": nil, "token": token, "until": past},
		"owner a list":           {"owner": bson.A{"me", ""}, "token": token, "until": past},
		"owner a document":       {"owner": bson.M{"$literal": "me"}, "token": token, "until": past},
		"token missing":          {"owner": "me", "until": now},
		"token a double":         {"owner": "me", "token": 1e15, "until": now},
		"token an int32":         {"owner": "me", "token": int32(7), "until": now},
		"token 0":                {"owner": "me", "token": int64(0), "until": now},
		"token negative":         {"owner": "me", "token": int64(-5), "until": now},
		"token 2^53-1":           {"owner": "", "token": int64(1<<53 - 1), "until": past},
		"token the largest":      {"owner": "", "token": int64(1<<63 - 1), "until": past},
		"token a list":           {"owner": "me", "token": bson.A{token}, "until": now},
		"until missing":          {"owner": "me", "token": token},
		"until a string":         {"owner": "me", "token": token, "until": "2000-01-01"},
		"until a timestamp":      {"owner": "me", "token": token, "until": bson.Timestamp{T: 1}},
		"until a number":         {"owner": "", "token": token, "until": int64(0)},
		"until a list":           {"owner": "me", "token": token, "until": bson.A{past}},
		"everything a list":      {"owner": bson.A{}, "token": bson.A{}, "until": bson.A{}},
		"names with dots":        {"a.b": 1, "$c": 2},
		"released, token a NaN":  {"owner": "", "token": "NaN", "until": past},
		"expired, until missing": {"owner": "gone", "token": token, "until": nil},
	} {
		t.Run(name, func(t *testing.T) {
			key := rand.Text()
			doc := bson.M{"_id": key}
			maps.Copy(doc, fields)
			if _, err := coll.InsertOne(t.Context(), doc); err != nil {
				t.Fatal(err)
			}
			want := document(t, coll, key)
			// A new store for each, so that every first try is a findAndModify,
			// and one that has learned that the key may be held.
			for range 2 {
				s := newStore(t, coll, mongostore.Options{})
				for range 2 {
					for call, err := range callAll(t, s, key) {
						if err == nil || !strings.Contains(err.Error(), "is not a lease") || errors.Is(err, core.ErrInvalid) {
							t.Errorf("%s returned the error %v, want one that says what is there", call, err)
						}
					}
				}
			}
			if got := document(t, coll, key); !reflect.DeepEqual(got, want) {
				t.Errorf("document became %v, want %v untouched", got, want)
			}
		})
	}
}

// A document with nothing but the _id is what an upsert begins with, and there is
// nothing in it to lose.
func TestBareDocumentIsAnEmptyPlace(t *testing.T) {
	coll := newCollection(t)
	if _, err := coll.InsertOne(t.Context(), bson.M{"_id": "k"}); err != nil {
		t.Fatal(err)
	}
	s := newStore(t, coll, mongostore.Options{})
	if ok, err := s.Renew(t.Context(), "k", "me", time.Minute); ok || err == nil {
		t.Errorf("Renew returned %v, %v, want an error", ok, err)
	}
	mustAcquire(t, s, "k", "me", time.Minute)
	mustBeHeld(t, s, "k")
}

// A later version may add fields; they are kept by those that do not know them.
func TestUnknownFieldsAreNoDamage(t *testing.T) {
	coll := newCollection(t)
	s := newStore(t, coll, mongostore.Options{})
	g := mustAcquire(t, s, "k", "me", time.Minute)
	if _, err := coll.UpdateByID(t.Context(), "k", bson.M{"$set": bson.M{"note": "later"}}); err != nil {
		t.Fatal(err)
	}
	if ok, err := s.Renew(t.Context(), "k", "me", time.Minute); !ok || err != nil {
		t.Fatalf("Renew returned %v, %v, want true, nil", ok, err)
	}
	mustRelease(t, s, "k", "me")
	if doc := document(t, coll, "k"); doc["note"] != "later" {
		t.Errorf("document %v, want the unknown field kept", doc)
	}
	if next := mustAcquire(t, s, "k", "you", time.Minute); next.Token <= g.Token {
		t.Errorf("token %d after %d, want a greater one", next.Token, g.Token)
	}
}

// In the caller's transaction a lease would be seen by nobody until the commit.
func TestSessionOfTheCallerIsIgnored(t *testing.T) {
	coll := newCollection(t)
	s, other := newStore(t, coll, mongostore.Options{}), newStore(t, coll, mongostore.Options{})
	session, err := coll.Database().Client().StartSession()
	if err != nil {
		t.Fatal(err)
	}
	defer session.EndSession(context.WithoutCancel(t.Context()))
	abort := errors.New("abort")
	_, err = session.WithTransaction(t.Context(), func(ctx context.Context) (any, error) {
		if _, err := coll.InsertOne(ctx, bson.M{"_id": "in the transaction"}); err != nil {
			t.Fatal(err)
		}
		if g, err := s.Acquire(ctx, "kept", "me", time.Minute); err != nil || !g.Acquired {
			t.Fatalf("Acquire in a transaction: got %+v, %v, want acquired", g, err)
		}
		mustBeHeld(t, other, "kept")
		if g, err := s.Acquire(ctx, "released", "me", time.Minute); err != nil || !g.Acquired {
			t.Fatalf("Acquire in a transaction: got %+v, %v, want acquired", g, err)
		}
		if ok, err := s.Renew(ctx, "released", "me", time.Minute); err != nil || !ok {
			t.Fatalf("Renew in a transaction: got %v, %v, want true", ok, err)
		}
		if err := s.Release(ctx, "released", "me"); err != nil {
			t.Fatalf("Release in a transaction: %v", err)
		}
		return nil, abort
	})
	if !errors.Is(err, abort) {
		t.Fatalf("WithTransaction returned %v, want %v", err, abort)
	}
	if document(t, coll, "in the transaction") != nil {
		t.Fatal("the transaction was not aborted")
	}
	mustBeHeld(t, other, "kept")
	mustAcquire(t, other, "released", "you", time.Minute)
}

// The context's other values are for those who trace commands.
func TestContextValuesReachTheDriver(t *testing.T) {
	type key struct{}
	var seen atomic.Int64
	monitor := options.Client().SetMonitor(&event.CommandMonitor{Started: func(ctx context.Context, e *event.CommandStartedEvent) {
		if ctx.Value(key{}) == "trace" && e.CommandName == "findAndModify" {
			seen.Add(1)
		}
	}})
	s := newStore(t, newCollection(t, monitor), mongostore.Options{})
	if g, err := s.Acquire(context.WithValue(t.Context(), key{}, "trace"), "k", "me", time.Minute); err != nil || !g.Acquired {
		t.Fatalf("Acquire: got %+v, %v, want acquired", g, err)
	}
	if seen.Load() != 1 {
		t.Errorf("%d findAndModify carried the value, want 1", seen.Load())
	}
}

// A monitor that panics is for the store's caller to recover: on a goroutine of the
// store's it would end the process.
func TestMonitorThatPanics(t *testing.T) {
	wrong := errors.New("this monitor panics")
	monitor := options.Client().SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if e.CommandName == "findAndModify" {
			panic(wrong)
		}
	}})
	s := newStore(t, newCollection(t, monitor), mongostore.Options{})
	defer func() {
		if err, ok := recover().(error); !ok || !errors.Is(err, wrong) {
			t.Errorf("recovered %v, want %v", err, wrong)
		}
	}()
	g, err := s.Acquire(t.Context(), "k", "me", time.Minute)
	t.Errorf("got %+v, %v, want a panic", g, err)
}

// One round trip each, when nobody contends; on a key seen held only reads, until
// a release is signalled or the lease has run out.
func TestRoundTrips(t *testing.T) {
	var r recorder
	coll := newCollection(t)
	s := newStore(t, through(t, coll, testserver.Mongo(t).URL, r.option()), mongostore.Options{})
	other := newStore(t, coll, mongostore.Options{})
	expect := func(what, want string) {
		t.Helper()
		if got := r.names(); got != want {
			t.Errorf("%s sent %q, want %q", what, got, want)
		}
	}
	mustAcquire(t, s, "k", "me", time.Minute)
	expect("the first Acquire of a store", "listIndexes findAndModify")
	if ok, err := s.Renew(t.Context(), "k", "me", time.Minute); !ok || err != nil {
		t.Fatal(ok, err)
	}
	expect("Renew", "update")
	mustRelease(t, s, "k", "me")
	expect("Release", "update")
	mustAcquire(t, s, "k", "me", time.Minute)
	expect("Acquire of a used key", "findAndModify")
	mustRelease(t, s, "k", "me")
	expect("Release", "update")

	mustAcquire(t, other, "k", "you", time.Minute)
	mustBeHeld(t, s, "k")
	expect("the first try on a held key", "findAndModify aggregate")
	for range 3 {
		mustBeHeld(t, s, "k")
		expect("a further try", "aggregate")
	}
	mustRelease(t, s, "k", "me") // not ours
	expect("Release by a stranger", "update aggregate")
	mustRelease(t, other, "k", "you")
	mustAcquire(t, s, "k", "me", time.Minute)
	expect("Acquire when the key has become free", "aggregate findAndModify")

	mustBeHeld(t, s, "k")
	expect("a try on a key that another owner of this store holds", "aggregate")
	mustRelease(t, s, "k", "me")
	mustAcquire(t, s, "k", "you", time.Minute)
	expect("Release, and Acquire by another owner of this store", "update findAndModify")

	mustAcquire(t, other, "short", "you", 2*time.Second)
	g := mustBeHeld(t, s, "short")
	expect("the first try on a held key", "findAndModify aggregate")
	time.Sleep(g.Left + time.Millisecond)
	mustAcquire(t, s, "short", "me", time.Minute)
	expect("Acquire when the lease has run out", "findAndModify")
	mustRelease(t, s, "never locked", "me")
	expect("Release of a key never locked", "update")
}

// How long the lease still lives is a hint: held stays an answer without it.
func TestHeldWithoutHint(t *testing.T) {
	coll := newCollection(t)
	w := newWire(t, testserver.Mongo(t), func(command string, _ bson.Raw) trick {
		if command != "aggregate" {
			return trick{}
		}
		return trick{instead: bson.D{{Key: "ok", Value: 0.0}, {Key: "code", Value: int32(8000)}, {Key: "codeName", Value: "AtlasError"}, {Key: "errmsg", Value: "no"}}}
	})
	s := newStore(t, through(t, coll, w.url), mongostore.Options{})
	mustAcquire(t, newStore(t, coll, mongostore.Options{}), "k", "you", time.Minute)
	if g, err := s.Acquire(t.Context(), "k", "me", time.Minute); err != nil || g != (core.Grant{}) {
		t.Errorf("Acquire returned %+v, %v, want held for an unknown time", g, err)
	}
}

// A refused update is no write: no entry in the oplog, and the document stays as
// it is, byte for byte.
func TestHeldTryWritesNothing(t *testing.T) {
	coll := newCollection(t)
	holder := newStore(t, coll, mongostore.Options{})
	mustAcquire(t, holder, "k", "me", time.Minute)
	written := writes(coll)
	if written(t) == 0 {
		t.Skip("the server shows no oplog")
	}
	before, doc := written(t), document(t, coll, "k")
	for range 50 {
		// A new store each time: it does not know yet that the key is held.
		s := newStore(t, coll, mongostore.Options{})
		mustBeHeld(t, s, "k")
		mustBeHeld(t, s, "k")
		if ok, err := s.Renew(t.Context(), "k", "stranger", time.Minute); ok || err != nil {
			t.Fatalf("Renew by a stranger returned %v, %v, want false, nil", ok, err)
		}
		mustRelease(t, s, "k", "stranger")
		mustRelease(t, s, "never locked", "stranger")
	}
	if n := written(t) - before; n != 0 {
		t.Errorf("%d writes in the oplog, want none", n)
	}
	if got := document(t, coll, "k"); !reflect.DeepEqual(got, doc) {
		t.Errorf("document became %v, want %v", got, doc)
	}
	// The counter counts.
	mustRelease(t, holder, "k", "me")
	if n := written(t) - before; n != 1 {
		t.Errorf("%d writes in the oplog after a release, want 1", n)
	}
}

// The clock was set back by hours: tokens go on from the last, and the document
// is kept until the clock has passed them.
func TestClockSetBack(t *testing.T) {
	coll := newCollection(t)
	s := newStore(t, coll, mongostore.Options{Retention: time.Hour})
	g := mustAcquire(t, s, "k", "me", time.Minute)
	mustRelease(t, s, "k", "me")
	ahead := g.Token + 3*time.Hour.Microseconds() // past what a lease is kept for
	if _, err := coll.UpdateByID(t.Context(), "k", bson.M{"$set": bson.M{"token": ahead}}); err != nil {
		t.Fatal(err)
	}
	check := func(after string, token int64) {
		t.Helper()
		if purge := date(t, document(t, coll, "k"), "purge"); !purge.After(time.UnixMicro(token)) {
			t.Errorf("after %s: purge %v is not past the token's time %v", after, purge, time.UnixMicro(token))
		}
	}
	next := mustAcquire(t, s, "k", "you", time.Minute)
	if next.Token != ahead+1 {
		t.Errorf("token %d after %d, want the next", next.Token, ahead)
	}
	check("Acquire", next.Token)
	if ok, err := s.Renew(t.Context(), "k", "you", time.Minute); !ok || err != nil {
		t.Fatal(ok, err)
	}
	check("Renew", next.Token)
	mustRelease(t, s, "k", "you")
	check("Release", next.Token)
}

// A key that is locked again and again does not change its entry in the TTL
// index with every call.
func TestPurgeDateIsCoarse(t *testing.T) {
	coll := newCollection(t)
	s := newStore(t, coll, mongostore.Options{})
	dates := map[bson.DateTime]bool{}
	for range 20 {
		mustAcquire(t, s, "k", "me", time.Second)
		mustRelease(t, s, "k", "me")
		dates[document(t, coll, "k")["purge"].(bson.DateTime)] = true
		time.Sleep(5 * time.Millisecond)
	}
	if len(dates) > 2 {
		t.Errorf("%d purge dates in 20 acquisitions, want 1, or 2 at the turn of an eighth of an hour", len(dates))
	}
}

// The driver sends a write again when its answer was lost. The server knows it
// by its number.
func TestAnswerLostAndSentAgain(t *testing.T) {
	coll := newCollection(t)
	var lose atomic.Int64
	w := newWire(t, testserver.Mongo(t), func(command string, _ bson.Raw) trick {
		if command == "findAndModify" || command == "update" {
			return trick{lose: lose.Add(-1) >= 0}
		}
		return trick{}
	})
	s := newStore(t, through(t, coll, w.url), mongostore.Options{})
	for i := range 3 {
		key := fmt.Sprint("k", i)
		if i == 2 { // one that exists
			mustAcquire(t, s, key, "x", time.Minute)
			mustRelease(t, s, key, "x")
		}
		lose.Store(1)
		g := mustAcquire(t, s, key, "me", time.Minute)
		if doc := document(t, coll, key); doc["token"] != g.Token || doc["owner"] != "me" {
			t.Errorf("token %d, document %v", g.Token, doc)
		}
		lose.Store(1)
		if ok, err := s.Renew(t.Context(), key, "me", time.Minute); !ok || err != nil {
			t.Errorf("Renew returned %v, %v, want true, nil", ok, err)
		}
		lose.Store(1)
		mustRelease(t, s, key, "me")
	}
}

// Without retryable writes a lost answer is an unknown outcome, and a Release by
// the owner undoes it.
func TestAnswerLostWithoutRetryableWrites(t *testing.T) {
	coll := newCollection(t)
	var lose atomic.Int64
	w := newWire(t, testserver.Mongo(t), func(command string, _ bson.Raw) trick {
		return trick{lose: command == "findAndModify" && lose.Add(-1) >= 0}
	})
	s := newStore(t, through(t, coll, w.url, options.Client().SetRetryWrites(false)), mongostore.Options{})
	other := newStore(t, coll, mongostore.Options{})
	mustRelease(t, s, "k", "me")
	lose.Store(1)
	if g, err := s.Acquire(t.Context(), "k", "me", time.Minute); err == nil {
		t.Fatalf("Acquire returned %+v and no error, want one", g)
	}
	mustBeHeld(t, other, "k")
	mustRelease(t, s, "k", "me")
	mustAcquire(t, other, "k", "you", time.Minute)
}

// A server that does not know a second delivery executes it. The nonce tells.
func TestSecondDeliveryWithoutRetryableWrites(t *testing.T) {
	coll := newCollection(t)
	w := newWire(t, testserver.Mongo(t), deliverTwice)
	s := newStore(t, through(t, coll, w.url, options.Client().SetRetryWrites(false)), mongostore.Options{})
	for range 20 {
		g := mustAcquire(t, s, "k", "me", time.Minute)
		if doc := document(t, coll, "k"); doc["token"] != g.Token {
			t.Errorf("token %d, document %v", g.Token, doc)
		}
		if again, err := s.Acquire(t.Context(), "k", "me", time.Minute); err != nil || again.Acquired {
			t.Errorf("another call of the same owner: got %+v, %v, want held", again, err)
		}
		if ok, err := s.Renew(t.Context(), "k", "me", time.Minute); !ok || err != nil {
			t.Errorf("Renew returned %v, %v, want true, nil", ok, err)
		}
		mustRelease(t, s, "k", "me")
	}
}

// Two renewals in one millisecond leave the same end of the lease. Both are yes.
func TestRenewTwiceInAMillisecond(t *testing.T) {
	s := newStore(t, newCollection(t), mongostore.Options{})
	mustAcquire(t, s, "k", "me", time.Minute)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 25 {
				if ok, err := s.Renew(t.Context(), "k", "me", time.Minute); !ok || err != nil {
					t.Errorf("Renew returned %v, %v, want true, nil", ok, err)
				}
			}
		})
	}
	wg.Wait()
}

// The server sees a deadline too (maxTimeMS), and may see it first.
func TestServerSideTimeoutMatchesDeadline(t *testing.T) {
	coll := newCollection(t)
	var failing atomic.Bool
	w := newWire(t, testserver.Mongo(t), func(command string, _ bson.Raw) trick {
		if !failing.Load() || command != "findAndModify" && command != "update" {
			return trick{}
		}
		return trick{instead: bson.D{{Key: "ok", Value: 0.0}, {Key: "code", Value: int32(50)}, {Key: "codeName", Value: "MaxTimeMSExpired"}, {Key: "errmsg", Value: "operation exceeded time limit"}}}
	})
	s := newStore(t, through(t, coll, w.url), mongostore.Options{})
	mustAcquire(t, s, "k", "me", time.Minute)
	failing.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.Release(ctx, "k", "me"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Release returned %v, want an error that matches DeadlineExceeded", err)
	}
}

// The default client options, a server that has gone silent, and a call that is
// cancelled: the driver may take its time, the caller does not.
func TestContextEndsAgainstSilence(t *testing.T) {
	server := testserver.StartMongo(t)
	s := newStore(t, newCollectionAt(t, server.URL), mongostore.Options{})
	mustAcquire(t, s, "k", "me", time.Minute)
	server.Pause(t)
	defer server.Resume(t)
	calls := map[string]func(ctx context.Context) error{
		"Acquire":   func(ctx context.Context) error { _, err := s.Acquire(ctx, "j", "me", time.Minute); return err },
		"Renew":     func(ctx context.Context) error { _, err := s.Renew(ctx, "k", "me", time.Minute); return err },
		"Release":   func(ctx context.Context) error { return s.Release(ctx, "k", "me") },
		"Subscribe": func(ctx context.Context) error { _, _, err := s.Subscribe(ctx, "k"); return err },
	}
	for name, call := range calls {
		ctx, cancel := context.WithCancel(t.Context())
		var cancelled time.Time
		time.AfterFunc(100*time.Millisecond, func() { cancelled = time.Now(); cancel() })
		err := call(ctx)
		if late := time.Since(cancelled); late > 5*time.Second { // the driver's own timeouts are 30 s
			t.Errorf("%s returned %v after the cancel", name, late)
		}
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s returned %v, want an error that matches Canceled", name, err)
		}
	}
}

// Whatever was answered before a kill -9 is there after it.
func TestKillKeepsLeases(t *testing.T) {
	server := testserver.StartMongo(t)
	coll := newCollectionAt(t, server.URL)
	s := newStore(t, coll, mongostore.Options{})
	type lease struct{ key, owner string }
	for round := range 3 {
		var mu sync.Mutex
		tokens := map[lease]int64{}
		var wg sync.WaitGroup
		var killed atomic.Bool
		for i := range 16 {
			wg.Go(func() {
				for n := 0; !killed.Load(); n++ {
					l := lease{fmt.Sprintf("%d-%d-%d", round, i, n), rand.Text()}
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					g, err := s.Acquire(ctx, l.key, l.owner, time.Hour)
					cancel()
					if err != nil {
						continue
					}
					mu.Lock()
					tokens[l] = g.Token
					mu.Unlock()
				}
			})
		}
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			mu.Lock()
			n := len(tokens)
			mu.Unlock()
			if n > 200 { // there is something to lose
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d leases in a minute", n)
			}
		}
		server.Kill(t)
		killed.Store(true)
		wg.Wait()
		server.Start(t)
		lost := 0
		for l, token := range tokens {
			doc := document(t, coll, l.key)
			if doc["owner"] != l.owner || doc["token"] != token {
				lost++
				continue
			}
		}
		if lost > 0 {
			t.Errorf("%d of %d acknowledged leases were lost by kill -9", lost, len(tokens))
		}
		for l, token := range tokens {
			mustRelease(t, s, l.key, l.owner)
			if g := mustAcquire(t, s, l.key, l.owner, time.Minute); g.Token <= token {
				t.Errorf("token %d after %d, want a greater one", g.Token, token)
			}
			break
		}
		t.Logf("round %d: %d leases acknowledged before the kill, %d lost", round, len(tokens), lost)
	}
}

// The TTL monitor has no say in when a lease ends.
func TestExpiryNeedsNoTTLMonitor(t *testing.T) {
	server := testserver.StartMongo(t)
	coll := newCollectionAt(t, server.URL)
	err := coll.Database().Client().Database("admin").
		RunCommand(t.Context(), bson.D{{Key: "setParameter", Value: 1}, {Key: "ttlMonitorEnabled", Value: false}}).Err()
	if err != nil {
		t.Fatal(err)
	}
	s := newStore(t, coll, mongostore.Options{Retention: time.Millisecond})
	last := int64(0)
	for range 10 {
		g := mustAcquire(t, s, "k", rand.Text(), 30*time.Millisecond)
		if g.Token <= last {
			t.Errorf("token %d after %d, want a greater one", g.Token, last)
		}
		for {
			held, err := s.Acquire(t.Context(), "k", "next", 30*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			if held.Acquired {
				if held.Token <= g.Token {
					t.Errorf("token %d after %d, want a greater one", held.Token, g.Token)
				}
				mustRelease(t, s, "k", "next")
				last = held.Token
				break
			}
			if held.Left > 31*time.Millisecond {
				t.Fatalf("Left %v of a lease of 30 ms", held.Left)
			}
		}
	}
	if count(t, coll) != 1 {
		t.Errorf("%d documents, want 1", count(t, coll))
	}
}
