"""Models that are built without memory, on torch's meta device, and never whole on any rank.

Read model.py first; whole_unit.py is the memory of the unit whose turn it is, initial_values.py what fills it.
"""
