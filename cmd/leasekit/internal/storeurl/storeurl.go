// Package storeurl opens the lock store that a URL names.
package storeurl

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/x/mongo/driver/connstring"
	"go.uber.org/zap"

	"github.com/leasekit/leasekit/core"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
	"github.com/leasekit/leasekit/stores/memory"
	mongostore "github.com/leasekit/leasekit/stores/mongo"
	pgstore "github.com/leasekit/leasekit/stores/postgres"
	redisstore "github.com/leasekit/leasekit/stores/redis"
)

// Schemes lists what URLs begin with, for help texts.
var Schemes = []string{
	"redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel",
	"etcd", "etcds", "postgres", "postgresql", "mongodb", "mongodb+srv", "memory",
}

// dialTimeout bounds the first connection of clients whose own default is
// longer than a person waits.
const dialTimeout = 5 * time.Second

// Opened is an open store and what else the URL gave.
type Opened struct {
	Store core.LockStore
	// Prepare creates what the store needs on its server, if it needs
	// anything: a table, an index. It may be called every time.
	Prepare func(context.Context) error
	// Close closes the store and its client.
	Close func()
}

// Open opens the store that raw names. It does little or no I/O: a server that
// is away is an error of the first call. prefix is the store's Options.Prefix,
// "" for its default. No error contains a password.
func Open(raw, prefix string) (*Opened, error) {
	o, err := open(raw, prefix)
	switch {
	case err == nil:
		return o, nil
	case unreadable(raw):
		return nil, fmt.Errorf("the store's URL cannot be read, and is not shown because of its password: begin with one of %s, then ://, and in a user or password write %%2F for /, %%3F for ?, %%23 for #, %%40 for @, %%25 for %%", strings.Join(Schemes, ", "))
	}
	return nil, errors.New(Redact(raw, err.Error()))
}

// unreadable reports whether raw may have a password that is not where it can be
// found: before the last @, behind a character that ends the host.
func unreadable(raw string) bool {
	_, rest, ok := strings.Cut(raw, "://")
	if !ok {
		return strings.Contains(raw, "@")
	}
	end := strings.IndexAny(rest, "/?#")
	return end >= 0 && strings.Contains(rest[end:], "@")
}

func open(raw, prefix string) (*Opened, error) {
	scheme, rest, ok := strings.Cut(raw, ":")
	if !ok {
		return nil, fmt.Errorf("store %q is no URL: begin with one of %s", raw, strings.Join(Schemes, ", "))
	}
	switch scheme {
	case "memory":
		store, err := memory.New(memory.Options{})
		return &Opened{Store: store, Prepare: nothing, Close: func() {}}, err
	case "redis", "rediss":
		return openRedis(redis.ParseURL(raw))(prefix, func(o *redis.Options) redis.UniversalClient { return redis.NewClient(o) })
	case "redis+cluster", "rediss+cluster":
		return openRedis(redis.ParseClusterURL(strings.TrimSuffix(scheme, "+cluster")+":"+rest))(prefix, func(o *redis.ClusterOptions) redis.UniversalClient { return redis.NewClusterClient(o) })
	case "redis+sentinel", "rediss+sentinel":
		o, err := redis.ParseFailoverURL(strings.TrimSuffix(scheme, "+sentinel") + ":" + rest)
		if err == nil && o.MasterName == "" {
			err = errors.New("add ?master_name=NAME, as the Sentinels call it")
		}
		return openRedis(o, err)(prefix, func(o *redis.FailoverOptions) redis.UniversalClient { return redis.NewFailoverClient(o) })
	case "etcd", "etcds":
		return openEtcd(raw, prefix)
	case "postgres", "postgresql":
		return openPostgres(raw, prefix)
	case "mongodb", "mongodb+srv":
		return openMongo(raw, prefix)
	}
	return nil, fmt.Errorf("store %q: unknown scheme %q: use one of %s", raw, scheme, strings.Join(Schemes, ", "))
}

func nothing(context.Context) error { return nil }

// silent keeps go-redis from printing each failed dial: what matters comes back
// as an error.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// openRedis takes what one of the client's parse functions returned, and opens
// the client that goes with it.
func openRedis[O any](o O, err error) func(prefix string, client func(O) redis.UniversalClient) (*Opened, error) {
	return func(prefix string, newClient func(O) redis.UniversalClient) (*Opened, error) {
		if err != nil {
			return nil, fmt.Errorf("store URL: %w", err)
		}
		redis.SetLogger(silent{})
		client := newClient(o)
		store, err := redisstore.New(client, redisstore.Options{Prefix: prefix})
		if err != nil {
			client.Close()
			return nil, err
		}
		return &Opened{Store: store, Prepare: nothing, Close: func() {
			store.Close()
			client.Close()
		}}, nil
	}
}

