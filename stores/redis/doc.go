// Package redisstore is a lock store of leasekit on Redis 7.0 or later, or
// Valkey, with go-redis v9 as its client.
//
//	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
//	store, err := redisstore.New(client, redisstore.Options{})
//	…
//	defer store.Close()
//	strategy, err := core.NewStrategy(store, core.Options{})
//
// The record of a lock is one hash, named [Options.Prefix] + key, with the
// fields owner, nonce, token and until (the end of the lease in microseconds
// since 1970, 0 once released); a field broken says which call of Break has ended
// a lease last. That layout is part of the API: programs of different versions
// exclude each other.
//
// # Clock
//
// The server's TIME, read by the script that reads and writes the record, so in
// the same atomic step. The end of a lease is stored and compared in
// microseconds; the expiry of the Redis key decides nothing, it only sweeps the
// record up after [Options.Retention]. The instant after its end a key can be
// acquired. A server whose clock is set forward ends leases early; one whose
// clock is set back ends them late. After a failover it is the new master's clock
// that counts.
//
// # Atomicity
//
// Each method is one Lua script on one key, in one round trip: EVALSHA, or EVAL
// when the server does not know the script, as after a restart. One key for a
// lock works in every slot of a cluster, whatever braces it contains. A try on a
// held key only reads: nothing goes to the append-only file or to replicas.
//
// The scripts start with #!lua, so that a replica or a demoted master refuses
// them with READONLY instead of answering from old data. A failing disk
// (MISCONF), too few replicas (NOREPLICAS) and a full memory (OOM) refuse an
// Acquire too; with a full memory Renew and Release still work.
//
// go-redis sends a command again when its connection breaks. Every call of
// Acquire carries a nonce: while its lease lives, a second delivery gets the
// token of the first, and once the lease has been released or has expired, a
// late one gets nothing, so that it leaves no lease that nobody knows of (as
// long as nobody else has acquired the key since).
//
// # Fencing
//
// The token is the larger of the last token + 1 and the server's time in
// microseconds. The last token is kept in the record, which outlives the lease
// by [Options.Retention]. After that, and also after FLUSHALL, an eviction, a
// restart without persistence or a failover that lost the last writes, tokens
// go on growing as long as the clock that grants is past the last grant.
//
// # Limits
//
// Redis replicates asynchronously: a master that fails right after a grant may be
// followed by a replica that has never heard of it, and grants again. FLUSHALL,
// eviction and a restart without persistence lose leases likewise. Two holders
// are possible then, and only the fencing token protects. Give the server
// maxmemory-policy noeviction; the volatile policies evict leases too. With
// appendfsync everysec a crash of the machine loses up to a second of grants.
//
// A user under ACL needs the commands EVALSHA, EVAL, HMGET, HSET, EXISTS, TYPE,
// TIME and PEXPIREAT on the keys of the prefix. For wake-ups he needs SPUBLISH
// and SSUBSCRIBE, SUNSUBSCRIBE and PING as well, on channels with the same names
// as the keys; without these a release succeeds and waiters poll.
//
// A lease can be as short as 1 ms; its length is kept to the microsecond,
// rounded up. An idle lock costs some 200 bytes for the time of its retention,
// which for a million keys an hour are 200 MB: choose Retention accordingly.
package redisstore
