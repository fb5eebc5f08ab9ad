package testserver

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// standIn is a server with MongoDB's wire protocol over MongoDB's storage
// engine, which can be had from a package registry where no mongod can.
const standIn = "secantusd-rs"

// replicaSet is the name of the replica set of one that mongod is made.
const replicaSet = "rs0"

var mongoKind = &kind{
	name: "mongo",
	hint: "install mongod, or run `make servers-mongo`, which builds a stand-in in about 7 minutes",
	find: func() (program, bool) {
		if p, ok := findProgram("mongod", []string{"/usr/local/bin", "/opt/homebrew/bin"}, "bin"); ok {
			return p, true
		}
		p, ok := findProgram(standIn, nil, "secantus/bin", "bin")
		path := p.path
		p.version = func() string { return versionOf(path) }
		return p, ok
	},
	setup: func(s *Server) error {
		// An empty configuration file keeps the stand-in from looking for one.
		if err := os.WriteFile(filepath.Join(s.Dir, "secantusd.toml"), nil, 0o644); err != nil {
			return err
		}
		return os.MkdirAll(filepath.Join(s.Dir, "data"), 0o700)
	},
	flags: func(s *Server) []string {
		port, data := strconv.Itoa(s.ports[0]), filepath.Join(s.Dir, "data")
		if s.Name == standIn {
			// Without the last flag a kill loses writes that were acknowledged
			// with a majority write concern.
			return []string{
				"--config", filepath.Join(s.Dir, "secantusd.toml"), "--host", "127.0.0.1", "--port", port,
				"--storage-path", data, "--cache-size", "256M", "--sync-on-commit",
			}
		}
		return []string{
			"--bind_ip", "127.0.0.1", "--port", port, "--dbpath", data,
			"--replSet", replicaSet, "--wiredTigerCacheSizeGB", "0.25",
		}
	},
	ready: mongoReady,
	// Without directConnection a driver would talk to the address that the
	// server calls itself, past any proxy that a test puts in front of it.
	url:  func(s *Server) string { return "mongodb://" + s.Addr + "/?directConnection=true" },
	stop: syscall.SIGTERM,
	quit: syscall.SIGKILL,
}

// mongoReady says hello. A mongod that has just been made is told to form its
// replica set, and is ready when it has become its primary.
func mongoReady(ctx context.Context, s *Server) (string, error) {
	if u, err := url.Parse(s.URL); err != nil || u.Scheme != "mongodb" {
		return "", errors.New("not a mongodb:// URL") // mongodb+srv
	}
	conn, err := s.dial(ctx)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	hello, err := mongoCommand(conn, bsonDoc{{"hello", int32(1)}})
	if err != nil {
		return "", err
	}
	if hello["isWritablePrimary"] != true {
		err := errors.New("not a primary yet")
		if hello["setName"] == nil && s.Dir != "" {
			_, initiateErr := mongoCommand(conn, bsonDoc{{"replSetInitiate", bsonDoc{
				{"_id", replicaSet},
				{"members", bsonArray{bsonDoc{{"_id", int32(0)}, {"host", s.Addr}}}},
			}}})
			err = errors.Join(err, initiateErr)
		}
		return "", err
	}
	build, err := mongoCommand(conn, bsonDoc{{"buildInfo", int32(1)}})
	if err != nil {
		return "", nil // it wants a password: ready, and no more to learn
	}
	version, _ := build["version"].(string)
	return version, nil
}

