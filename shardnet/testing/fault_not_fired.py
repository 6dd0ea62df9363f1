"""`FaultNotFired`: the error of a test that disturbs nothing."""


class FaultNotFired(AssertionError):
    """A fault was ordered, but the moment for it never came."""
