// Package faults is a TCP proxy that fails on demand. It stands between a
// client and any server, and breaks the network while a test runs:
//
//	proxy := faults.NewProxy(t, "127.0.0.1:6379")
//	store := open(t, proxy.Addr())
//	…
//	proxy.Set(faults.HalfOpen()) // the server hears and acts, its replies are lost
//	…
//	proxy.Clear()
//
// A [Fault] says what happens to the bytes of each direction; it can be changed
// at any time, for all connections, for those that are open, or for those to
// come. A [Trap] waits for one request, known by a text in it, and loses that
// or its reply.
//
// # What a network can do
//
// TCP delivers bytes in order or not at all, so that is all the proxy does.
// Bytes that are held ([Silence]) come late, even if the client has closed its
// connection meanwhile: a server may act on a request that its client gave up
// long ago. A connection that lost bytes ([Blackhole], [HalfOpen]) never
// delivers anything in that direction again, and is reset when the fault ends.
//
// One thing a proxy cannot play: it accepts every connection, so that a client
// behind it never fails to dial in silence, but waits for the first answer.
package faults
