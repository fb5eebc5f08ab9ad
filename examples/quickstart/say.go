package main

import (
	"fmt"
	"log/slog"
	"time"
)

var began = time.Now()

// quiet is for a strategy whose hooks say everything already.
var quiet = slog.New(slog.DiscardHandler)

// say prints what happens, and when.
func say(format string, args ...any) {
	if format == "" {
		fmt.Println()
		return
	}
	fmt.Printf("%5.1f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
}
