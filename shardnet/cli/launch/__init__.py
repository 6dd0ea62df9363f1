"""Starting the workers of one machine and keeping them together: they begin and stop as one, and fail as one if the job is not elastic.

Read in this order: `job` (what to start), `worker` (one process) with `start`, `forge` and `tether` (how it begins and cannot be left
behind) and `environment` (what it is told), `place` (it and its successors), `recovery` (what an elastic job can bear), `failure` (who is
to blame), `supervisor` (all of them), `launcher` (the whole).

What is shown: `pipe`, `lines`, `output` and `tracebacks` (what a worker writes), `progress` and `console`.
"""
