package mongostore_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/leasekit/leasekit/internal/testserver"
)

// wire is a proxy that understands the wire protocol: it can deliver a command
// twice, lose an answer, or change it. One request at a time is on a connection,
// as the driver sends them.
type wire struct {
	url    string // of the server, seen through the proxy
	server string // host:port

	mu     sync.Mutex
	meddle func(command string, request bson.Raw) trick
	conns  map[net.Conn]struct{}
}

// trick is what happens to one request. The zero value passes it on.
type trick struct {
	twice   bool                      // deliver it twice, the client gets the second answer
	lose    bool                      // close the connection instead of answering
	instead bson.D                    // answer this, and deliver nothing
	answer  func(reply bson.D) bson.D // changes the answer
}

// newWire starts a proxy in front of the primary of server. meddle is called for
// every command, from many goroutines.
func newWire(t testing.TB, server *testserver.Server, meddle func(command string, request bson.Raw) trick) *wire {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url, err := urlAt(server, listener.Addr().String())
	if err != nil {
		_ = listener.Close()
		t.Skip(err)
	}
	// In the other mode the server would send answers to one hello again and
	// again.
	url += "&serverMonitoringMode=poll&heartbeatFrequencyMS=500"
	w := &wire{url: url, server: primary(t, server), meddle: meddle, conns: map[net.Conn]struct{}{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { w.serve(client) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		w.mu.Lock()
		for c := range w.conns {
			_ = c.Close()
		}
		w.mu.Unlock()
		wg.Wait()
	})
	return w
}

// urlAt is the URL of server with the address of a proxy in it.
func urlAt(server *testserver.Server, addr string) (string, error) {
	u, err := url.Parse(server.URL)
	if err != nil || u.Scheme != "mongodb" || u.Query().Get("tls") == "true" || u.Query().Get("ssl") == "true" {
		return "", errors.New("a proxy needs a server at a mongodb:// URL without TLS")
	}
	u.Host = addr
	q := u.Query()
	q.Del("replicaSet")
	q.Set("directConnection", "true")
	u.RawQuery = q.Encode()
	return u.String(), nil
}

// primary returns host:port of the one that writes.
func primary(t testing.TB, server *testserver.Server) string {
	t.Helper()
	hello, err := connect(t, server.URL).Database("admin").RunCommand(t.Context(), bson.D{{Key: "hello", Value: 1}}).Raw()
	if err != nil {
		t.Fatalf("hello: %v", err)
	}
	addr, ok := hello.Lookup("primary").StringValueOK()
	if !ok {
		return server.Addr
	}
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return server.Addr // a name that only the members know
	}
	_ = conn.Close()
	return addr
}

func (w *wire) serve(client net.Conn) {
	server, err := net.Dial("tcp", w.server)
	if err != nil {
		_ = client.Close()
		return
	}
	w.mu.Lock()
	w.conns[client], w.conns[server] = struct{}{}, struct{}{}
	w.mu.Unlock()
	defer func() {
		_, _ = client.Close(), server.Close()
		w.mu.Lock()
		delete(w.conns, client)
		delete(w.conns, server)
		w.mu.Unlock()
	}()
	for w.forward(client, server) == nil {
	}
}

func (w *wire) forward(client, server net.Conn) error {
	request, err := readMessage(client)
	if err != nil {
		return err
	}
	var do trick
	if body, ok := request.body(); ok {
		if elements, err := body.Elements(); err == nil && len(elements) > 0 {
			do = w.meddle(elements[0].Key(), body)
		}
	}
	if do.instead != nil {
		return answerWith(client, request, do.instead)
	}
	var reply message
	for range map[bool]int{false: 1, true: 2}[do.twice] {
		if _, err := server.Write(request); err != nil {
			return err
		}
		if reply, err = readMessage(server); err != nil {
			return err
		}
	}
	if do.lose {
		return errors.New("lost")
	}
	if do.answer != nil {
		if reply, err = reply.changed(do.answer); err != nil {
			return err
		}
	}
	_, err = client.Write(reply)
	return err
}

// message is one of the wire protocol: length, request id, response to and
// opcode, 4 bytes each, and for OP_MSG flags, the kind of section, and a document.
// Source: the manual, "MongoDB Wire Protocol".
type message []byte

const (
	opMsg    = 2013
	headSize = 21
)

func readMessage(r io.Reader) (message, error) {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	size := binary.LittleEndian.Uint32(length[:])
	if size < 16 || size > 1<<26 {
		return nil, fmt.Errorf("message of %d bytes", size)
	}
	m := make(message, size)
	copy(m, length[:])
	_, err := io.ReadFull(r, m[4:])
	return m, err
}

// answerWith writes a message with doc in answer to request.
func answerWith(client io.Writer, request message, doc bson.D) error {
	reply := append(message{}, request[:headSize]...)
	copy(reply[8:], request[4:8])                // response to
	binary.LittleEndian.PutUint32(reply[16:], 0) // flags
	reply, err := reply.with(doc)
	if err != nil {
		return err
	}
	_, err = client.Write(reply)
	return err
}

func (m message) body() (bson.Raw, bool) {
	if len(m) < headSize+5 || binary.LittleEndian.Uint32(m[12:]) != opMsg || m[20] != 0 {
		return nil, false
	}
	size := binary.LittleEndian.Uint32(m[headSize:])
	if uint64(headSize)+uint64(size) > uint64(len(m)) {
		return nil, false
	}
	return bson.Raw(m[headSize : headSize+size]), true
}

func (m message) changed(change func(bson.D) bson.D) (message, error) {
	body, ok := m.body()
	if !ok {
		return nil, errors.New("not an OP_MSG")
	}
	var doc bson.D
	if err := bson.Unmarshal(body, &doc); err != nil {
		return nil, err
	}
	return m.with(change(doc))
}

// with returns a message with the head of m and doc as its only section.
func (m message) with(doc bson.D) (message, error) {
	raw, err := bson.Marshal(doc)
	if err != nil {
		return nil, err
	}
	out := append(append(message{}, m[:headSize]...), raw...)
	binary.LittleEndian.PutUint32(out, uint32(len(out)))
	return out, nil
}
