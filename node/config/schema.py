"""The run file's sections as frozen dataclasses. `node/run_file` reads and checks them.

The docstring below a field is its text in the run file's reference. Units are in the name or the docstring.
What a number must be stands beside its type, as a `Rule`. Rules between keys are in `node.run_file.validate`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from wire.codecs.formats import codec_format, known_format, ladder

PLANNED = "auto"
"""Instead of a codec's name: the coordinator plans the codecs of each link. Instead of a precision: the
coordinator decides when all nodes are there."""
FIRST_BITS = 4.41
"""The bits per element of planned codecs until something is measured, if the run allows so few."""
Every = int | str
"""A number of steps, or a length of time as text."""
MOST_LAYERS = 1024
"""The most blocks of a model."""
MOST_EXPERTS = 4096
"""The most experts of a block."""
MOST_SIZE = 1 << 24
"""The most of a model's widths, heads, tokens of a vocabulary or tokens of a sample. No model has more."""
MOST_POSITIONS = 1 << 40
"""The most positions for which a checkpoint is made."""
LEAST_COMPUTED = 1e-37
"""The least number above 0 that enters computations. Below it float32 loses digits, and then the number."""
MOST_COMPUTED = 1e18
"""The largest number that enters computations. Messages to nodes hold no larger one."""


class Rule(NamedTuple):
    """What a number must be. A key that may also be a text, such as `auto`, has rules for its numbers."""

    words: str
    holds: Callable[[float], bool]


def at_least(least: int) -> Rule:
    return Rule(f"at least {least}", lambda value: value >= least)


def at_most(most: int, why: str = "") -> Rule:
    return Rule(f"at most {most}{why}", lambda value: value <= most)


ABOVE_0 = Rule("a finite number above 0", lambda value: 0 < value < math.inf)
NOT_BELOW_0 = Rule("a finite number of at least 0", lambda value: 0 <= value < math.inf)
BELOW_1 = Rule("at least 0 and below 1", lambda value: 0 <= value < 1)
SHARE = Rule("from 0 to 1", lambda value: 0 <= value <= 1)
COMPUTED = Rule(
    f"from {LEAST_COMPUTED:g} to {MOST_COMPUTED:g}",
    lambda value: value == 0 or LEAST_COMPUTED <= value <= MOST_COMPUTED,
)
"""Of a number that float32 must hold. 0 is for another rule."""

