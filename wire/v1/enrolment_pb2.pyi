from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hardware(_message.Message):
    __slots__ = ("device", "cores", "memory_bytes", "devices", "tensor_parallel", "host_bytes", "arithmetic")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    device: str
    cores: int
    memory_bytes: int
    devices: int
    tensor_parallel: int
    host_bytes: int
    arithmetic: str
    def __init__(self, device: _Optional[str] = ..., cores: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., devices: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., host_bytes: _Optional[int] = ..., arithmetic: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("version", "protocol", "run_id", "token_id", "secret", "csr_der", "hardware")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CSR_DER_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    run_id: str
    token_id: str
    secret: bytes
    csr_der: bytes
    hardware: Hardware
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., token_id: _Optional[str] = ..., secret: _Optional[bytes] = ..., csr_der: _Optional[bytes] = ..., hardware: _Optional[_Union[Hardware, _Mapping]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("node_id", "certificate_pem", "ca_pem", "control_port")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PORT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    certificate_pem: bytes
    ca_pem: bytes
    control_port: int
    def __init__(self, node_id: _Optional[str] = ..., certificate_pem: _Optional[bytes] = ..., ca_pem: _Optional[bytes] = ..., control_port: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("granted", "refusal")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    granted: Granted
    refusal: Refusal
    def __init__(self, granted: _Optional[_Union[Granted, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class LookRequest(_message.Message):
    __slots__ = ("version", "protocol", "run_id", "token_id", "secret", "port", "mapped_port", "padding")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    MAPPED_PORT_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    run_id: str
    token_id: str
    secret: bytes
    port: int
    mapped_port: int
    padding: bytes
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., token_id: _Optional[str] = ..., secret: _Optional[bytes] = ..., port: _Optional[int] = ..., mapped_port: _Optional[int] = ..., padding: _Optional[bytes] = ...) -> None: ...

class Seen(_message.Message):
    __slots__ = ("host", "reached", "mapped_reached", "relayed", "relays", "refusal", "links", "control_port", "precision", "compute")
    HOST_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    MAPPED_REACHED_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PORT_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    host: str
    reached: bool
    mapped_reached: bool
    relayed: bool
    relays: _containers.RepeatedScalarFieldContainer[str]
    refusal: str
    links: _containers.RepeatedScalarFieldContainer[str]
    control_port: int
    precision: str
    compute: str
    def __init__(self, host: _Optional[str] = ..., reached: bool = ..., mapped_reached: bool = ..., relayed: bool = ..., relays: _Optional[_Iterable[str]] = ..., refusal: _Optional[str] = ..., links: _Optional[_Iterable[str]] = ..., control_port: _Optional[int] = ..., precision: _Optional[str] = ..., compute: _Optional[str] = ...) -> None: ...

class LookReply(_message.Message):
    __slots__ = ("refusal", "seen", "padding", "done")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    seen: Seen
    padding: bytes
    done: bool
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ..., seen: _Optional[_Union[Seen, _Mapping]] = ..., padding: _Optional[bytes] = ..., done: bool = ...) -> None: ...
