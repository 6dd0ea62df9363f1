"""Processes that begin where another one is, with everything imported: server.py forks them, for whom nursery.py speaks."""
