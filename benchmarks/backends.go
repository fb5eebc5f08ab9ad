package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/leasekit/leasekit/internal/testserver"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
	"github.com/leasekit/leasekit/stores/memory"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// storeNames are all stores, in the order of the report.
var storeNames = []string{"memory", "redis", "etcd", "postgres", "mongo"}

// connections is the size of each client's pool: enough for all contenders,
// some of which keep one while they wait.
const connections = 80

// openBackend returns the backend of one store, ready to be measured.
func openBackend(ctx context.Context, name string, s settings) (*backend, error) {
	if name == "memory" {
		return openMemory(s)
	}
	server, err := findServer(ctx, name)
	if err != nil {
		return nil, err
	}
	open := map[string]func(context.Context, string, settings) (*backend, error){
		"redis": openRedis, "etcd": openEtcd, "postgres": openPostgres, "mongo": openMongo,
	}[name]
	b, err := open(ctx, server.url, s)
	// A container answers some time after it was started.
	for end := time.Now().Add(server.startUp); err != nil && time.Now().Before(end) && ctx.Err() == nil; {
		time.Sleep(500 * time.Millisecond)
		b, err = open(ctx, server.url, s)
	}
	if err != nil {
		server.stop()
		return nil, err
	}
	closeClients := b.close
	b.close = func() {
		closeClients()
		server.stop()
	}
	b.server = server.name
	return b, nil
}

// server is where a backend runs.
type server struct {
	url, name string
	startUp   time.Duration // how long it may still need
	stop      func()
}

// findServer returns a server from the environment, PATH, the tool cache, or a
// container, in this order.
func findServer(ctx context.Context, kind string) (*server, error) {
	found, err := testserver.Open(kind)
	if err == nil {
		return &server{url: found.URL, name: fmt.Sprintf("%s %s (%s)", found.Name, found.Version, found.Origin()), stop: found.Close}, nil
	}
	if !errors.Is(err, testserver.ErrMissing) {
		return nil, err
	}
	url, image, stop, containerErr := startContainer(ctx, kind)
	if containerErr != nil {
		return nil, fmt.Errorf("%w; nor a container: %w", err, containerErr)
	}
	return &server{url: url, name: "container of " + image, startUp: time.Minute, stop: stop}, nil
}

func openMemory(s settings) (*backend, error) {
	store, err := memory.New(memory.Options{})
	if err != nil {
		return nil, err
	}
	locks, err := ours(store, s.ttl)
	if err != nil {
		return nil, err
	}
	type lease struct {
		owner string
		until time.Time
	}
	var mu sync.Mutex
	leases := map[string]lease{}
	acquire := func(key string) {
		mu.Lock()
		defer mu.Unlock()
		if l, ok := leases[key]; !ok || !time.Now().Before(l.until) {
			leases[key] = lease{"owner", time.Now().Add(s.ttl)}
		}
	}
	floor := simpleFloor(
		func(_ context.Context, key string) error { acquire(key); return nil },
		func(_ context.Context, key string) error {
			mu.Lock()
			defer mu.Unlock()
			delete(leases, key)
			return nil
		},
		func(_ context.Context, key string) error { acquire(key); return nil },
		func(_ context.Context, key string) error {
			mu.Lock()
			defer mu.Unlock()
			leases[key] = lease{"owner", time.Now().Add(s.ttl)}
			return nil
		})
	return &backend{name: "memory", server: "this process", store: store, lockers: []locker{locks, floor}, traffic: &traffic{}, close: nothing}, nil
}

// simpleFloor makes a floor of four raw operations on a key.
func simpleFloor(lock, unlockKey, read, renew func(ctx context.Context, key string) error) locker {
	try := func(ctx context.Context, key string) (unlock, error) {
		return func(ctx context.Context) error { return unlockKey(ctx, key) }, lock(ctx, key)
	}
	return locker{
		impl: implFloor,
		try:  try,
		wait: try,
		held: read,
		hold: func(ctx context.Context, key string) (func(context.Context) error, unlock, error) {
			end, err := try(ctx, key)
			return func(ctx context.Context) error { return renew(ctx, key) }, end, err
		},
		run: func(ctx context.Context, key string) error { return lockUnlock(ctx, try, key) },
	}
}

