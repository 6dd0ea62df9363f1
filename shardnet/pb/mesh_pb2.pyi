from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushResult(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttendReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("epoch", "group", "sequence", "block", "offset", "crc32c", "control", "padding", "data")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    group: int
    sequence: int
    block: int
    offset: int
    crc32c: int
    control: Control
    padding: bytes
    data: bytes
    def __init__(self, epoch: _Optional[int] = ..., group: _Optional[int] = ..., sequence: _Optional[int] = ..., block: _Optional[int] = ..., offset: _Optional[int] = ..., crc32c: _Optional[int] = ..., control: _Optional[_Union[Control, _Mapping]] = ..., padding: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("announcement", "abort", "probe", "probe_reply", "goodbye", "loss", "window_offer", "window_answer", "window_released", "window_full", "loan_returned", "suspicion", "group_ended", "group_made", "abort_heard", "group_over", "last_words", "window_piece", "loan", "placed")
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    PROBE_REPLY_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_OFFER_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ANSWER_FIELD_NUMBER: _ClassVar[int]
    WINDOW_RELEASED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FULL_FIELD_NUMBER: _ClassVar[int]
    LOAN_RETURNED_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ENDED_FIELD_NUMBER: _ClassVar[int]
    GROUP_MADE_FIELD_NUMBER: _ClassVar[int]
    ABORT_HEARD_FIELD_NUMBER: _ClassVar[int]
    GROUP_OVER_FIELD_NUMBER: _ClassVar[int]
    LAST_WORDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_PIECE_FIELD_NUMBER: _ClassVar[int]
    LOAN_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    announcement: Announcement
    abort: Abort
    probe: Probe
    probe_reply: ProbeReply
    goodbye: Goodbye
    loss: Loss
    window_offer: WindowOffer
    window_answer: WindowAnswer
    window_released: WindowReleased
    window_full: WindowFull
    loan_returned: LoanReturned
    suspicion: Suspicion
    group_ended: GroupEnded
    group_made: GroupMade
    abort_heard: AbortHeard
    group_over: GroupOver
    last_words: LastWords
    window_piece: WindowPiece
    loan: Loan
    placed: Placed
    def __init__(self, announcement: _Optional[_Union[Announcement, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., probe_reply: _Optional[_Union[ProbeReply, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., loss: _Optional[_Union[Loss, _Mapping]] = ..., window_offer: _Optional[_Union[WindowOffer, _Mapping]] = ..., window_answer: _Optional[_Union[WindowAnswer, _Mapping]] = ..., window_released: _Optional[_Union[WindowReleased, _Mapping]] = ..., window_full: _Optional[_Union[WindowFull, _Mapping]] = ..., loan_returned: _Optional[_Union[LoanReturned, _Mapping]] = ..., suspicion: _Optional[_Union[Suspicion, _Mapping]] = ..., group_ended: _Optional[_Union[GroupEnded, _Mapping]] = ..., group_made: _Optional[_Union[GroupMade, _Mapping]] = ..., abort_heard: _Optional[_Union[AbortHeard, _Mapping]] = ..., group_over: _Optional[_Union[GroupOver, _Mapping]] = ..., last_words: _Optional[_Union[LastWords, _Mapping]] = ..., window_piece: _Optional[_Union[WindowPiece, _Mapping]] = ..., loan: _Optional[_Union[Loan, _Mapping]] = ..., placed: _Optional[_Union[Placed, _Mapping]] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("signature", "send_bytes", "expect_bytes", "grant", "released", "posted")
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SEND_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    POSTED_FIELD_NUMBER: _ClassVar[int]
    signature: str
    send_bytes: int
    expect_bytes: int
    grant: Grant
    released: _containers.RepeatedScalarFieldContainer[int]
    posted: bool
    def __init__(self, signature: _Optional[str] = ..., send_bytes: _Optional[int] = ..., expect_bytes: _Optional[int] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., released: _Optional[_Iterable[int]] = ..., posted: _Optional[bool] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("serial", "id", "descriptor", "inode", "size", "dropped")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    serial: int
    id: int
    descriptor: int
    inode: int
    size: int
    dropped: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, serial: _Optional[int] = ..., id: _Optional[int] = ..., descriptor: _Optional[int] = ..., inode: _Optional[int] = ..., size: _Optional[int] = ..., dropped: _Optional[_Iterable[int]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reason", "detail", "ranks", "expected", "sent")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Abort.Reason]
        MISMATCH: _ClassVar[Abort.Reason]
        TIMEOUT: _ClassVar[Abort.Reason]
        FAILED: _ClassVar[Abort.Reason]
        LOST: _ClassVar[Abort.Reason]
        SIZES: _ClassVar[Abort.Reason]
    REASON_UNSPECIFIED: Abort.Reason
    MISMATCH: Abort.Reason
    TIMEOUT: Abort.Reason
    FAILED: Abort.Reason
    LOST: Abort.Reason
    SIZES: Abort.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    reason: Abort.Reason
    detail: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    expected: int
    sent: int
    def __init__(self, reason: _Optional[_Union[Abort.Reason, str]] = ..., detail: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., expected: _Optional[int] = ..., sent: _Optional[int] = ...) -> None: ...

class GroupMade(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupOver(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortHeard(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupEnded(_message.Message):
    __slots__ = ("rank", "detail", "next_sequence", "of_channel")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OF_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    rank: int
    detail: str
    next_sequence: int
    of_channel: bool
    def __init__(self, rank: _Optional[int] = ..., detail: _Optional[str] = ..., next_sequence: _Optional[int] = ..., of_channel: _Optional[bool] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("id", "entered", "next_sequence", "last_signature", "waits_in")
    ID_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    WAITS_IN_FIELD_NUMBER: _ClassVar[int]
    id: int
    entered: bool
    next_sequence: int
    last_signature: str
    waits_in: str
    def __init__(self, id: _Optional[int] = ..., entered: _Optional[bool] = ..., next_sequence: _Optional[int] = ..., last_signature: _Optional[str] = ..., waits_in: _Optional[str] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("rank", "last_words")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LAST_WORDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    last_words: str
    def __init__(self, rank: _Optional[int] = ..., last_words: _Optional[str] = ...) -> None: ...

class LastWords(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class Suspicion(_message.Message):
    __slots__ = ("rank", "gone")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    gone: bool
    def __init__(self, rank: _Optional[int] = ..., gone: _Optional[bool] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("positions",)
    class Position(_message.Message):
        __slots__ = ("group", "next_sequence")
        GROUP_FIELD_NUMBER: _ClassVar[int]
        NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
        group: int
        next_sequence: int
        def __init__(self, group: _Optional[int] = ..., next_sequence: _Optional[int] = ...) -> None: ...
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[Goodbye.Position]
    def __init__(self, positions: _Optional[_Iterable[_Union[Goodbye.Position, _Mapping]]] = ...) -> None: ...

class WindowOffer(_message.Message):
    __slots__ = ("pid", "descriptor", "capacity", "secret", "secret_address", "mailbox")
    PID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    SECRET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAILBOX_FIELD_NUMBER: _ClassVar[int]
    pid: int
    descriptor: int
    capacity: int
    secret: bytes
    secret_address: int
    mailbox: MailboxOffer
    def __init__(self, pid: _Optional[int] = ..., descriptor: _Optional[int] = ..., capacity: _Optional[int] = ..., secret: _Optional[bytes] = ..., secret_address: _Optional[int] = ..., mailbox: _Optional[_Union[MailboxOffer, _Mapping]] = ...) -> None: ...

class MailboxOffer(_message.Message):
    __slots__ = ("descriptor", "capacity", "place")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    descriptor: int
    capacity: int
    place: int
    def __init__(self, descriptor: _Optional[int] = ..., capacity: _Optional[int] = ..., place: _Optional[int] = ...) -> None: ...

class WindowAnswer(_message.Message):
    __slots__ = ("refusal", "borrows")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BORROWS_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    borrows: bool
    def __init__(self, refusal: _Optional[str] = ..., borrows: _Optional[bool] = ...) -> None: ...

class WindowPiece(_message.Message):
    __slots__ = ("position", "size")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    position: int
    size: int
    def __init__(self, position: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class WindowReleased(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: int
    def __init__(self, position: _Optional[int] = ...) -> None: ...

class WindowFull(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Loan(_message.Message):
    __slots__ = ("address", "size", "token_address", "token")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    address: int
    size: int
    token_address: int
    token: int
    def __init__(self, address: _Optional[int] = ..., size: _Optional[int] = ..., token_address: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class LoanReturned(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Placed(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...
