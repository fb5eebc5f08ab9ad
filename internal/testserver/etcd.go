package testserver

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

var etcdKind = &kind{
	name:  "etcd",
	hint:  "run `make servers`, which builds it from its Go module in about a minute",
	ports: 2, // clients, peers
	find: func() (program, bool) {
		return findProgram("etcd", []string{"/usr/local/bin", "/opt/homebrew/bin"}, "bin")
	},
	flags: func(s *Server) []string {
		name, peers := s.peerName(), s.peers
		if peers == "" {
			peers = s.peer()
		}
		return []string{
			"--name", name, "--data-dir", s.Dir + "/data", "--logger", "zap", "--log-level", "warn",
			"--listen-client-urls", s.URL, "--advertise-client-urls", s.URL,
			"--listen-peer-urls", "http://127.0.0.1:" + strconv.Itoa(s.ports[1]), "--initial-advertise-peer-urls", s.peerURL(),
			"--initial-cluster", peers, "--initial-cluster-state", "new",
		}
	},
	ready: etcdReady,
	url: func(s *Server) string {
		if slices.ContainsFunc(s.args, func(a string) bool { return strings.HasPrefix(a, "--cert-file") }) {
			return "https://" + s.Addr
		}
		return "http://" + s.Addr
	},
	stop: syscall.SIGTERM,
	quit: syscall.SIGKILL,
}

// peerName is the member's name in its cluster.
func (s *Server) peerName() string { return "m" + strconv.Itoa(s.ports[0]) }

// peer is the member's part of --initial-cluster.
func (s *Server) peer() string {
	return s.peerName() + "=" + s.peerURL()
}

// etcdReady asks for /health, which says true when there is a leader, and
// /version.
func etcdReady(ctx context.Context, s *Server) (string, error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		// This is a look at a server of our own, and carries no secret.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
	}}
	get := func(path string, into any) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(s.URL, "/")+path, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		return json.NewDecoder(resp.Body).Decode(into)
	}
	var health struct{ Health, Reason string }
	if err := get("/health", &health); err != nil {
		return "", err
	}
	if health.Health != "true" {
		return "", fmt.Errorf("health %q: %s", health.Health, health.Reason)
	}
	var version struct {
		Server string `json:"etcdserver"`
	}
	err := get("/version", &version)
	return version.Server, err
}

// StartEtcdCluster starts an etcd cluster of n members for this test alone; args
// are appended to the command line of each. A member may be stopped, killed,
// paused and started again. Starting one waits until it answers, so a majority
// has to be running.
func StartEtcdCluster(t testing.TB, n int, args ...string) []*Server {
	t.Helper()
	return startEtcd(t, n, args, nil)
}

func startEtcd(t testing.TB, n int, args []string, network *EtcdNetwork) []*Server {
	t.Helper()
	var members []*Server
	var err error
	for range 10 { // as in launch
		if members, err = launchEtcdCluster(n, args, network); !errors.Is(err, errPortTaken) {
			break
		}
	}
	if err != nil {
		giveUp(t, etcdKind, err)
	}
	for _, s := range members {
		t.Cleanup(s.remove)
		announce(t, s)
	}
	return members
}

func launchEtcdCluster(n int, args []string, network *EtcdNetwork) (members []*Server, err error) {
	defer func() {
		if err != nil {
			for _, s := range members {
				s.remove()
			}
		}
	}()
	var peers []string
	for range n {
		s, err := prepare(etcdKind, args)
		if err != nil {
			return members, err
		}
		s.ports = []int{freePort(), freePort()}
		s.address()
		members = append(members, s)
		if network != nil {
			if err := network.attach(s); err != nil {
				return members, err
			}
		}
		peers = append(peers, s.peer())
	}
	for _, s := range members {
		s.peers = strings.Join(peers, ",")
		if err := s.spawn(); err != nil {
			return members, err
		}
	}
	for _, s := range members { // none answers before a majority runs
		if err := s.wait(); err != nil {
			return members, err
		}
	}
	return members, nil
}
