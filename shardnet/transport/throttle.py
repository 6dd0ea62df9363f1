"""`Throttle`: limits log lines about strangers, who could otherwise cause as many as they like."""

import logging
import time

EVERY_S = 1.0


class Throttle:
    """One line a second at most; the next one says how many were left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last_s = -EVERY_S
        self._omitted = 0

    def warning(self, message: str, *arguments: object) -> None:
        now = time.monotonic()
        if now < self._last_s + EVERY_S:
            self._omitted += 1
            return
        more = f" (and {self._omitted} more since the last such line)" if self._omitted else ""
        self._last_s, self._omitted = now, 0
        self._log.warning(message + more, *arguments)
