// Package integration runs the stores on servers as people run them: in
// containers, and in topologies of several servers that fail over.
//
// It is a module of its own, and never tagged, because what it needs must not
// reach a user of the stores.
package integration