func openRedis(ctx context.Context, url string, s settings) (*backend, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	t := &traffic{}
	o.PoolSize = connections
	o.Dialer = t.DialContext
	client := redis.NewClient(o)
	if err := client.Ping(ctx).Err(); err != nil {
		client.Close()
		return nil, err
	}
	store, err := redisstore.New(client, redisstore.Options{})
	if err != nil {
		return nil, err
	}
	locks, err := ours(store, s.ttl)
	if err != nil {
		return nil, err
	}
	floor := simpleFloor(
		func(ctx context.Context, key string) error {
			return client.SetArgs(ctx, key, "owner", redis.SetArgs{Mode: "NX", TTL: s.ttl}).Err()
		},
		func(ctx context.Context, key string) error { return client.Del(ctx, key).Err() },
		func(ctx context.Context, key string) error { return client.Get(ctx, key).Err() },
		func(ctx context.Context, key string) error { return client.PExpire(ctx, key, s.ttl).Err() })
	floor.wait = func(ctx context.Context, key string) (unlock, error) { // without NX: nobody is kept out
		return func(ctx context.Context) error { return client.Del(ctx, key).Err() }, client.Set(ctx, key, "owner", s.ttl).Err()
	}

	bsm := redislock.New(client)
	bsmLock := func(retry redislock.RetryStrategy) func(context.Context, string) (unlock, error) {
		return func(ctx context.Context, key string) (unlock, error) {
			l, err := bsm.Obtain(ctx, key, s.ttl, &redislock.Options{RetryStrategy: retry})
			if err != nil {
				return nil, err
			}
			return l.Release, nil
		}
	}
	bsmTry := bsmLock(redislock.NoRetry())
	rs := redsync.New(goredis.NewPool(client))
	redsyncLock := func(ctx context.Context, key string) (unlock, error) {
		m := rs.NewMutex(key, redsync.WithExpiry(s.ttl), redsync.WithTries(1_000_000))
		if err := m.LockContext(ctx); err != nil {
			return nil, err
		}
		return func(ctx context.Context) error {
			_, err := m.UnlockContext(ctx)
			return err
		}, nil
	}
	rueidisLocker, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{InitAddress: []string{o.Addr}, Username: o.Username, Password: o.Password, SelectDB: o.DB},
		KeyMajority:  1, KeyValidity: s.ttl,
	})
	if err != nil {
		return nil, err
	}
	rueidisLock := func(ctx context.Context, key string) (unlock, error) {
		_, cancel, err := rueidisLocker.WithContext(ctx, key)
		return func(context.Context) error { cancel(); return nil }, err
	}
	return &backend{
		name: "redis", store: store, traffic: t,
		lockers: []locker{locks, floor, {
			impl: "redislock",
			try:  bsmTry,
			wait: func(ctx context.Context, key string) (unlock, error) {
				retry := bsmLock(redislock.ExponentialBackoff(16*time.Millisecond, time.Second))
				for { // it gives up after the ttl, which is not what is measured
					unlock, err := retry(ctx, key)
					if err == nil || ctx.Err() != nil || !errors.Is(err, redislock.ErrNotObtained) && !errors.Is(err, context.DeadlineExceeded) {
						return unlock, err
					}
				}
			},
			held: func(ctx context.Context, key string) error {
				_, err := bsmTry(ctx, key)
				return wantErr(err, redislock.ErrNotObtained)
			},
			hold: func(ctx context.Context, key string) (func(context.Context) error, unlock, error) {
				l, err := bsm.Obtain(ctx, key, s.ttl, nil)
				if err != nil {
					return nil, nil, err
				}
				return func(ctx context.Context) error { return l.Refresh(ctx, s.ttl, nil) }, l.Release, nil
			},
		}, {
			impl: "redsync", try: redsyncLock, wait: redsyncLock,
		}, {
			impl: "rueidislock", try: rueidisLock, wait: rueidisLock,
		}},
		operations: func(ctx context.Context) (int64, error) {
			info, err := client.Info(ctx, "stats").Result()
			if err != nil {
				return 0, err
			}
			_, rest, _ := strings.Cut(info, "total_commands_processed:")
			var n int64
			_, err = fmt.Sscan(rest, &n)
			return n, err
		},
		close: func() {
			rueidisLocker.Close()
			store.Close()
			client.Close()
		},
	}, nil
}