Count = Annotated[int, at_least(1)]
Whole = Annotated[int, at_least(0)]
Size = Annotated[int, at_least(1), at_most(MOST_SIZE)]
Experts = Annotated[int, at_most(MOST_EXPERTS)]
Positions = Annotated[int, at_most(MOST_POSITIONS)]
Layers = Annotated[int, at_least(1), at_most(MOST_LAYERS)]
Positive = Annotated[float, ABOVE_0]
Factor = Annotated[float, ABOVE_0, COMPUTED]
FactorOr0 = Annotated[float, NOT_BELOW_0, COMPUTED]
Decay = Annotated[float, BELOW_1]
Share = Annotated[float, SHARE]


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """`[run]`"""

    name: str = "run"
    """Shown to volunteers and used as the run directory's name."""
    seed: Annotated[int, at_least(0), at_most(2**63 - 1)] = 0
    """Seed of all randomness: data order, initial weights, stochastic rounding."""
    steps: Count = 300
    """Steps in the whole run: optimizer steps, or rounds of local ones (see `sync.every`)."""
    tokens: Whole = 0
    """Tokens in the whole run, rounded up to whole steps, instead of `steps`; 0 uses `steps`."""
    snapshot_every: Annotated[Every, at_least(1)] = 100
    """Steps between snapshots, or a time such as `"10 min"`; the last step always writes one."""
    keep_snapshots: Count = 3
    """Complete snapshots to keep; older ones are deleted."""
    keep_best: bool = True
    """With `data.valid_every`: also keep the snapshot with the least held-out loss. A new best is saved at
    once if a snapshot takes at most 5 seconds, or a tenth of the time since the last one. Over slower lines
    the next regular snapshot is measured too, and may be the best."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """`[model]`"""

    family: str = "llama"
    """`llama` (RMSNorm, RoPE, grouped-query attention, SwiGLU), `mixture` (the same with a mixture of experts
    instead of the feed-forward) or `gpt2` (LayerNorm, positions, GELU)."""
    from_: str = ""
    """Start from a Hugging Face checkpoint: a folder, or `hf://owner/name@revision`. Its `config.json` sets
    the other keys of this section, except `sequence`."""
    layers: Layers = 8
    """Transformer blocks."""
    hidden: Size = 256
    """Model width: channels of the tensors between stages."""
    heads: Size = 8
    """Attention heads; must divide `hidden`."""
    kv_heads: Size = 8
    """Key and value heads (llama only; must divide `heads`)."""
    head_width: Annotated[int, at_most(MOST_SIZE)] = 0
    """Width of a head (llama only); 0 means `hidden` / `heads`."""
    ffn: Size = 688
    """Inner width of the feed-forward layer; with experts, of each expert."""
    experts: Experts = 0
    """Experts in each block (mixture only)."""
    experts_per_token: Experts = 0
    """Experts that compute each token: those with the largest logits of the router (mixture only)."""
    normalized_routing: bool = True
    """The weights of a token's experts add up to 1 (mixture only). Otherwise they are shares of the softmax
    over all experts (OLMoE)."""
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
    """Each head has a trained logit for attending to nothing (mixture only; gpt-oss)."""
    all_biases: bool = False
    """Attention's output, the router and the experts have biases too (mixture only; gpt-oss)."""
    vocab: Size = 256
    """Size of the vocabulary, at least 256 for byte tokens."""
    sequence: Size = 256
    """Tokens in a sample."""
    tied: bool = False
    """The output head shares the embedding's weight. `pipeline.head` determines what is sent for it."""
    norm_eps: Factor = 1e-5
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
    rope_original: Positions = 8192
    """`llama3` and `yarn`: context length before scaling."""
    rope_beta_fast: float = 32.0
    """`yarn`: frequencies that rotate more often than this within `rope_original` are not scaled."""
    rope_beta_slow: float = 1.0
    """`yarn`: frequencies that rotate less often than this are scaled fully."""
    rope_truncate: bool = True
    """`yarn`: round the bounds between these to whole channels."""
    rope_attention: float = 0.0
    """`yarn`: the factor of queries and keys; 0 is 0.1 ln(`rope_factor`) + 1."""
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
    window: Positions = 0
    """A query sees this many keys, its own and those just before it; 0 for all keys (llama only; Mistral,
    Gemma 3)."""
    no_window: tuple[int, ...] = ()
    """Blocks that see all keys despite `window`, counted from 0 (Gemma 3)."""
    window_theta: float = 0.0
    """Base of the rotary embedding, without scaling, in blocks with a window; 0 for that of other blocks
    (Gemma 3)."""
    query_scale: Positions = 0
    """Scores are divided by the square root of this; 0 for the width of a head (llama only; Gemma 3)."""
    activation: str = "silu"
    """The activation of the feed-forward's gate: `silu`, or `gelu` in its tanh form (llama only; Gemma 3)."""
    scaled_embedding: bool = False
    """Token embeddings are multiplied by the square root of `hidden` (llama only; Gemma 3)."""
    init_std: Factor = 0.02
    """Standard deviation of initial weights."""

    @property
    def width(self) -> int:
        """The width of a head."""
        return self.head_width or self.hidden // self.heads

    @property
    def q_width(self) -> int:
        """The width of all queries of a position."""
        return self.heads * self.width

    @property
    def is_plain(self) -> bool:
        """Whether blocks are GPT-2's, or have SwiGLU without norms of queries, keys or outputs. A GPU runs
        such blocks fused even if nothing is packed, and their products may be in FP8."""
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
    """Several files or folders instead of `path`, mixed by `weights`."""
    weights: tuple[float, ...] = ()
    """The share of samples from each of `sources`, in any unit; empty weighs them equally."""
    format: str = "text"
    """`text`, or `chat`: conversations in `messages` (OpenAI's format) or `conversations` (ShareGPT's), or a
    question and its answer in `instruction`, `input` and `output` (Alpaca's) or in `prompt` and `completion`.
    They are rendered by the tokenizer's chat template, with loss on the assistant's tokens only."""
    response_marker: str = ""
    """With `format` chat: rows are whole texts in `jsonl_field`, and the answer is the text after the last of
    these marks, such as `### Response:`. The loss is on the answer and on the tokenizer's end of text, which
    is added. No chat template is needed."""
    chat_template: str = ""
    """A Jinja file to use instead of the tokenizer's chat template."""
    jsonl_field: str = "text"
    """The field of JSON rows, or the column of parquet and Arrow files, that holds the text."""
    order: str = "auto"
    """`whole`: hold all tokens and shuffle all samples. `shards`: tokenize in shards during training, shuffle
    the shards and the samples in them. `auto` is `whole` for one text source of less than 2 GB, else
    `shards`."""
    separate_documents: bool = False
    """Attention does not cross the borders of documents in one sample, and GPT-2's positions restart with
    each document."""
    shift: bool = True
    """Cut each pass over the text at another offset. `aqsgd-b` needs `false`."""
    valid: str = ""
    """Held-out text, as for `path`; empty takes the end of the training text, which is never trained on."""
    valid_every: Whole = 0
    """Measure the held-out loss every this many steps and after the last; 0 never does."""
    valid_samples: int = 64
    """Held-out samples for measuring the loss. More samples take longer and give a steadier loss."""
    tokenizer: str = "bytes"
    """`bytes` (a token per byte, vocabulary 256), or a folder or file with `tokenizer.json`, GPT-2 style
    BPE tables or `tokenizer.model`."""
    prompts: tuple[str, ...] = ()
    """Texts that the coordinator lets the model continue from snapshots on its disk during the run, as
    `thinwire sample` does; questions, with `format` chat. The page shows them to everyone who can reach
    it."""
    prompts_every: Count = 1
    """Continue them at every n-th snapshot, and at the last."""

    @property
    def masks_labels(self) -> bool:
        """Whether some tokens are no labels: those that the assistant did not write."""
        return self.format == "chat"


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """`[training]`"""

    global_batch: Count = 16
    """Samples in a step."""
    microbatch: Count = 2
    """Samples in a microbatch; must divide `global_batch`."""
    lr: Factor = 1e-3
    """Peak learning rate, after the warm-up."""
    min_lr_ratio: Share = 0.1
    """The schedule ends at this share of `lr`."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: `cosine`, `linear`, `constant`, or `wsd` (constant, then a linear
    decay)."""
    warmup_steps: int = 20
    """Steps of the warm-up, in which the learning rate rises."""
    warmup_tokens: Whole = 0
    """The same in tokens, instead of `warmup_steps`; 0 uses `warmup_steps`."""
    decay_steps: int = 0
    """Steps of the decay of `wsd`; 0 is a fifth of the run."""
    decay_tokens: Whole = 0
    """The same in tokens, instead of `decay_steps`; 0 uses `decay_steps`."""
    optimizer: str = "adamw"
    """`adamw`, or `muon`: matrices of blocks move by the orthogonalized mean of their gradient (queries, keys
    and values separately), and all other parameters by AdamW. Updates are scaled so that one `lr` and
    `weight_decay` suit both. Muon keeps half of AdamW's state; a round of local steps also sends its
    momentum, which doubles its bytes."""
    adapter_optimizer: str = "adamw"
    """The optimizer of adapters (`[lora]`), which are matrices of blocks too: `adamw` or `muon`."""
    momentum: Decay = 0.95
    """Muon's momentum (Nesterov)."""
    muon_iterations: Annotated[int, Rule("3, 4 or 5", (3, 4, 5).__contains__)] = 5
    """Iterations with which Muon orthogonalizes a matrix: 5 of K. Jordan's polynomial, or 3 or 4 of Polar
    Express, which take three or four fifths of the time."""
    beta1: Decay = 0.9
    """AdamW's decay rate of the first moment."""
    beta2: Decay = 0.95
    """AdamW's decay rate of the second moment."""
    eps: Factor = 1e-8
    """AdamW's epsilon."""
    weight_decay: FactorOr0 = 0.1
    """Weight decay of matrices; norms and biases have none."""
    clip: FactorOr0 = 1.0
    """Clip the global gradient norm to this; 0 turns clipping off."""
    precision: str = "float32"
    """Compute in `float32`, in `bfloat16` (autocast), or in `float16` (autocast), for GPUs without bfloat16.
    In float16 the loss is scaled, and a step whose gradients overflow is skipped. `auto` is bfloat16 if all
    machines that are there when the first stages can be placed support it, else float16. It is decided at
    that moment, written into the run's file, and also holds for machines that join later."""
    loss_scale: float = 65536.0
    """With `precision` float16: the initial loss scale, a power of two. It halves after a skipped step."""
    loss_scale_steps: Count = 1000
    """With `precision` float16: the loss scale doubles after this many steps without a skipped one."""
    compute: str = "precision"
    """Multiply blocks' matrices in `precision`, or in `fp8`: in e4m3 with a scale per row, in forward and for
    inputs' gradients. Attention, embedding and head stay in bfloat16. It needs `precision` bfloat16, and GPUs
    of compute capability 8.9 or later; CPUs emulate it, slowly."""
    weight_gradients: str = "precision"
    """Compute the gradients of blocks' matrices in `precision`, or in `fp8` (needs `compute` fp8). They are a
    third of all products. It is faster, but the errors add up in the weights."""
    deterministic: bool = True
    """Sum in a fixed order, so that a step has the same bits however often it runs. With `false`, attention's
    backward on GPUs sums in any order, which is faster (with `pipeline.sequence_chunks`, only in a sample's
    first slice). A run that loses a node then still continues, but with other bits, and no run repeats
    another one bit for bit."""
    weights: str = "float32"
    """Store weights in `float32`, or in `bfloat16` with stochastic rounding (needs `precision` bfloat16 and
    `moments` fp8)."""
    gradients: str = "float32"
    """Accumulate gradients in `float32`, or in `fp8` (e4m3 in blocks of 128; matrices only)."""
    moments: str = "float32"
    """Store the optimizer's moments of matrices in `float32`, in `bfloat16` (except squares of gradients,
    which stay in float32), or in `fp8` (e4m3 in blocks of 128 with range expansion)."""
    export_every: Whole = 0
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
    """The input of both norms: `none` (as computed), `bf16`, or `8`, `6`, `5` or `4` bits in blocks of 128.
    `4+outliers` keeps 1 of 64 channels, those with the largest magnitudes, in bf16 besides 4 bits, for
    pretrained models. It cannot be recomputed, because everything that is recomputed starts from it."""
    ffn_input: str = "preset"
    """The inputs of SwiGLU or GELU: the same forms, `3`, or `recompute` (from the norm's input)."""
    attention: str = "preset"
    """Queries, keys and values: `none`, `bf16`, `8`, `6`, `5`, `4` or `recompute`."""
    attention_output: str = "preset"
    """Attention's output: the same forms; `recompute` runs attention again."""
    allow: tuple[str, ...] = ()
    """Other forms in which a stage may store its activations, as `"kind:form"` (for example `["ffn_input:8",
    "ffn_input:4", "attention:8"]`), or a form alone for norm and FFN inputs (`["8", "4"]`). The coordinator
    decides when it places a stage, by its nodes' measurements: it takes the fastest form with which the stage
    fits, and among equals the one with the most bits. The choice is recorded and kept."""
    bits_by_stage: bool = False
    """Stages that hold fewer microbatches store norm and FFN inputs in more bits, within the same memory."""


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """`[lora]`: train low-rank adapters and freeze the model."""

    rank: Whole = 0
    """Rank of the adapters; 0 trains the whole model."""
    alpha: Factor = 16.0
    """The adapter's result is multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = ()
    """Projections with adapters, for example `["query", "value"]`; empty is all projections of the blocks."""
    dropout: Decay = 0.0
    """The share of an adapter's input that is dropped during training."""
    base: str = "bf16"
    """How the blocks' frozen matrices are kept: `float32`, `bf16`, or `8`, `6`, `5`, `4` or `3` bits in
    blocks of 128. Embedding and head are kept in bf16."""


