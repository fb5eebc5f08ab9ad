package integration

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/leasekit/leasekit/conformance/history"
	"github.com/leasekit/leasekit/core"
	"github.com/leasekit/leasekit/internal/testserver"
	etcdstore "github.com/leasekit/leasekit/stores/etcd"
)

func etcdClient(t testing.TB, members []*testserver.Server) *clientv3.Client {
	t.Helper()
	var urls []string
	for _, m := range members {
		urls = append(urls, m.URL)
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: urls, DialTimeout: 10 * time.Second,
		// The least that gRPC allows, so that a silent member is left.
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: time.Second,
		Logger: zap.NewNop(), // members are killed on purpose
	})
	check(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// etcdLeader returns the member that leads, according to any that answers.
func etcdLeader(ctx context.Context, client *clientv3.Client, members []*testserver.Server) (*testserver.Server, error) {
	err := errors.New("no member knows a leader")
	for _, m := range members {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		status, statusErr := client.Status(ctx, m.URL)
		cancel()
		if statusErr != nil {
			err = statusErr
		} else if status.Leader == status.Header.MemberId {
			return m, nil
		}
	}
	return nil, err
}

// Clients of a cluster of three go on while a member dies, falls silent, or is
// cut off from the others.
func TestEtcdMemberAway(t *testing.T) {
	kill := func(t testing.TB, s *testserver.Server, _ *testserver.EtcdNetwork) { s.Kill(t) }
	start := func(t testing.TB, s *testserver.Server, _ *testserver.EtcdNetwork) { s.Start(t) }
	pause := func(t testing.TB, s *testserver.Server, _ *testserver.EtcdNetwork) { s.Pause(t) }
	resume := func(t testing.TB, s *testserver.Server, _ *testserver.EtcdNetwork) { s.Resume(t) }
	isolate := func(_ testing.TB, s *testserver.Server, n *testserver.EtcdNetwork) { n.Isolate(s) }
	heal := func(_ testing.TB, _ *testserver.Server, n *testserver.EtcdNetwork) { n.Heal() }
	for _, test := range []struct {
		name, fault string
		leads       bool // the member
		away, back  func(t testing.TB, s *testserver.Server, n *testserver.EtcdNetwork)
	}{
		{"leader killed", "leader killed -9 under load, restarted later", true, kill, start},
		{"leader silent", "leader stopped (SIGSTOP) under load, continued later", true, pause, resume},
		{"leader partitioned", "leader cut off from its peers under load, clients still reach it; joined again later", true, isolate, heal},
		{"follower partitioned", "follower cut off from its peers under load, clients still reach it; joined again later", false, isolate, heal},
	} {
		t.Run(test.name, func(t *testing.T) {
			members, network := testserver.StartEtcdOnNetwork(t, 3)
			admin := etcdClient(t, members)
			// Many clients, because some of them wait for leases to end, which
			// takes long with the slack below.
			const clients, keys = 24, 8
			stores := make([]core.LockStore, 6)
			for i := range stores {
				store, err := etcdstore.New(etcdClient(t, members), etcdstore.Options{})
				check(t, err)
				t.Cleanup(func() { _ = store.Close() })
				stores[i] = store
			}

			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			type result struct {
				report history.Report
				err    error
			}
			done := make(chan result, 1)
			go func() {
				report, err := history.Drive(ctx, func(client int) (core.LockStore, error) { return stores[client%len(stores)], nil }, history.Plan{
					Clients: clients, Keys: keys,
					TTL: 2 * time.Second,
					// The answers of a leader that is away are waited for, so
					// that there are more of them than of unknown outcomes.
					Timeout: 5 * time.Second,
					// A new leader starts the ttl of every lease again: up to
					// 6 s and the 1.5 s on top of it, and the election.
					Check: history.Options{Slack: 15 * time.Second},
				})
				done <- result{report, err}
			}()

			time.Sleep(2 * time.Second) // load before,
			var member *testserver.Server
			eventually(t, "led", func() bool {
				var err error
				member, err = etcdLeader(t.Context(), admin, members)
				return err == nil
			})
			others := func() []*testserver.Server {
				return slices.DeleteFunc(slices.Clone(members), func(m *testserver.Server) bool { return m == member })
			}
			if !test.leads {
				member = others()[0]
			}
			test.away(t, member, network)
			eventually(t, "led by another", func() bool {
				for _, m := range others() {
					if _, err := etcdLeader(t.Context(), admin, []*testserver.Server{m}); err == nil {
						return true
					}
				}
				return false
			})
			time.Sleep(2 * time.Second) // with two,
			test.back(t, member, network)
			time.Sleep(2 * time.Second) // and with three again
			stop()
			r := receive(t, "report", done)
			check(t, r.err)
			t.Logf("%v", r.report)
			if v := r.report.Violation; v != nil {
				html, data, err := v.WriteFiles(t.ArtifactDir())
				t.Fatalf("not linearizable: %v\n%s\n%s\n%s\n%v", v, v.Table(len(v.History.Ops)), html, data, err)
			}
			if !r.report.OK() {
				t.Fatalf("undecided: %v", r.report.Result)
			}
			if r.report.Answers["acquire yes"] == 0 || r.report.Answers["acquire no"] == 0 {
				t.Errorf("no acquisition was granted, or none refused: %v", r.report.Answers)
			}
			outcome(t, "etcd, three members", test.fault, "linearizable: "+r.report.Result.String())
		})
	}
}
