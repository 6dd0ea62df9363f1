"""Collectives by letter, among ranks of one node that read each other's memory.

Read in this order: round.py (the idea, and one collective on one rank), letter_round.py and shares.py (small ones, with the data in the
letters: MPI's eager protocol), loan_round.py and loans.py (large ones, whose letters say where the data lies: MPI's rendezvous protocol);
mail.py (access to the mailboxes), rounds.py (all rounds of a group) and attendant.py (a thread for rounds for which no thread waits).
"""
