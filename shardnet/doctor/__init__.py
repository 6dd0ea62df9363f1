"""Finds what may keep a cluster from working, or from being fast, before a training begins.

`machine` looks at this machine, `trust` at its certificate, `meeting` at the rendezvous, and `peers` at the other machines: in a
`gathering` of doctors each finds out whether the others' `ports` can be reached, and how fast the `links` are. The result of each check
is a `finding`.
"""

from shardnet.doctor.finding import Finding, Level
from shardnet.doctor.machine import about_machine
from shardnet.doctor.meeting import about_rendezvous
from shardnet.doctor.peers import about_peers
from shardnet.doctor.trust import about_trust

__all__ = ["Finding", "Level", "about_machine", "about_peers", "about_rendezvous", "about_trust"]
