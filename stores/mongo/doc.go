// Package mongostore is a lock store of leasekit on MongoDB 5.0 or later, a
// replica set or a sharded cluster, with version 2 of the official driver as its
// client.
//
//	client, err := mongo.Connect(options.Client().ApplyURI(os.Getenv("MONGODB_URI")))
//	…
//	coll := client.Database("app").Collection("leases")
//	err = mongostore.EnsureIndexes(ctx, coll) // once
//	…
//	store, err := mongostore.New(coll, mongostore.Options{})
//	…
//	defer store.Close()
//	strategy, err := core.NewStrategy(store, core.Options{})
//
// The record of a lock is one document with the _id [Options.Prefix] + key and
// the fields owner (a string, "" once released), call (the nonce of the call
// that wrote last), token, until (the end of the lease) and purge (when the
// TTL index may delete the document). That layout is part of the API: programs
// of different versions exclude each other.
//
// The store is checked on a stand-in that speaks MongoDB's protocol, not on a
// mongod; docs/stores.md says what that leaves open, and how to check it on
// yours.
//
// # Clock
//
// The server's clock, $$NOW, decides when a lease ends; the store never asks
// the client's. The server reads it once for a command, when that begins. If
// the command then waits, for a ticket or because it collided with another
// write, it decides by a time that has passed: an Acquire finds a lease alive
// that has just ended, a Renew pushes the end to that time + ttl. Neither makes
// two holders, because an earlier $$NOW only grants less.
//
// $$NOW has milliseconds, cut, so that a lease is kept for one more than the
// ttl, which itself is rounded up. The instant after its end a key can be
// acquired; the TTL index, whose monitor runs once a minute, decides nothing.
// After a failover it is the new primary's clock that counts, and on a sharded
// cluster that of the mongos which the call went through: a lease ends early or
// late by what these clocks differ, so keep them together with NTP, and leases
// longer than the difference. A released key is free by any clock.
//
// # Atomicity
//
// Acquire is one findAndModify with an update pipeline and upsert, Renew and
// Release are one update with a pipeline. The filter is the _id; whose the lease
// is, and whether it is alive, is decided in the pipeline, in the server's
// atomic step on that document, and compared byte by byte whatever the
// collation. Of several upserts of a fresh key one inserts, and the others meet
// a duplicate key (E11000): nothing was written, so they try again, at most ten
// times. Most servers do so by themselves.
//
// A pipeline that does not grant returns the document as it is, which the server
// does not write: no oplog entry. After a held answer one read asks how long the
// lease still lives, and for that long further tries of the same store on the
// key are that read alone.
//
// Whatever the client's defaults, writes are acknowledged by a majority of the
// replica set, from its journal, and reads go to the primary. A write concern
// that fails or times out is an error, though the write may stand: the outcome
// is unknown. A call in whose context there is a session or a transaction of
// the driver does not take part in it.
//
// With retryable writes (the driver's default) the driver sends a write again
// when the connection breaks or the primary steps down, and the server answers
// the second delivery with the result of the first. Where they are off, or the
// server has none, the driver sends nothing twice. The nonce tells either way
// which call a lease belongs to, also two calls of the same owner.
//
// # Fencing
//
// The token is the larger of the last token + 1 and $$NOW in microseconds. The
// last token is kept in the document, which outlives its lease by
// [Options.Retention], and is not purged before the clock has passed the token.
// After that, and also after the collection was dropped or an old backup
// restored, tokens go on growing as long as the clock that grants is past the
// last grant.
//
// # Limits
//
// Leases and tokens are as durable as majority-acknowledged, journaled writes
// are: they survive an election and a crash, unless a majority of the members
// loses its disks. A primary that was cut off may for some seconds answer
// "held" from a state that has passed; it cannot grant, because it reaches no
// majority.
//
// The collection must have the index of [EnsureIndexes] and no default
// collation; the first Acquire of each Store checks that. On a sharded cluster
// it may be sharded by _id, plain or hashed. It should hold nothing but leases:
// a document of another form under a key is an error of every call, and is
// never overwritten, except that one with nothing but the _id is taken for an
// empty place.
//
// A user needs find, insert, update, listIndexes and, for wake-ups,
// changeStream on the collection; the role readWrite has them. remove is not
// needed. Wake-ups also need a replica set or a sharded cluster and a pool of
// two connections or more; elsewhere waiters poll.
//
// $dateAdd and $dateTrunc need MongoDB 5.0. Of other servers with MongoDB's
// protocol most have no update pipelines, or no atomic findAndModify: run the
// conformance suite before you trust one.
package mongostore
