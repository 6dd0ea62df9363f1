"""Run as a script, `forge.py [-m] TARGET ARGS...`: forks workers, each of which behaves like `python -u [-m] TARGET ARGS...`.

All workers share the modules that this process has imported before ([Note: fork server] in shardnet/forking/server.py). A worker gets
those variables of its environment that this process does not have, as "NAME=VALUE"; it writes its report to an extra descriptor.
"""

import ast
import atexit
import builtins
import contextlib
import gc
import importlib.util
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

LIBRARIES = ("torch", "shardnet.training", "shardnet.fsdp", "shardnet.zero", "shardnet.checkpoint", "shardnet.elastic")
COMPILER = "torch._dynamo"  # takes a second to import; the first optimizer imports it
_ROOT = str(Path(__file__).parents[3])


def main(argv: Sequence[str]) -> None:
    """Does not return: a worker ends when its program has ended, and the forking process when nobody needs it any more."""
    is_module, (target, *arguments) = argv[0] == "-m", argv[1:] if argv[0] == "-m" else argv
    _look_first_in(_ROOT)
    from shardnet.forking.server import preload, serve

    _look_first_in(_place(target, is_module))
    problem: Exception | None = None
    try:
        with _cuda_untouched():
            preload(needs(target, is_module))
    except Exception as error:  # noqa: BLE001 - the program will fail with it, too, or does not need the module
        problem = error
    worker = serve(sessions=True)
    if worker is None:
        os._exit(0)
    for variable in worker.task:
        name, _, value = variable.partition("=")
        os.environ[name] = value
    (report,) = worker.descriptors
    os.environ["SHARDNET_REPORT_FILE"] = f"/dev/fd/{report}"  # a pipe, not a file: nothing is left on disk however this ends
    sys.argv = [target, *arguments]
    sys.orig_argv = [sys.executable, "-u", *argv]
    _end(run(target, is_module, problem))


def needs(target: str, is_module: bool) -> Sequence[str]:
    """The modules to import ahead. None if the program needs only the standard library, or uses its environment before it imports anything
    else, because it may set variables that libraries read when they are loaded. The compiler is left out if the program has no optimizer.

    If the source alone does not tell, all of them.
    """
    path = target
    if is_module:
        spec = None if "." in target else importlib.util.find_spec(target)
        if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
            return (*LIBRARIES, COMPILER)
        path = spec.origin
    try:
        source = Path(path).read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return (*LIBRARIES, COMPILER) if Path(path).is_dir() or _is_archive(path) else ()  # any other target will fail
    foreign = {name: line for name, line in _imports(tree) if name not in sys.stdlib_module_names}
    if not foreign or any(line < min(foreign.values()) for line in _environment_lines(tree)):
        return ()
    return LIBRARIES if foreign.keys() <= {"numpy", "shardnet", "torch"} and b"optim" not in source else (*LIBRARIES, COMPILER)


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names of imported packages with their lines, the first line last; "" is a part of the program's own package."""
    for node in sorted((node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)), key=lambda node: -node.lineno):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else ["" if node.level else node.module or ""]
        yield from ((name.partition(".")[0], node.lineno) for name in names)


def _environment_lines(tree: ast.Module) -> Iterator[int]:
    """The lines in which the program mentions its environment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (node.attr if isinstance(node, ast.Attribute) else node.id) in (
            "environ",
            "putenv",
        ):
            yield node.lineno


def run(target: str, is_module: bool, problem: Exception | None = None) -> int:
    """Run a program as `__main__`; returns its exit status. Shows uncaught errors as Python does, without the frames of this file.

    problem  the error that has kept this process from importing everything ahead. It is shown above the program's own error, because torch
             says only the first time why it cannot be imported
    """
    was_main, main_module = sys.modules["__main__"], ModuleType("__main__")
    main_module.__dict__.update({"__builtins__": builtins} | ({"__annotations__": {}} if hasattr(was_main, "__annotations__") else {}))
    sys.modules["__main__"] = main_module
    try:
        if is_module:
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` calls
        elif Path(target).is_dir() or _is_archive(target):
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # and `python FOLDER`
        else:
            _run_script(main_module, str(Path(target).absolute()))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - whatever the program has raised
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        _begin_with(problem, error)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace  # for functions that run at the end
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _begin_with(problem: Exception | None, error: BaseException) -> None:
    """Make the traceback of `error` begin with that of `problem`, as if `error` had been raised while handling it."""
    first, seen = error, set[int]()
    while (before := first.__cause__ or first.__context__) is not None and id(before) not in seen:
        seen.add(id(before))
        first = before
    if problem is not None and isinstance(error, ImportError | AttributeError) and first is not problem:
        first.__context__ = problem


def _run_script(main_module: ModuleType, path: str) -> None:
    loader = SourceFileLoader("__main__", path)
    main_module.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def _end(status: int) -> NoReturn:
    """End this process as Python would, but without destroying the objects that it shares with the other workers: that would copy their
    memory, and take a second. The program's global names are dropped, and files that it has left open are closed."""
    threads, callbacks = threading._shutdown, atexit._run_exitfuncs  # type: ignore[attr-defined]  # as multiprocessing does
    for step in (threads, callbacks, _drop_main, _close_files, _flush):
        _do(step)
    os._exit(status & 0xFF)


def _drop_main() -> None:
    """Drop the program's global names, those that begin with an underscore first, as Python does."""
    threading.excepthook = lambda _: None  # a daemon thread may still run, and fail because a name is gone
    names = vars(sys.modules.pop("__main__"))
    for each in sorted(names, key=lambda name: not name.startswith("_")):
        if each != "__builtins__":
            names[each] = None
    gc.collect()


def _close_files() -> None:
    """Close open files, the outer ones first, because their buffered data goes into the inner ones. Frozen objects are not among them."""
    files = [each for each in gc.get_objects() if issubclass(type(each), io.TextIOBase | io.BufferedIOBase)]  # asking `each` may warn
    for file in sorted(files, key=lambda file: (not isinstance(file, io.TextIOBase), type(file).__module__ == "_io")):
        with contextlib.suppress(Exception):
            if not file.closed and file.writable():
                _ = file.flush() if file.fileno() <= 2 else file.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _do(step: Callable[[], object]) -> None:
    try:
        step()
    except BaseException:  # noqa: BLE001 - otherwise the steps after it would not run
        traceback.print_exc()


def _place(target: str, is_module: bool) -> str:
    """The place where Python looks first for the modules that a program imports."""
    if is_module:
        return str(Path.cwd())
    path = Path(target).resolve()
    return str(path if path.is_dir() or _is_archive(target) else path.parent)


def _look_first_in(path: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = path


def _is_archive(path: str) -> bool:
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
    return False


@contextlib.contextmanager
def _cuda_untouched() -> Iterator[None]:
    """Make torch ask the driver's library (NVML), not CUDA, whether there are GPUs: forked processes cannot use CUDA after it was used."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


if __name__ == "__main__":
    main(sys.argv[1:])
