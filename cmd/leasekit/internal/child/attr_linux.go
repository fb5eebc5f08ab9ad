package child

import "syscall"

// Only Linux can kill a child when its parent dies.
func killWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
