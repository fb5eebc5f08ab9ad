package conformance

import (
	"cmp"
	"context"
	"iter"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/leasekit/leasekit/core"
)

// asked tells whether q asks for key.
func (s *server) asked(q core.LeaseQuery, key string) bool {
	switch {
	case q.Key != "" && s.makes("KeyTakenForPrefix"):
		return strings.HasPrefix(key, q.Key)
	case q.Key != "":
		return key == q.Key
	case s.makes("PrefixIsPattern"):
		match, _ := path.Match(q.Prefix+"*", key)
		return match
	default:
		return strings.HasPrefix(key, q.Prefix)
	}
}

// look returns what q asks for.
func (s *server) look(q core.LeaseQuery) []core.LeaseInfo {
	now := time.Now()
	var found []core.LeaseInfo
	for key, r := range s.records {
		live := s.live(r, now, now)
		switch s.mistake {
		case "LeasesShowReleased":
			live = r.token > 0
		case "LeasesShowExpired":
			live = r.owner != ""
		case "LookingRenews":
			if live {
				r.expires = now.Add(r.ttl)
			}
		}
		if live && s.asked(q, key) {
			found = append(found, s.info(key, r, now))
		}
	}
	slices.SortFunc(found, func(a, b core.LeaseInfo) int { return cmp.Compare(a.Key, b.Key) })
	switch {
	case s.makes("LeasesFirstPageOnly"):
		found = found[:min(len(found), 100)]
	case s.makes("LeasesTwiceAtPageEnd") && len(found) > 100:
		found = slices.Insert(found, 100, found[99])
	}
	return found
}

func (s *server) info(key string, r *record, now time.Time) core.LeaseInfo {
	info := core.LeaseInfo{Key: key, Label: core.OwnerLabel(r.owner), Token: r.token, Left: r.expires.Sub(now)}
	switch s.mistake {
	case "LabelIsOwner":
		info.Label = r.owner
	case "LeftIsUntilEpoch":
		info.Left = time.Duration(r.expires.UnixNano())
	}
	return info
}

// Leases implements [core.Inspector].
func (c *client) Leases(ctx context.Context, q core.LeaseQuery) iter.Seq2[core.LeaseInfo, error] {
	return func(yield func(core.LeaseInfo, error) bool) {
		err := q.Check()
		var found []core.LeaseInfo
		if err == nil {
			err = c.call(ctx, func() { found = c.srv.look(q) })
		}
		if err != nil {
			if !c.srv.makes("LeasesSwallowErrors") {
				yield(core.LeaseInfo{}, err)
			}
			return
		}
		for _, info := range found {
			if !yield(info, nil) {
				return
			}
		}
	}
}

// Break implements [core.Breaker].
func (c *client) Break(ctx context.Context, key string) (was core.LeaseInfo, broken bool, err error) {
	s := c.srv
	if s.makes("BreakIgnoresContext") {
		ctx = context.WithoutCancel(ctx)
	}
	if err := core.CheckKey(key); err != nil {
		return core.LeaseInfo{}, false, err
	}
	err = c.call(ctx, func() {
		now := time.Now()
		r := s.records[key]
		if !s.live(r, now, now) {
			broken = s.makes("BreakAlwaysTrue")
			return
		}
		was, broken = s.info(key, r, now), true
		s.writes++
		switch s.mistake {
		case "BreakOnlyMarks":
			return
		case "BreakDeletesRecord":
			delete(s.records, key)
		case "BrokenRenews":
			r.last, r.owner, r.nonce = r.owner, "", nil
		case "BreakByPrefix":
			for other, r := range s.records {
				if strings.HasPrefix(other, key) {
					r.owner, r.nonce, r.expires = "", nil, now
				}
			}
		default:
			r.owner, r.nonce, r.expires = "", nil, now
		}
		if !s.makes("BreakInSilence") {
			s.notify(c, key)
		}
	})
	return was, broken, err
}