// mongoCommand sends a command to database admin and returns the top level of
// its answer.
func mongoCommand(conn io.ReadWriter, cmd bsonDoc) (map[string]any, error) {
	const opMsg = 2013
	body := append(cmd, bsonField{"$db", "admin"}).append(nil)
	// Header (length, request id, response to, opcode), flags, section kind 0.
	msg := make([]byte, 21, 21+len(body))
	msg = append(msg, body...)
	binary.LittleEndian.PutUint32(msg, uint32(len(msg)))
	binary.LittleEndian.PutUint32(msg[4:], 1)
	binary.LittleEndian.PutUint32(msg[12:], opMsg)
	if _, err := conn.Write(msg); err != nil {
		return nil, err
	}
	var size [4]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(size[:])
	if n < 26 || n > 1<<20 {
		return nil, errors.New("not a MongoDB server")
	}
	reply := make([]byte, n-4)
	if _, err := io.ReadFull(conn, reply); err != nil {
		return nil, err
	}
	answer, err := parseBSON(reply[17:])
	if err != nil {
		return nil, err
	}
	if answer["ok"] != 1.0 {
		return answer, fmt.Errorf("%s: %v", cmd[0].key, answer["errmsg"])
	}
	return answer, nil
}

// As much of BSON as the commands above need.
type (
	bsonField struct {
		key   string
		value any
	}
	bsonDoc   []bsonField
	bsonArray []bsonDoc
)

func (d bsonDoc) append(b []byte) []byte {
	start := len(b)
	b = append(b, 0, 0, 0, 0)
	for _, f := range d {
		tag := len(b)
		b = append(b, 0)
		b = append(append(b, f.key...), 0)
		switch v := f.value.(type) {
		case int32:
			b[tag] = 0x10
			b = binary.LittleEndian.AppendUint32(b, uint32(v))
		case string:
			b[tag] = 0x02
			b = binary.LittleEndian.AppendUint32(b, uint32(len(v)+1))
			b = append(append(b, v...), 0)
		case bool:
			b[tag] = 0x08
			if v {
				b = append(b, 1)
			} else {
				b = append(b, 0)
			}
		case bsonDoc:
			b[tag] = 0x03
			b = v.append(b)
		case bsonArray:
			b[tag] = 0x04
			var elems bsonDoc
			for i, d := range v {
				elems = append(elems, bsonField{strconv.Itoa(i), d})
			}
			b = elems.append(b)
		}
	}
	b = append(b, 0)
	binary.LittleEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

var errBSON = errors.New("malformed BSON")

// parseBSON returns the fields of a document; those of other types than strings,
// booleans, doubles and 32-bit integers are nil.
func parseBSON(b []byte) (map[string]any, error) {
	if len(b) < 5 {
		return nil, errBSON
	}
	fields := map[string]any{}
	for b = b[4:]; len(b) > 0 && b[0] != 0; {
		tag := b[0]
		key, rest, ok := bytes.Cut(b[1:], []byte{0})
		if !ok {
			return nil, errBSON
		}
		size := bsonSize(tag, rest)
		if size < 0 || size > len(rest) {
			return nil, fmt.Errorf("%w: field %q of type %#x", errBSON, key, tag)
		}
		v := rest[:size]
		switch tag {
		case 0x01:
			fields[string(key)] = math.Float64frombits(binary.LittleEndian.Uint64(v))
		case 0x02:
			if size > 4 {
				fields[string(key)] = string(v[4 : size-1])
			}
		case 0x08:
			fields[string(key)] = v[0] == 1
		case 0x10:
			fields[string(key)] = int32(binary.LittleEndian.Uint32(v))
		}
		b = rest[size:]
	}
	return fields, nil
}

// bsonSize returns how long a value is, -1 if it cannot be told.
func bsonSize(tag byte, v []byte) int {
	prefixed := func(extra int) int {
		if len(v) < 4 {
			return -1
		}
		return int(binary.LittleEndian.Uint32(v)) + extra
	}
	switch tag {
	case 0x01, 0x09, 0x11, 0x12: // double, date, timestamp, int64
		return 8
	case 0x02: // string
		return prefixed(4)
	case 0x03, 0x04: // document, array
		return prefixed(0)
	case 0x05: // binary
		return prefixed(5)
	case 0x07: // object id
		return 12
	case 0x08: // boolean
		return 1
	case 0x0A: // null
		return 0
	case 0x10: // int32
		return 4
	}
	return -1
}
