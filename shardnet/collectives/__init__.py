"""Collectives: what the ranks of a group do together, over the pipes of a mesh or through the memory of a node.

Read in this order.

Common to all: ledger.py (how ranks know that they are in the same collective), reduction.py (sums in an order that never depends on
timing), plans.py (chooses the algorithm), route.py (the way over the nodes), operation.py (one collective on one rank).

Over streams: exchange.py and two_shot.py (small collectives), hierarchical.py (large ones) with cut.py, lane.py and parts.py;
operations.py (all operations of one group), early.py (chunks that arrive before this rank has asked for them).

By letter, among ranks of one node: letters/. commons.py is the memory that these ranks share and gather into.

Around them: group.py (some of the ranks) with first_contact.py and farewell.py (how a group is set up and forgotten), switchboard.py
(all groups of a mesh), channels.py, turns.py and any_source.py (sends and receives).

When a collective fails or hangs: verdict.py (the error that ends it on all ranks), watch.py and roll_call.py (which ranks it waits for).
"""
