"""`shardnet run --start-method`: for its program, a forked worker is like one that `python` has started."""

import errno
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from shardnet.cli.launch import forge
from shardnet.cli.launch.job import StartMethod
from tests.cli.launched import Launched, Result, has_ended, shardnet

METHODS = ("forkserver", "spawn")
FACTS = """
import gc, json, multiprocessing, os, pickle, resource, signal, sys, threading

OPAQUE = ("__builtins__", "__loader__")

class Own:
    pass

def spawned():
    finds_main = __spec__ is None or not __spec__.name.endswith("__main__")
    child = multiprocessing.get_context("spawn").Process(target=Own if finds_main else int)
    child.start()
    child.join()
    return child.exitcode

def facts():
    main = sys.modules["__main__"]
    return {
        "main": {name: str(value) for name, value in vars(main).items() if name.startswith("__") and name not in OPAQUE},
        "is main": main.__dict__ is globals(),
        "loader": type(__loader__).__name__,
        "builtins": type(__builtins__).__name__,
        "pickled": type(pickle.loads(pickle.dumps(Own()))) is Own,
        "spawned": spawned(),
        "arguments": [sys.argv, sys.orig_argv, str(sys.flags)],
        "path": sys.path,
        "files": sorted(os.readlink(f"/proc/self/fd/{each}").split(":")[0] for each in os.listdir("/proc/self/fd") if int(each) < 3),
        "input": sys.stdin.read(),
        "streams": [(each.encoding, each.errors, each.write_through, each.isatty()) for each in (sys.stdout, sys.stderr)],
        "signals": [str(signal.getsignal(each)) for each in signal.valid_signals() if each not in (signal.SIGKILL, signal.SIGSTOP)],
        "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "threads": [each.name for each in threading.enumerate()],
        "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "collector": [gc.isenabled(), gc.get_threshold()],
        "folder": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name not in ("SHARDNET_RENDEZVOUS", "SHARDNET_REPORT_FILE")},
    }

if __name__ == "__main__":
    print(json.dumps(facts()))
    with open(os.environ["SHARDNET_REPORT_FILE"], "a") as report:
        report.write("127.0.0.1:1 0 1\\n")
"""
ENDS = {
    "returns": "pass",
    "exits": "sys.exit(7)",
    "exits with more than a byte": "sys.exit(300)",
    "exits with None": "sys.exit()",
    "exits with a text": "sys.exit('no such thing')",
    "fails": "def work():\n    raise ValueError('too large') from KeyError('x')\nwork()",
    "fails in a library": "json.loads('{')",
    "is interrupted": "raise KeyboardInterrupt",
    "has its own hook": "sys.excepthook = lambda kind, error, trace: print('hook', kind, error, trace.tb_lineno)\nraise ValueError(3)",
    "is no Python": "else:",
    "leaves threads": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')",
    "leaves callbacks": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')\nprint('main')",
    "fails, and a callback looks at it": (
        "import atexit\natexit.register(lambda: print([repr(getattr(sys, f'last_{each}', None)) for each in ('type', 'value', 'exc')]))\n"
        "raise ValueError(3)"
    ),
    "fails in a callback": "import atexit\natexit.register(print, 'first')\natexit.register(lambda: 1 / 0)",
    "leaves files open": "file = open('left.txt', 'w')\nfile.write('text')",
    "leaves an import's files open": "import helper\nhelper.file.write('text')",
    "leaves a compressed file open": "import gzip\nfile = gzip.open('left.gz', 'wt')\nfile.write('text')\nkept = [file]\nsys.kept = kept",
    "leaves a thread in the background": "import threading\ndef work():\n    while True: min(rank, 1)\nrank = 0\n"
    "threading.Thread(target=work, daemon=True).start()",
    "has loggers": "import logging, logging.config\nlogging.basicConfig(filename='left.txt')\n"
    "logging.getLogger().handlers[0].stream.write('text')",
    "leaves a circle": "class Ends:\n    def __del__(self): print('gone')\nfirst = Ends()\nfirst.itself = first",
    "kills itself": "os.kill(os.getpid(), signal.SIGTERM)",
    "closes its output": "sys.stdout.close()",
}

_ADDRESS = re.compile("0x[0-9a-f]+")


def run(folder: Path, *command: str) -> list[Result]:
    """A command's results with each start method, in the same folder; files that a forked worker leaves there stay."""
    results: list[Result] = []
    before = shutil.copytree(folder, folder.with_name("before"))
    for method in reversed(METHODS):
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        results.insert(0, shardnet(folder, "run", "--job", "j", "--start-method", method, *command))
    return results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "here").mkdir()
    return folder


