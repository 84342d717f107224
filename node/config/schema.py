"""The run file's sections as frozen dataclasses. Reading, checking and printing live beside this module.

Units are in the names or the docstrings; every field's meaning is given beneath it.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """`[run]`"""

    name: str = "run"
    """Shown to volunteers and used as the run directory's name."""
    seed: int = 0
    """All randomness is a function of this and of (step, microbatch, layer, direction)."""
    steps: int = 300
    """Optimizer steps in the whole run."""
    snapshot_every: int = 100
    """Steps between snapshots; the last step always makes one."""
    keep_snapshots: int = 3
    """Complete snapshots kept; older ones are removed."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """`[model]`"""

    family: str = "llama"
    """`llama` (RMSNorm, RoPE, grouped-query attention, SwiGLU) or `gpt2` (LayerNorm, positions, GELU)."""
    layers: int = 8
    """Transformer blocks."""
    hidden: int = 256
    """Width of the model: channels of the tensors between stages."""
    heads: int = 8
    """Attention heads; must divide `hidden`."""
    kv_heads: int = 8
    """Key and value heads (llama only; must divide `heads`)."""
    ffn: int = 688
    """Inner width of the feed-forward layer."""
    vocab: int = 256
    """Size of the vocabulary, at least 256 for byte tokens."""
    sequence: int = 256
    """Tokens a sample."""
    tied: bool = False
    """The output head shares the embedding's weight. Its gradient crosses the network once a step."""
    norm_eps: float = 1e-5
    """Added under the root in norms."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding (llama only)."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """`[data]`, read by the coordinator alone: volunteers need no data."""

    path: str = "stdlib"
    """A text or JSONL file, a folder of them, or `stdlib`: the Python standard library's own sources. A
    relative path is of the folder where the coordinator is started; the run keeps it absolute."""
    jsonl_field: str = "text"
    """The field of each JSONL line that holds its text."""
    shift: bool = True
    """Each pass over the text cuts it into samples at another offset; `aqsgd-b` needs `false`: the same."""
    tokenizer: str = "bytes"
    """`bytes`: a token a byte, vocabulary 256; or a folder or file with GPT-2 style BPE tables."""


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """`[training]`"""

    global_batch: int = 16
    """Samples a step."""
    microbatch: int = 2
    """Samples a microbatch; must divide `global_batch`."""
    lr: float = 1e-3
    """Learning rate at its highest, after warmup."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this share of `lr`."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises; a cosine follows."""
    beta1: float = 0.9
    """AdamW's decay of the gradient's mean."""
    beta2: float = 0.95
    """AdamW's decay of the gradient's square."""
    eps: float = 1e-8
    """AdamW's, added to the root of the second moment."""
    weight_decay: float = 0.1
    """On matrices; never on norms and biases."""
    clip: float = 1.0
    """Global gradient norm across all stages; 0 turns clipping off."""
    precision: str = "float32"
    """`float32`, or `bfloat16` (autocast)."""
    weights: str = "float32"
    """`float32`, or `bfloat16` with stochastic rounding (needs precision bfloat16 and moments fp8)."""
    gradients: str = "float32"
    """Where gradients add up over a step: `float32`, or `fp8` (e4m3 in blocks of 128; matrices alone)."""
    moments: str = "float32"
    """AdamW's state: `float32`, or `fp8` (e4m3 in blocks of 128 with range expansion; matrices alone)."""
    cuda_graphs: bool = True
    """A node of one GPU gives it a whole pass at a time and not kernel by kernel; this changes no bit."""


@dataclass(frozen=True, kw_only=True)
class StorageSection:
    """`[storage]`, how a block keeps activations for backward."""

    preset: str = "off"
    """`off` (what autograd keeps), `agoq` (the paper's: 4 bits, attention in BF16) or `compact` (attention in
    8 bits too). The keys below replace a kind's form."""
    norm_input: str = "preset"
    """Both norms' input: `none` (as computed), `bf16`, or `8`, `6`, `5` or `4` bits in blocks of 128. All
    that is computed again follows from it, so it cannot be itself."""
    ffn_input: str = "preset"
    """The inputs of SwiGLU or GELU: the same, `3`, or `recompute` (from the norm's input)."""
    attention: str = "preset"
    """Queries, keys and values: `none`, `bf16`, `8`, `6`, `5`, `4` or `recompute`."""
    attention_output: str = "preset"
    """What attention gives: the same; `recompute` runs attention again."""
    bits_by_stage: bool = False
    """Stages that hold fewer microbatches keep norm and FFN inputs in more bits, within the same memory."""


