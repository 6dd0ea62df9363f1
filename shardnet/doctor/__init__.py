"""What may keep a cluster from working, or from being fast, found before a training is begun.

`machine` looks at this machine, `trust` at its certificate, `meeting` at the rendezvous, and `peers` at the links to the
other machines. What each has looked at is a `finding`.
"""

from shardnet.doctor.finding import Finding, Level
from shardnet.doctor.machine import about_machine
from shardnet.doctor.meeting import about_rendezvous
from shardnet.doctor.peers import about_peers
from shardnet.doctor.trust import about_trust

__all__ = ["Finding", "Level", "about_machine", "about_peers", "about_rendezvous", "about_trust"]