// openEtcd reads etcd://user:password@host:2379,host2:2379?ca=file&cert=file&key=file;
// with etcds, or with one of the files, by TLS.
func openEtcd(raw, prefix string) (*Opened, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("store URL: %w", err)
	}
	if u.Host == "" {
		return nil, errors.New("store URL: etcd needs a host: etcd://127.0.0.1:2379")
	}
	config := clientv3.Config{DialTimeout: dialTimeout, Logger: zap.NewNop()}
	for host := range strings.SplitSeq(u.Host, ",") {
		if !strings.Contains(host, ":") {
			host += ":2379"
		}
		config.Endpoints = append(config.Endpoints, host)
	}
	config.Username = u.User.Username()
	config.Password, _ = u.User.Password()
	if config.TLS, err = tlsConfig(u); err != nil {
		return nil, err
	}
	client, err := clientv3.New(config)
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	store, err := etcdstore.New(client, etcdstore.Options{Prefix: prefix})
	if err != nil {
		client.Close()
		return nil, err
	}
	return &Opened{Store: store, Prepare: nothing, Close: func() {
		store.Close()
		client.Close()
	}}, nil
}

func tlsConfig(u *url.URL) (*tls.Config, error) {
	q := u.Query()
	for name := range q {
		if name != "ca" && name != "cert" && name != "key" {
			return nil, fmt.Errorf("store URL: unknown parameter %q: etcd takes ca, cert and key, each a file", name)
		}
	}
	if u.Scheme != "etcds" && len(q) == 0 {
		return nil, nil //nolint:nilnil // no TLS
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca := q.Get("ca"); ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("store URL: ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("store URL: ca: no certificate in %s", ca)
		}
	}
	if cert, key := q.Get("cert"), q.Get("key"); cert != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("store URL: cert and key: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

func openPostgres(raw, prefix string) (*Opened, error) {
	config, err := pgxpool.ParseConfig(raw)
	if err != nil {
		return nil, fmt.Errorf("store URL: %w", err)
	}
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = dialTimeout
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		return nil, err
	}
	o := pgstore.Options{Prefix: prefix}
	store, err := pgstore.New(pool, o)
	if err != nil {
		pool.Close()
		return nil, err
	}
	return &Opened{
		Store:   store,
		Prepare: func(ctx context.Context) error { return pgstore.Migrate(ctx, pool, o) },
		Close: func() {
			store.Close()
			pool.Close()
		},
	}, nil
}

const mongoCollection = "leases"

// openMongo reads a MongoDB URI. The leases are in the collection "leases" of
// the database in its path, or of "leasekit" if it names none.
func openMongo(raw, prefix string) (*Opened, error) {
	parsed, err := connstring.Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("store URL: %w", err)
	}
	client, err := mongo.Connect(options.Client().ApplyURI(raw))
	if err != nil {
		return nil, fmt.Errorf("mongo: %w", err)
	}
	database := parsed.Database
	if database == "" {
		database = "leasekit"
	}
	disconnect := func() {
		ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
		defer cancel()
		_ = client.Disconnect(ctx)
	}
	collection := client.Database(database).Collection(mongoCollection)
	store, err := mongostore.New(collection, mongostore.Options{Prefix: prefix})
	if err != nil {
		disconnect()
		return nil, err
	}
	return &Opened{
		Store:   store,
		Prepare: func(ctx context.Context) error { return mongostore.EnsureIndexes(ctx, collection) },
		Close: func() {
			store.Close()
			disconnect()
		},
	}, nil
}

// Redact takes the passwords in the URL raw out of text, however a client has
// quoted them.
func Redact(raw, text string) string {
	for _, secret := range secrets(raw) {
		text = mask(text, secret)
		for _, unescape := range []func(string) (string, error){url.PathUnescape, url.QueryUnescape} {
			if plain, err := unescape(secret); err == nil {
				text = mask(text, plain)
			}
		}
	}
	return text
}

// mask takes secret out of text. A very short one is part of many words, which
// would tell it: it is looked for where passwords stand.
func mask(text, secret string) string {
	if len(secret) > 3 {
		return strings.ReplaceAll(text, secret, "***")
	}
	text = strings.ReplaceAll(text, ":"+secret+"@", ":***@")
	return strings.ReplaceAll(text, "password="+secret, "password=***")
}

// secrets finds passwords by hand: raw may be no URL at all, which is when an
// error is likely to quote it.
func secrets(raw string) []string {
	var found []string
	_, rest, _ := strings.Cut(raw, "://")
	rest, query, _ := strings.Cut(rest, "?")
	if at := strings.LastIndex(rest, "@"); at >= 0 { // the last: somebody may not have escaped one
		if _, password, _ := strings.Cut(rest[:at], ":"); password != "" {
			found = append(found, password)
		}
	}
	for parameter := range strings.SplitSeq(query, "&") {
		name, value, _ := strings.Cut(parameter, "=")
		if value != "" && strings.Contains(strings.ToLower(name), "password") {
			found = append(found, value)
		}
	}
	return found
}
