"""`Traffic`: what one rank and one of its peers have sent each other."""

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Payload bytes of collectives; for one epoch. `memory` is what a peer on the same node reads in memory, wherever that is."""

    sent_network: int = 0
    sent_memory: int = 0
    received_network: int = 0
    received_memory: int = 0
