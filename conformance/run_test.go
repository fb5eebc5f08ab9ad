package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/leasekit/leasekit/core"
)

// caseEnv tells TestCase, in a process that a test started, what to run: the
// suite's own outcome can only be seen from outside.
const caseEnv = "LEASEKIT_CONFORMANCE_CASE"

// cases are the configurations that TestCase runs.
var cases = map[string]func() Config{
	"healthy": func() Config { return fake("") },
	"broken":  func() Config { return fake("TokenResetOnRelease") },
	"known failing": func() Config {
		c := fake("TokenInNanoseconds")
		c.OpenRetention = nil
		c.KnownFailing = map[string]string{"TokenFitsJSON": "issue 12", "MutualExclusion": "core refuses the token"}
		return c
	},
	"known failing passes": func() Config {
		c := fake("")
		c.KnownFailing = map[string]string{"Fencing/TokenFitsJSON": "issue 12"}
		return c
	},
	"misspelt": func() Config {
		c := fake("")
		c.NotSupported = map[string]string{"TokenFitsJson": "a name that no rule has"}
		return c
	},
	"only Open": func() Config {
		c := fake("")
		return Config{Open: c.Open, Around: c.Around, NotSupported: map[string]string{"Notifier": "polling is enough", "HeldTryIsARead": "it is not"}}
	},
	"no server": func() Config {
		return Config{Open: func(t testing.TB) core.LockStore { t.Skip("no server here"); return nil }}
	},
	"too slow": func() Config {
		open := referenceConfig("").Open
		return Config{Open: func(t testing.TB) core.LockStore { return slowStore{open(t)} }, TTL: 2 * time.Millisecond}
	},
	"panics": func() Config {
		c := fake("")
		c.Rules = []Rule{{Group: "Own", Name: "Panics", Sentence: "It does not panic.", Check: func(*T) { panic("boom") }}}
		return c
	},
	"processes":        func() Config { return fileConfig(true) },
	"processes broken": func() Config { return fileConfig(false) },
	"processes that skip": func() Config {
		c := fileConfig(true)
		open := c.Open
		c.Open = func(t testing.TB) core.LockStore {
			if isWorker() {
				t.Skip("no server here")
			}
			return open(t)
		}
		return c
	},
}

func fake(mistake string) Config {
	c := referenceConfig(mistake)
	c.Around = inBubble
	return c
}

func TestCase(t *testing.T) {
	name := os.Getenv(caseEnv)
	if name == "" {
		t.Skip("run by TestRun in a process of its own")
	}
	t.Run("with/slash", func(t *testing.T) { Run(t, cases[name]()) })
}

func TestRun(t *testing.T) {
	for _, tt := range []struct {
		name string
		// run is added to the pattern of -run.
		run  string
		fail bool
		want []string
		not  []string
	}{
		{
			name: "healthy",
			want: []string{
				"rules checked\n", " not supported:", "set Config.Env: Exclusion/MutualExclusionOfProcesses",
				"--- PASS: TestCase/with/slash/Fencing/TokenGrowsAfterRelease", "--- PASS: TestCase/with/slash/Exclusion/LeaseSurvivesRestart",
				"--- SKIP: TestCase/with/slash/Exclusion/MutualExclusionOfProcesses", "100 hand-overs between 4 clients",
			},
			not: []string{"broken", "not judged", "not selected"},
		}, {
			name: "broken",
			fail: true,
			want: []string{
				"TokenGrowsAfterRelease is broken (fencing.go:", "  got:      token 1 after 1, when the lease before had been released",
				"  want:     a greater one", "  contract: Tokens of one key strictly increase", " broken:", "    Fencing/TokenGrowsAfterRelease\n",
			},
		}, {
			name: "known failing",
			want: []string{"2 known failing:", "Fencing/TokenFitsJSON: issue 12", "known failing: issue 12", "want:     more than 0 and less than 2^53"},
			not:  []string{" broken:"},
		}, {
			name: "known failing passes",
			fail: true,
			want: []string{`TokenFitsJSON passes, although Config.KnownFailing lists it ("issue 12"): remove the entry`, "1 failed otherwise:"},
		}, {
			name: "misspelt",
			fail: true,
			want: []string{`there is no rule or group "TokenFitsJson"`},
			not:  []string{"rules checked"},
		}, {
			name: "only Open",
			want: []string{"set Config.Restart: Exclusion/LeaseSurvivesRestart, Fencing/TokenSurvivesRestart", "polling is enough: Notifier (all 10)", "it is not: State/HeldTryIsARead"},
			not:  []string{"broken", "--- PASS: TestCase/with/slash/Notifier/"},
		}, {
			name: "no server",
			want: []string{"no server here", "--- SKIP: TestCase/with/slash "},
			not:  []string{"rules checked"},
		}, {
			name: "too slow",
			run:  "/Renewal/RenewPushesExpiry",
			fail: true,
			want: []string{"RenewPushesExpiry could not be judged", "with a ttl of ", "1 not judged", "0 rules checked"},
		}, {
			name: "panics",
			run:  "/Own",
			fail: true,
			want: []string{"Panics could not be checked: panic: boom", "run_test.go:"},
		}, {
			name: "healthy",
			run:  "/Fencing/TokenGrowsAfterRelease",
			want: []string{"1 rules checked", "not selected by -run or -skip", "--- PASS: TestCase/with/slash/Fencing/TokenGrowsAfterRelease"},
			not:  []string{"TokenGrowsAfterExpiry"},
		}, {
			name: "healthy",
			run:  "//LeaseSurvivesRestart", // it waits for the rules that do not run
			want: []string{"1 rules checked", "--- PASS: TestCase/with/slash/Exclusion/LeaseSurvivesRestart"},
		}, {
			name: "processes",
			run:  "/Exclusion/MutualExclusionOfProcesses",
			want: []string{"1 rules checked", "--- PASS: TestCase/with/slash/Exclusion/MutualExclusionOfProcesses"},
		}, {
			name: "processes broken",
			run:  "/Exclusion/MutualExclusionOfProcesses",
			fail: true,
			want: []string{"MutualExclusionOfProcesses is broken", "got:      the counter is at", "want:     180"},
		}, {
			name: "processes that skip",
			run:  "/Exclusion/MutualExclusionOfProcesses",
			fail: true,
			want: []string{"a child process ended and had not called conformance.Run"},
		},
	} {
		t.Run(tt.name+strings.ReplaceAll(tt.run, "/", " "), func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^TestCase$/^with$/^slash$"+tt.run)
			cmd.Env = append(os.Environ(), caseEnv+"="+tt.name, fileEnv+"="+filepath.Join(t.TempDir(), "leases"))
			output, err := cmd.CombinedOutput()
			if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if failed := err != nil; failed != tt.fail {
				t.Errorf("test failed: %v, want %v", failed, tt.fail)
			}
			for _, want := range tt.want {
				if !strings.Contains(string(output), want) {
					t.Errorf("output lacks %q", want)
				}
			}
			for _, not := range tt.not {
				if strings.Contains(string(output), not) {
					t.Errorf("output has %q", not)
				}
			}
			if t.Failed() {
				t.Logf("%s", output)
			}
		})
	}
}

