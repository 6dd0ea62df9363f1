"""Data between the ranks of a node through memory that they share; everything else stays on their streams.

[Note: the window] Each rank writes into one window, a ring buffer that the node's other ranks map read-only. The writer copies
data in once, for any number of readers, and says over its stream where the data lies. Each reader adds or copies the data from there
to where it belongs, and says over its own stream which data it no longer needs. So the kernel copies nothing, nobody polls, and the
streams themselves keep the order, control the flow and show the loss of a peer. A window's memory has no name (memfd) and is freed with
the last process that maps it, however that process ends. All of it is allocated when the window is made, so that a lack of memory shows
then (as an error, or as a kill at a container's limit) and not in the middle of a training run. And it is sealed: it cannot shrink
under a reader, and no reader can map it for writing.

Two ranks must find out whether they share memory, because containers of one host may not: the owner says which descriptor of which
process the window is, and the reader opens it below /proc and compares the secret at the start of the window. If that fails, or
there is no memory, data goes over the stream as between nodes.

Data that need not be copied into a window is lent: see [Note: loans] in `lending.py`. Where all ranks of a node want the same data, they
write it into one segment (`segment.py`). And a small message is left in a mailbox, without any notice on a stream: see [Note: mailboxes]
in `mailbox.py`.

`window.py` is the writer's side, `view.py` the reader's, `sharing.py` what a mesh does with both. `bell.py`, `alarm.py` and `futex.py`
wake a thread that sleeps at a mailbox; `memfd.py` and `mapping.py` make and map the memory.
"""

from shardnet.transport.shared_memory.alarm import Alarm
from shardnet.transport.shared_memory.bell import Bell
from shardnet.transport.shared_memory.futex import give_way
from shardnet.transport.shared_memory.lending import Lender, Loan
from shardnet.transport.shared_memory.mailbox import Letter, Mailbox, MailboxView, Posted
from shardnet.transport.shared_memory.memfd import Stranger
from shardnet.transport.shared_memory.segment import Segment
from shardnet.transport.shared_memory.sharing import Sharing

__all__ = ["Alarm", "Bell", "Lender", "Letter", "Loan", "Mailbox", "MailboxView", "Posted", "Segment", "Sharing", "Stranger", "give_way"]
