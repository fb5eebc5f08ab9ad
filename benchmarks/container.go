package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// container is how a server is run by Docker. Another image may be named by the
// variable LEASEKIT_REDIS_IMAGE and so on, as for the tests in integration/.
type container struct {
	image string
	port  string
	run   []string // options of docker run, then "IMAGE", then arguments
	url   string   // with ADDR for host:port
}

var containers = map[string]container{
	"redis": {
		image: "redis:7.4.2", port: "6379",
		run: []string{"IMAGE", "redis-server", "--save", "", "--protected-mode", "no"},
		url: "redis://ADDR/0",
	},
	"etcd": {
		image: "gcr.io/etcd-development/etcd:v3.6.5", port: "2379",
		run: []string{"IMAGE", "/usr/local/bin/etcd", "--data-dir=/tmp/data", "--listen-client-urls=http://0.0.0.0:2379", "--advertise-client-urls=http://127.0.0.1:2379"},
		url: "http://ADDR",
	},
	"postgres": {
		image: "postgres:17.4", port: "5432",
		run: []string{"-e", "POSTGRES_HOST_AUTH_METHOD=trust", "IMAGE"},
		url: "postgres://postgres@ADDR/postgres?sslmode=disable",
	},
	"mongo": {
		image: "mongo:8.0.5", port: "27017",
		run: []string{"IMAGE", "mongod", "--bind_ip_all"},
		url: "mongodb://ADDR/?directConnection=true",
	},
}

// startContainer starts a server of one kind in a container and returns its
// URL, its image, and what ends it.
func startContainer(ctx context.Context, kind string) (url, image string, stop func(), err error) {
	c, ok := containers[kind]
	if !ok {
		return "", "", nil, fmt.Errorf("no image for %s", kind)
	}
	image = c.image
	if other := os.Getenv("LEASEKIT_" + strings.ToUpper(kind) + "_IMAGE"); other != "" {
		image = other
	}
	args := []string{"run", "--detach", "--rm", "--publish", "127.0.0.1::" + c.port}
	for _, arg := range c.run {
		if arg == "IMAGE" {
			arg = image
		}
		args = append(args, arg)
	}
	id, err := docker(ctx, args...)
	if err != nil {
		return "", "", nil, err
	}
	stop = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		_, _ = docker(ctx, "rm", "--force", id)
	}
	addr, err := docker(ctx, "port", id, c.port+"/tcp")
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
