"""Collectives: what the ranks of a group do together, over the pipes of a mesh or through the memory of a node.

Read in this order.

What is common: ledger.py (how ranks know that they mean the same), reduction.py (sums in an order that never depends on timing),
plans.py (which algorithm it is) and route.py (over which nodes), operation.py (one collective on one rank).

Over streams: exchange.py and two_shot.py (small), hierarchical.py (large) with cut.py, lane.py and parts.py; operations.py (a group's,
one after the other), early.py (what comes too soon).

By letter, among ranks of one node: letters/. commons.py is memory that they gather into.

All of them: group.py (some ranks) with first_contact.py and farewell.py (how it begins to be, and to be forgotten), switchboard.py
(all groups of a mesh), channels.py, turns.py and any_source.py (sends and receives).

When it does not go well: verdict.py (what ends a collective on all ranks), watch.py and roll_call.py (who is waited for).
"""