// fileStore is a store that processes can share: leases in a JSON file, under a
// lock that is a folder. It is there for MutualExclusionOfProcesses alone.
type fileStore struct{ path string }

type fileLease struct {
	Owner   string
	Token   int64
	Expires time.Time
}

// slowStore renews more slowly than leases end.
type slowStore struct{ core.LockStore }

func (s slowStore) Renew(ctx context.Context, key, owner string, ttl time.Duration) (bool, error) {
	time.Sleep(20 * time.Millisecond)
	return s.LockStore.Renew(ctx, key, owner, ttl)
}

// fileEnv is where the file is, in every process that has to share it.
const fileEnv = "LEASEKIT_CONFORMANCE_FILE"

// fileConfig is a store that every process shares, or one in each process, as a
// forgotten setting may have it.
func fileConfig(shared bool) Config {
	return Config{
		Open: func(testing.TB) core.LockStore {
			path := os.Getenv(fileEnv)
			if !shared {
				path += strconv.Itoa(os.Getpid())
			}
			return &fileStore{path: path}
		},
		Env: func(testing.TB) []string { return []string{fileEnv + "=" + os.Getenv(fileEnv)} },
	}
}

func (s *fileStore) update(ctx context.Context, key string, f func(l *fileLease)) error {
	for {
		err := os.Mkdir(s.path+".lock", 0o700)
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrExist) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		time.Sleep(100 * time.Microsecond)
	}
	defer os.Remove(s.path + ".lock")
	leases := make(map[string]*fileLease)
	text, err := os.ReadFile(s.path)
	if err == nil {
		err = json.Unmarshal(text, &leases)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if leases[key] == nil {
		leases[key] = new(fileLease)
	}
	f(leases[key])
	text, err = json.Marshal(leases)
	if err != nil {
		return err
	}
	return os.WriteFile(s.path, text, 0o600)
}

func (s *fileStore) Acquire(ctx context.Context, key, owner string, ttl time.Duration) (grant core.Grant, err error) {
	err = s.update(ctx, key, func(l *fileLease) {
		now := time.Now()
		if now.Before(l.Expires) {
			return
		}
		*l = fileLease{Owner: owner, Token: l.Token + 1, Expires: now.Add(ttl)}
		grant = core.Grant{Acquired: true, Token: l.Token}
	})
	return grant, err
}

func (s *fileStore) Renew(ctx context.Context, key, owner string, ttl time.Duration) (renewed bool, err error) {
	err = s.update(ctx, key, func(l *fileLease) {
		if now := time.Now(); l.Owner == owner && now.Before(l.Expires) {
			l.Expires, renewed = now.Add(ttl), true
		}
	})
	return renewed, err
}

func (s *fileStore) Release(ctx context.Context, key, owner string) error {
	return s.update(ctx, key, func(l *fileLease) {
		if l.Owner == owner {
			l.Owner, l.Expires = "", time.Time{}
		}
	})
}
