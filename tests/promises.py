"""How long it may take. What shardnet promises in seconds is asked to the letter where nothing else runs, as `make faults` does. The suite
shares its processors with itself and with strangers, and asks with room: not so much that what waits for a timeout or for a peer's silence
(`Timeouts.for_tests`) would pass for prompt."""

import os

ROOM = 1.0 if os.environ.get("SHARDNET_TO_THE_LETTER") else 3.0


def within_s(promised_s: float) -> float:
    return ROOM * promised_s
