"""The parser and the argument types that the commands share."""

import argparse
import math
from typing import Any, NoReturn

from shardnet.address import Address
from shardnet.errors import AddressError

WEB_LISTEN = "127.0.0.1:7080"  # any user of this machine may look at it
Arguments = argparse.Namespace
# argparse's own name for what add_subparsers returns is private and generic at type-checking time only.
Commands = Any


class Parser(argparse.ArgumentParser):
    """argparse with whole option names only, epilogs printed as written, and errors of one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        one_line = " ".join(message.split())
        self.exit(2, f"{self.prog}: {one_line} (see '{self.prog} --help')\n")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on, not {text!r}")
    return int(text)


def quantity(text: str) -> int:
    """A whole number from 1 on, also as `7e9`, `125M` or `1.5B`: K, M, B (or G) and T are thousands, millions and so on."""
    scale = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        value = float(text if scale == 1 else text[:-1]) * scale
    except ValueError:
        value = math.nan
    if not 1 <= value < 2**63 or value != round(value):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, such as 125M, not {text!r}")
    return round(value)


def gigabytes_per_s(text: str) -> float:
    """A speed in GB/s, as bytes per second."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a speed in GB/s, not {text!r}")
    return value * 1e9


def seconds(text: str) -> float:
    """A time of 0 s or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a time in seconds, not {text!r}")
    return value


def interval(text: str) -> float:
    """A time of more than 0 s: with 0 a repeated action would run without a pause."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, not {text!r}")
    return value


def address(text: str) -> str:
    """`HOST:PORT` to connect to."""
    if _parsed(text).port == 0:
        raise argparse.ArgumentTypeError(f"{text!r} has port 0; give the port at which the process there listens")
    return text


def listen_address(text: str) -> str:
    """`HOST:PORT` to listen on; port 0 lets the system choose."""
    _parsed(text)
    return text


def host(text: str) -> str:
    """A host without a port."""
    try:
        Address.parse(f"[{text}]:0" if ":" in text else f"{text}:0")
    except AddressError:
        raise argparse.ArgumentTypeError(f"must be the name or the address of a host, without a port, not {text!r}") from None
    return text


def name(text: str) -> str:
    """A non-empty name without blanks: it stands in messages and tables."""
    if not text or not text.isprintable() or any(character.isspace() for character in text):
        raise argparse.ArgumentTypeError(f"must be a name without blanks, not {text!r}")
    return text


def add_web_to(parser: Parser, *, before: str = "") -> None:
    """Add `--web`, whose value may be left out. If a positional argument, `before`, follows, a `--` before it shows that it is not the
    value of `--web`."""

    def page_address(text: str) -> str:
        try:
            return listen_address(text)
        except argparse.ArgumentTypeError as error:
            advice = f"; if {text!r} is {before}, put '--' between: --web -- {text}" if before else ""
            raise argparse.ArgumentTypeError(f"{error}{advice}") from error

    parser.add_argument(
        "--web",
        nargs="?",
        const=WEB_LISTEN,
        type=page_address,
        metavar="HOST:PORT",
        help="serve a live page that shows the cluster, for browsers, without encryption, at HOST:PORT "
        f"(default: no page; --web alone: {WEB_LISTEN})",
    )


def _parsed(text: str) -> Address:
    try:
        return Address.parse(text)
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