Window = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """`[pipeline]`"""

    stages: int = 4
    """Nodes that the model is spread over; no more than `model.layers`."""
    min_stages: int = 0
    """When nodes are missing, go on with as few stages as this; 0 pauses until every stage has a node."""
    chunks: int = 1
    """Model chunks a stage; above 1 the schedule is interleaved 1F1B."""
    window: Window = "auto"
    """Extra microbatches in flight on each link, so that compute goes on while tensors travel; `auto` follows
    what each step was measured to take."""
    window_gb: float = 0.0
    """`auto` alone: the most that the extra microbatches may take at a stage, in GB as estimated; 0 is what
    the node's memory leaves."""
    split: tuple[int, ...] = ()
    """Blocks of each chunk in pipeline order (stages x chunks numbers); empty splits evenly by cost."""
    forward_codec: str = "tah"
    """Packs activations: `fp32`, `bf16`, `fp16`, `fixed-2` to `-10`, `tah`, `trellis-2` to `-10`,
    `aqsgd-2` to `-8`."""
    backward_codec: str = "fixed-8"
    """Packs the gradients of activations; the same names but for `aqsgd-b`."""
    cache_gb: float = 4.0
    """`aqsgd-b` alone: the most that a stage may keep of activations sent before, in GB of main memory."""

    @property
    def first_window(self) -> int:
        """The window before anything was measured."""
        return 0 if self.window == "auto" else self.window

    @property
    def remembers(self) -> bool:
        """Whether activations are packed against those that the same samples had before."""
        return self.forward_codec.startswith("aqsgd-")


@dataclass(frozen=True, kw_only=True)
class CoordinatorSection:
    """`[coordinator]`"""

    listen: str = "0.0.0.0:7700"
    """Address of the join port; nodes that hold a certificate use the next port (port 0 picks both)."""
    advertise: tuple[str, ...] = ()
    """host:port pairs that go into join tokens; empty uses this machine's addresses."""
    heartbeat_seconds: float = 2.0
    """Between two messages of a node that say that it lives."""
    silent_seconds: float = 14.0
    """A node that says nothing for this long is taken for dead."""
    regroup_seconds: float = 10.0
    """How long to wait for a missing node before fewer nodes share the model (see `pipeline.min_stages`)."""
    outage_seconds: float = 60.0
    """How long nodes wait for a coordinator that went away. One that resumes and still reads says so, if its
    port is fixed, and they wait on."""
    certificate_hours: float = 24.0
    """How long a node's certificate lasts; nodes renew theirs in time."""


@dataclass(frozen=True, kw_only=True)
class DashboardSection:
    """`[dashboard]`, the run's page. Whoever reaches it can look, and sees no address, token or text."""

    listen: str = "auto"
    """Address of the page and of `/metrics`; `auto`: the coordinator's host, two ports above its own; empty:
    no page."""
    tls: bool = False
    """Serve it over TLS with a certificate of the run's CA, so that changes can be made from elsewhere."""


@dataclass(frozen=True, kw_only=True)
class TelemetrySection:
    """`[telemetry]`"""

    trace: str = "all"
    """Steps of which nodes tell what they did when (`thinwire trace`): `off`, `all`, or the first and last
    one as in `3:5`."""
    trace_mb: int = 64
    """Megabytes of the trace, compressed, that the run directory may hold; the oldest steps go first."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run file."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    storage: StorageSection = field(default_factory=StorageSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    coordinator: CoordinatorSection = field(default_factory=CoordinatorSection)
    dashboard: DashboardSection = field(default_factory=DashboardSection)
    telemetry: TelemetrySection = field(default_factory=TelemetrySection)

    @property
    def microbatches(self) -> int:
        """Microbatches a step."""
        return self.training.global_batch // self.training.microbatch
