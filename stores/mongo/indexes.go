package mongostore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/await"
)

// purgeIndex is the name of the TTL index.
const purgeIndex = "leasekit_purge"

// codeNamespaceNotFound is the server's error for a collection that does not
// exist. Source: src/mongo/base/error_codes.yml of the server.
const codeNamespaceNotFound = 26

// ErrNoIndex is in the errors of a store whose TTL index is not there: call
// [EnsureIndexes].
var ErrNoIndex = errors.New("the TTL index is missing")

// EnsureIndexes makes the TTL index by which the server deletes the documents of
// keys that nobody locks any more, and with it the collection if need be. It
// may be called at every start, by many processes at once. The index does not
// depend on [Options]: stores with different retentions may share a collection.
//
// Without the index [Store.Acquire] fails with [ErrNoIndex]. EnsureIndexes
// refuses a collection whose default collation is not the simple one: it would
// take different keys for the same.
//
// It needs the privileges createIndex, createCollection and listIndexes, which
// the built-in role readWrite has.
func EnsureIndexes(ctx context.Context, coll *mongo.Collection) error {
	if coll == nil {
		return fmt.Errorf("mongostore: %w: no collection", core.ErrInvalid)
	}
	coll = strict(coll)
	w := await.New("mongo")
	defer w.Close()
	_, err := call(ctx, w, func(ctx context.Context) (struct{}, error) {
		found, err := inspectIndexes(ctx, coll)
		if err != nil || found {
			return struct{}{}, err
		}
		_, err = coll.Indexes().CreateOne(ctx, mongo.IndexModel{
			Keys:    bson.D{{Key: fieldPurge, Value: 1}},
			Options: options.Index().SetName(purgeIndex).SetExpireAfterSeconds(0),
		})
		return struct{}{}, wrap(ctx, "", err)
	})
	return err
}

// checkEvery is how often a store looks whether its indexes are still there: a
// collection that is dropped comes back with the next lease, without them, and
// would grow for ever.
const checkEvery = time.Hour

// indexed remembers when a store has seen its indexes.
type indexed struct {
	again time.Duration // checkEvery, but in tests

	mu   sync.Mutex
	seen time.Time // zero: not yet
}

// check calls checkIndexes if that is due. Once it has passed, one call at a time
// asks again, and the others go on meanwhile.
func (x *indexed) check(ctx context.Context, coll *mongo.Collection) error {
	x.mu.Lock()
	now, before := time.Now(), x.seen
	if !before.IsZero() && now.Sub(before) < x.again {
		x.mu.Unlock()
		return nil
	}
	if !before.IsZero() {
		x.seen = now
	}
	x.mu.Unlock()

	err := checkIndexes(ctx, coll)
	x.mu.Lock()
	defer x.mu.Unlock()
	if err != nil {
		x.seen = time.Time{}
	} else {
		x.seen = now
	}
	return err
}

// checkIndexes returns an error if EnsureIndexes has not been called.
func checkIndexes(ctx context.Context, coll *mongo.Collection) error {
	found, err := inspectIndexes(ctx, coll)
	if err == nil && !found {
		err = fmt.Errorf("mongo: %w: collection %s needs one on %q, or nothing would ever be deleted: call mongostore.EnsureIndexes once", ErrNoIndex, name(coll), fieldPurge)
	}
	return err
}

// inspectIndexes reports whether the collection has the TTL index, and returns
// an error if its keys are not compared byte by byte. The index of _id shows the
// collation of the collection.
func inspectIndexes(ctx context.Context, coll *mongo.Collection) (found bool, err error) {
	cursor, err := coll.Indexes().List(ctx)
	if err != nil {
		if e, ok := errors.AsType[mongo.CommandError](err); ok && e.Code == codeNamespaceNotFound {
			return false, nil
		}
		return false, wrap(ctx, "", err)
	}
	defer cursor.Close(ctx)
	for cursor.Next(ctx) {
		index := cursor.Current
		if locale, ok := index.Lookup("collation", "locale").StringValueOK(); ok && locale != "simple" && indexes(index, "_id") {
			return false, fmt.Errorf("mongo: collection %s has the default collation %q, which takes different keys for the same: use a collection without one", name(coll), locale)
		}
		after, ok := index.Lookup("expireAfterSeconds").AsInt64OK()
		_, partial := index.Lookup("partialFilterExpression").DocumentOK()
		if ok && after >= 0 && !partial && indexes(index, fieldPurge) {
			found = true
		}
	}
	return found, wrap(ctx, "", cursor.Err())
}

// indexes reports whether an index is on field and nothing else.
func indexes(index bson.Raw, field string) bool {
	keys, ok := index.Lookup("key").DocumentOK()
	if !ok {
		return false
	}
	elements, err := keys.Elements()
	return err == nil && len(elements) == 1 && elements[0].Key() == field
}

func name(coll *mongo.Collection) string { return coll.Database().Name() + "." + coll.Name() }