Window = int | Literal["auto"]
Replicas = Window
Gateways = Window
SequenceChunks = Window


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """`[pipeline]`"""

    stages: Layers = 4
    """Pipeline stages, one node each; at most `model.layers`."""
    min_stages: int = 0
    """If nodes are missing, continue with no fewer stages than this; 0 pauses until every stage has a
    node."""
    chunks: Layers = 1
    """Model chunks in a stage; above 1 the schedule is interleaved 1F1B."""
    sequence_chunks: SequenceChunks = 1
    """Cut each sample along the sequence into this many slices, which pass through the stages one after
    another. The result is exact, and no link carries more bytes. The times to fill and drain the pipeline,
    and what a stage keeps for backward, shrink by this factor. `auto` takes the fewest slices with which fill
    and drain take at most 4 % of a step, without links. The number of slices determines bits."""
    window: Annotated[Window, at_least(0)] = "auto"
    """Extra microbatches in flight on each link, or slices (see `sequence_chunks`), to overlap compute with
    transfers; `auto` plans it from measured times."""
    window_gb: Annotated[float, NOT_BELOW_0] = 0.0
    """With `window = "auto"`: the most memory, in GB, for the extra microbatches of a stage; 0 for all that
    the node has left."""
    split: tuple[int, ...] = ()
    """Blocks of each chunk in pipeline order (stages x chunks numbers); empty balances them by cost."""
    placement: str = "order"
    """How stages are assigned: in the `order` in which nodes join, or `measured`, by the nodes' speed and
    memory and the lines between them, which nodes measure. Then stages move, and `split` changes, if a step
    becomes a tenth shorter and this pays for the move within 200 steps. A split determines bits, so it is on
    record."""
    head: str = "auto"
    """The stage of a tied model's head. `first`: with the embedding, so that the last stage sends its hidden
    states there. `last`: the last stage and the first exchange the weight's gradient; choose it also if the
    first stage is short of memory. `auto`: whichever sends fewer bytes."""
    forward_codec: str = "tah"
    """Codec of activations: `fp32`, `bf16`, `fp16`, `fixed-2` to `-10`, `tah`, `trellis-2` to `-10`,
    `dither-2` to `-10`, `aqsgd-2` to `-8`; or `auto` for both kinds of tensors: each link and direction gets
    the most bits that hide behind compute, as measured."""
    backward_codec: str = "fixed-8"
    """Codec of their gradients: the same names, without `aqsgd-b`."""
    min_bits: float = 4.41
    """With codec `auto`: the fewest bits per element, from 2 to 8, for a link that limits the step in any
    case."""
    cache_gb: Positive = 4.0
    """With `aqsgd-b`: the most memory, in GB, of a stage's sample cache."""
    groups: Count = 1
    """Gradient groups of a step's microbatches; must divide their number. At most this many rows of nodes
    share a step. The run's bits depend on `groups`, but not on the number of rows."""
    sync_codec: str = "fixed-8"
    """With several groups: codec of each group's gradient and of their sums: `fp32`, `bf16`, `fp16`,
    `fixed-2` to `-10`, `trellis-2` to `-10`."""
    replicas: Annotated[Replicas, at_least(1)] = "auto"
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
        """Whether stages are assigned by measurements."""
        return self.placement == "measured"

    @property
    def plans_codecs(self) -> bool:
        """Whether the coordinator plans the codecs of links."""
        return PLANNED in (self.forward_codec, self.backward_codec)

    @property
    def first_codecs(self) -> tuple[str, str]:
        """The codecs of activations and gradients until others are planned; the run file's if none are
        planned."""
        if not self.plans_codecs:
            return self.forward_codec, self.backward_codec
        first = ladder(max(FIRST_BITS, self.min_bits))[0]
        return first, codec_format(first).for_gradients

    @property
    def most_rows(self) -> int:
        """The most rows of nodes that may share a step."""
        return self.groups if self.replicas == "auto" else min(self.groups, self.replicas)


