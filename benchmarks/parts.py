"""The parts of a collective's time, as a caller meets them."""

HANDED_OVER = "handed over"  # from the calling thread to the loop thread and back, if it is handed over
PEERS = "waiting for peers"  # to enter the collective
COPYING = "copying"
REDUCING = "reducing"
SENDING = "kernel: sending"
RECEIVING = "kernel: receiving"
CHECKSUMS = "checksums"
TLS = "TLS"
TRANSPORT = "Python: transport"
COLLECTIVES = "Python: the rest"
DATA = "waiting for data"

BUSY = (COPYING, REDUCING, SENDING, RECEIVING, CHECKSUMS, TLS, TRANSPORT, COLLECTIVES)  # what the working thread does
PARTS = (HANDED_OVER, PEERS, *BUSY, DATA)
