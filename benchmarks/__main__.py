"""`python -m benchmarks`: measure, print tables, write JSON.

Exit status 0 if everything was measured, fast or slow. A topology that this machine cannot have fails the run only if asked for by name.
"""

import argparse
import datetime
import signal
import sys
from pathlib import Path

from benchmarks.launching import SessionFailed, run_session
from benchmarks.machine import describe_machine
from benchmarks.options import parse_options
from benchmarks.plan import Session, Topology
from benchmarks.report import markdown_report, read_json, text_report, write_json, write_tables
from benchmarks.row import Row
from shardnet.testing.namespaces import NamespacesUnavailable


def main() -> int:
    options = parse_options()
    try:
        if options.markdown is None:
            return measure(options)
        rows = read_json(options.markdown)
        print(markdown_report(rows))
        record(rows, options.results)
    except (OSError, ValueError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def measure(options: argparse.Namespace) -> int:
    """Run all sessions, one after the other, and write the report."""
    machine, now = describe_machine(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows: list[Row] = []
    left_out: set[Topology] = set()
    try:
        for session in options.sessions:
            rows += (row.stamped(machine, now) for row in _run_where_possible(session, left_out))
    except SessionFailed as failure:  # the launcher has told why
        if rows:
            print(f"{text_report(rows)}\n\nIncomplete: {options.json} is left as it was.")
        return failure.status
    if rows:
        write_json(rows, options.json)
        print(f"{text_report(rows)}\n\nAll numbers: {options.json}")
        record(rows, options.results)
    return 1 if left_out.intersection(options.topologies or ()) else 0


def record(rows: list[Row], directory: Path | None) -> None:
    """Write the tables, and plots of how cost grows if it was measured, where they are wanted."""
    if directory is not None:
        from benchmarks.plots import draw_all  # needs matplotlib

        directory.mkdir(parents=True, exist_ok=True)
        for path in (write_tables(rows, directory), *draw_all(rows, directory)):
            print(f"Written: {path}")


def _run_where_possible(session: Session, left_out: set[Topology]) -> list[Row]:
    """Run a session unless its topology is in `left_out`. One that this machine turns out not to have is added there, with a message."""
    if session.topology in left_out:
        return []
    try:
        return run_session(session)
    except NamespacesUnavailable as error:
        left_out.add(session.topology)
        print(f"benchmarks: {session.topology} is left out: {error}", file=sys.stderr)
        return []


if __name__ == "__main__":
    sys.exit(main())
