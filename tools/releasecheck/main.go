// Command releasecheck plays the release of a version before it is tagged. It
// packs each published module as the Go module proxy would, out of the commit
// at HEAD, and then does what users will do, in empty folders: "go get" each
// library and build a program that imports its packages, and "go install" each
// command.
//
//	releasecheck [-v] DIR      DIR: the repository's top folder
//	releasecheck -tags DIR     only prints the tags of the libraries, those of
//	                           the release's first step
//
// That catches what a workspace and replace directives hide: a module that
// needs a version of its sibling which will never exist, a go.mod that is not
// tidy for importers, a file missing from the module, a replace directive that
// "go install" refuses.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

// unpublished are the modules of go.work that are never tagged, by folder. This
// is the one place that says so.
var unpublished = []string{"integration", "benchmarks", "examples/sqlite"}

var (
	verbose = flag.Bool("v", false, "print each go command")
	tags    = flag.Bool("tags", false, "print the tags of the libraries, and check nothing")
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("release-check: ")
	flag.Parse()
	if flag.NArg() != 1 {
		log.Fatal("usage: releasecheck [-v] DIR")
	}
	do := run
	if *tags {
		do = printTags
	}
	if err := do(flag.Arg(0)); err != nil {
		log.Fatal(err)
	}
}

func printTags(top string) error {
	mods, err := published(top)
	for _, m := range mods {
		if !m.command() {
			fmt.Println(path.Join(m.dir, m.Version.Version))
		}
	}
	return err
}

// mod is a module that will be published.
type mod struct {
	module.Version
	dir  string // relative to the repository; "" is the root
	file *modfile.File
}

// command reports whether the module is there to be installed, not imported.
func (m *mod) command() bool { return strings.HasPrefix(m.dir, "cmd/") }

func run(top string) (err error) {
	mods, err := published(top)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "leasekit-release-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	if out, err := exec.Command("git", "-C", top, "status", "--porcelain").Output(); err == nil && len(out) > 0 {
		log.Print("the work tree differs from HEAD, which is what is checked")
	}
	userEnv := env(tmp)
	for _, m := range mods {
		if err := pack(top, filepath.Join(tmp, "proxy"), m); err != nil {
			return fmt.Errorf("pack %s: %w", m, err)
		}
	}
	var failed []error
	for i, m := range mods {
		start := time.Now()
		dir := filepath.Join(tmp, fmt.Sprint("user", i))
		if err := try(dir, userEnv, m); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", m, err))
			continue
		}
		log.Printf("ok  %s  %.1fs", m, time.Since(start).Seconds())
	}
	return errors.Join(failed...)
}

// published returns the modules of go.work that get a tag, with the version
// that they require of each other: the next one.
func published(top string) ([]*mod, error) {
	data, err := os.ReadFile(filepath.Join(top, "go.work"))
	if err != nil {
		return nil, err
	}
	work, err := modfile.ParseWork("go.work", data, nil)
	if err != nil {
		return nil, err
	}
	var mods []*mod
	for _, use := range work.Use {
		dir := filepath.ToSlash(filepath.Clean(use.Path))
		if slices.Contains(unpublished, dir) {
			continue
		}
		name := filepath.Join(top, dir, "go.mod")
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		file, err := modfile.Parse(name, data, nil)
		if err != nil {
			return nil, err
		}
		if dir == "." {
			dir = ""
		}
		mods = append(mods, &mod{Version: module.Version{Path: file.Module.Mod.Path}, dir: dir, file: file})
	}
	version, err := nextVersion(mods)
	if err != nil {
		return nil, err
	}
	for _, m := range mods {
		m.Version.Version = version
	}
	return mods, nil
}

// nextVersion returns the version that the modules require of each other, which
// must be one and the same, of published modules only.
func nextVersion(mods []*mod) (string, error) {
	root := slices.IndexFunc(mods, func(m *mod) bool { return m.dir == "" })
	if root < 0 {
		return "", errors.New("go.work does not use the top folder")
	}
	ours := mods[root].Path
	version := ""
	for _, m := range mods {
		for _, req := range m.file.Require {
			if req.Mod.Path != ours && !strings.HasPrefix(req.Mod.Path, ours+"/") {
				continue
			}
			if !slices.ContainsFunc(mods, func(o *mod) bool { return o.Path == req.Mod.Path }) {
				return "", fmt.Errorf("%s requires %s, which is not published", m.Path, req.Mod.Path)
			}
			if version != "" && version != req.Mod.Version {
				return "", fmt.Errorf("%s requires %s, others %s: all modules share one version", m.Path, req.Mod, version)
			}
			version = req.Mod.Version
		}
	}
	if version == "" {
		return "", errors.New("no module requires another, so the next version is not known")
	}
	return version, nil
}

