package mongostore

import (
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// The fields of a lock's document. They are part of the API: programs of
// different versions exclude each other through them.
const (
	fieldOwner = "owner" // string; "" once released
	fieldCall  = "call"  // int64, the nonce of the call that wrote last
	fieldToken = "token" // int64, the last fencing token
	fieldUntil = "until" // date, the end of the lease
	fieldPurge = "purge" // date, when the TTL index may delete the document
)

// maxToken bounds tokens: 2^53 - 1, the largest integer that every reader of
// JSON keeps.
const maxToken = 1<<53 - 1

// pipelines are the updates of a store, in BSON. What changes from call to call
// is handed over as the command's `let` variables $$owner, $$call, $$ttl (in
// milliseconds) and $$keep ($$ttl and the retention).
//
// Each is one stage, {$replaceWith: {$cond: [may write, new document, $$ROOT]}},
// run by the server on one document, together with the read of it, as one
// atomic step. The else branch returns the document byte for byte, which the
// server takes for no update: nothing is written, neither to the collection nor
// to the oplog. None of the expressions fails on a document of any other form.
type pipelines struct {
	acquire, renew, release []bson.Raw
}

func newPipelines(retention time.Duration) (*pipelines, error) {
	mine := op("$eq", "$"+fieldOwner, "$$owner")

	// An upsert that finds nothing runs the pipeline on a document that has
	// only the _id.
	fresh := op("$eq", "$$ROOT", bson.D{{Key: "_id", Value: "$_id"}})
	// A released lease is free whatever the clock says: behind several routers
	// $$NOW may be earlier than the $$NOW of the release.
	ended := op("$or", op("$eq", "$"+fieldOwner, ""), op("$lte", "$"+fieldUntil, "$$NOW"))

	token := op("$max",
		op("$add", "$"+fieldToken, int64(1)), // null, which $max ignores, on a fresh document
		op("$multiply", op("$toLong", "$$NOW"), int64(1000)))
	newLease := func(token any) bson.D {
		return bson.D{
			{Key: fieldOwner, Value: "$$owner"},
			{Key: fieldCall, Value: "$$call"},
			{Key: fieldToken, Value: token},
			{Key: fieldUntil, Value: nowPlus("$$ttl")},
			{Key: fieldPurge, Value: purgeDate(token, retention)},
		}
	}

	var p pipelines
	for _, x := range []struct {
		to            *[]bson.Raw
		mayWrite, doc bson.D
	}{
		{&p.acquire, op("$or", fresh, all(ended)),
			let("token", token, append(bson.D{{Key: "_id", Value: "$_id"}}, newLease("$$token")...))},
		{&p.renew, all(mine, op("$gt", "$"+fieldUntil, "$$NOW")),
			op("$mergeObjects", "$$ROOT", newLease("$"+fieldToken))},
		{&p.release, all(mine),
			op("$mergeObjects", "$$ROOT", bson.D{
				{Key: fieldOwner, Value: ""},
				{Key: fieldCall, Value: "$$call"},
				{Key: fieldPurge, Value: purgeDate("$"+fieldToken, retention)},
			})},
	} {
		stage, err := bson.Marshal(bson.D{{Key: "$replaceWith", Value: op("$cond", x.mayWrite, x.doc, "$$ROOT")}})
		if err != nil {
			return nil, fmt.Errorf("mongo: %w", err)
		}
		*x.to = []bson.Raw{stage}
	}
	return &p, nil
}

// all is true for a document as this package writes it that satisfies more.
// Everything else is somebody else's, and is left alone.
func all(more ...any) bson.D {
	return bson.D{{Key: "$and", Value: append(bson.A{
		op("$eq", op("$type", "$"+fieldOwner), "string"),
		op("$eq", op("$type", "$"+fieldToken), "long"),
		op("$gt", "$"+fieldToken, int64(0)),
		op("$lt", "$"+fieldToken, int64(maxToken)),
		op("$eq", op("$type", "$"+fieldUntil), "date"),
	}, more...)}}
}

// isLive is true for a lease that has not ended.
func isLive() bson.D {
	return all(op("$ne", "$"+fieldOwner, ""), op("$gt", "$"+fieldUntil, "$$NOW"))
}

// nowPlus is the server's clock, read once for the command, and ms milliseconds.
func nowPlus(ms any) bson.D {
	return bson.D{{Key: "$dateAdd", Value: bson.D{
		{Key: "startDate", Value: "$$NOW"}, {Key: "unit", Value: "millisecond"}, {Key: "amount", Value: ms},
	}}}
}

// purgeDate is when a document may be deleted: $$keep from now, but not before
// the clock has passed its token, or a clock that was set back would give a
// lower one to the next document.
//
// It is rounded up to a multiple of an eighth of the retention, so that a key
// that is locked again and again changes its entry in the TTL index a few times
// an hour, not with every call.
func purgeDate(token any, retention time.Duration) bson.D {
	step := int64(max(retention/8/time.Second, 1)) // seconds
	earliest := op("$max",
		nowPlus("$$keep"),
		op("$toDate", op("$divide", token, int64(1000))))
	return bson.D{{Key: "$dateAdd", Value: bson.D{
		{Key: "startDate", Value: bson.D{{Key: "$dateTrunc", Value: bson.D{
			{Key: "date", Value: earliest}, {Key: "unit", Value: "second"}, {Key: "binSize", Value: step},
		}}}},
		{Key: "unit", Value: "second"},
		{Key: "amount", Value: step},
	}}}
}

// op is the expression {name: args}, or {name: [args…]} with several.
func op(name string, args ...any) bson.D {
	if len(args) == 1 {
		return bson.D{{Key: name, Value: args[0]}}
	}
	return bson.D{{Key: name, Value: bson.A(args)}}
}

// let is in, with variable $$name for value.
func let(name string, value, in any) bson.D {
	return bson.D{{Key: "$let", Value: bson.D{
		{Key: "vars", Value: bson.D{{Key: name, Value: value}}}, {Key: "in", Value: in},
	}}}
}

// literal is the value s: without it the server would take an owner called
// "$$NOW" for an expression.
func literal(s string) bson.D { return bson.D{{Key: "$literal", Value: s}} }