@pytest.fixture
def light_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that takes no time to import, for programs that do not need torch but might, as far as the launcher can tell."""
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries/torch.py").write_text("default_generator = type('Generator', (), {'seed': staticmethod(lambda: None)})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "libraries"))


@pytest.mark.parametrize("kind", ["file", "path", "link", "module", "package", "folder", "archive"])
def test_a_program_finds_what_it_would_find(folder: Path, kind: str, request: pytest.FixtureRequest) -> None:
    if kind in ("folder", "archive"):
        request.getfixturevalue("light_torch")  # not for a package, so that one has torch imported ahead
    (folder / "package").mkdir()
    for path in ("program.py", "package/__main__.py", "package/program.py"):
        (folder / path).write_text(FACTS)
    (folder / "package/__init__.py").touch()
    (folder / "link.py").symlink_to("package/program.py")
    with zipfile.ZipFile(folder / "archive", "w") as archive:
        archive.write(folder / "program.py", "__main__.py")
    command = {
        "file": ["program.py"],
        "path": [str(folder / "package/program.py")],
        "link": ["link.py"],
        "module": ["-m", "program"],
        "package": ["-m", "package"],
        "folder": ["package"],
        "archive": ["archive"],
    }[kind]
    forked, spawned = run(folder, *command, "--", "-x", "y z")
    assert (forked.status, forked.err) == (spawned.status, spawned.err) == (0, "")
    facts = [json.loads(_ADDRESS.sub("", result.out).removeprefix("[0] ")) for result in (forked, spawned)]
    for name, fact in facts[1].items():
        assert facts[0][name] == fact, name


@pytest.mark.usefixtures("light_torch")
@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_it_would_end(folder: Path, end: str) -> None:
    (folder / "program.py").write_text(f"import json, os, signal, sys\n{ENDS[end]}\n")
    (folder / "helper.py").write_text("file = open('left.txt', 'w')\n")
    forked, spawned = run(folder, "program.py")
    if end != "is interrupted":  # otherwise the interpreter ends itself with the signal
        assert (forked.out, _ADDRESS.sub("", forked.err)) == (spawned.out, _ADDRESS.sub("", spawned.err))
    assert forked.status == spawned.status
    assert not (left := folder / "left.txt").exists() or left.read_text() == "text"
    assert not (left := folder / "left.gz").exists() or gzip.decompress(left.read_bytes()) == b"text"


@pytest.mark.usefixtures("light_torch")
@pytest.mark.parametrize("module", ["nothing", "package.nothing", "package"])
def test_a_module_that_is_not_there(folder: Path, module: str) -> None:
    (folder / "package").mkdir()
    forked, spawned = run(folder, "-m", module)
    assert forked.status == spawned.status == 1
    assert module in spawned.err
    assert forked.err.replace(str(forge.__file__), sys.executable) == spawned.err


def test_a_library_that_cannot_be_imported_is_the_programs_failure(folder: Path) -> None:
    (folder / "torch.py").write_text("raise RuntimeError('this is not torch')")
    (folder / "program.py").write_text("import torch")
    forked, spawned = run(folder, "program.py")
    assert forked.status == spawned.status == 1
    assert "[0] RuntimeError: this is not torch" in forked.err
    assert forked.err == spawned.err


def test_ranks_draw_numbers_of_their_own(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import random, numpy, torch, os\nprint(random.random(), numpy.random.rand(), float(torch.rand(1)))  # optim"
    )
    result = shardnet(folder, "run", "--start-method", "forkserver", "--nproc", "3", "program.py")
    pythons, numpys, torchs = zip(*(line.split()[1:] for line in result.out.splitlines()), strict=True)
    assert (len(set(pythons)), len(set(numpys)), len(set(torchs))) == (3, 3, 3)


def test_torch_is_in_memory_once(folder: Path) -> None:
    text = "import torch, os\nprint(*[line.split()[1] for line in open('/proc/self/smaps_rollup') if line.startswith('Private_Dirty')])"
    (folder / "program.py").write_text(text)
    forked, spawned = ([int(line.split()[1]) for line in result.out.splitlines()] for result in run(folder, "--nproc", "2", "program.py"))
    assert len(forked) == len(spawned) == 2
    assert 10 * max(forked) < min(spawned)


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        ("import os, sys.monitoring\nfrom json import loads", ()),
        ("import torch", forge.LIBRARIES),
        ("def f():\n    from shardnet import connect", forge.LIBRARIES),
        ("import torch\ntorch.optim.SGD", (*forge.LIBRARIES, forge.COMPILER)),
        ("import transformers", (*forge.LIBRARIES, forge.COMPILER)),
        ("from . import model", (*forge.LIBRARIES, forge.COMPILER)),
        ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '3'", forge.LIBRARIES),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch", ()),
        ("import os\ndef f():\n    os.environ.update(A='3')\n    import torch\nimport torch", ()),
        ("from os import environ\nenviron['A'] = '3'\nfrom torch import nn", ()),
        ("else:", ()),
        ("# coding: latin-1\nname = '\xe9'", ()),
    ],
)
def test_what_is_imported_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, needed: tuple[str, ...]) -> None:
    (tmp_path / "its_program.py").write_text(source, encoding="latin-1")
    assert forge.needs(str(tmp_path / "its_program.py"), is_module=False) == needed
    monkeypatch.syspath_prepend(tmp_path)
    assert forge.needs("its_program", is_module=True) == needed


def test_what_is_imported_ahead_of_a_package(tmp_path: Path) -> None:
    everything = (*forge.LIBRARIES, forge.COMPILER)
    assert (
        forge.needs("json.tool", is_module=True)
        == forge.needs("json", is_module=True)
        == forge.needs("no_module", is_module=True)
        == everything
    )
    assert forge.needs(str(tmp_path), is_module=False) == everything


@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_nobody_is_left_when_one_of_them_is_killed(tmp_path: Path, victim: str) -> None:
    (tmp_path / "program.py").write_text("import os, signal\nprint('pid', os.getpid())\nsignal.pause()")
    with Launched(tmp_path, "run", "--start-method", "forkserver", "--nproc", "2", "program.py") as run:
        pids = [int(line.split()[-1]) for line in run.read_lines(2)]
        server = psutil.Process(pids[0]).ppid()
        assert psutil.Process(server).ppid() == run.process.pid
        os.kill(server if victim == "server" else run.process.pid, signal.SIGKILL)
        assert all(has_ended(pid) for pid in (*pids, server))
        if victim == "server":
            assert run.finish().status == 1  # and says so: test_run_machine.py


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_ends_all_at_once(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "torch.py").write_text("open('fifo', 'w').write('here')\nopen('fifo').read()")
    (tmp_path / "program.py").write_text("import torch")
    with Launched(tmp_path, "run", "--start-method", "forkserver", "program.py") as run:
        assert (tmp_path / "fifo").read_text() == "here"
        (server,) = psutil.Process(run.process.pid).children()
        run.process.send_signal(number)
        assert run.process.wait(10) in (128 + number, -number)
        assert has_ended(server.pid)
        assert run.finish().err == ""


@pytest.mark.parametrize("daemon", [False, True])
def test_what_an_import_has_started_does_not_hold_up_the_end(tmp_path: Path, daemon: bool) -> None:
    """What it has started ends as well, unless that has left the session, which is allowed."""
    os.mkfifo(tmp_path / "fifo")
    text = f"""
import subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session={daemon})
open("fifo", "w").write(str(child.pid))
open("fifo").read()
"""
    (tmp_path / "torch.py").write_text(text)
    (tmp_path / "program.py").write_text("import torch")
    with Launched(tmp_path, "run", "--start-method", "forkserver", "program.py", merged=True) as run:
        child = int((tmp_path / "fifo").read_text())
        try:
            run.process.send_signal(signal.SIGINT)
            assert run.process.wait(10) == 128 + signal.SIGINT
            assert has_ended(child, within_s=0 if daemon else 5) != daemon
        finally:
            if daemon:
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("given", [None, "0"])
def test_importing_torch_does_not_begin_to_use_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """A stand-in says what torch reads; https://docs.pytorch.org/docs/stable/notes/cuda.html has what it means."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(name, raising=False) if given is None else monkeypatch.setenv(name, given)
    (tmp_path / "torch.py").write_text(
        f"import os\ndefault_generator = type(os)('')\ndefault_generator.seed = lambda: None\nseen = os.environ['{name}']"
    )
    (tmp_path / "program.py").write_text(f"import os, torch\nprint(torch.seen, os.environ.get('{name}'))")
    assert shardnet(tmp_path, "run", "--start-method", "forkserver", "program.py").out == f"[0] 1 {given}\n"


def test_a_server_that_dies_of_an_import_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nos.abort()")
    (tmp_path / "program.py").write_text("import torch")
    result = shardnet(tmp_path, "run", "--start-method", "forkserver", "program.py")
    assert result.status == 1
    assert "--start-method spawn" in result.err.splitlines()[-1]


def test_a_process_that_is_forked_may_fork(tmp_path: Path) -> None:
    text = """
import multiprocessing
import torch

def tell(method: str) -> None:
    print(method, float(torch.ones(2).sum()))

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=tell, args=(method,))
        child.start()
        child.join()
"""
    (tmp_path / "program.py").write_text(text)
    result = shardnet(tmp_path, "run", "--start-method", "forkserver", "program.py")
    assert result.out.splitlines() == [f"[0] {method} 2.0" for method in ("fork", "spawn", "forkserver")], result.err


def test_a_system_that_cannot_wait_for_a_forked_worker_spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StartMethod.default() is StartMethod.FORKSERVER

    def missing(_: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", missing)
    assert StartMethod.default() is StartMethod.SPAWN


def test_the_command_line_says_what_there_is(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "shardnet.cli", "run", "--start-method", "thread", "x.py"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "forkserver" in result.stderr
    assert "spawn" in result.stderr
