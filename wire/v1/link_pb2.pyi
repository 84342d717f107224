from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkHello(_message.Message):
    __slots__ = ("epoch", "stage", "session", "next_sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stage: int
    session: int
    next_sequence: int
    def __init__(self, epoch: _Optional[int] = ..., stage: _Optional[int] = ..., session: _Optional[int] = ..., next_sequence: _Optional[int] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("next_sequence", "microseconds_ago")
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    microseconds_ago: int
    def __init__(self, next_sequence: _Optional[int] = ..., microseconds_ago: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("next_sequence", "credit_limit", "arrived")
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    credit_limit: int
    arrived: _containers.RepeatedCompositeFieldContainer[Arrival]
    def __init__(self, next_sequence: _Optional[int] = ..., credit_limit: _Optional[int] = ..., arrived: _Optional[_Iterable[_Union[Arrival, _Mapping]]] = ...) -> None: ...

class SendAgain(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class LinkMessage(_message.Message):
    __slots__ = ("hello", "acknowledge", "send_again", "ping", "pong")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    SEND_AGAIN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    acknowledge: Acknowledge
    send_again: SendAgain
    ping: Ping
    pong: Pong
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., send_again: _Optional[_Union[SendAgain, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...
