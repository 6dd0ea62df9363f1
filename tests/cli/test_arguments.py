"""The command line: what it accepts, and the errors for a wrong one."""

import subprocess
import sys
from importlib.abc import MetaPathFinder

import pytest

from shardnet.cli import __main__ as program
from shardnet.cli.main import COMMANDS, main, parse


@pytest.mark.parametrize(
    ("given", "script", "args"),
    [
        (["a.py"], "a.py", []),
        (["a.py", "--flag", "-h", "--nproc", "9"], "a.py", ["--flag", "-h", "--nproc", "9"]),
        (["a.py", "--", "--flag"], "a.py", ["--flag"]),
        (["a.py", "--", "--", "x"], "a.py", ["--", "x"]),
        (["a.py", "x", "--", "y"], "a.py", ["x", "--", "y"]),
        (["--", "a.py", "x"], "a.py", ["x"]),
        (["-m", "a.b", "-m", "x"], "a.b", ["-m", "x"]),
    ],
)
def test_run_takes_the_first_word_as_the_program_and_leaves_it_the_rest(given: list[str], script: str, args: list[str]) -> None:
    options = parse(["run", "--nproc", "2", *given])
    assert (options.nproc, options.script, options.args) == (2, script, args)


@pytest.mark.parametrize(
    ("given", "web", "script", "args"),
    [
        (["--web", "--nproc", "2", "a.py"], "127.0.0.1:7080", "a.py", []),
        (["--web", "127.0.0.1:0", "a.py", "--web", "x"], "127.0.0.1:0", "a.py", ["--web", "x"]),
        (["--web", "--", "a.py", "x"], "127.0.0.1:7080", "a.py", ["x"]),
        (["--web", "-m", "a.b"], "127.0.0.1:7080", "a.b", []),
        (["a.py", "--web"], None, "a.py", ["--web"]),
    ],
)
def test_where_the_page_is(given: list[str], web: str | None, script: str, args: list[str]) -> None:
    options = parse(["run", *given])
    assert (options.web, options.script, options.args) == (web, script, args)
    assert parse(["rendezvous", *(["--web"] if web else [])]).web == ("127.0.0.1:7080" if web else None)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([], "shardnet: the following arguments are required: COMMAND"),
        (["fly"], "shardnet: argument COMMAND: invalid choice: 'fly'"),
        (["run"], "shardnet run: the following arguments are required: SCRIPT (see"),
        (["run", "--nproc", "0", "a.py"], "shardnet run: argument --nproc: must be a whole number from 1 on, not '0'"),
        (["run", "--nproc", "٢", "a.py"], "shardnet run: argument --nproc: must be a whole number from 1 on"),
        (["run", "--npro", "2", "a.py"], "shardnet run: unrecognized arguments: --npro (see 'shardnet run --help')"),
        (["run", "--grace", "nan", "a.py"], "shardnet run: argument --grace: must be a time in seconds, not 'nan'"),
        (["run", "--rendezvous", "10.0.0.1", "a.py"], "shardnet run: argument --rendezvous: '10.0.0.1' does not end in a port"),
        (["run", "--rendezvous", "10.0.0.1:0", "a.py"], "shardnet run: argument --rendezvous: '10.0.0.1:0' has port 0"),
        (["run", "--listen", "10.0.0.1:7000", "a.py"], "shardnet run: argument --listen: "),
        (["run", "--job", "two words", "a.py"], "shardnet run: argument --job: must be a name without blanks"),
        (["run", "no-such-file.py"], "shardnet run: there is no file 'no-such-file.py'; to run a module, put -m before its name"),
        (["run", "/dev/stdin"], "shardnet run: /dev/stdin is not the same file in each process; put the program into a file"),
        (["run", "--nnodes", "2", "-m", "a"], "shardnet run: 2 nodes need --rendezvous HOST:PORT"),
        (["run", "--rendezvous", "10.0.0.1:7000", "-m", "a"], "shardnet run: 10.0.0.1:7000 is not a loopback address"),
        (["run", "--listen", "::", "-m", "a"], "shardnet run: [::]:0 is not a loopback address"),
        (["run", "--web", "a.py"], "shardnet run: argument --web: 'a.py' does not end in a port from 0 to 65535; write host:port"),
        (["run", "--web", "--rendezvous", "127.0.0.1:7000", "-m", "a"], "shardnet run: --web is for a run that starts its own rendezvous"),
        (["rendezvous", "--web", "here"], "shardnet rendezvous: argument --web: 'here' does not end in a port"),
        (["status"], "shardnet status: the following arguments are required: ADDRESS"),
        (["status", "10.0.0.1:7000"], "shardnet status: 10.0.0.1:7000 is not a loopback address"),
        (["rendezvous", "--listen", "0.0.0.0:7000"], "shardnet rendezvous: 0.0.0.0:7000 is not a loopback address"),
        (["top", "127.0.0.1:7000", "--interval", "0"], "shardnet top: argument --interval: must be more than 0 seconds, not '0'"),
        (["top", "127.0.0.1:7000", "--interval", "soon"], "shardnet top: argument --interval: must be a time in seconds, not 'soon'"),
        (["rendezvous", "extra"], "shardnet rendezvous: unrecognized arguments: extra (see"),
        (["rendezvous", "10.0.0.1:7000"], "shardnet rendezvous: unrecognized arguments: 10.0.0.1:7000 (see"),
        (["doctor", "10.0.0.1:7000"], "shardnet doctor: unrecognized arguments: 10.0.0.1:7000; did you mean --rendezvous 10.0"),
        (["doctor", "extra"], "shardnet doctor: unrecognized arguments: extra (see"),
        (["doctor", "--rendezvous", "[::1]:7000", "[::1]:7001"], "shardnet doctor: unrecognized arguments: [::1]:7001 (see"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line_with_status_2(
    given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(given)
    except SystemExit as exit_:
        status = exit_.code  # type: ignore[assignment]  # argparse exits with a number
    out, err = capsys.readouterr()
    assert status == 2
    assert err.startswith(complaint)
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("command", [module.__name__.rpartition(".")[2] for module in COMMANDS])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"usage: shardnet {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("shardnet ")


@pytest.mark.parametrize("module", ["shardnet", "shardnet.cli"])
def test_python_finds_the_command_where_it_is_not_on_the_path(module: str) -> None:
    ended = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("shardnet ")


def test_demo_and_bench_pass_on_what_they_do_not_know() -> None:
    assert parse(["demo", "--nproc", "3", "--steps", "50", "--name", "x y"]).unknown == ["--steps", "50", "--name", "x y"]
    assert parse(["bench", "--quick"]).unknown == ["--quick"]


def test_a_page_that_was_given_the_script_as_its_address_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--web", "a.py"])
    assert "; if 'a.py' is SCRIPT, put '--' between: --web -- a.py (see" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        ["rendezvous", "--listen", "0.0.0.0:7000"],
        ["rendezvous", "--web", "0.0.0.0:7080", "--listen", "127.0.0.1:0"],
        ["run", "--web", "0.0.0.0:7080", "-m", "a"],
    ],
)
def test_what_is_refused_without_encryption_names_the_option_that_allows_it(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It does not name a function's argument, which nobody can give on a command line."""
    assert main(given) == 2
    said = capsys.readouterr().err
    assert said.endswith(", or allow it with --insecure on a network that you trust\n"), said
    assert "insecure=True" not in said


def test_a_ctrl_c_while_the_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "shardnet.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "shardnet.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert program.main() == 130


@pytest.mark.parametrize("given", ["bad host", "", "a:b", "10.0.0.1:70"])
def test_a_host_has_no_port(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["certs", "issue", "cluster", "x", "--host", given])
    assert f"must be the name or the address of a host, without a port, not {given!r}" in capsys.readouterr().err
