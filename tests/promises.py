"""How long it may take. What shardnet promises in seconds is asked to the letter where nothing else runs, as `make faults` does. The suite
shares its processors with itself and with strangers, and asks with room: not so much that what waits for a timeout, for the end of a peer's
silence (1.5 x suspect_s) or of its data (drain_s) would pass for prompt."""

import os

TO_THE_LETTER = bool(os.environ.get("SHARDNET_TO_THE_LETTER"))


def within_s(promised_s: float, room: float = 1.9) -> float:
    return promised_s if TO_THE_LETTER else room * promised_s
