package testserver

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// setAttributes makes cmd a process group of its own, so that an interrupt from
// the terminal reaches the tests alone, has it signalled when this process
// dies, and runs it as owner unless nil.
func setAttributes(cmd *exec.Cmd, atDeath syscall.Signal, owner *account) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: atDeath}
	if owner != nil {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: owner.uid, Gid: owner.gid}
	}
}

// listens reports whether process pid listens on a port of 127.0.0.1.
func listens(pid, port int) bool {
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return true // no way to tell
	}
	local := fmt.Sprintf("0100007F:%04X", port)
	const listen = "0A"
	for line := range strings.Lines(string(table)) {
		// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
		f := strings.Fields(line)
		if len(f) > 9 && f[1] == local && f[3] == listen {
			return hasSocket(pid, f[9])
		}
	}
	return false
}

func hasSocket(pid int, inode string) bool {
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil && target == "socket:["+inode+"]" {
			return true
		}
	}
	return false
}

// descendants returns the children of a process, and theirs.
func descendants(pid int) []int {
	children := map[int][]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range stats {
		if child, parent, _, ok := readStat(name); ok {
			children[parent] = append(children[parent], child)
		}
	}
	var all []int
	for queue := children[pid]; len(queue) > 0; queue = queue[1:] {
		all = append(all, queue[0])
		queue = append(queue, children[queue[0]]...)
	}
	return all
}

// readStat reads /proc/PID/stat: pid (command) state ppid …
func readStat(name string) (pid, parent int, state string, ok bool) {
	text, err := os.ReadFile(name)
	if err != nil {
		return 0, 0, "", false
	}
	head, rest, found := strings.Cut(string(text), " (")
	end := strings.LastIndex(rest, ") ") // the command may contain anything
	if !found || end < 0 {
		return 0, 0, "", false
	}
	f := strings.Fields(rest[end+2:])
	if len(f) < 2 {
		return 0, 0, "", false
	}
	pid, err1 := strconv.Atoi(head)
	parent, err2 := strconv.Atoi(f[1])
	return pid, parent, f[0], err1 == nil && err2 == nil
}

// exists reports whether a process has not ended: one that waits for its parent
// to notice has.
func exists(pid int) bool {
	_, _, state, ok := readStat(fmt.Sprintf("/proc/%d/stat", pid))
	return ok && state != "Z" && state != "X"
}