// wantErr is nil if err is what a held key gives.
func wantErr(err, want error) error {
	switch {
	case err == nil:
		return errGranted
	case errors.Is(err, want):
		return nil
	default:
		return err
	}
}

func openEtcd(ctx context.Context, url string, s settings) (*backend, error) {
	t := &traffic{}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{url}, DialTimeout: 5 * time.Second, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return t.DialContext(ctx, "tcp", strings.TrimPrefix(addr, "http://"))
		})},
	})
	if err != nil {
		return nil, err
	}
	store, err := etcdstore.New(client, etcdstore.Options{})
	if err != nil {
		return nil, err
	}
	locks, err := ours(store, s.ttl)
	if err != nil {
		return nil, err
	}
	lease, err := client.Grant(ctx, int64(s.ttl/time.Second)+60)
	if err != nil {
		return nil, err
	}
	floor := simpleFloor(
		func(ctx context.Context, key string) error {
			_, err := client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).Then(clientv3.OpPut(key, "owner")).Commit()
			return err
		},
		func(ctx context.Context, key string) error { _, err := client.Delete(ctx, key); return err },
		func(ctx context.Context, key string) error { _, err := client.Get(ctx, key); return err },
		func(ctx context.Context, _ string) error { _, err := client.KeepAliveOnce(ctx, lease.ID); return err })
	session := func(context.Context) (func(context.Context, string) (unlock, error), func(), error) {
		s, err := concurrency.NewSession(client, concurrency.WithTTL(max(int(s.ttl/time.Second), 2)))
		if err != nil {
			return nil, nil, err
		}
		return func(ctx context.Context, key string) (unlock, error) {
			m := concurrency.NewMutex(s, key)
			return m.Unlock, m.Lock(ctx)
		}, func() { s.Close() }, nil
	}
	one, closeOne, err := session(ctx)
	if err != nil {
		return nil, err
	}
	return &backend{
		name: "etcd", store: store, traffic: t,
		lockers: []locker{locks, floor, {impl: "concurrency.Mutex", try: one, wait: one, contender: session}},
		operations: func(ctx context.Context) (int64, error) {
			return scrape(ctx, url+"/metrics", "grpc_server_handled_total", "grpc_server_msg_received_total{grpc_method=\"LeaseKeepAlive\"")
		},
		close: func() {
			closeOne()
			store.Close()
			client.Close()
		},
	}, nil
}