@dataclass(frozen=True, kw_only=True)
class SyncSection:
    """`[sync]`: local steps, for links between rows that are too slow for a sum at every optimizer step."""

    every: Count = 1
    """Local steps in a step. 1 sums gradients exactly. Above 1 a step is a round: the samples of each
    gradient group are divided into this many parts, the group takes its own optimizer step on each, and then
    all groups continue from the mean of their weights. Must divide the microbatches of a group."""
    warmup: Whole = 100
    """With `every` above 1: the number of steps at the start of the run that are exact nevertheless, with one
    optimizer step each. Local steps from initial weights cost far more loss."""
    outer_lr: Factor = 1.0
    """Outer learning rate: how far weights move towards the groups' mean, or beyond it."""
    outer_momentum: Decay = 0.0
    """Outer momentum (Nesterov); 0 turns it off. Local steps already have the run's momentum. With 0.9,
    weights move up to ten times as far as with `outer_lr` alone, which is too far for short rounds."""
    codec: str = "fixed-4"
    """Codec of the changes of a group's weights, and of their sums. The names are those of
    `pipeline.sync_codec`, which applies to exact steps."""


@dataclass(frozen=True, kw_only=True)
class SnapshotsSection:
    """`[snapshots]`: where the layers of snapshots are kept."""

    keep: str = "auto"
    """`coordinator` (on its disk), `nodes` (each layer on the disks of two machines, and none passes through
    the coordinator), `auto` (at the coordinator if its line takes a snapshot within a minute, else at nodes),
    or an object store's URL such as `s3://BUCKET/FOLDER`, where nodes write and read layers themselves, with
    the credentials of their own environment."""
    last_here: bool = True
    """With `keep = "nodes"` or a URL: send the last step's snapshot to the coordinator nevertheless."""
    last: str = "all"
    """What the snapshot of the run's last step contains: `all`, with the weights first, so that the model can
    be exported while the rest follows; or `weights`, a third of it with AdamW, so that the run ends sooner.
    Such a run cannot be extended; its export can start another run."""


