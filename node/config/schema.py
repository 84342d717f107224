"""The run file's sections as frozen dataclasses; `node/run_file` reads and checks them.

The docstring below a field is its text in the run file's reference. Units are in the name or the docstring.
"""

from dataclasses import dataclass, field
from typing import Literal

from wire.codecs.formats import codec_format, known_format, ladder

PLANNED = "auto"
"""In place of a codec's name: the coordinator plans the codecs of each link. In place of a precision: it
decides when all nodes are there."""
FIRST_BITS = 4.41
"""Bits an element of planned codecs until something is measured; or the fewest that the run allows."""
Every = int | str
"""Steps, or a length of time as text."""
MOST_LAYERS = 1024
"""Blocks of a model."""
MOST_EXPERTS = 4096
"""Experts of a block."""
MOST_SIZE = 1 << 24
"""A model's widths, heads, tokens of a vocabulary or of a sample: more than any has."""
MOST_POSITIONS = 1 << 40
"""Positions that a checkpoint is made for."""


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """`[run]`"""

    name: str = "run"
    """Shown to volunteers and used as the run directory's name."""
    seed: int = 0
    """Seed of all randomness: data order, initial weights, stochastic rounding."""
    steps: int = 300
    """Steps in the whole run: optimizer steps, or rounds of local ones (see `sync.every`)."""
    tokens: int = 0
    """Tokens in the whole run, rounded up to whole steps, in place of `steps`; 0 takes `steps`."""
    snapshot_every: Every = 100
    """Steps between snapshots, or a time such as `"10 min"`; the last step always writes one."""
    keep_snapshots: int = 3
    """Complete snapshots to keep; older ones are deleted."""
    keep_best: bool = True
    """With `data.valid_every`: also keep the snapshot with the least held-out loss. A new best is saved at
    once where a snapshot takes 5 seconds at most, or a tenth of the time since the last one; over slower
    lines the next due one is measured too, and may be the best."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """`[model]`"""

    family: str = "llama"
    """`llama` (RMSNorm, RoPE, grouped-query attention, SwiGLU), `mixture` (the same with a mixture of experts
    in place of the feed-forward) or `gpt2` (LayerNorm, positions, GELU)."""
    from_: str = ""
    """Start from a Hugging Face checkpoint: a folder, or `hf://owner/name@revision`. Its `config.json` sets
    the other keys of this section, except `sequence`."""
    layers: int = 8
    """Transformer blocks."""
    hidden: int = 256
    """Model width: channels of the tensors between stages."""
    heads: int = 8
    """Attention heads; must divide `hidden`."""
    kv_heads: int = 8
    """Key and value heads (llama only; must divide `heads`)."""
    head_width: int = 0
    """Width of a head (llama only); 0 means `hidden` / `heads`."""
    ffn: int = 688
    """Inner width of the feed-forward layer; with experts, of each."""
    experts: int = 0
    """Experts in each block (mixture only)."""
    experts_per_token: int = 0
    """How many of them compute a token: those with the largest logits of the router (mixture only)."""
    normalized_routing: bool = True
    """The weights of a token's experts add up to 1 (mixture only); without it they are their shares of the
    softmax over all experts (OLMoE)."""
    balance_loss: float = 0.0
    """Factor of a term that each block adds to the loss to balance its experts: the number of experts, times
    the sum over them of their share of the tokens times their mean probability (mixture only)."""
    z_loss: float = 0.0
    """Factor of a term that each block adds to the loss to keep the router's logits small: the mean square of
    the logarithm of the sum of their exponentials (mixture only)."""
    swiglu_limit: float = 0.0
    """Experts clamp gate and input to this and scale the gate's sigmoid by 1.702; 0 is plain SwiGLU (mixture
    only; gpt-oss)."""
    sinks: bool = False
    """A head may attend to nothing, with a trained logit for it (mixture only; gpt-oss)."""
    all_biases: bool = False
    """Attention's output, the router and the experts have biases too (mixture only; gpt-oss)."""
    vocab: int = 256
    """Size of the vocabulary, at least 256 for byte tokens."""
    sequence: int = 256
    """Tokens in a sample."""
    tied: bool = False
    """The output head shares the embedding's weight; `pipeline.head` says what crosses the network for it."""
    norm_eps: float = 1e-5
    """Epsilon of the norms."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding (llama only)."""
    rope_scaling: str = "none"
    """Scaling of the rotary frequencies: `none`, `linear`, `llama3` (Llama 3.1 and later) or `yarn`."""
    rope_factor: float = 1.0
    """Factor of `rope_scaling`."""
    rope_low: float = 1.0
    """`llama3`: wavelengths above `rope_original` / this are scaled fully."""
    rope_high: float = 4.0
    """`llama3`: wavelengths below `rope_original` / this are not scaled."""
    rope_original: int = 8192
    """`llama3` and `yarn`: context length before scaling."""
    rope_beta_fast: float = 32.0
    """`yarn`: frequencies that turn more often than this within `rope_original` are not scaled."""
    rope_beta_slow: float = 1.0
    """`yarn`: those that turn less often than this are scaled fully."""
    rope_truncate: bool = True
    """`yarn`: the bounds between these are whole numbers of channels."""
    rope_attention: float = 0.0
    """`yarn`: queries and keys are multiplied by this; 0 is 0.1 ln(`rope_factor`) + 1."""
    no_rope: tuple[int, ...] = ()
    """Blocks without rotary position embedding (SmolLM3), counted from 0."""
    qkv_bias: bool = False
    """Queries, keys and values have biases (llama only; Qwen2)."""
    qk_norm: str = "none"
    """RMSNorm of queries and keys (llama only): `none`, `head` (each head; Qwen3) or `full` (OLMo 2)."""
    norm_place: str = "input"
    """Norms are at the `input` of attention and feed-forward, at their `output` (llama only; OLMo 2), or at
    `both` (Gemma 3)."""
    norm_offset: bool = False
    """RMSNorm multiplies by 1 + its weight, which starts at 0 (llama only; Gemma 3)."""
    window: int = 0
    """A query sees this many keys, its own and those just before it; 0 is all (llama only; Mistral, Gemma
    3)."""
    no_window: tuple[int, ...] = ()
    """Blocks that see all keys in spite of `window`, counted from 0 (Gemma 3)."""
    window_theta: float = 0.0
    """Base of the rotary embedding, without scaling, of the blocks with a window; 0 is as the others (Gemma
    3)."""
    query_scale: int = 0
    """Scores are divided by the square root of this; 0 is the width of a head (llama only; Gemma 3)."""
    activation: str = "silu"
    """The activation of the feed-forward's gate: `silu`, or `gelu` in its tanh form (llama only; Gemma 3)."""
    scaled_embedding: bool = False
    """Token embeddings are multiplied by the square root of `hidden` (llama only; Gemma 3)."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.head_width or self.hidden // self.heads

    @property
    def q_width(self) -> int:
        """Width of all queries of a position."""
        return self.heads * self.width

    @property
    def is_plain(self) -> bool:
        """Whether blocks have SwiGLU or are GPT-2's, without norms of queries, keys or outputs: those that a
        GPU runs fused with nothing packed, and whose products may be in FP8."""
        own = self.norm_offset or self.activation != "silu" or self.query_scale > 0 or self.experts > 0
        return self.qk_norm == "none" and self.norm_place == "input" and not own

    def window_of(self, block: int) -> int:
        """The window of a block; 0 if its queries see all keys of a sample."""
        return self.window if self.window < self.sequence and block not in self.no_window else 0


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """`[data]`: only the coordinator reads it; volunteers need no data."""

    path: str = "stdlib"
    """A text or JSON file, a folder of them, or `stdlib` (the sources of Python's standard library). A
    relative path starts where the coordinator is started; the run stores it as an absolute path."""
    sources: tuple[str, ...] = ()
    """Several files or folders in place of `path`, mixed by `weights`."""
    weights: tuple[float, ...] = ()
    """The share of samples from each of `sources`, in any unit; empty weighs them equally."""
    format: str = "text"
    """`text`, or `chat`: conversations in `messages` (OpenAI's form) or `conversations` (ShareGPT's), or a
    question and its answer in `instruction`, `input` and `output` (Alpaca's) or in `prompt` and `completion`;
    rendered by the tokenizer's chat template, with loss on the assistant's tokens only."""
    response_marker: str = ""
    """With `format` chat: rows are whole texts in `jsonl_field`, and the answer is what follows the last of
    these marks, such as `### Response:`. The loss is on the answer and on the tokenizer's end of text, which
    is added; no chat template is needed."""
    chat_template: str = ""
    """A Jinja file to use in place of the tokenizer's chat template."""
    jsonl_field: str = "text"
    """The field of JSON rows, or the column of parquet and Arrow files, that holds the text."""
    order: str = "auto"
    """`whole`: hold all tokens and shuffle all samples. `shards`: tokenize in shards beside training, shuffle
    shards and the samples in them. `auto` is `whole` for one text source of less than 2 GB, else `shards`."""
    separate_documents: bool = False
    """Attention does not cross documents that are packed into one sample, and GPT-2's positions begin again
    with each."""
    shift: bool = True
    """Cut each pass over the text at another offset. `aqsgd-b` needs `false`."""
    valid: str = ""
    """Held-out text, as for `path`; empty takes the end of the training text, which is never trained on."""
    valid_every: int = 0
    """Measure the held-out loss every this many steps and after the last; 0 never does."""
    valid_samples: int = 64
    """Held-out samples to measure the loss on; more samples take longer and give a steadier loss."""
    tokenizer: str = "bytes"
    """`bytes` (a token per byte, vocabulary 256), or a folder or file with `tokenizer.json`, GPT-2 style
    BPE tables or `tokenizer.model`."""
    prompts: tuple[str, ...] = ()
    """Texts that the coordinator has the model continue from snapshots on its disk while the run is on, as
    `thinwire sample` does: questions, with `format` chat. The page shows them to all who reach it."""
    prompts_every: int = 1
    """Continue them at every n-th snapshot, and at the last."""

    @property
    def masks_labels(self) -> bool:
        """Whether some tokens are no labels: those that the assistant did not write."""
        return self.format == "chat"


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """`[training]`"""

    global_batch: int = 16
    """Samples in a step."""
    microbatch: int = 2
    """Samples in a microbatch; must divide `global_batch`."""
    lr: float = 1e-3
    """Peak learning rate, after warmup."""
    min_lr_ratio: float = 0.1
    """The schedule ends at this share of `lr`."""
    schedule: str = "cosine"
    """Learning rate after warmup: `cosine`, `linear`, `constant`, or `wsd` (constant, then a linear
    decay)."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises."""
    warmup_tokens: int = 0
    """The same in tokens, in place of `warmup_steps`; 0 takes `warmup_steps`."""
    decay_steps: int = 0
    """Steps of the decay of `wsd`; 0 is a fifth of the run."""
    decay_tokens: int = 0
    """The same in tokens, in place of `decay_steps`; 0 takes `decay_steps`."""
    optimizer: str = "adamw"
    """Step with `adamw`, or with `muon`: matrices of blocks move by the mean of their gradient made
    orthogonal (queries, keys and values each by itself), all else by AdamW. Updates are scaled so that one
    `lr` and `weight_decay` serve both. Muon keeps half of AdamW's state; a round of local steps sends its
    momentum too, which is as much again."""
    adapter_optimizer: str = "adamw"
    """The same for adapters (`[lora]`), which are matrices of blocks too: `adamw` or `muon`."""
    momentum: float = 0.95
    """Muon's momentum, Nesterov's."""
    muon_iterations: int = 5
    """Iterations by which Muon makes a matrix orthogonal: 5 of K. Jordan's polynomial, or 3 or 4 of Polar
    Express, which take three or four fifths of the time."""
    beta1: float = 0.9
    """AdamW's decay rate of the first moment."""
    beta2: float = 0.95
    """AdamW's decay rate of the second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none."""
    clip: float = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    precision: str = "float32"
    """Compute in `float32`, or in `bfloat16` (autocast), or in `float16` (autocast too), which GPUs without
    bfloat16 have: then the loss is scaled, and a step whose gradients overflow is skipped. `auto` is bfloat16
    if all machines have it that are there when the first stages could be placed, else float16; it is decided
    then, written into the run's file, and holds for machines that come later."""
    loss_scale: float = 65536.0
    """With `precision` float16: the loss's first factor, a power of two. It halves after a skipped step."""
    loss_scale_steps: int = 1000
    """With `precision` float16: the factor doubles after this many steps without a skipped one."""
    compute: str = "precision"
    """Multiply blocks' matrices in `precision`, or in `fp8`: forward and for inputs' gradients in e4m3, with
    a scale a row; attention, embedding and head stay in bfloat16. Needs `precision` bfloat16, and GPUs of
    compute capability 8.9 or later; CPUs emulate it, slowly."""
    weight_gradients: str = "precision"
    """Multiply for the gradients of blocks' matrices in `precision`, or in `fp8` (needs `compute` fp8): a
    third of all products, faster, but their errors add up in the weights."""
    deterministic: bool = True
    """Sum in a fixed order, so that a step has the same bits however often it runs. `false` lets attention's
    backward on GPUs add in any order, which is faster (of slices, by `pipeline.sequence_chunks`, in a
    sample's first alone); a run that loses a node still goes on, but not with the bits that it would have
    had, and no run repeats another's."""
    weights: str = "float32"
    """Store weights in `float32`, or in `bfloat16` with stochastic rounding (needs `precision` bfloat16 and
    `moments` fp8)."""
    gradients: str = "float32"
    """Accumulate gradients in `float32`, or in `fp8` (e4m3 in blocks of 128; matrices only)."""
    moments: str = "float32"
    """Store the optimizer's moments of matrices in `float32`, in `bfloat16` (but for squares of gradients,
    which stay in float32), or in `fp8` (e4m3 in blocks of 128 with range expansion)."""
    export_every: int = 0
    """Write a Hugging Face folder at every n-th snapshot, in the run directory's `exports`; 0 writes none."""
    cuda_graphs: bool = True
    """Capture passes as CUDA graphs on single-GPU nodes; the bits are the same."""


@dataclass(frozen=True, kw_only=True)
class StorageSection:
    """`[storage]`: how a block stores activations for backward."""

    preset: str = "off"
    """`off` (as autograd does), `agoq` (the paper's: 4 bits, attention in BF16) or `compact` (attention in 8
    bits too). The keys below override the preset for one kind of tensor."""
    norm_input: str = "preset"
    """Both norms' input: `none` (as computed), `bf16`, or `8`, `6`, `5` or `4` bits in blocks of 128;
    `4+outliers` keeps one channel of 64, those with the largest magnitudes, in bf16 beside 4 bits, for
    pretrained models. Everything recomputed starts from it, so it cannot be recomputed."""
    ffn_input: str = "preset"
    """The inputs of SwiGLU or GELU: the same forms, `3`, or `recompute` (from the norm's input)."""
    attention: str = "preset"
    """Queries, keys and values: `none`, `bf16`, `8`, `6`, `5`, `4` or `recompute`."""
    attention_output: str = "preset"
    """Attention's output: the same forms; `recompute` runs attention again."""
    allow: tuple[str, ...] = ()
    """What else a stage may store its activations in, as `"kind:form"` (for example
    `["ffn_input:8", "ffn_input:4", "attention:8"]`), or a form alone for norm and FFN inputs (`["8", "4"]`).
    The coordinator decides when it places a stage, by what its nodes measured: the fastest with which it
    fits, of equals the most bits. The choice is recorded and kept."""
    bits_by_stage: bool = False
    """Stages that hold fewer microbatches store norm and FFN inputs in more bits, within the same memory."""


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """`[lora]`: train low-rank adapters and freeze the model."""

    rank: int = 0
    """Rank of the adapters; 0 trains the whole model."""
    alpha: float = 16.0
    """What an adapter adds is multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = ()
    """Projections with adapters, for example `["query", "value"]`; empty is all projections of the blocks."""
    dropout: float = 0.0
    """Share of an adapter's input that is dropped while training."""
    base: str = "bf16"
    """How the blocks' frozen matrices are kept: `float32`, `bf16`, or `8`, `6`, `5`, `4` or `3` bits in
    blocks of
    128. Embedding and head are kept in bf16."""


Window = int | Literal["auto"]
Replicas = Window
Gateways = Window
SequenceChunks = Window


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """`[pipeline]`"""

    stages: int = 4
    """Pipeline stages, one node each; at most `model.layers`."""
    min_stages: int = 0
    """When nodes are missing, continue with as few stages as this; 0 pauses until every stage has a node."""
    chunks: int = 1
    """Model chunks in a stage; above 1 the schedule is interleaved 1F1B."""
    sequence_chunks: SequenceChunks = 1
    """Cut each sample along the sequence into this many slices, which pass through the stages one after
    another. The result is exact, and no link carries more bytes. The times to fill and drain the pipeline,
    and what a stage keeps for backward, shrink by this number. `auto` takes the fewest slices for which
    filling and draining take at most 4 % of a step, apart from links. The number of slices determines
    bits."""
    window: Window = "auto"
    """Extra microbatches in flight on each link, or slices (see `sequence_chunks`), to overlap compute with
    transfers; `auto` plans it from measured times."""
    window_gb: float = 0.0
    """With `window = "auto"`: the most memory, in GB, that the extra microbatches of a stage may take; 0 is
    what the node has left."""
    split: tuple[int, ...] = ()
    """Blocks of each chunk in pipeline order (stages x chunks numbers); empty balances them by cost."""
    placement: str = "order"
    """How stages are assigned: in the `order` in which nodes join, or `measured`, by their speed and memory
    and the lines between them, which nodes measure. Then stages move, and `split` changes, if a step becomes
    a tenth shorter and 200 steps make up for the cost. A split determines bits, so it is on record."""
    head: str = "auto"
    """The stage of a tied model's head. `first`: with the embedding, so that the last stage sends its hidden
    states there. `last`: the two send each other the weight's gradient; also where the first stage is short
    of memory. `auto`: what sends fewer bytes."""
    forward_codec: str = "tah"
    """Codec of activations: `fp32`, `bf16`, `fp16`, `fixed-2` to `-10`, `tah`, `trellis-2` to `-10`,
    `dither-2` to `-10`, `aqsgd-2` to `-8`; or `auto`, for both kinds of tensor at once: each link and
    direction gets the most bits that hide behind compute, as measured."""
    backward_codec: str = "fixed-8"
    """Codec of their gradients: the same names, without `aqsgd-b`."""
    min_bits: float = 4.41
    """With codec `auto`: the fewest bits per element, 2 to 8, for a link that limits the step in any case."""
    cache_gb: float = 4.0
    """With `aqsgd-b`: the most memory, in GB, of a stage's sample cache."""
    groups: int = 1
    """Gradient groups of a step's microbatches; must divide their number. At most this many rows of nodes
    share a step. The run's bits depend on `groups`, but not on the number of rows."""
    sync_codec: str = "fixed-8"
    """With several groups: codec of each group's gradient and of their sums: `fp32`, `bf16`, `fp16`,
    `fixed-2` to `-10`, `trellis-2` to `-10`."""
    replicas: Replicas = "auto"
    """Rows of nodes, each a whole pipeline: at most this many, and at most `groups`; `auto` is `groups`."""

    @property
    def first_window(self) -> int:
        """The window until something has been measured."""
        return 0 if self.window == "auto" else self.window

    @property
    def remembers(self) -> bool:
        """Whether the forward codec packs changes against a sample cache (AQ-SGD)."""
        known = known_format(self.forward_codec)
        return known is not None and known.REMEMBERS

    @property
    def measures_places(self) -> bool:
        """Whether nodes get their stages by what was measured."""
        return self.placement == "measured"

    @property
    def plans_codecs(self) -> bool:
        """Whether the coordinator plans the codecs of links."""
        return PLANNED in (self.forward_codec, self.backward_codec)

    @property
    def first_codecs(self) -> tuple[str, str]:
        """Codecs of activations and gradients until others are planned; the run file's if none ever are."""
        if not self.plans_codecs:
            return self.forward_codec, self.backward_codec
        first = ladder(max(FIRST_BITS, self.min_bits))[0]
        return first, codec_format(first).for_gradients

    @property
    def most_rows(self) -> int:
        """Rows of nodes that a step can be shared among."""
        return self.groups if self.replicas == "auto" else min(self.groups, self.replicas)


@dataclass(frozen=True, kw_only=True)
class SyncSection:
    """`[sync]`: local steps, for links between rows that are too slow for a sum at every optimizer step."""

    every: int = 1
    """Local steps in a step. 1 sums gradients exactly. Above 1 a step is a round: the samples of each
    gradient group are divided into this many parts, the group takes its own optimizer step on each, and then
    all groups continue from the mean of their weights. Must divide the microbatches of a group."""
    warmup: int = 100
    """With `every` above 1: steps at the start of the run that are exact all the same, with one optimizer
    step each. Local steps from initial weights cost far more loss."""
    outer_lr: float = 1.0
    """Outer learning rate: how far weights go towards, or beyond, the groups' mean."""
    outer_momentum: float = 0.0
    """Outer momentum, Nesterov's; 0 turns it off. Local steps have the run's momentum by themselves: with 0.9
    weights go up to ten times `outer_lr` as far, which short rounds do not stand."""
    codec: str = "fixed-4"
    """Codec of how a group's weights changed, and of the sums: the same names as `pipeline.sync_codec`, which
    is that of exact steps."""


@dataclass(frozen=True, kw_only=True)
class SnapshotsSection:
    """`[snapshots]`: where the layers of snapshots are kept."""

    keep: str = "auto"
    """`coordinator` (on its disk), `nodes` (each layer on the disks of two machines, and none of it passes
    through the coordinator), `auto` (at the coordinator while its line takes a snapshot in a minute), or an
    object store's URL such as `s3://BUCKET/FOLDER`, where nodes write and read layers themselves, with the
    credentials of their own environment."""
    last_here: bool = True
    """With `keep = "nodes"` or a URL: the snapshot of the last step goes to the coordinator all the same."""
    last: str = "all"
    """What the snapshot of the run's last step holds: `all`, of which the weights come first, so that the
    model can be exported while the rest follows; or `weights`, a third of it with AdamW, so that the run ends
    sooner. Such a run cannot go on to more steps; its export starts another run."""


@dataclass(frozen=True, kw_only=True)
class AuditSection:
    """`[audit]`: find a node that computes wrong values, by having another one compute the same."""

    rate: float = 0.0
    """Share of steps in which a second row repeats one of another row's gradient groups, and the results are
    compared bit for bit. Needs rows of like nodes (see `pipeline.groups`)."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorSection:
    """`[coordinator]`"""

    listen: str = "0.0.0.0:7700"
    """host:port of the coordinator. Port 0 takes a free one."""
    one_port: bool = True
    """Joins, nodes with a certificate and the page share that port. If false, nodes with a certificate use
    the next port, and the page by default the one after."""
    relay: bool = True
    """Carry bytes between neighbours that cannot reach each other. If false, every node needs a port that the
    others can reach."""
    advertise: tuple[str, ...] = ()
    """host:port pairs that join tokens carry; empty takes this machine's addresses."""
    heartbeat_seconds: float = 2.0
    """Seconds between two heartbeats of a node; with many nodes longer, up to a few in `silent_seconds`."""
    silent_seconds: float = 14.0
    """Seconds of silence after which a node counts as dead. One that neighbours do not hear either, and whose
    work others can do, does so after 3 or 4 seconds, or at once if its connections closed."""
    regroup_seconds: float = 10.0
    """Seconds to wait for a missing node before fewer nodes share the model (see `pipeline.min_stages`)."""
    outage_seconds: float = 60.0
    """Seconds that nodes wait for a coordinator that has gone. They wait longer while one that resumes still
    reads its data, if its port is fixed."""
    certificate_hours: float = 24.0
    """Hours that a node's certificate is valid; nodes renew theirs in time."""
    gateways: Gateways = "auto"
    """Processes beside the coordinator that keep the control sessions of a large run; 0: it keeps them
    itself. `auto` starts none for up to 128 nodes, and one for every 64 of more, at most half as many as the
    machine has cores."""


@dataclass(frozen=True, kw_only=True)
class DashboardSection:
    """`[dashboard]`: the run's page. It shows no address, token or text of the run to whoever reaches it,
    except `data.prompts` and what the model makes of them."""

    listen: str = "auto"
    """host:port of the page and of `/metrics`; `auto` is the coordinator's own port, or with separate ports
    the one two up; empty turns it off."""
    tls: bool = False
    """Serve it over TLS alone, with a certificate of the run's CA, so that it can be operated from other
    machines. The coordinator's own port serves it over TLS in any case."""


@dataclass(frozen=True, kw_only=True)
class TelemetrySection:
    """`[telemetry]`"""

    trace: str = "all"
    """Steps to trace (`thinwire trace`): `off`, `all`, or the first and the last as in `3:5`."""
    trace_mb: int = 64
    """Megabytes of compressed trace to keep in the run directory; the oldest steps are deleted first."""
    loggers: tuple[str, ...] = ()
    """Also write steps to `tensorboard` (in the run directory) or `wandb` (Weights & Biases)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run file."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    storage: StorageSection = field(default_factory=StorageSection)
    lora: LoraSection = field(default_factory=LoraSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    sync: SyncSection = field(default_factory=SyncSection)
    snapshots: SnapshotsSection = field(default_factory=SnapshotsSection)
    audit: AuditSection = field(default_factory=AuditSection)
    coordinator: CoordinatorSection = field(default_factory=CoordinatorSection)
    dashboard: DashboardSection = field(default_factory=DashboardSection)
    telemetry: TelemetrySection = field(default_factory=TelemetrySection)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step."""
        return self.training.global_batch * self.model.sequence

    @property
    def microbatches(self) -> int:
        """Microbatches in a step."""
        return self.training.global_batch // self.training.microbatch

    def is_round(self, step: int) -> bool:
        """Whether each gradient group takes local steps in a step."""
        return self.sync.every > 1 and step >= self.sync.warmup

    @property
    def has_outer_momentum(self) -> bool:
        """Whether states after a round have one."""
        return self.sync.every > 1 and self.sync.outer_momentum > 0.0

    def parts_of(self, step: int) -> int:
        """Parts that a row computes a gradient group of this step in: one a local step."""
        return self.sync.every if self.is_round(step) else 1

    def sync_codec_of(self, step: int) -> str:
        """Codec of what gradient groups send of a step, and of the sums."""
        return self.sync.codec if self.is_round(step) else self.pipeline.sync_codec

    @property
    def sync_codecs(self) -> tuple[str, ...]:
        """Those of all steps; empty without gradient groups."""
        if self.pipeline.groups == 1:
            return ()
        codecs = (self.pipeline.sync_codec, *((self.sync.codec,) if self.sync.every > 1 else ()))
        return tuple(dict.fromkeys(codecs))

    @property
    def weighs_loss(self) -> bool:
        """Whether a step has a factor of its loss: the weight of its labels, or a scale, in float16."""
        return self.data.masks_labels or self.training.precision == "float16"

    @property
    def sums_tied_gradients(self) -> bool:
        """Whether both copies of a tied weight are trained, so that their gradients are added up."""
        return self.model.tied and self.lora.rank == 0

    @property
    def validation_passes(self) -> int:
        """Most passes over held-out samples of one measurement (`wire.messages.Validate`)."""
        data = self.data
        return 2 * -(-data.valid_samples // self.training.global_batch) if data.valid_every else 0