func openPostgres(ctx context.Context, url string, s settings) (*backend, error) {
	t := &traffic{}
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = connections
	config.ConnConfig.DialFunc = t.DialContext
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	// A schema of this run's own: LEASEKIT_TEST_POSTGRES may be somebody's
	// database.
	schema := "leasekit_bench_" + strings.ToLower(rand.Text()[:8])
	name := pgx.Identifier{schema}.Sanitize()
	drop := func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, _ = pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+name+" CASCADE")
		pool.Close()
	}
	if _, err := pool.Exec(ctx, "CREATE SCHEMA "+name); err != nil {
		pool.Close()
		return nil, err
	}
	table := pgx.Identifier{schema, "floor"}.Sanitize()
	if _, err := pool.Exec(ctx, "CREATE TABLE "+table+" (key text PRIMARY KEY, owner text NOT NULL, until timestamptz NOT NULL) WITH (fillfactor = 50)"); err != nil {
		drop()
		return nil, err
	}
	o := pgstore.Options{Schema: schema}
	if err := pgstore.Migrate(ctx, pool, o); err != nil {
		drop()
		return nil, err
	}
	store, err := pgstore.New(pool, o)
	if err != nil {
		drop()
		return nil, err
	}
	locks, err := ours(store, s.ttl)
	if err != nil {
		drop()
		return nil, err
	}
	var rows sync.Map // keys that have their row
	row := func(ctx context.Context, key string) error {
		if _, ok := rows.LoadOrStore(key, true); ok {
			return nil
		}
		_, err := pool.Exec(ctx, "INSERT INTO "+table+" VALUES ($1, '', now()) ON CONFLICT DO NOTHING", key)
		return err
	}
	update := func(ctx context.Context, key string) error {
		_, err := pool.Exec(ctx, "UPDATE "+table+" SET owner = $2, until = clock_timestamp() WHERE key = $1", key, "owner")
		return err
	}
	floor := simpleFloor(
		func(ctx context.Context, key string) error {
			if err := row(ctx, key); err != nil {
				return err
			}
			return update(ctx, key)
		}, update,
		func(ctx context.Context, key string) error {
			var owner string
			return pool.QueryRow(ctx, "SELECT owner FROM "+table+" WHERE key = $1", key).Scan(&owner)
		}, update)

	advisory := func(sql string) func(context.Context, string) (unlock, error) {
		return func(ctx context.Context, key string) (unlock, error) {
			conn, err := pool.Acquire(ctx)
			if err != nil {
				return nil, err
			}
			h := fnv.New64a()
			h.Write([]byte(key))
			id := int64(h.Sum64())
			if _, err := conn.Exec(ctx, sql, id); err != nil {
				conn.Release()
				return nil, err
			}
			return func(ctx context.Context) error {
				defer conn.Release()
				_, err := conn.Exec(ctx, "SELECT pg_advisory_unlock($1)", id)
				return err
			}, nil
		}
	}
	return &backend{
		name: "postgres", store: store, traffic: t,
		lockers: []locker{locks, floor, {
			impl: "advisory lock",
			try:  advisory("SELECT pg_try_advisory_lock($1)"),
			wait: advisory("SELECT pg_advisory_lock($1)"),
		}},
		close: func() {
			store.Close()
			drop()
		},
	}, nil
}

func openMongo(ctx context.Context, url string, s settings) (*backend, error) {
	t := &traffic{}
	client, err := mongo.Connect(options.Client().ApplyURI(url).SetDialer(t).SetMaxPoolSize(connections))
	if err != nil {
		return nil, err
	}
	journaled := true
	db := client.Database("leasekit_bench_"+strings.ToLower(rand.Text()[:8]),
		options.Database().SetWriteConcern(&writeconcern.WriteConcern{W: "majority", Journal: &journaled}))
	closeAll := func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_ = db.Drop(ctx)
		_ = client.Disconnect(ctx)
	}
	coll, raw := db.Collection("leases"), db.Collection("floor")
	if err := mongostore.EnsureIndexes(ctx, coll); err != nil {
		closeAll()
		return nil, err
	}
	store, err := mongostore.New(coll, mongostore.Options{})
	if err != nil {
		closeAll()
		return nil, err
	}
	locks, err := ours(store, s.ttl)
	if err != nil {
		closeAll()
		return nil, err
	}
	var documents sync.Map
	update := func(owner string) func(ctx context.Context, key string) error {
		return func(ctx context.Context, key string) error {
			o := options.UpdateOne()
			if _, ok := documents.LoadOrStore(key, true); !ok {
				o.SetUpsert(true)
			}
			_, err := raw.UpdateOne(ctx, bson.D{{Key: "_id", Value: key}}, bson.D{{Key: "$set", Value: bson.D{
				{Key: "owner", Value: owner}, {Key: "until", Value: time.Now()},
			}}}, o)
			return err
		}
	}
	floor := simpleFloor(update("owner"), update(""),
		func(ctx context.Context, key string) error {
			return raw.FindOne(ctx, bson.D{{Key: "_id", Value: key}}).Err()
		}, update("owner"))
	return &backend{
		name: "mongo", store: store, traffic: t,
		lockers: []locker{locks, floor},
		close: func() {
			store.Close()
			closeAll()
		},
	}, nil
}
