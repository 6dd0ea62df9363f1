"""Processes that begin where another one is, with everything imported: see [Note: fork server] in server.py."""
