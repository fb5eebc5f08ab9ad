package etcdstore_test

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
)

// endpointEnv names the server in the processes that the suite starts.
const endpointEnv = "ETCDSTORE_TEST_ENDPOINT"

// TestConformance runs the suite on a server of its own, which it restarts,
// pauses, and fills up; or, if $LEASEKIT_TEST_ETCD names one, on that, and then
// leaves out the rules that would disturb others.
func TestConformance(t *testing.T) {
	url := os.Getenv(endpointEnv)
	var server *testserver.Server
	switch {
	case url != "": // a process that the suite has started
	case os.Getenv("LEASEKIT_TEST_ETCD") != "":
		url = testserver.Etcd(t).URL
	default:
		server = testserver.StartEtcd(t)
		url = server.URL
	}
	config := conformance.Config{
		// What etcd's default election time-out allows, and in whole seconds.
		TTL: 2 * time.Second,
		// Up to 1.5 s that the store asks for on top, up to 500 ms until etcd
		// looks, and the revocation of all that have expired with it, which
		// waits for the disk.
		Slack: 4 * time.Second,
		Open: func(t testing.TB) core.LockStore {
			return open(t, connect(t, url), etcdstore.Options{})
		},
		Env: func(testing.TB) []string { return []string{endpointEnv + "=" + url} },
		OpenRetention: func(t testing.TB, retention time.Duration) (core.LockStore, func() int) {
			client := connect(t, url)
			prefix := random("retention-") + "/"
			return open(t, client, etcdstore.Options{Prefix: prefix, Retention: retention}),
				func() int { return count(t, client, prefix) }
		},
		// One endpoint is one connection, whatever goes over it.
		OpenOneConnection: func(t testing.TB) core.LockStore {
			return open(t, connect(t, url), etcdstore.Options{})
		},
		OpenResending: func(t testing.TB) core.LockStore {
			return open(t, connect(t, url, grpc.WithChainUnaryInterceptor(sendTwice)), etcdstore.Options{})
		},
		OpenSkewed: func(t testing.TB, skew time.Duration) core.LockStore {
			store := open(t, connect(t, url), etcdstore.Options{})
			etcdstore.Skew(store, skew)
			return store
		},
		Faults: conformance.Faults{
			Addr: strings.TrimPrefix(url, "http://"),
			Open: func(t testing.TB, addr string) core.LockStore {
				return open(t, connect(t, addr), etcdstore.Options{})
			},
		},
		Foreign: func(t testing.TB, key string) func() bool {
			client := connect(t, url)
			name := etcdstore.DefaultPrefix + key
			resp, err := client.Put(t.Context(), name, "nobody's")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _, _ = client.Delete(context.Background(), name) })
			return func() bool {
				got, err := client.Get(t.Context(), name)
				return err == nil && len(got.Kvs) == 1 && got.Kvs[0].ModRevision == resp.Header.Revision
			}
		},
		NotSupported: map[string]string{
			"TokenSurvivesDataLoss": "tokens are revisions, which a cluster without its data begins anew: docs/stores.md names the revision bump",
		},
	}
	if server != nil {
		config.Restart = func(t testing.TB) {
			server.Kill(t)
			server.Start(t)
		}
		config.Pause = func(t testing.TB) func() {
			server.Pause(t)
			return func() { server.Resume(t) }
		}
		config.Writes = func(t testing.TB) int64 { return metric(t, url, "etcd_server_proposals_applied_total") }
		config.Refusals = []conformance.Refusal{noSpace(url), noPermission(url)}
	}
	conformance.Run(t, config)
}

func BenchmarkConformance(b *testing.B) {
	url := testserver.Etcd(b).URL
	conformance.Benchmark(b, conformance.Config{
		Open: func(t testing.TB) core.LockStore { return open(t, connect(t, url), etcdstore.Options{}) },
	})
}

// noSpace raises the alarm that etcd raises itself when its quota is used up.
func noSpace(url string) conformance.Refusal {
	return conformance.Refusal{Name: "NoSpace", Begin: func(t testing.TB) (core.LockStore, func()) {
		client := connect(t, url)
		store := open(t, client, etcdstore.Options{})
		members, err := client.MemberList(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		alarm := &pb.AlarmRequest{
			Action:   pb.AlarmRequest_ACTIVATE,
			Alarm:    pb.AlarmType_NOSPACE,
			MemberID: members.Members[0].ID,
		}
		maintenance := pb.NewMaintenanceClient(client.ActiveConnection())
		if _, err := maintenance.Alarm(t.Context(), alarm); err != nil {
			t.Fatal(err)
		}
		return store, func() {
			alarm.Action = pb.AlarmRequest_DEACTIVATE
			if _, err := maintenance.Alarm(t.Context(), alarm); err != nil {
				t.Error(err)
			}
		}
	}}
}

// noPermission switches authentication on, for a user without rights.
func noPermission(url string) conformance.Refusal {
	return conformance.Refusal{Name: "NoPermission", Begin: func(t testing.TB) (core.LockStore, func()) {
		disable := enableAuth(t, url)
		client := connectAs(t, url, "nobody", "secret")
		return open(t, client, etcdstore.Options{}), disable
	}}
}

// sendTwice delivers each request twice, and returns the second answer.
func sendTwice(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	_ = invoke(ctx, method, req, reply, cc, opts...)
	return invoke(ctx, method, req, reply, cc, opts...)
}

// metric reads a counter from the server's own metrics.
func metric(t testing.TB, url, name string) int64 {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatal(err)
			}
			return int64(n)
		}
	}
	t.Fatal(fmt.Errorf("no metric %s", name), lines.Err())
	return 0
}

func count(t testing.TB, client *clientv3.Client, prefix string) int {
	t.Helper()
	resp, err := client.Get(t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		t.Fatal(err)
	}
	return int(resp.Count)
}
