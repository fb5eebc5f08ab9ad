package testserver

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// EtcdNetwork is what the members of an etcd cluster speak to each other over:
// each reaches the others through an HTTP proxy of its own, so that one can be
// cut off from its peers while clients still reach it.
type EtcdNetwork struct {
	mu      sync.Mutex
	members map[string]*Server // by peerName
	cut     map[*Server]bool
	flows   map[*flow]struct{}
	heal    chan struct{} // closed by Heal
}

// flow is a request of one member to another; messages are streamed in its
// body, so that it lasts.
type flow struct {
	from, to *Server
	cancel   context.CancelFunc
}

// peerDomain is no domain that anybody can resolve: only the proxies know it.
// For an address of this machine Go would use no proxy.
const peerDomain = ".etcd.invalid"

// StartEtcdOnNetwork is [StartEtcdCluster] for a network that can be cut.
func StartEtcdOnNetwork(t testing.TB, n int, args ...string) ([]*Server, *EtcdNetwork) {
	t.Helper()
	network := &EtcdNetwork{members: make(map[string]*Server), cut: make(map[*Server]bool), flows: make(map[*flow]struct{}), heal: make(chan struct{})}
	return startEtcd(t, n, args, network), network
}

// attach gives s its name in the network and its way into it.
func (nw *EtcdNetwork) attach(s *Server) error {
	listener, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	proxy := &http.Server{Handler: nw.handler(s), ReadHeaderTimeout: time.Minute}
	go func() { _ = proxy.Serve(listener) }()
	s.onRemove = append(s.onRemove, func() { _ = proxy.Close() })
	nw.mu.Lock()
	nw.members[s.peerName()] = s
	nw.mu.Unlock()
	s.peerHost = s.peerName() + peerDomain
	at := "http://" + listener.Addr().String()
	s.env = []string{"HTTP_PROXY=" + at, "http_proxy=" + at, "NO_PROXY=", "no_proxy="}
	return nil
}

// handler forwards the requests of s to the member that they name.
func (nw *EtcdNetwork) handler(s *Server) http.Handler {
	transport := &http.Transport{MaxIdleConnsPerHost: 16}
	s.onRemove = append(s.onRemove, transport.CloseIdleConnections)
	forward := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1, // messages are streamed
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: "127.0.0.1:" + r.In.URL.Port()})
		},
		ErrorLog:     log.New(io.Discard, "", 0), // streams break off on purpose
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		nw.mu.Lock()
		to := nw.members[strings.TrimSuffix(r.URL.Hostname(), peerDomain)]
		nw.mu.Unlock()
		if to == nil {
			http.Error(w, "no such member: "+r.URL.Host, http.StatusBadGateway)
			return
		}
		ctx, done := nw.begin(r.Context(), s, to)
		defer done()
		if ctx.Err() != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer func() {
			// A reverse proxy panics so when a body breaks off half way.
			if err := recover(); err != nil && err != http.ErrAbortHandler { //nolint:errorlint // a panic's value
				panic(err)
			}
		}()
		forward.ServeHTTP(w, r.WithContext(ctx))
	})
}

// begin waits until a request may pass. Its context ends when it must not any
// more.
func (nw *EtcdNetwork) begin(ctx context.Context, from, to *Server) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	f := &flow{from: from, to: to, cancel: cancel}
	for {
		nw.mu.Lock()
		if nw.cut[from] == nw.cut[to] {
			nw.flows[f] = struct{}{}
			nw.mu.Unlock()
			return ctx, func() {
				cancel()
				nw.mu.Lock()
				defer nw.mu.Unlock()
				delete(nw.flows, f)
			}
		}
		heal := nw.heal
		nw.mu.Unlock()
		select {
		case <-heal:
		case <-ctx.Done():
			return ctx, cancel
		}
	}
}

// Isolate cuts members off from all others, until [EtcdNetwork.Heal]. What they
// are sending to each other is lost; what they begin to send is held.
func (nw *EtcdNetwork) Isolate(members ...*Server) {
	nw.mu.Lock()
	defer nw.mu.Unlock()
	for _, m := range members {
		nw.cut[m] = true
	}
	for f := range nw.flows {
		if nw.cut[f.from] != nw.cut[f.to] {
			f.cancel()
		}
	}
}

// Heal joins all members again.
func (nw *EtcdNetwork) Heal() {
	nw.mu.Lock()
	defer nw.mu.Unlock()
	clear(nw.cut)
	close(nw.heal)
	nw.heal = make(chan struct{})
}

// peerURL is where other members reach s.
func (s *Server) peerURL() string {
	host := s.peerHost
	if host == "" {
		host = "127.0.0.1"
	}
	return "http://" + host + ":" + strconv.Itoa(s.ports[1])
}
