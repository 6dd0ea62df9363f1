"""Run as a script, `tether.py LAUNCHER_PID COMMAND...`: becomes COMMAND, which the kernel kills when the launcher dies.

A launcher that is killed with SIGKILL cannot end its workers any more, so the kernel has to: PR_SET_PDEATHSIG, which
outlives the exec below. The child itself must set it between fork and exec. `preexec_fn` would do that inside a
fork of a process with threads (gRPC has some), which may deadlock. A short-lived interpreter without site-packages cannot
deadlock, and costs 25 ms. The signal comes when the thread that forked ends, not the process: so only the main thread, which
outlives all others, may start workers. Only Linux has this signal; elsewhere workers outlive a killed launcher until
they notice that the rendezvous is gone.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def tethered(command: Sequence[str]) -> tuple[str, ...]:
    """The command line for a child of this process that does not outlive it. `command` begins with the path of a program."""
    return (sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command)  # noqa: PTH100 - 10 ms to import pathlib


def main() -> None:
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C that comes now ends the worker without a traceback of this file
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.exit("shardnet: prctl(PR_SET_PDEATHSIG) failed; this worker could outlive its launcher")
    if os.getppid() != launcher:  # it died before prctl: no signal will come
        sys.exit("shardnet: the launcher has died")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
