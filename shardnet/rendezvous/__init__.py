"""The service where workers meet: it gives them ranks, and tells them which members are gone.

Read in this order.

The service: job.py (how a world forms, and ends) with request.py, placement.py (which worker gets which rank), events.py (what members
are told) and refusal.py; membership.py (all jobs), store.py (what outlives a restart); service.py and mailbox.py (over gRPC), server.py.

A worker's side: client.py with joining.py (until the world is formed), lease.py (while it exists) and backoff.py; identity.py (names for
this host and this start of a worker).

Both: messages.py and status.py (on the wire), tasks.py.
"""

import shardnet.quiet  # noqa: F401 - before grpc