@dataclass(frozen=True, kw_only=True)
class AuditSection:
    """`[audit]`: find a node that computes wrong values, by letting another node compute the same."""

    rate: Share = 0.0
    """The share of steps in which a second row repeats one of another row's gradient groups, and the results
    are compared bit for bit. It needs rows of equal nodes (see `pipeline.groups`)."""


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
    heartbeat_seconds: Positive = 2.0
    """Seconds between two heartbeats of a node. With many nodes it is longer, up to a few per
    `silent_seconds`."""
    silent_seconds: Positive = 14.0
    """Seconds of silence after which a node counts as dead. If its neighbours do not hear it either, and
    others can do its work, it counts as dead after 3 or 4 seconds, or at once if its connections closed."""
    regroup_seconds: Positive = 10.0
    """Seconds to wait for a missing node before fewer nodes share the model (see `pipeline.min_stages`)."""
    outage_seconds: Positive = 60.0
    """Seconds for which nodes wait for a coordinator that is gone. They wait longer while a resumed
    coordinator is still reading its data, if its port is fixed."""
    # The run's CA lives for ten years.
    certificate_hours: Annotated[float, ABOVE_0, at_most(87_600, " (ten years)")] = 24.0
    """Hours for which a node's certificate is valid. Nodes renew theirs in time."""
    gateways: Annotated[Gateways, at_least(0), at_most(256)] = "auto"
    """Processes beside the coordinator that keep the control sessions of a large run; with 0 the coordinator
    keeps them itself. `auto` starts none for up to 128 nodes, else one for every 64 nodes, but at most half
    as many as the machine has cores."""


