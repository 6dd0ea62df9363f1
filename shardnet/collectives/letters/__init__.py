"""Collectives by letter, among ranks of one node that read each other's memory.

Read in this order: round.py (the idea, and one collective on one rank), letter_round.py and shares.py (small ones, with the data in the
letters), loan_round.py and loans.py (large ones, whose letters say where the data lies); mail.py (to whom), rounds.py (all of a group) and
attendant.py (a thread that looks after those for which nobody waits).
"""
