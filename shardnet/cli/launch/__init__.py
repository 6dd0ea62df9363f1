"""Starting the workers of one machine and keeping them together: they begin, stop and fail as one.

Read in this order: `job` (what to start), `worker` (one process), `place` (it and its successors), `supervisor` (all of them),
`launcher` (the whole).
"""