@dataclass(frozen=True, kw_only=True)
class DashboardSection:
    """`[dashboard]`: the run's page. It shows no address, token or text of the run to those who reach it,
    except `data.prompts` and the model's continuations."""

    listen: str = "auto"
    """host:port of the page and of `/metrics`. `auto` is the coordinator's own port, or with separate ports
    the one two above it; empty turns the page off."""
    tls: bool = False
    """Serve the page only over TLS, with a certificate of the run's CA, so that it can be operated from other
    machines. The coordinator's own port always serves it over TLS."""


@dataclass(frozen=True, kw_only=True)
class TelemetrySection:
    """`[telemetry]`"""

    trace: str = "all"
    """Steps to trace (`thinwire trace`): `off`, `all`, or the first and the last as in `3:5`."""
    trace_mb: Count = 64
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
        """Whether each gradient group takes local steps in this step."""
        return self.sync.every > 1 and step >= self.sync.warmup

    @property
    def has_outer_momentum(self) -> bool:
        """Whether states after a round contain outer momentum."""
        return self.sync.every > 1 and self.sync.outer_momentum > 0.0

    def parts_of(self, step: int) -> int:
        """The number of parts in which a row computes a gradient group of this step: one per local step."""
        return self.sync.every if self.is_round(step) else 1

    def sync_codec_of(self, step: int) -> str:
        """The codec of what gradient groups send in this step, and of the sums."""
        return self.sync.codec if self.is_round(step) else self.pipeline.sync_codec

    @property
    def sync_codecs(self) -> tuple[str, ...]:
        """The codecs of `sync_codec_of` for all steps; empty without gradient groups."""
        if self.pipeline.groups == 1:
            return ()
        codecs = (self.pipeline.sync_codec, *((self.sync.codec,) if self.sync.every > 1 else ()))
        return tuple(dict.fromkeys(codecs))

    @property
    def weighs_loss(self) -> bool:
        """Whether a step's loss has a factor: the weight of its labels, or in float16 a loss scale."""
        return self.data.masks_labels or self.training.precision == "float16"

    @property
    def sums_tied_gradients(self) -> bool:
        """Whether both copies of a tied weight are trained, so that their gradients are summed."""
        return self.model.tied and self.lora.rank == 0

    @property
    def validation_passes(self) -> int:
        """The most passes over held-out samples in one measurement (`wire.messages.Validate`)."""
        data = self.data
        return 2 * -(-data.valid_samples // self.training.global_batch) if data.valid_every else 0
