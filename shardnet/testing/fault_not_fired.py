"""`FaultNotFired`: the error of a test that disturbs nothing."""


class FaultNotFired(AssertionError):
    """A fault was ordered, and what it waits for never came."""
