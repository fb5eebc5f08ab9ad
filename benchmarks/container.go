package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/leasekit/leasekit/internal/testserver/images"
)

// containers are the servers that can run in one, and their URLs with ADDR for
// host:port.
var containers = map[string]struct {
	image images.Image
	url   string
}{
	"redis":    {images.Redis, "redis://ADDR/0"},
	"etcd":     {images.Etcd, "http://ADDR"},
	"postgres": {images.Postgres, "postgres://postgres@ADDR/postgres?sslmode=disable"},
	"mongo":    {images.Mongo, "mongodb://ADDR/?directConnection=true"},
}

// startContainer starts a server of one kind in a container and returns its
// URL, its image, and what ends it.
func startContainer(ctx context.Context, kind string) (url, image string, stop func(), err error) {
	c, ok := containers[kind]
	if !ok {
		return "", "", nil, fmt.Errorf("no image for %s", kind)
	}
	image = c.image.Name()
	args := []string{"run", "--detach", "--rm", "--publish", "127.0.0.1::" + c.image.Port}
	for name, value := range c.image.Env {
		args = append(args, "--env", name+"="+value)
	}
	id, err := docker(ctx, append(append(args, image), c.image.Cmd...)...)
	if err != nil {
		return "", "", nil, err
	}
	stop = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		_, _ = docker(ctx, "rm", "--force", id)
	}
	addr, err := docker(ctx, "port", id, c.image.Port+"/tcp")
	if err != nil {
		stop()
		return "", "", nil, err
	}
	addr, _, _ = strings.Cut(addr, "\n")
	return strings.Replace(c.url, "ADDR", addr, 1), image, stop, nil
}

// docker runs the docker command and returns what it printed.
func docker(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "docker", args...).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && len(exit.Stderr) > 0 {
		err = errors.New(strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		return "", fmt.Errorf("docker %s: %w", args[0], err)
	}
	return strings.TrimSpace(string(out)), nil
}
