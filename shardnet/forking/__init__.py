"""Processes that start as forks of another one, with everything imported: server.py forks them, and nursery.py asks it to."""
