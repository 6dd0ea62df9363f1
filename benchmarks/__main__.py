"""`python -m benchmarks`: measure, print tables, write JSON. Exit status 0 if everything was measured, fast or slow."""

import argparse
import datetime
import signal
import sys

from benchmarks.launching import SessionFailed, run_session
from benchmarks.machine import describe_machine
from benchmarks.options import parse_options
from benchmarks.report import markdown_report, read_json, text_report, write_json
from benchmarks.row import Row


def main() -> int:
    options = parse_options()
    try:
        if options.markdown is None:
            return measure(options)
        print(markdown_report(read_json(options.markdown)))
    except (OSError, ValueError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def measure(options: argparse.Namespace) -> int:
    """All sessions, one after the other, and the report."""
    machine, now = describe_machine(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows: list[Row] = []
    try:
        for session in options.sessions:
            rows += (row.stamped(machine, now) for row in run_session(session))
    except SessionFailed as failure:  # the launcher has told why
        if rows:
            print(f"{text_report(rows)}\n\nIncomplete: {options.json} is left as it was.")
        return failure.status
    write_json(rows, options.json)
    print(f"{text_report(rows)}\n\nAll numbers: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
