"""Data between the ranks of a node through memory that they share; everything else stays on their streams.

[Note: the window] Each rank writes into one window, a ring of bytes that the node's other ranks map read-only. Data is
copied in once, however many shall read it, and the stream says where it lies; who reads it adds or copies it from there to
where it belongs, and says over its own stream what it needs no more. So the kernel copies nothing, nobody polls, and order,
flow control and the loss of a peer are the streams' own. A window's memory has no name (memfd) and goes with the last
process that maps it, however that ends. It is allocated when it is made, so that a lack of memory shows then (as an error,
or where a container's limit is reached by its killer) and not in the middle of a training. And it is sealed: it cannot
shrink under a reader, nor be mapped for writing by one.

Whether two ranks share memory is found out, for containers of one host may not: the owner says which descriptor of which
process the window is, and the reader opens it below /proc and compares the secret that the window begins with. Where that
fails, or there is no memory, data goes over the stream as between nodes.

What need not be copied into a window is lent: see [Note: loans] in `lending.py`. Where all ranks of a node want the same, they
write it into one segment (`segment.py`). And what is small is left in a mailbox, of which nobody is told: see [Note: mailboxes] in
`mailbox.py`.

`window.py` is the writer's side, `view.py` the reader's, `sharing.py` what a mesh does with both. Whoever sleeps at a mailbox is
woken by what is in `bell.py`, `alarm.py` and `futex.py`; `memfd.py` and `mapping.py` are how memory is made and mapped.
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
