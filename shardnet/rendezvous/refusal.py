"""Why the rendezvous says no, in one word each."""

from enum import StrEnum


class Refusal(StrEnum):
    """`JoinRefused.reason`. Asking again at once does not help against any of them, except ABSENT."""

    MALFORMED = "malformed"  # the request itself makes no sense
    PROTOCOL = "protocol"  # the worker speaks another version of the messages
    WISH = "wish"  # it asks for another world size than the job was started with
    DUPLICATE_INCARNATION = "duplicate-incarnation"  # this very start of a worker is a member already
    DUPLICATE_ADDRESS = "duplicate-address"  # a live member listens there; it is never overwritten
    DUPLICATE_WORKER = "duplicate-worker"  # a live member has the same certificate and local rank
    IDENTITY = "identity"  # its certificate is for something else
    FULL = "full"  # the job has its maximum of workers, or the rendezvous has its maximum of jobs or workers
    ABSENT = "absent"  # members may still come back after a restart of the rendezvous; asking again helps once they are given up
    RUNNING = "running"  # the world is formed and takes in nobody
    ENDED = "ended"  # the members have left with goodbyes: the job's training is over
    UNKNOWN = "unknown"  # it says that it is a member, but it no longer is one
