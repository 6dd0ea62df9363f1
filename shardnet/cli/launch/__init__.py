"""Starting the workers of one machine and keeping them together: they begin and stop as one, and fail as one if the job is not elastic.

Read in this order: `job` (what to start), `worker` (one process) with `start`, `forge` and `tether` (how it begins and why it does not
outlive the launcher) and `environment` (its variables), `place` (a worker and its successors), `recovery` (which failures an elastic job
survives), `failure` (which worker is to blame), `supervisor` (all of them), `launcher` (the whole run).

Output: `pipe`, `lines`, `output` and `tracebacks` (what a worker writes), `progress` and `console`.
"""
