"""Starting the workers of one machine and keeping them together: they begin and stop as one, and fail as one if the job is not elastic.

Read in this order: `job` (what to start), `worker` (one process), `output` and `tracebacks` (what it writes), `place` (it and its
successors), `recovery` (what an elastic job can bear), `supervisor` (all of them), `launcher` (the whole).
"""
