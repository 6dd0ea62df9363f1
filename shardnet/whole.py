"""`whole`: a number of steps that a caller gives, as an int."""

import operator
from typing import SupportsIndex

from shardnet.errors import UsageError


def whole(number: SupportsIndex, what: str) -> int:
    """A number as an int; numpy's and torch's integers are converted. Raises UsageError for anything that is not a whole number."""
    try:
        return operator.index(number)
    except TypeError:
        raise UsageError(f"{what} must be a whole number, got {number!r}") from None
