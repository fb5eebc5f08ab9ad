package core

import (
	"crypto/rand"
	"encoding/hex"
	"strings"
)

// An owner is the strategy's label, a separator, and 128 random bits in hex.
const (
	ownerRandomLen = 32
	ownerSeparator = "/"

	// MaxLabelLen is the longest [Options].Label, in bytes.
	MaxLabelLen = MaxKeyLen - len(ownerSeparator) - ownerRandomLen
)

// newOwner makes an owner that nobody can guess: whoever knows it can end the
// lease.
func newOwner(label string) string {
	var random [ownerRandomLen / 2]byte
	rand.Read(random[:]) // never fails: crypto/rand ends the process instead
	var buf [64]byte
	b := buf[:0]
	if label != "" {
		b = append(append(b, label...), ownerSeparator...)
	}
	return string(hex.AppendEncode(b, random[:]))
}

// OwnerLabel returns the part of owner that may be shown to people: the
// [Options].Label of the strategy that made it, "" if it had none or if owner
// was not made by a strategy. The rest of an owner is a secret.
func OwnerLabel(owner string) string {
	i := len(owner) - ownerRandomLen - len(ownerSeparator)
	if i < 0 || owner[i:i+len(ownerSeparator)] != ownerSeparator {
		return ""
	}
	if strings.Trim(owner[i+len(ownerSeparator):], "0123456789abcdef") != "" {
		return ""
	}
	return owner[:i]
}