// pack writes a module to a folder that serves as a module proxy.
func pack(top, proxy string, m *mod) error {
	escaped, err := module.EscapePath(m.Path)
	if err != nil {
		return err
	}
	dir := filepath.Join(proxy, filepath.FromSlash(escaped), "@v")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var packed bytes.Buffer
	if err := zip.CreateFromVCS(&packed, m.Version, top, "HEAD", m.dir); err != nil {
		return err
	}
	goMod, err := exec.Command("git", "-C", top, "show", "HEAD:./"+path.Join(m.dir, "go.mod")).Output()
	if err != nil {
		return err
	}
	info, err := json.Marshal(map[string]any{"Version": m.Version.Version, "Time": time.Now().UTC()})
	if err != nil {
		return err
	}
	for name, data := range map[string][]byte{
		"list":                      []byte(m.Version.Version + "\n"),
		m.Version.Version + ".info": info,
		m.Version.Version + ".mod":  goMod,
		m.Version.Version + ".zip":  packed.Bytes(),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// env is the environment of a user who has the proxy in tmp in front of the
// usual one. The module cache is a new one, because the version must not stay
// behind in the real one; that serves as a proxy for everything else.
func env(tmp string) []string {
	proxies := []string{"file://" + filepath.Join(tmp, "proxy")}
	if cache := goEnv("GOMODCACHE"); cache != "" {
		proxies = append(proxies, "file://"+filepath.Join(cache, "cache", "download"))
	}
	for p := range strings.FieldsFuncSeq(goEnv("GOPROXY"), func(r rune) bool { return r == ',' || r == '|' }) {
		if p != "direct" && p != "off" { // nothing of ours is to be had from its repository yet
			proxies = append(proxies, p)
		}
	}
	return append(os.Environ(),
		"GOWORK=off",
		// The cache must be deletable, and what was built in it last time
		// usable from another folder.
		"GOFLAGS=-mod=mod -modcacherw -trimpath",
		"GOPRIVATE=", "GONOPROXY=",
		"GOSUMDB=off", // the checksum database cannot know what is not released
		"GOPROXY="+strings.Join(proxies, ","),
		"GOMODCACHE="+filepath.Join(tmp, "modcache"),
		"GOBIN="+filepath.Join(tmp, "bin"))
}

func goEnv(name string) string {
	out, err := exec.Command("go", "env", name).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// try does with a published module what its users will do.
func try(dir string, env []string, m *mod) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if m.command() {
		return goCommand(dir, env, "install", m.String())
	}
	if err := goCommand(dir, env, "mod", "init", "example.com/user"); err != nil {
		return err
	}
	if err := goCommand(dir, env, "get", m.String()); err != nil {
		return err
	}
	packages, err := goOutput(dir, env, "list", "-f", `{{if ne .Name "main"}}{{.ImportPath}}{{end}}`, m.Path+"/...")
	if err != nil {
		return err
	}
	var program strings.Builder
	program.WriteString("package main\n\nimport (\n")
	imports := 0
	for pkg := range strings.FieldsSeq(packages) {
		inModule := pkg == m.Path || strings.HasPrefix(pkg, m.Path+"/")
		if inModule && !strings.Contains(pkg+"/", "/internal/") {
			fmt.Fprintf(&program, "\t_ %q\n", pkg)
			imports++
		}
	}
	program.WriteString(")\n\nfunc main() {}\n")
	if imports == 0 {
		return errors.New("the module has no package to import")
	}
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(program.String()), 0o644); err != nil {
		return err
	}
	if err := goCommand(dir, env, "mod", "tidy"); err != nil {
		return err
	}
	return goCommand(dir, env, "build", "-o", os.DevNull, ".")
}

func goCommand(dir string, env []string, args ...string) error {
	_, err := goOutput(dir, env, args...)
	return err
}

func goOutput(dir string, env []string, args ...string) (string, error) {
	if *verbose {
		log.Print("go ", strings.Join(args, " "))
	}
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Env = dir, env
	var out, text bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&out, &text), &text
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, text.Bytes())
	}
	return out.String(), nil
}
