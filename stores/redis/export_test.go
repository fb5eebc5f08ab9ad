package redisstore

import "time"

// SetPing makes s ping its subscription connections every d. Before the first
// Subscribe.
func SetPing(s *Store, d time.Duration) { s.wakeups.ping = d }

// Subscriptions returns how many channels s keeps for its waiters, and on how
// many connections.
func Subscriptions(s *Store) (channels, links int) {
	s.wakeups.mu.Lock()
	defer s.wakeups.mu.Unlock()
	return len(s.wakeups.topics), len(s.wakeups.links)
}
