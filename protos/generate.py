"""Generate shardnet/pb from protos/shardnet/v1/*.proto: `python protos/generate.py` writes the files, `--check` only compares them.

The proto package is shardnet.v1, the Python package is shardnet.pb. protoc derives Python import paths from file paths, so this program
gives it the directory of the .proto files under the virtual name `shardnet/pb`. The output then needs no patching, and the names under
which protobuf's process-wide registry keeps the files cannot collide with another package's `stats.proto`.
"""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "protos" / "shardnet" / "v1"
OUTPUT_DIR = ROOT / "shardnet" / "pb"
VIRTUAL_DIR = "shardnet/pb"

# The methods of Mesh are registered by hand, because its chunks pass gRPC as bytes and not as message objects.
WITH_GRPC_STUBS = ("rendezvous", "stats")


def generate(into: Path) -> None:
    """Write the modules of all .proto files below `into`, in `into/shardnet/pb`. Raises SystemExit if protoc refuses one."""
    names = sorted(path.stem for path in PROTO_DIR.glob("*.proto"))
    _protoc([f"--python_out={into}", f"--pyi_out={into}", *(f"{VIRTUAL_DIR}/{name}.proto" for name in names)])
    _protoc([f"--grpc_python_out={into}", *(f"{VIRTUAL_DIR}/{name}.proto" for name in WITH_GRPC_STUBS)])


def drift(fresh: Path, committed: Path) -> list[str]:
    """Names of generated files that differ, are missing or are left over in `committed`."""
    names = {path.name for directory in (fresh, committed) for path in directory.glob("*_pb2*.py*")}
    return sorted(name for name in names if _content(fresh / name) != _content(committed / name))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _protoc(arguments: list[str]) -> None:
    well_known = files("grpc_tools") / "_proto"
    if protoc.main(["protoc", f"--proto_path={VIRTUAL_DIR}={PROTO_DIR}", f"--proto_path={well_known}", *arguments]) != 0:
        raise SystemExit("protoc failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if shardnet/pb is not what the .proto files say")
    check = parser.parse_args().check
    if not check:
        for stale in OUTPUT_DIR.glob("*_pb2*.py*"):
            stale.unlink()
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        changed = drift(Path(scratch) / VIRTUAL_DIR, OUTPUT_DIR)
    for name in changed:
        print(f"{OUTPUT_DIR.relative_to(ROOT) / name} does not match protos/: run `make proto`", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
