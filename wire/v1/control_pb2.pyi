from wire.v1 import enrolment_pb2 as _enrolment_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_LINK: _ClassVar[FailureKind]
    FAILURE_NON_FINITE: _ClassVar[FailureKind]
    FAILURE_INTERNAL: _ClassVar[FailureKind]
    FAILURE_PEER: _ClassVar[FailureKind]
FAILURE_UNSPECIFIED: FailureKind
FAILURE_LINK: FailureKind
FAILURE_NON_FINITE: FailureKind
FAILURE_INTERNAL: FailureKind
FAILURE_PEER: FailureKind

class Hello(_message.Message):
    __slots__ = ("version", "protocol", "peer_address", "hardware", "flops", "download_rate", "epoch", "process_nonce", "name", "relay_rate", "mapped_port", "also")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_RATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROCESS_NONCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RELAY_RATE_FIELD_NUMBER: _ClassVar[int]
    MAPPED_PORT_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    peer_address: str
    hardware: _enrolment_pb2.Hardware
    flops: float
    download_rate: float
    epoch: int
    process_nonce: int
    name: str
    relay_rate: float
    mapped_port: int
    also: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., peer_address: _Optional[str] = ..., hardware: _Optional[_Union[_enrolment_pb2.Hardware, _Mapping]] = ..., flops: _Optional[float] = ..., download_rate: _Optional[float] = ..., epoch: _Optional[int] = ..., process_nonce: _Optional[int] = ..., name: _Optional[str] = ..., relay_rate: _Optional[float] = ..., mapped_port: _Optional[int] = ..., also: _Optional[_Iterable[str]] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("epoch", "held_step", "voted", "lineage", "storages")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_STEP_FIELD_NUMBER: _ClassVar[int]
    VOTED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    held_step: int
    voted: bool
    lineage: int
    storages: _containers.RepeatedCompositeFieldContainer[StorageSeconds]
    def __init__(self, epoch: _Optional[int] = ..., held_step: _Optional[int] = ..., voted: bool = ..., lineage: _Optional[int] = ..., storages: _Optional[_Iterable[_Union[StorageSeconds, _Mapping]]] = ...) -> None: ...

class StorageSeconds(_message.Message):
    __slots__ = ("storage", "seconds")
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    storage: str
    seconds: float
    def __init__(self, storage: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("epoch", "telemetry")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    telemetry: Telemetry
    def __init__(self, epoch: _Optional[int] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ...) -> None: ...

class UnitNorm(_message.Message):
    __slots__ = ("unit", "squared_norm")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    unit: int
    squared_norm: float
    def __init__(self, unit: _Optional[int] = ..., squared_norm: _Optional[float] = ...) -> None: ...

class UnitDigest(_message.Message):
    __slots__ = ("unit", "digest")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    unit: int
    digest: bytes
    def __init__(self, unit: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("epoch", "step", "norms", "loss", "has_loss", "group_losses", "digests", "telemetry", "generation", "sums")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    HAS_LOSS_FIELD_NUMBER: _ClassVar[int]
    GROUP_LOSSES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    norms: _containers.RepeatedCompositeFieldContainer[UnitNorm]
    loss: float
    has_loss: bool
    group_losses: _containers.RepeatedCompositeFieldContainer[GroupLoss]
    digests: _containers.RepeatedCompositeFieldContainer[GroupDigests]
    telemetry: Telemetry
    generation: int
    sums: _containers.RepeatedCompositeFieldContainer[UnitDigest]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., norms: _Optional[_Iterable[_Union[UnitNorm, _Mapping]]] = ..., loss: _Optional[float] = ..., has_loss: bool = ..., group_losses: _Optional[_Iterable[_Union[GroupLoss, _Mapping]]] = ..., digests: _Optional[_Iterable[_Union[GroupDigests, _Mapping]]] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ..., generation: _Optional[int] = ..., sums: _Optional[_Iterable[_Union[UnitDigest, _Mapping]]] = ...) -> None: ...

class HandedOver(_message.Message):
    __slots__ = ("epoch", "step", "generation", "groups", "group_losses", "passed_on")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUP_LOSSES_FIELD_NUMBER: _ClassVar[int]
    PASSED_ON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    generation: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    group_losses: _containers.RepeatedCompositeFieldContainer[GroupLoss]
    passed_on: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., generation: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ..., group_losses: _Optional[_Iterable[_Union[GroupLoss, _Mapping]]] = ..., passed_on: _Optional[_Iterable[int]] = ...) -> None: ...

