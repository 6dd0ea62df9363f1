from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoreRequest(_message.Message):
    __slots__ = ("epoch", "within_s", "set", "get", "wait", "check", "delete", "add", "exchange", "append", "count")
    class Entries(_message.Message):
        __slots__ = ("keys", "values")
        KEYS_FIELD_NUMBER: _ClassVar[int]
        VALUES_FIELD_NUMBER: _ClassVar[int]
        keys: _containers.RepeatedScalarFieldContainer[str]
        values: _containers.RepeatedScalarFieldContainer[bytes]
        def __init__(self, keys: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[bytes]] = ...) -> None: ...
    class Keys(_message.Message):
        __slots__ = ("keys",)
        KEYS_FIELD_NUMBER: _ClassVar[int]
        keys: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...
    class Sum(_message.Message):
        __slots__ = ("key", "amount")
        KEY_FIELD_NUMBER: _ClassVar[int]
        AMOUNT_FIELD_NUMBER: _ClassVar[int]
        key: str
        amount: int
        def __init__(self, key: _Optional[str] = ..., amount: _Optional[int] = ...) -> None: ...
    class Exchange(_message.Message):
        __slots__ = ("key", "expected", "desired")
        KEY_FIELD_NUMBER: _ClassVar[int]
        EXPECTED_FIELD_NUMBER: _ClassVar[int]
        DESIRED_FIELD_NUMBER: _ClassVar[int]
        key: str
        expected: bytes
        desired: bytes
        def __init__(self, key: _Optional[str] = ..., expected: _Optional[bytes] = ..., desired: _Optional[bytes] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    within_s: float
    set: StoreRequest.Entries
    get: StoreRequest.Keys
    wait: StoreRequest.Keys
    check: StoreRequest.Keys
    delete: StoreRequest.Keys
    add: StoreRequest.Sum
    exchange: StoreRequest.Exchange
    append: StoreRequest.Entries
    count: bool
    def __init__(self, epoch: _Optional[int] = ..., within_s: _Optional[float] = ..., set: _Optional[_Union[StoreRequest.Entries, _Mapping]] = ..., get: _Optional[_Union[StoreRequest.Keys, _Mapping]] = ..., wait: _Optional[_Union[StoreRequest.Keys, _Mapping]] = ..., check: _Optional[_Union[StoreRequest.Keys, _Mapping]] = ..., delete: _Optional[_Union[StoreRequest.Keys, _Mapping]] = ..., add: _Optional[_Union[StoreRequest.Sum, _Mapping]] = ..., exchange: _Optional[_Union[StoreRequest.Exchange, _Mapping]] = ..., append: _Optional[_Union[StoreRequest.Entries, _Mapping]] = ..., count: _Optional[bool] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("values", "number", "missing")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    number: int
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[bytes]] = ..., number: _Optional[int] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...
