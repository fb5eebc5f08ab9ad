package etcdstore_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"

	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
)

// A member of three goes away while ten keys are held by a client of all three.
// Nobody loses a lease, nobody gets a second one, and the work goes on.
func TestMemberGoesAwayInMidHold(t *testing.T) {
	for _, test := range []struct {
		name string
		what string // leader or follower
		away func(t testing.TB, s *testserver.Server)
	}{
		{"LeaderKilled", "leader", func(t testing.TB, s *testserver.Server) { s.Kill(t) }},
		{"FollowerStopped", "follower", func(t testing.TB, s *testserver.Server) { s.Stop(t) }},
		{"LeaderSilent", "leader", func(t testing.TB, s *testserver.Server) {
			s.Pause(t)
			t.Cleanup(func() { s.Resume(t) })
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel() // it mostly waits
			members := testserver.StartEtcdCluster(t, 3)
			var urls []string
			for _, m := range members {
				urls = append(urls, m.URL)
			}
			// The least that gRPC allows: the connection to a silent member
			// lasts longer than a lease, and is gone when the keys are
			// released.
			config := clientv3.Config{Endpoints: urls, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: time.Second}
			store := open(t, connectWith(t, config), etcdstore.Options{})
			rival := open(t, connectWith(t, config), etcdstore.Options{})

			const leaseTTL, keys = 9 * time.Second, 10
			var lost atomic.Int64
			strategy, err := core.NewStrategy(store, core.Options{
				TTL:   leaseTTL,
				Hooks: core.Hooks{Lost: func(_ context.Context, e core.Event) { t.Log("lost:", e.Err); lost.Add(1) }},
			})
			if err != nil {
				t.Fatal(err)
			}
			prefix := random("member-")
			var held []*core.Lease
			for i := range keys {
				lease, err := strategy.Acquire(t.Context(), prefix+string(rune('a'+i)))
				if err != nil {
					t.Fatal(err)
				}
				held = append(held, lease)
			}
			highest := held[keys-1].Token()

			i := leader(t, members)
			if test.what == "follower" {
				i = (i + 1) % len(members)
			}
			test.away(t, members[i])

			// For longer than a lease lives without renewal.
			for end := time.Now().Add(leaseTTL + 6*time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				for _, lease := range held {
					ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
					g, err := rival.Acquire(ctx, lease.Key(), "rival", leaseTTL)
					cancel()
					if g.Acquired {
						t.Fatalf("a rival got %q (%v) while its holder has not lost it", lease.Key(), err)
					}
				}
			}
			if n := lost.Load(); n > 0 {
				t.Errorf("%d of %d leases lost", n, keys)
			}
			for _, lease := range held {
				if err := lease.Err(); err != nil {
					t.Errorf("lease of %q: %v", lease.Key(), err)
				}
				if err := lease.Release(); err != nil {
					t.Errorf("release of %q: %v", lease.Key(), err)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for _, lease := range held {
				g, err := rival.Acquire(ctx, lease.Key(), "rival", leaseTTL)
				if err != nil || !g.Acquired {
					t.Fatalf("after the release a rival's Acquire = %+v, %v; want acquired", g, err)
				}
				if g.Token <= highest {
					t.Errorf("token %d, want more than %d", g.Token, highest)
				}
			}
		})
	}
}

// A leader is frozen for longer than a lease, and continues. Before it hears of
// its successor it revokes the leases that have expired by its own clock, though
// the successor has kept them alive. A plain client of etcd loses its keys so.
func TestLeaderThatContinuesRevokesNothing(t *testing.T) {
	t.Parallel() // it mostly waits
	members := testserver.StartEtcdCluster(t, 3)
	i := leader(t, members)
	var others []string
	for j, m := range members {
		if j != i {
			others = append(others, m.URL)
		}
	}
	client := connectWith(t, clientv3.Config{Endpoints: others})
	store := open(t, client, etcdstore.Options{})
	const leaseTTL, keys = 5 * time.Second, 20
	type held struct {
		key   string
		token int64
		lease clientv3.LeaseID
	}
	var helds []held
	for range keys {
		key := random("frozen-")
		g := acquire(t, store, key, "owner", leaseTTL)
		lease, _ := keyOf(t, client, key)
		helds = append(helds, held{key, g.Token, lease})
	}
	renew := func() {
		t.Helper()
		for _, h := range helds {
			if renewed, err := store.Renew(t.Context(), h.key, "owner", leaseTTL); !renewed || err != nil {
				t.Fatalf("Renew = %t, %v; want true, nil", renewed, err)
			}
		}
	}
	renew()
	frozen := time.Now()
	members[i].Pause(t)
	t.Cleanup(func() { members[i].Resume(t) })
	// The new leader gives every lease its whole time again.
	for time.Since(frozen) < 2*leaseTTL {
		renew()
		time.Sleep(leaseTTL / 10)
	}
	members[i].Resume(t)
	for continued := time.Now(); time.Since(continued) < leaseTTL/2; time.Sleep(10 * time.Millisecond) {
		for _, h := range helds {
			if lease, created := keyOf(t, client, h.key); created != h.token {
				t.Fatalf("%v after the old leader continued the key was created at %d on lease %x, want %d (a lease other than %x)",
					time.Since(continued), created, lease, h.token, h.lease)
			}
		}
	}
	renew()
}

// Whatever was granted before an election is not kept alive after it.
func TestRenewAfterAnElectionMovesTheKeyOnce(t *testing.T) {
	t.Parallel()
	members := testserver.StartEtcdCluster(t, 3)
	client := connect(t, members[0].URL)
	store, key := open(t, client, etcdstore.Options{}), random("election-")
	released := random("released-")
	g := acquire(t, store, key, "owner", time.Minute)
	acquire(t, store, released, "owner", time.Minute)
	release(t, store, released, "owner")
	renew := func() clientv3.LeaseID {
		t.Helper()
		if renewed, err := store.Renew(t.Context(), key, "owner", time.Minute); !renewed || err != nil {
			t.Fatalf("Renew = %t, %v; want true, nil", renewed, err)
		}
		lease, created := keyOf(t, client, key)
		if created != g.Token {
			t.Fatalf("the key was created at %d, want %d", created, g.Token)
		}
		return lease
	}
	first := renew()
	pooled := etcdstore.Pooled(store)
	status := func(i int) *clientv3.StatusResponse {
		t.Helper()
		status, err := client.Status(t.Context(), members[i].URL)
		if err != nil {
			t.Fatal(err)
		}
		return status
	}
	eventually(t, "the leader hands over", func() bool {
		i := leader(t, members)
		_, err := connect(t, members[i].URL).MoveLeader(t.Context(), status((i+1)%3).Header.MemberId)
		return err == nil
	})
	term := status(0).RaftTerm
	second := renew()
	if second == first {
		t.Error("the key hangs on the lease that it had before the election")
	}
	if slices.Contains(pooled, second) {
		t.Error("the key hangs on a lease that was released before the election")
	}
	for range 3 {
		lease := renew()
		now := status(0).RaftTerm
		if lease != second && now == term {
			t.Errorf("the key was moved from lease %x to %x without an election", second, lease)
		}
		second, term = lease, now
	}
}

// leader returns the index of the member that leads.
func leader(t testing.TB, members []*testserver.Server) int {
	t.Helper()
	client := connect(t, members[0].URL)
	var leader int
	eventually(t, "one of the members leads", func() bool { // there may be an election
		for i, m := range members {
			status, err := client.Status(t.Context(), m.URL)
			if err != nil {
				t.Fatal(err)
			}
			if status.Leader == status.Header.MemberId {
				leader = i
				return true
			}
		}
		return false
	})
	return leader
}

// Two of three members are gone: no answer can be given, and none is made up.
func TestNoQuorumIsAnError(t *testing.T) {
	t.Parallel()
	members := testserver.StartEtcdCluster(t, 3)
	store := open(t, connect(t, members[0].URL), etcdstore.Options{})
	acquire(t, store, "held", "owner", time.Minute)
	if g, err := store.Acquire(t.Context(), "held", "other", time.Minute); g.Acquired || err != nil {
		t.Fatalf("Acquire = %+v, %v", g, err)
	}
	members[1].Kill(t)
	members[2].Kill(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for call, f := range map[string]func() error{
		"Acquire of a free key": func() error { _, err := store.Acquire(ctx, "free", "owner", time.Minute); return err },
		"Acquire of a held key": func() error { _, err := store.Acquire(ctx, "held", "other", time.Minute); return err },
		"Renew":                 func() error { _, err := store.Renew(ctx, "held", "owner", time.Minute); return err },
		"Release":               func() error { return store.Release(ctx, "held", "owner") },
	} {
		wg.Go(func() {
			if err := f(); err == nil {
				t.Errorf("%s = nil without a quorum, want an error", call)
			}
		})
	}
	wg.Wait()
}

// gRPC and etcd's client go on trying, and say in the end that a context has
// ended. What people need is the address that is wrong.
func TestUnreachableServerIsNamed(t *testing.T) {
	t.Parallel()
	const nobody = "127.0.0.1:1" // tcpmux, reserved
	client := connect(t, nobody)
	store := open(t, client, etcdstore.Options{})
	client.ActiveConnection().Connect()
	eventually(t, "the connection has failed", func() bool {
		return client.ActiveConnection().GetState() == connectivity.TransientFailure
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, acquire := store.Acquire(ctx, "key", "owner", time.Minute)
	_, renew := store.Renew(ctx, "key", "owner", time.Minute)
	release := store.Release(ctx, "key", "owner")
	_, _, subscribe := store.Subscribe(ctx, "key")
	for call, err := range map[string]error{"Acquire": acquire, "Renew": renew, "Release": release, "Subscribe": subscribe} {
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), nobody) {
			t.Errorf("%s: error %v, want the context's, and %s in it", call, err, nobody)
		}
	}
}

func TestAuthentication(t *testing.T) {
	server := testserver.StartEtcd(t, "--bcrypt-cost", "4", "--auth-token-ttl", "2")
	disable := enableAuth(t, server.URL)
	t.Cleanup(disable)

	t.Run("allowed", func(t *testing.T) {
		client := connectAs(t, server.URL, "locker", "secret")
		store := open(t, client, etcdstore.Options{})
		acquire(t, store, "key", "owner", time.Minute)
		signals, stop, err := store.Subscribe(t.Context(), "key")
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		// Past the life of the token that the keep-alive stream began with.
		for range 5 {
			for _, ttl := range []time.Duration{time.Minute, 2 * time.Minute} {
				if renewed, err := store.Renew(t.Context(), "key", "owner", ttl); !renewed || err != nil {
					t.Fatalf("Renew = %t, %v; want true, nil", renewed, err)
				}
			}
			time.Sleep(700 * time.Millisecond)
		}
		if g, err := store.Acquire(t.Context(), "key", "other", time.Minute); g.Acquired || err != nil {
			t.Errorf("Acquire of a held key = %+v, %v", g, err)
		}
		release(t, store, "key", "owner")
		awaitSignal(t, signals)
	})
	t.Run("denied", func(t *testing.T) {
		store := open(t, connectAs(t, server.URL, "nobody", "secret"), etcdstore.Options{})
		_, errAcquire := store.Acquire(t.Context(), "key", "owner", ttl)
		_, errRenew := store.Renew(t.Context(), "key", "owner", ttl)
		_, _, errBreak := store.Break(t.Context(), "key")
		for call, err := range map[string]error{
			"Acquire": errAcquire, "Renew": errRenew, "Break": errBreak,
			"Release": store.Release(t.Context(), "key", "owner"),
		} {
			if !errors.Is(err, rpctypes.ErrPermissionDenied) || !strings.HasPrefix(err.Error(), "etcd: ") {
				t.Errorf("%s = %v, want %v", call, err, rpctypes.ErrPermissionDenied)
			}
		}
	})
	t.Run("no user", func(t *testing.T) {
		store := open(t, connect(t, server.URL), etcdstore.Options{})
		if _, err := store.Acquire(t.Context(), "key", "owner", ttl); !errors.Is(err, rpctypes.ErrUserEmpty) {
			t.Errorf("Acquire = %v, want %v", err, rpctypes.ErrUserEmpty)
		}
	})
	// One key that its holder may not read any more must not take the renewals
	// of others with it.
	t.Run("one key denied", func(t *testing.T) {
		root := connectAs(t, server.URL, "root", "secret")
		store := open(t, connectAs(t, server.URL, "locker", "secret"), etcdstore.Options{Prefix: "some/"})
		end := func(what string) string { return clientv3.GetPrefixRangeEnd("some/" + what) }
		for _, what := range []string{"a", "b"} {
			_, err := root.RoleGrantPermission(t.Context(), "locker", "some/"+what, end(what), clientv3.PermissionType(clientv3.PermReadWrite))
			if err != nil {
				t.Fatal(err)
			}
			acquire(t, store, what, "owner", time.Minute)
		}
		if _, err := root.RoleRevokePermission(t.Context(), "locker", "some/b", end("b")); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i := range 100 {
			key, want := "a", error(nil)
			if i%2 == 1 {
				key, want = "b", rpctypes.ErrPermissionDenied
			}
			wg.Go(func() {
				renewed, err := store.Renew(t.Context(), key, "owner", time.Minute)
				if !errors.Is(err, want) || renewed != (want == nil) {
					t.Errorf("Renew of %q = %t, %v; want %v", key, renewed, err, want)
				}
			})
		}
		wg.Wait()
	})
}

func TestTLS(t *testing.T) {
	cert, key, pool := certificate(t)
	server := testserver.StartEtcd(t, "--cert-file", cert, "--key-file", key)
	client := connectWith(t, clientv3.Config{
		Endpoints: []string{server.URL},
		TLS:       &tls.Config{RootCAs: pool},
	})
	store := open(t, client, etcdstore.Options{})
	acquire(t, store, "key", "owner", ttl)
	signals, stop, err := store.Subscribe(t.Context(), "key")
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	for _, ttl := range []time.Duration{ttl, time.Minute} {
		if renewed, err := store.Renew(t.Context(), "key", "owner", ttl); !renewed || err != nil {
			t.Fatalf("Renew = %t, %v", renewed, err)
		}
	}
	release(t, store, "key", "owner")
	awaitSignal(t, signals)
}

// certificate makes a self-signed certificate for 127.0.0.1.
func certificate(t *testing.T) (certFile, keyFile string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "leasekit test"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	pool.AddCert(parsed)
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", pkcs8), pool
}
