//go:build unix && !linux

package testserver

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// setAttributes makes cmd a process group of its own, so that an interrupt from
// the terminal reaches the tests alone, and runs it as owner unless nil. Only
// Linux can tie its life to this process's.
func setAttributes(cmd *exec.Cmd, _ syscall.Signal, owner *account) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if owner != nil {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: owner.uid, Gid: owner.gid}
	}
}

// listens cannot tell here.
func listens(int, int) bool { return true }

// descendants returns the children of a process, and theirs.
func descendants(pid int) []int {
	out, err := exec.Command("pgrep", "-P", strconv.Itoa(pid)).Output()
	if err != nil {
		return nil
	}
	var all []int
	for _, f := range strings.Fields(string(out)) {
		if child, err := strconv.Atoi(f); err == nil {
			all = append(append(all, child), descendants(child)...)
		}
	}
	return all
}

func exists(pid int) bool { return syscall.Kill(pid, 0) != syscall.ESRCH }
