// Package etcdstore keeps leasekit's leases in etcd, through the official
// client, go.etcd.io/etcd/client/v3.
//
//	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"127.0.0.1:2379"}})
//	…
//	store, err := etcdstore.New(client, etcdstore.Options{})
//	…
//	defer store.Close()
//	strategy, err := core.NewStrategy(store, core.Options{TTL: 30 * time.Second})
//
// A lock is one etcd key, Options.Prefix followed by the lock's key. Its value
// is the owner, and it hangs on an etcd lease of its own: the key goes when the
// lease does. It needs etcd 3.5.13 or newer: older leaders answer keep-alives
// for a while after they have been deposed.
//
// # Clock
//
// The clock of etcd's leader ends a lease; no client's clock is asked. Leases
// are counted in whole seconds, and are never shorter than one and a half
// election time-outs: 2 s with etcd's defaults. The store asks for ttl plus half a
// second, rounded up: what is left over is what lets a released lease serve
// again without another request (see Limits). etcd looks for expired leases
// every 500 ms, and revokes 1,000 a second at most. So a key whose holder died
// becomes free between ttl and about ttl + 2 s after its last renewal (1.5 s for
// a ttl of whole seconds), with ttl counted as at least 0.5 s. After a change of
// leader or a restart it is later by up to a ttl and an election, because a new
// leader gives every lease its whole time again. Never earlier.
//
// The store's own clock decides one thing: whether a released lease has enough
// left for the next key. It takes the longer of what the monotonic and the wall
// clock say has passed, because the first stands still while a machine is
// suspended, and adds one percent for clocks of different speed.
//
// # Atomicity
//
// Acquire is one transaction, "if the key does not exist, put it", Release is
// one, "if the key is the one created at this revision, delete it" (for a key
// that another store has put a read comes first). Renew keeps the etcd lease
// alive and, beside that, reads the key: it answers true only if the key was
// there, with this owner and on this lease, if the answer came before the
// lease could have ended, and if no leader was elected since it was granted: a
// former leader that was frozen may revoke it when it continues. Else, and for
// another ttl, it moves the key to another etcd lease in one transaction, "if the
// key has not been touched". All reads are linearizable.
//
// A request is sent again, to the next member if there is one, while etcd
// answers that it is unavailable, for about three seconds, or says nothing, for
// 0.1 s (the put of an Acquire: 1 s) and then twice as long each time. A delivery
// that comes late does nothing: whatever it compares with has changed, or its
// etcd lease was revoked. The latter goes for an Acquire whose outcome remains
// unknown, and for one that was sent twice: its key is moved to another etcd lease
// first. One that was sent twice, and lost, looks in the key's history whether the
// key was the call's own meanwhile: if so, or if that cannot be told (etcd has
// compacted the history; the client's KV was wrapped, which hides the key's name)
// the answer is an error, not "held". An etcd lease serves one key, and another
// only after it is certain that the first has gone and that nothing is on its way
// that could put it again.
//
// # Fencing
//
// The token is the revision at which the key was created. Revisions grow with
// every write to the cluster, across restarts and changes of leader. They are
// set back when a cluster is built anew, or restored from a snapshot: restore
// with
//
//	etcdutl snapshot restore --bump-revision 1000000000 --mark-compacted …
//
// so that they go on above what was handed out. Nothing is kept for a key
// whose lease has ended.
//
// # Limits
//
// Up to 64 released leases are kept for each length, to be used again: an
// Acquire that finds one costs etcd one write instead of two. They end by
// themselves when they are not used for a ttl. A first try on a held key costs a
// Raft entry, each further one is a read.
//
// A waiter is woken by a watch on its key; all keys share one watch stream, and
// all waiters of a key in one store share one watcher. The end of a dead
// holder's lease wakes them too, so Grant.Left is not filled in.
//
// The store keeps, from the first use until Close, one goroutine that sends
// keep-alives and one that reads the answers; one for each key that somebody
// waits for, beside the client's own; while there is something to do, up to four
// that read keys for renewals; and after failed requests up to four that revoke
// leases. With authentication enabled, its user needs read and write permission
// on the prefix.
//
// Give the client the endpoints of all members, and DialKeepAliveTime, which
// makes it leave a member that has fallen silent.
//
// An embedded etcd works through a client that is connected to it, not through
// package v3client.
package etcdstore