class GroupDigests(_message.Message):
    __slots__ = ("group", "gradient", "boundaries", "loss", "has_loss")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    HAS_LOSS_FIELD_NUMBER: _ClassVar[int]
    group: int
    gradient: bytes
    boundaries: _containers.RepeatedCompositeFieldContainer[BoundaryDigest]
    loss: float
    has_loss: bool
    def __init__(self, group: _Optional[int] = ..., gradient: _Optional[bytes] = ..., boundaries: _Optional[_Iterable[_Union[BoundaryDigest, _Mapping]]] = ..., loss: _Optional[float] = ..., has_loss: bool = ...) -> None: ...

class BoundaryDigest(_message.Message):
    __slots__ = ("boundary", "backward", "received", "digest")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    backward: bool
    received: bool
    digest: bytes
    def __init__(self, boundary: _Optional[int] = ..., backward: bool = ..., received: bool = ..., digest: _Optional[bytes] = ...) -> None: ...

class GroupLoss(_message.Message):
    __slots__ = ("group", "loss")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    group: int
    loss: float
    def __init__(self, group: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("epoch", "step", "telemetry")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    telemetry: Telemetry
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ...) -> None: ...

class Validated(_message.Message):
    __slots__ = ("epoch", "step", "number", "loss", "has_loss", "telemetry")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    HAS_LOSS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    number: int
    loss: float
    has_loss: bool
    telemetry: Telemetry
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., number: _Optional[int] = ..., loss: _Optional[float] = ..., has_loss: bool = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ...) -> None: ...

class StepFailed(_message.Message):
    __slots__ = ("epoch", "step", "kind", "message", "peer_stage", "peer_replica")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_STAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_REPLICA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    kind: FailureKind
    message: str
    peer_stage: int
    peer_replica: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ..., peer_stage: _Optional[int] = ..., peer_replica: _Optional[int] = ...) -> None: ...

class PeerSilent(_message.Message):
    __slots__ = ("epoch", "stage", "replica")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stage: int
    replica: int
    def __init__(self, epoch: _Optional[int] = ..., stage: _Optional[int] = ..., replica: _Optional[int] = ...) -> None: ...

class SumsMissing(_message.Message):
    __slots__ = ("epoch", "step", "replica")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    replica: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., replica: _Optional[int] = ...) -> None: ...

class FlowFigures(_message.Message):
    __slots__ = ("direction", "codec", "bytes", "elements")
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    direction: int
    codec: str
    bytes: int
    elements: int
    def __init__(self, direction: _Optional[int] = ..., codec: _Optional[str] = ..., bytes: _Optional[int] = ..., elements: _Optional[int] = ...) -> None: ...

class LinkFigures(_message.Message):
    __slots__ = ("target", "bytes", "bytes_received", "retransmits", "rejects", "round_trip_seconds", "least_round_trip_seconds", "capacity", "busy_seconds", "queued_bytes", "flows", "target_replica", "path", "not_together", "source", "source_replica", "processor_seconds")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    RETRANSMITS_FIELD_NUMBER: _ClassVar[int]
    REJECTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEAST_ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    TARGET_REPLICA_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NOT_TOGETHER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_REPLICA_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    target: int
    bytes: int
    bytes_received: int
    retransmits: int
    rejects: int
    round_trip_seconds: float
    least_round_trip_seconds: float
    capacity: float
    busy_seconds: float
    queued_bytes: int
    flows: _containers.RepeatedCompositeFieldContainer[FlowFigures]
    target_replica: int
    path: str
    not_together: str
    source: int
    source_replica: int
    processor_seconds: float
    def __init__(self, target: _Optional[int] = ..., bytes: _Optional[int] = ..., bytes_received: _Optional[int] = ..., retransmits: _Optional[int] = ..., rejects: _Optional[int] = ..., round_trip_seconds: _Optional[float] = ..., least_round_trip_seconds: _Optional[float] = ..., capacity: _Optional[float] = ..., busy_seconds: _Optional[float] = ..., queued_bytes: _Optional[int] = ..., flows: _Optional[_Iterable[_Union[FlowFigures, _Mapping]]] = ..., target_replica: _Optional[int] = ..., path: _Optional[str] = ..., not_together: _Optional[str] = ..., source: _Optional[int] = ..., source_replica: _Optional[int] = ..., processor_seconds: _Optional[float] = ...) -> None: ...

