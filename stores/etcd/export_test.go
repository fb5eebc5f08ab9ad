package etcdstore

import "time"

// Skew makes the clocks of s wrong by d.
func Skew(s *Store, d time.Duration) {
	s.clock = func() instant {
		t := now()
		return instant{mono: t.mono.Add(d), wall: t.wall.Add(d)}
	}
}
