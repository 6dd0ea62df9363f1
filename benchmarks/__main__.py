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
        if options.markdown is not None:
            print(markdown_report(read_json(options.markdown)))
        else:
            rows = measure(options)
            write_json(rows, options.json)
            print(f"\n{text_report(rows)}\n\nAll numbers: {options.json}")
    except SessionFailed as failure:
        return failure.status  # the launcher has told why; an earlier run's JSON is left as it is
    except (OSError, ValueError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def measure(options: argparse.Namespace) -> list[Row]:
    """All sessions, one after the other."""
    machine, now = describe_machine(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [row.stamped(machine, now) for session in options.sessions for row in run_session(session)]


if __name__ == "__main__":
    sys.exit(main())