class KindSeconds(_message.Message):
    __slots__ = ("kind", "seconds")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    seconds: float
    def __init__(self, kind: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("seconds", "wall_seconds", "links", "epoch", "memory_bytes", "peak_memory_bytes", "gpu_memory_bytes", "gpu_peak_memory_bytes", "clock_skew_seconds", "clock_error_seconds", "relayed_bytes", "relay_pairs", "relay_refused", "line_up", "line_down", "expert_load", "dead_experts", "without_kernels")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SKEW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAY_PAIRS_FIELD_NUMBER: _ClassVar[int]
    RELAY_REFUSED_FIELD_NUMBER: _ClassVar[int]
    LINE_UP_FIELD_NUMBER: _ClassVar[int]
    LINE_DOWN_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOAD_FIELD_NUMBER: _ClassVar[int]
    DEAD_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_KERNELS_FIELD_NUMBER: _ClassVar[int]
    seconds: _containers.RepeatedCompositeFieldContainer[KindSeconds]
    wall_seconds: float
    links: _containers.RepeatedCompositeFieldContainer[LinkFigures]
    epoch: int
    memory_bytes: int
    peak_memory_bytes: int
    gpu_memory_bytes: int
    gpu_peak_memory_bytes: int
    clock_skew_seconds: float
    clock_error_seconds: float
    relayed_bytes: int
    relay_pairs: int
    relay_refused: int
    line_up: float
    line_down: float
    expert_load: float
    dead_experts: int
    without_kernels: str
    def __init__(self, seconds: _Optional[_Iterable[_Union[KindSeconds, _Mapping]]] = ..., wall_seconds: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkFigures, _Mapping]]] = ..., epoch: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., gpu_memory_bytes: _Optional[int] = ..., gpu_peak_memory_bytes: _Optional[int] = ..., clock_skew_seconds: _Optional[float] = ..., clock_error_seconds: _Optional[float] = ..., relayed_bytes: _Optional[int] = ..., relay_pairs: _Optional[int] = ..., relay_refused: _Optional[int] = ..., line_up: _Optional[float] = ..., line_down: _Optional[float] = ..., expert_load: _Optional[float] = ..., dead_experts: _Optional[int] = ..., without_kernels: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("telemetry", "sent_at", "preparing", "awaited")
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    PREPARING_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    telemetry: Telemetry
    sent_at: float
    preparing: bool
    awaited: AwaitedSums
    def __init__(self, telemetry: _Optional[_Union[Telemetry, _Mapping]] = ..., sent_at: _Optional[float] = ..., preparing: bool = ..., awaited: _Optional[_Union[AwaitedSums, _Mapping]] = ...) -> None: ...

class AwaitedSums(_message.Message):
    __slots__ = ("row", "is_total")
    ROW_FIELD_NUMBER: _ClassVar[int]
    IS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    row: int
    is_total: bool
    def __init__(self, row: _Optional[int] = ..., is_total: bool = ...) -> None: ...

