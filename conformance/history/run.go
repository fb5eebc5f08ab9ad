package history

import (
	"cmp"
	"flag"
	"slices"
	"testing"
	"time"

	"github.com/leasekit/leasekit/conformance"
	"github.com/leasekit/leasekit/conformance/faults"
	"github.com/leasekit/leasekit/core"
)

// What [Run] does: some seconds' worth of calls with short leases; longer leases
// make fewer calls in the time that there is.
const (
	runCalls      = 3000
	runCallsShort = 600
	runTime       = 30 * time.Second
	runClients    = 2 * DefaultClients
	runKeys       = 2 * DefaultKeys
	// runStores is how many stores the clients share.
	runStores = 4
)

// Run drives the store of c with concurrent clients and checks what they were
// told. It uses Open, TTL, Slack and Around of c, and Faults, if set: then half
// of the stores are opened through proxies that break the network again and
// again.
//
// A violation fails the test. The message says which rule was broken, and by
// which call; a picture of the history and the JSON behind it are in
// t.ArtifactDir(), which go test -artifacts keeps.
//
// It makes 3000 calls, which takes some seconds; with -short a fifth of that.
func Run(t *testing.T, c conformance.Config) {
	t.Helper()
	plan := Plan{Calls: runCalls, For: runTime, Clients: runClients, Keys: runKeys}
	if testing.Short() {
		plan.Calls = runCallsShort
	}
	RunPlan(t, c, plan)
}

// RunPlan is [Run] with a plan of one's own, which must set Calls or For. A TTL
// and Slack that it leaves open are those of c.
func RunPlan(t *testing.T, c conformance.Config, plan Plan) {
	t.Helper()
	if c.Open == nil {
		t.Fatal("history: Config.Open is nil")
	}
	if plan.Calls == 0 && plan.For == 0 {
		t.Fatal("history: set Plan.Calls or Plan.For")
	}
	around := c.Around
	if around == nil {
		around = func(t *testing.T, f func(t *testing.T)) { t.Helper(); f(t) }
	}
	around(t, func(t *testing.T) { t.Helper(); run(t, &c, plan) })
}

func run(t *testing.T, c *conformance.Config, plan Plan) {
	t.Helper()
	plan.TTL = cmp.Or(plan.TTL, c.TTL, conformance.DefaultTTL)
	plan.Check.Slack = cmp.Or(plan.Check.Slack, c.Slack, conformance.DefaultSlack)
	plan.Clients = cmp.Or(plan.Clients, DefaultClients)

	// Opened here and not by Drive, so that Open may call t.Skip.
	var stores []core.LockStore
	for i := range runStores {
		if i%2 == 0 || c.Faults.Open == nil {
			stores = append(stores, c.Open(t))
			continue
		}
		proxy := faults.NewProxy(t, c.Faults.Addr)
		stores = append(stores, c.Faults.Open(t, proxy.Addr()))
		var clients []int
		for client := i; client < plan.Clients; client += runStores {
			clients = append(clients, client)
		}
		plan.Faults = slices.Concat(plan.Faults, NetworkFaults(proxy, plan.TTL, clients...))
	}
	report, err := Drive(t.Context(), func(client int) (core.LockStore, error) { return stores[client%len(stores)], nil }, plan)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(report)
	switch {
	case report.Violation != nil:
		reportViolation(t, report.Violation)
	case len(report.Undecided) > 0:
		t.Errorf("the histories of %d keys could not be decided in time, of %q for one", len(report.Undecided), report.Undecided[0])
	case report.Calls == 0:
		t.Error("no call was made")
	}
}

func reportViolation(t *testing.T, v *Violation) {
	t.Helper()
	t.Errorf("%v\nthe last calls on the key:\n%s", v, v.Table(20))
	html, data, err := v.WriteFiles(t.ArtifactDir())
	if err != nil {
		t.Error(err)
		return
	}
	t.Logf("picture: %s\nhistory: %s", html, data)
	if f := flag.Lookup("test.artifacts"); f != nil && f.Value.String() != "true" {
		t.Log("run go test with -artifacts to keep these files")
	}
}

// NetworkFaults are the faults that proxy can play, for [Plan].Faults. ttl is
// the plan's; clients are those whose stores are behind the proxy, all if none
// is named.
func NetworkFaults(proxy *faults.Proxy, ttl time.Duration, clients ...int) []Fault {
	set := func(name string, breaks bool, f faults.Fault) Fault {
		return Fault{Name: name, Breaks: breaks, Clients: clients, Begin: func() func() {
			proxy.Set(f)
			return proxy.Clear
		}}
	}
	return []Fault{
		set("latency", false, faults.Latency(ttl/20, ttl/10)),
		set("slow drip", false, faults.SlowDrip(64, 2*time.Millisecond)),
		set("silence", true, faults.Silence()),
		set("blackhole", true, faults.Blackhole()),
		set("half-open", true, faults.HalfOpen()),
		set("requests dropped", true, faults.DropRequests()),
		{Name: "reset", Breaks: true, Clients: clients, Begin: func() func() {
			proxy.Reset()
			return func() {}
		}},
		{Name: "down", Breaks: true, Clients: clients, Begin: func() func() {
			proxy.Set(faults.Refuse())
			proxy.Reset()
			return proxy.Clear
		}},
	}
}
