package child

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
)

// Only Linux can kill a child when its parent dies.
func killWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }

// parentOf returns the parent of pid: 0 if it has none in its container, -1 if it
// cannot be told.
func parentOf(pid int) int {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return -1
	}
	// "pid (name) state parent ...", where the name may have any characters.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 {
		return -1
	}
	parent, err := strconv.Atoi(string(fields[1]))
	if err != nil {
		return -1
	}
	return parent
}