class StepSpans(_message.Message):
    __slots__ = ("epoch", "step", "stage", "clock_offset", "clock_error", "dropped", "names", "kinds", "starts", "lengths", "directions", "microbatches", "boundaries", "steps", "peers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DIRECTIONS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    stage: int
    clock_offset: float
    clock_error: float
    dropped: int
    names: _containers.RepeatedScalarFieldContainer[str]
    kinds: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    directions: _containers.RepeatedScalarFieldContainer[int]
    microbatches: _containers.RepeatedScalarFieldContainer[int]
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    peers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., stage: _Optional[int] = ..., clock_offset: _Optional[float] = ..., clock_error: _Optional[float] = ..., dropped: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., kinds: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., directions: _Optional[_Iterable[int]] = ..., microbatches: _Optional[_Iterable[int]] = ..., boundaries: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., peers: _Optional[_Iterable[int]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "failed")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    failed: bool
    def __init__(self, reason: _Optional[str] = ..., failed: bool = ...) -> None: ...

class Following(_message.Message):
    __slots__ = ("snapshot", "step", "failed")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    step: int
    failed: str
    def __init__(self, snapshot: _Optional[int] = ..., step: _Optional[int] = ..., failed: _Optional[str] = ...) -> None: ...

class RelayTime(_message.Message):
    __slots__ = ("node_id", "seconds")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    seconds: float
    def __init__(self, node_id: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class RelayTimes(_message.Message):
    __slots__ = ("times",)
    TIMES_FIELD_NUMBER: _ClassVar[int]
    times: _containers.RepeatedCompositeFieldContainer[RelayTime]
    def __init__(self, times: _Optional[_Iterable[_Union[RelayTime, _Mapping]]] = ...) -> None: ...

class BlockTime(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class CodecTime(_message.Message):
    __slots__ = ("codec", "pack", "unpack")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    UNPACK_FIELD_NUMBER: _ClassVar[int]
    codec: str
    pack: float
    unpack: float
    def __init__(self, codec: _Optional[str] = ..., pack: _Optional[float] = ..., unpack: _Optional[float] = ...) -> None: ...

class CodecTimes(_message.Message):
    __slots__ = ("times",)
    TIMES_FIELD_NUMBER: _ClassVar[int]
    times: _containers.RepeatedCompositeFieldContainer[CodecTime]
    def __init__(self, times: _Optional[_Iterable[_Union[CodecTime, _Mapping]]] = ...) -> None: ...

class PeerRate(_message.Message):
    __slots__ = ("node_id", "round_trip", "up", "down")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    round_trip: float
    up: float
    down: float
    def __init__(self, node_id: _Optional[str] = ..., round_trip: _Optional[float] = ..., up: _Optional[float] = ..., down: _Optional[float] = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("hello", "placed", "ready", "vote", "applied", "step_failed", "heartbeat", "leave", "step_spans", "validated", "following", "relay_times", "block_time", "peer_rate", "codec_times", "several", "state_hashes", "peer_silent", "handed_over", "sums_missing")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    STEP_FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    STEP_SPANS_FIELD_NUMBER: _ClassVar[int]
    VALIDATED_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    RELAY_TIMES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TIME_FIELD_NUMBER: _ClassVar[int]
    PEER_RATE_FIELD_NUMBER: _ClassVar[int]
    CODEC_TIMES_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    STATE_HASHES_FIELD_NUMBER: _ClassVar[int]
    PEER_SILENT_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    SUMS_MISSING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    placed: Placed
    ready: Ready
    vote: Vote
    applied: Applied
    step_failed: StepFailed
    heartbeat: Heartbeat
    leave: Leave
    step_spans: StepSpans
    validated: Validated
    following: Following
    relay_times: RelayTimes
    block_time: BlockTime
    peer_rate: PeerRate
    codec_times: CodecTimes
    several: Several
    state_hashes: StateHashes
    peer_silent: PeerSilent
    handed_over: HandedOver
    sums_missing: SumsMissing
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., placed: _Optional[_Union[Placed, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., step_failed: _Optional[_Union[StepFailed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., step_spans: _Optional[_Union[StepSpans, _Mapping]] = ..., validated: _Optional[_Union[Validated, _Mapping]] = ..., following: _Optional[_Union[Following, _Mapping]] = ..., relay_times: _Optional[_Union[RelayTimes, _Mapping]] = ..., block_time: _Optional[_Union[BlockTime, _Mapping]] = ..., peer_rate: _Optional[_Union[PeerRate, _Mapping]] = ..., codec_times: _Optional[_Union[CodecTimes, _Mapping]] = ..., several: _Optional[_Union[Several, _Mapping]] = ..., state_hashes: _Optional[_Union[StateHashes, _Mapping]] = ..., peer_silent: _Optional[_Union[PeerSilent, _Mapping]] = ..., handed_over: _Optional[_Union[HandedOver, _Mapping]] = ..., sums_missing: _Optional[_Union[SumsMissing, _Mapping]] = ...) -> None: ...

class StateHashes(_message.Message):
    __slots__ = ("epoch", "step", "units")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    units: _containers.RepeatedCompositeFieldContainer[UnitHash]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., units: _Optional[_Iterable[_Union[UnitHash, _Mapping]]] = ...) -> None: ...

class UnitHash(_message.Message):
    __slots__ = ("unit", "sha256", "weights", "moments", "squares", "weights_sha256")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    unit: int
    sha256: bytes
    weights: float
    moments: float
    squares: float
    weights_sha256: bytes
    def __init__(self, unit: _Optional[int] = ..., sha256: _Optional[bytes] = ..., weights: _Optional[float] = ..., moments: _Optional[float] = ..., squares: _Optional[float] = ..., weights_sha256: _Optional[bytes] = ...) -> None: ...

class Several(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[NodeMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[NodeMessage, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("node_id", "config_json", "heartbeat_seconds", "windows")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    config_json: str
    heartbeat_seconds: float
    windows: int
    def __init__(self, node_id: _Optional[str] = ..., config_json: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ..., windows: _Optional[int] = ...) -> None: ...

class PlacedStage(_message.Message):
    __slots__ = ("node_id", "address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("epoch", "stage", "stages", "replica", "relays", "also", "enters", "renewed", "row_nodes", "row_addresses", "row_lengths", "row_groups")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    ALSO_FIELD_NUMBER: _ClassVar[int]
    ENTERS_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    ROW_NODES_FIELD_NUMBER: _ClassVar[int]
    ROW_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ROW_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ROW_GROUPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stage: int
    stages: _containers.RepeatedCompositeFieldContainer[PlacedStage]
    replica: int
    relays: _containers.RepeatedCompositeFieldContainer[PeerRelays]
    also: _containers.RepeatedCompositeFieldContainer[PeerAddresses]
    enters: bool
    renewed: _containers.RepeatedCompositeFieldContainer[Seat]
    row_nodes: _containers.RepeatedScalarFieldContainer[str]
    row_addresses: _containers.RepeatedScalarFieldContainer[str]
    row_lengths: _containers.RepeatedScalarFieldContainer[int]
    row_groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., stage: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[PlacedStage, _Mapping]]] = ..., replica: _Optional[int] = ..., relays: _Optional[_Iterable[_Union[PeerRelays, _Mapping]]] = ..., also: _Optional[_Iterable[_Union[PeerAddresses, _Mapping]]] = ..., enters: bool = ..., renewed: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., row_nodes: _Optional[_Iterable[str]] = ..., row_addresses: _Optional[_Iterable[str]] = ..., row_lengths: _Optional[_Iterable[int]] = ..., row_groups: _Optional[_Iterable[int]] = ...) -> None: ...

class PeerAddresses(_message.Message):
    __slots__ = ("node_id", "addresses")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class PeerRelays(_message.Message):
    __slots__ = ("node_id", "relays")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    relays: _containers.RepeatedCompositeFieldContainer[PlacedStage]
    def __init__(self, node_id: _Optional[str] = ..., relays: _Optional[_Iterable[_Union[PlacedStage, _Mapping]]] = ...) -> None: ...

class Relays(_message.Message):
    __slots__ = ("relays",)
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    relays: _containers.RepeatedCompositeFieldContainer[PlacedStage]
    def __init__(self, relays: _Optional[_Iterable[_Union[PlacedStage, _Mapping]]] = ...) -> None: ...

class ProbePeer(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: PlacedStage
    def __init__(self, peer: _Optional[_Union[PlacedStage, _Mapping]] = ...) -> None: ...

class RelayFor(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class AskHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("sent_at", "at", "pause")
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    sent_at: float
    at: float
    pause: float
    def __init__(self, sent_at: _Optional[float] = ..., at: _Optional[float] = ..., pause: _Optional[float] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("epoch", "step", "missed", "uncompressed", "lineage", "activation_codecs", "gradient_codecs", "storages")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    UNCOMPRESSED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_CODECS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_CODECS_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    missed: Commit
    uncompressed: bool
    lineage: int
    activation_codecs: _containers.RepeatedScalarFieldContainer[str]
    gradient_codecs: _containers.RepeatedScalarFieldContainer[str]
    storages: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., missed: _Optional[_Union[Commit, _Mapping]] = ..., uncompressed: bool = ..., lineage: _Optional[int] = ..., activation_codecs: _Optional[_Iterable[str]] = ..., gradient_codecs: _Optional[_Iterable[str]] = ..., storages: _Optional[_Iterable[str]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("epoch", "step", "link_windows", "keep_sums", "audited", "waited_seconds", "loss_scale", "digests", "generation", "absent", "late", "hands_over", "portion_rows", "portion_lengths", "portion_groups")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINK_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SUMS_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    HANDS_OVER_FIELD_NUMBER: _ClassVar[int]
    PORTION_ROWS_FIELD_NUMBER: _ClassVar[int]
    PORTION_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PORTION_GROUPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    link_windows: _containers.RepeatedScalarFieldContainer[int]
    keep_sums: bool
    audited: _containers.RepeatedScalarFieldContainer[int]
    waited_seconds: float
    loss_scale: float
    digests: bool
    generation: int
    absent: _containers.RepeatedCompositeFieldContainer[Seat]
    late: _containers.RepeatedCompositeFieldContainer[Seat]
    hands_over: bool
    portion_rows: _containers.RepeatedScalarFieldContainer[int]
    portion_lengths: _containers.RepeatedScalarFieldContainer[int]
    portion_groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., link_windows: _Optional[_Iterable[int]] = ..., keep_sums: bool = ..., audited: _Optional[_Iterable[int]] = ..., waited_seconds: _Optional[float] = ..., loss_scale: _Optional[float] = ..., digests: bool = ..., generation: _Optional[int] = ..., absent: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., late: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., hands_over: bool = ..., portion_rows: _Optional[_Iterable[int]] = ..., portion_lengths: _Optional[_Iterable[int]] = ..., portion_groups: _Optional[_Iterable[int]] = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("row", "stage")
    ROW_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    row: int
    stage: int
    def __init__(self, row: _Optional[int] = ..., stage: _Optional[int] = ...) -> None: ...

class Validate(_message.Message):
    __slots__ = ("epoch", "step", "number", "microbatches", "waited_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    number: int
    microbatches: int
    waited_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., number: _Optional[int] = ..., microbatches: _Optional[int] = ..., waited_seconds: _Optional[float] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("step", "units", "keep")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    units: _containers.RepeatedScalarFieldContainer[str]
    keep: bool
    def __init__(self, step: _Optional[int] = ..., units: _Optional[_Iterable[str]] = ..., keep: bool = ...) -> None: ...

class Retain(_message.Message):
    __slots__ = ("steps", "record")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    record: str
    def __init__(self, steps: _Optional[_Iterable[int]] = ..., record: _Optional[str] = ...) -> None: ...

class ShutOut(_message.Message):
    __slots__ = ("node_ids",)
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SendLayers(_message.Message):
    __slots__ = ("step", "units", "place")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    step: int
    units: _containers.RepeatedScalarFieldContainer[str]
    place: str
    def __init__(self, step: _Optional[int] = ..., units: _Optional[_Iterable[str]] = ..., place: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("epoch", "step", "clip_coefficient", "lr", "waited_seconds", "then")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLIP_COEFFICIENT_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    clip_coefficient: float
    lr: float
    waited_seconds: float
    then: Begin
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., clip_coefficient: _Optional[float] = ..., lr: _Optional[float] = ..., waited_seconds: _Optional[float] = ..., then: _Optional[_Union[Begin, _Mapping]] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ("step", "stage", "stages", "lineage", "sources", "storages")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    step: int
    stage: int
    stages: int
    lineage: int
    sources: _containers.RepeatedCompositeFieldContainer[PlacedStage]
    storages: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., stage: _Optional[int] = ..., stages: _Optional[int] = ..., lineage: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[PlacedStage, _Mapping]]] = ..., storages: _Optional[_Iterable[str]] = ...) -> None: ...

class FollowStep(_message.Message):
    __slots__ = ("snapshot", "step", "clip_coefficient", "lr", "norms", "sums")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLIP_COEFFICIENT_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    step: int
    clip_coefficient: float
    lr: float
    norms: _containers.RepeatedCompositeFieldContainer[UnitNorm]
    sums: _containers.RepeatedCompositeFieldContainer[UnitDigest]
    def __init__(self, snapshot: _Optional[int] = ..., step: _Optional[int] = ..., clip_coefficient: _Optional[float] = ..., lr: _Optional[float] = ..., norms: _Optional[_Iterable[_Union[UnitNorm, _Mapping]]] = ..., sums: _Optional[_Iterable[_Union[UnitDigest, _Mapping]]] = ...) -> None: ...

class TakeSnapshot(_message.Message):
    __slots__ = ("epoch", "step", "place", "only_hashes", "attempt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ONLY_HASHES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    place: str
    only_hashes: bool
    attempt: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., place: _Optional[str] = ..., only_hashes: bool = ..., attempt: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("epoch", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "failed", "paused", "soon")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SOON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    failed: bool
    paused: bool
    soon: bool
    def __init__(self, reason: _Optional[str] = ..., failed: bool = ..., paused: bool = ..., soon: bool = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "placement", "restore", "begin", "commit", "abort", "finish", "refusal", "take_snapshot", "prefetch", "heartbeat_reply", "validate", "retain", "send_layers", "follow", "follow_step", "relays", "relay_for", "shut_out", "probe_peer", "ask_heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TAKE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_REPLY_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    SEND_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_STEP_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    RELAY_FOR_FIELD_NUMBER: _ClassVar[int]
    SHUT_OUT_FIELD_NUMBER: _ClassVar[int]
    PROBE_PEER_FIELD_NUMBER: _ClassVar[int]
    ASK_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    placement: Placement
    restore: Restore
    begin: Begin
    commit: Commit
    abort: Abort
    finish: Finish
    refusal: _enrolment_pb2.Refusal
    take_snapshot: TakeSnapshot
    prefetch: Prefetch
    heartbeat_reply: HeartbeatReply
    validate: Validate
    retain: Retain
    send_layers: SendLayers
    follow: Follow
    follow_step: FollowStep
    relays: Relays
    relay_for: RelayFor
    shut_out: ShutOut
    probe_peer: ProbePeer
    ask_heartbeat: AskHeartbeat
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., refusal: _Optional[_Union[_enrolment_pb2.Refusal, _Mapping]] = ..., take_snapshot: _Optional[_Union[TakeSnapshot, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., heartbeat_reply: _Optional[_Union[HeartbeatReply, _Mapping]] = ..., validate: _Optional[_Union[Validate, _Mapping]] = ..., retain: _Optional[_Union[Retain, _Mapping]] = ..., send_layers: _Optional[_Union[SendLayers, _Mapping]] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., follow_step: _Optional[_Union[FollowStep, _Mapping]] = ..., relays: _Optional[_Union[Relays, _Mapping]] = ..., relay_for: _Optional[_Union[RelayFor, _Mapping]] = ..., shut_out: _Optional[_Union[ShutOut, _Mapping]] = ..., probe_peer: _Optional[_Union[ProbePeer, _Mapping]] = ..., ask_heartbeat: _Optional[_Union[AskHeartbeat, _Mapping]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("csr_der",)
    CSR_DER_FIELD_NUMBER: _ClassVar[int]
    csr_der: bytes
    def __init__(self, csr_der: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate_pem", "refusal")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    refusal: _enrolment_pb2.Refusal
    def __init__(self, certificate_pem: _Optional[bytes] = ..., refusal: _Optional[_Union[_enrolment_pb2.Refusal, _Mapping]] = ...) -> None: ...

class GetBatchRequest(_message.Message):
    __slots__ = ("step", "labels", "held_out", "groups", "documents", "steps")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    labels: bool
    held_out: bool
    groups: _containers.RepeatedScalarFieldContainer[int]
    documents: bool
    steps: int
    def __init__(self, step: _Optional[int] = ..., labels: bool = ..., held_out: bool = ..., groups: _Optional[_Iterable[int]] = ..., documents: bool = ..., steps: _Optional[int] = ...) -> None: ...

class GetLayerRequest(_message.Message):
    __slots__ = ("step", "unit", "held_sha256", "bad_holders")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    HELD_SHA256_FIELD_NUMBER: _ClassVar[int]
    BAD_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    step: int
    unit: str
    held_sha256: str
    bad_holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., unit: _Optional[str] = ..., held_sha256: _Optional[str] = ..., bad_holders: _Optional[_Iterable[str]] = ...) -> None: ...

class LayerPlace(_message.Message):
    __slots__ = ("holders", "url")
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[PlacedStage]
    url: str
    def __init__(self, holders: _Optional[_Iterable[_Union[PlacedStage, _Mapping]]] = ..., url: _Optional[str] = ...) -> None: ...

class HeldLayer(_message.Message):
    __slots__ = ("step", "unit", "bytes", "sha256", "weights_sha256")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    step: int
    unit: str
    bytes: int
    sha256: str
    weights_sha256: str
    def __init__(self, step: _Optional[int] = ..., unit: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., weights_sha256: _Optional[str] = ...) -> None: ...

class LayerName(_message.Message):
    __slots__ = ("step", "unit")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    step: int
    unit: str
    def __init__(self, step: _Optional[int] = ..., unit: _Optional[str] = ...) -> None: ...

class HoldLayersRequest(_message.Message):
    __slots__ = ("layers", "missing")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[HeldLayer]
    missing: _containers.RepeatedCompositeFieldContainer[LayerName]
    def __init__(self, layers: _Optional[_Iterable[_Union[HeldLayer, _Mapping]]] = ..., missing: _Optional[_Iterable[_Union[LayerName, _Mapping]]] = ...) -> None: ...

class HoldLayersReply(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedCompositeFieldContainer[LayerName]
    def __init__(self, unknown: _Optional[_Iterable[_Union[LayerName, _Mapping]]] = ...) -> None: ...

class PeerLayerRequest(_message.Message):
    __slots__ = ("step", "unit", "sha256", "offset", "sums")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    unit: str
    sha256: str
    offset: int
    sums: bool
    def __init__(self, step: _Optional[int] = ..., unit: _Optional[str] = ..., sha256: _Optional[str] = ..., offset: _Optional[int] = ..., sums: bool = ...) -> None: ...

class DataChunk(_message.Message):
    __slots__ = ("data", "total_bytes", "sha256", "place")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    total_bytes: int
    sha256: str
    place: LayerPlace
    def __init__(self, data: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., place: _Optional[_Union[LayerPlace, _Mapping]] = ...) -> None: ...

class PutLayerChunk(_message.Message):
    __slots__ = ("step", "unit", "total_bytes", "sha256", "weights_alone", "weights_at", "data")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ALONE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_AT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    step: int
    unit: str
    total_bytes: int
    sha256: str
    weights_alone: bool
    weights_at: int
    data: bytes
    def __init__(self, step: _Optional[int] = ..., unit: _Optional[str] = ..., total_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., weights_alone: bool = ..., weights_at: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutLayerReply(_message.Message):
    __slots__ = ("stored", "message")
    STORED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    message: str
    def __init__(self, stored: bool = ..., message: _Optional[str] = ...) -> None: ...
