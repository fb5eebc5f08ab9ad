// Package images says which container images of servers the tests and the
// benchmarks run, and how.
package images

import (
	"os"
	"strings"
)

// Image is a server's image.
type Image struct {
	kind, name string
	// Port that the server listens on.
	Port string
	// Env and Cmd of the container.
	Env map[string]string
	Cmd []string
}

// The images that are run unless a variable names others.
var (
	Redis = Image{
		kind: "redis", name: "redis:7.4.2", Port: "6379",
		Cmd: []string{"redis-server", "--save", "", "--protected-mode", "no"},
	}
	Etcd = Image{
		kind: "etcd", name: "gcr.io/etcd-development/etcd:v3.6.5", Port: "2379",
		Cmd: []string{
			"/usr/local/bin/etcd", "--data-dir=/tmp/data",
			"--listen-client-urls=http://0.0.0.0:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		},
	}
	Postgres = Image{
		kind: "postgres", name: "postgres:17.4", Port: "5432",
		Env: map[string]string{"POSTGRES_HOST_AUTH_METHOD": "trust"},
	}
	Mongo = Image{
		kind: "mongo", name: "mongo:8.0.5", Port: "27017",
		Cmd: []string{"mongod", "--bind_ip_all"},
	}
)

// Name returns what $LEASEKIT_REDIS_IMAGE, or the same for another server, names:
// a mirror, or an image that tools/images.sh has made. Else it is a pinned
// version of the server's official image.
func (i Image) Name() string {
	if other := os.Getenv("LEASEKIT_" + strings.ToUpper(i.kind) + "_IMAGE"); other != "" {
		return other
	}
	return i.name
}
