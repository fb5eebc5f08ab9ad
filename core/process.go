package core

import (
	"context"
	"sync"
	"time"

	"github.com/leasekit/leasekit/internal/memstore"
)

var (
	warnProcessStore sync.Once
	processStore     = sync.OnceValue(func() LockStore { return processMemory{memstore.New(nil)} })
)

// processMemory is the memory store behind strategies without a store. Package
// memory, which cannot be imported here, has the same engine for everybody
// else; this one need not check what the strategy has checked.
type processMemory struct{ engine *memstore.Store }

func (p processMemory) Acquire(_ context.Context, key, owner string, ttl time.Duration) (Grant, error) {
	token, left := p.engine.Acquire(key, owner, ttl)
	return Grant{Acquired: token != 0, Token: token, Left: left}, nil
}

func (p processMemory) Renew(_ context.Context, key, owner string, ttl time.Duration) (bool, error) {
	return p.engine.Renew(key, owner, ttl), nil
}

func (p processMemory) Release(_ context.Context, key, owner string) error {
	p.engine.Release(key, owner)
	return nil
}

func (p processMemory) Subscribe(_ context.Context, key string) (<-chan struct{}, func(), error) {
	signals, stop := p.engine.Subscribe(key)
	return signals, stop, nil
}
