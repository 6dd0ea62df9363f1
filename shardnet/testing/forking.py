"""Processes that begin where another one is, with everything imported: `python -m shardnet.testing.forking FD MODULE...`

Importing torch and its compiler takes seconds, so one process imports everything, starts no thread, and then forks as often as it is told
through the socket FD. A request is lines of text: "ready"; or "call", a function as "module:name" and its arguments, together with the
descriptors that the new process shall have as its standard input, output and errors, as far as there are any, and others, whose numbers
are further arguments; the answer is its pid. Or "wait" and a pid, until that process has ended; the answer is its exit status.
"""

import ctypes
import gc
import importlib
import os
import pkgutil
import signal
import socket
import sys

import torch

MAX_REQUEST_BYTES = 4096
MAX_DESCRIPTORS = 4
PR_SET_PDEATHSIG = 1


def serve(control: socket.socket) -> list[str]:
    """Fork and reap as told, until the socket closes; then returns nothing. In each child: returns what it shall do."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first one imports torch's compiler
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads, and what they hold locked"  # noqa: PTH208
    gc.freeze()  # or each child's first collection copies all that it shares with the others
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        match request.decode().split("\n"):
            case [""]:
                return []
            case ["ready"]:
                control.send(b"0")
            case ["wait", pid]:
                control.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(int(pid), 0)[1]))
            case ["call", *task]:
                if not (child := os.fork()):
                    control.close()
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would know of it any more
                    for number, descriptor in enumerate(descriptors[:3]):
                        os.dup2(descriptor, number)
                        os.close(descriptor)
                    return [*task, *map(str, descriptors[3:])]  # these are not inherited by programs that the process starts
                for descriptor in descriptors:
                    os.close(descriptor)
                control.send(b"%d" % child)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    to_do = serve(socket.socket(fileno=int(sys.argv[1])))
    status = pkgutil.resolve_name(to_do[0])(*to_do[1:]) if to_do else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at once: what is frozen is never collected, which some libraries complain of when Python takes itself down
