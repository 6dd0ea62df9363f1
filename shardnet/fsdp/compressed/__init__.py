"""Parameters and gradients that are sent in fewer bits than they are computed in.

Read in this order: codec.py (how numbers are packed), gather.py (parameters), reduction.py and residual.py (gradients, and what rounding
took from them), across.py (the same where nodes hold several ranks); wire_memory.py.
"""
