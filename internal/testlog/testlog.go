// Package testlog keeps what a test has logged.
package testlog

import (
	"log/slog"
	"strings"
	"sync"
)

// Book keeps what is logged, one line each, without the time. The zero value is
// ready for use, by many goroutines at once.
type Book struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements [io.Writer].
func (b *Book) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

// Logger writes to the book what is logged, of all levels.
func (b *Book) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{
		Level: slog.LevelDebug,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey || a.Key == "stack" {
				return slog.Attr{}
			}
			return a
		},
	}))
}

// Lines returns the lines, nil if there are none.
func (b *Book) Lines() []string {
	text := strings.TrimSuffix(b.String(), "\n")
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

// Count returns how often word has been written.
func (b *Book) Count(word string) int { return strings.Count(b.String(), word) }

func (b *Book) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
