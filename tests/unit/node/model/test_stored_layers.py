"""Blocks with packed activations: bits, gradients, bytes and recomputation against plain blocks."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.ops import attention, attention_backward
from kernels.blockfloat import reference as blockfloat
from kernels.common import layers
from node.config.schema import LoraSection, ModelSection, TrainingSection
from node.model.chunk import FAMILY_BLOCKS, build_chunk, compute_precision
from node.model.storage import OUTLIERS_APART, PRESETS, Storage, stored_bytes

CPU = torch.device("cpu")
LLAMA = ModelSection(layers=2, hidden=96, heads=6, kv_heads=2, ffn=200, sequence=40)
GPT2 = ModelSection(family="gpt2", layers=2, hidden=96, heads=6, kv_heads=6, ffn=200, sequence=40)
QWEN3 = replace(LLAMA, qk_norm="head", head_width=24)
OLMO2 = replace(LLAMA, qk_norm="full", norm_place="output")
GEMMA3 = replace(
    LLAMA,
    qk_norm="head",
    norm_place="both",
    norm_offset=True,
    activation="gelu",
    query_scale=24,
    window=9,
    no_window=(1,),
)
BLOCKS = ("block.0000", "block.0001")
AGAIN = Storage(ffn_input="recompute", attention="recompute", attention_output="recompute")


def input_and_gradient() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 2, 37, 96, generator=generator).unbind(0)


def run(
    model: ModelSection,
    storage: Storage,
    precision: str = "float32",
    lora: LoraSection | None = None,
    outlier: float = 1.0,
) -> dict[str, Tensor]:
    """The result of two blocks, and the gradients of their input and parameters. One channel of the input is
    `outlier` times as large."""
    chunk = build_chunk(model, BLOCKS, 3, CPU, storage=storage, lora=lora)
    if chunk.dropout is not None:
        chunk.dropout.begin(0x9E3779B9)
    with torch.no_grad():
        for index, parameter in enumerate(chunk.parameters()):
            # So that biases and norms count.
            generator = torch.Generator().manual_seed(index)
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    x, upstream = input_and_gradient()
    x[..., 5] *= outlier
    x.requires_grad_()
    with compute_precision(precision, CPU):
        result = chunk(x)
    assert result.dtype == torch.float32
    if chunk.dropout is not None:
        chunk.dropout.begin(1)  # the next microbatch goes forward before this one goes back
    torch.autograd.backward(result, upstream)
    named = {name: parameter.grad for name, parameter in chunk.named_parameters()}
    made = {"result": result.detach(), "input": x.grad, **named}
    assert all(tensor is not None for tensor in made.values())
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def near(model: ModelSection) -> float:
    """How far 4 bits put gradients off; norms of what is added keep it in 4 bits too."""
    return 0.2 if model.norm_place == "input" else 0.25


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(params=[LLAMA, GPT2, QWEN3, OLMO2, GEMMA3], ids=["llama", "gpt2", "qwen3", "olmo2", "gemma3"])
def model(request: pytest.FixtureRequest) -> ModelSection:
    chosen: ModelSection = request.param
    return chosen


def test_off_is_the_plain_block_bit_for_bit(model: ModelSection) -> None:
    chunk = build_chunk(model, BLOCKS, 3, CPU)
    again = build_chunk(model, BLOCKS, 3, CPU, storage=Storage())
    x, _ = input_and_gradient()
    assert torch.equal(chunk(x), again(x))
    assert type(again(x).grad_fn).__name__ == "AddBackward0"


ADAPTERS = {
    "all": LoraSection(rank=4, base="8"),
    "some, dropout": LoraSection(rank=4, base="8", targets=("down",), dropout=0.3),
    "all, dropout": LoraSection(rank=4, base="float32", dropout=0.3),
}


@pytest.mark.parametrize(
    ("storage", "lora"),
    [
        (replace(AGAIN, attention="none", attention_output="none"), None),
        (replace(AGAIN, attention="none", ffn_input="none"), None),
        (replace(AGAIN, attention_output="none"), None),
        (AGAIN, None),
        (Storage(norm_input="none", ffn_input="recompute"), ADAPTERS["all"]),
        (Storage(norm_input="none", ffn_input="recompute"), ADAPTERS["all, dropout"]),
        (AGAIN, ADAPTERS["some, dropout"]),
    ],
)
def test_gradients_without_rounding_are_those_of_autograd(
    model: ModelSection, storage: Storage, lora: LoraSection | None
) -> None:
    """Forward has the same bits, and weights that adapters freeze have no gradient."""
    plain, stored = run(model, Storage(), lora=lora), run(model, storage, lora=lora)
    assert torch.equal(stored["result"], plain["result"])
    if lora is not None:
        assert {name.rpartition(".")[2] for name in plain} == {"result", "input", "lora_A", "lora_B"}
    for name, wanted in plain.items():
        assert distance(stored[name], wanted) < 2e-6, name


@pytest.mark.parametrize(
    ("preset", "precision"), [("agoq", "bfloat16"), ("compact", "float32"), ("compact", "bfloat16")]
)
def test_packed_blocks_are_near_plain_ones(model: ModelSection, preset: str, precision: str) -> None:
    plain, stored = run(model, Storage(), precision), run(model, PRESETS[preset], precision)
    if preset == "agoq" and precision == "bfloat16":
        # Nothing that forward computes with is packed.
        assert torch.equal(stored["result"], plain["result"])
    assert distance(stored["result"], plain["result"]) < 0.1 * near(model)
    for name, wanted in plain.items():
        assert distance(stored[name], wanted) < near(model), name


def test_more_bits_are_nearer(model: ModelSection) -> None:
    plain = run(model, Storage())
    errors = []
    for bits in ("4", "5", "6", "8", "bf16"):
        stored = run(model, Storage(norm_input=bits, ffn_input=bits, attention_output="recompute"))
        assert torch.equal(stored["result"], plain["result"])
        errors.append(max(distance(stored[name], wanted) for name, wanted in plain.items()))
    assert all(more < 0.75 * less for less, more in pairwise(errors)), errors


def test_a_channel_apart_leaves_the_gradients_of_the_others_their_bits() -> None:
    plain, *stored = (
        run(LLAMA, Storage(norm_input=form), "float32", outlier=50.0)
        for form in ("none", "4", OUTLIERS_APART)
    )
    names = [name for name in plain if name not in ("result", "input")]
    errors = [max(distance(one[name], plain[name]) for name in names) for one in stored]
    assert errors[1] < 0.3 * errors[0], errors


@pytest.mark.parametrize(
    "storage", [PRESETS["compact"], replace(AGAIN, norm_input="4"), Storage(norm_input=OUTLIERS_APART)]
)
def test_running_again_gives_the_same_bits(model: ModelSection, storage: Storage) -> None:
    first, second = run(model, storage, "bfloat16"), run(model, storage, "bfloat16")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_attention_runs_on_what_is_kept_so_that_its_sums_fit(
    model: ModelSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(attention="4")
    stored = run(model, storage)
    block = FAMILY_BLOCKS[model.family]
    split = block.split

    def rounded(self: Any, projected: Any, first: int = 0) -> tuple[Tensor, ...]:
        """Four bits straight through: what forward sees; gradients pass as if nothing were rounded."""
        return tuple(part + (_rounded(part) - part).detach() for part in split(self, projected, first))

    monkeypatch.setattr(block, "split", rounded)
    plain = run(model, Storage())
    for name, wanted in plain.items():
        assert distance(stored[name], wanted) < 3e-6, name


def _rounded(heads: Tensor) -> Tensor:
    """Heads as 4 bits keep them, in blocks along the channels of a token."""
    flat = heads.detach().transpose(1, 2).flatten(2)
    kept = blockfloat.unpack(blockfloat.pack(flat, 4), flat.shape, 4, torch.float32)
    return torch.unflatten(kept, 2, (heads.shape[1], -1)).transpose(1, 2)


def saved(model: ModelSection, storage: Storage, precision: str, lora: LoraSection | None = None) -> int:
    """Bytes of all storages in the graph of two blocks but weights and tables."""
    chunk = build_chunk(model, BLOCKS, 3, CPU, storage=storage, lora=lora)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*chunk.parameters(), *chunk.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x, _ = input_and_gradient()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        compute_precision(precision, CPU),
    ):
        result = chunk(x.requires_grad_())
    total = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    del result
    return total


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "storage",
    [
        PRESETS["agoq"],
        PRESETS["compact"],
        Storage(norm_input="5", ffn_input="3", attention="6", attention_output="recompute"),
        replace(AGAIN, norm_input="bf16"),
        Storage(norm_input="bf16", ffn_input="bf16", attention="bf16", attention_output="bf16"),
    ],
    ids=lambda storage: "-".join(map(str, vars(storage).values())),
)
def test_a_block_keeps_the_bytes_that_config_explain_says(
    model: ModelSection, storage: Storage, precision: str
) -> None:
    training = TrainingSection(precision=precision)
    counted = stored_bytes(replace(model, sequence=37), training, storage, samples=2)
    assert saved(model, storage, precision) == 2 * counted.total


def test_packed_blocks_with_adapters_are_near_plain_ones_and_keep_what_those_of_full_training_keep(
    model: ModelSection,
) -> None:
    lora, storage, precision = ADAPTERS["all"], PRESETS["agoq"], "bfloat16"
    plain, stored = run(model, Storage(), precision, lora), run(model, storage, precision, lora)
    assert torch.equal(stored["result"], plain["result"])
    for name, wanted in plain.items():
        assert distance(stored[name], wanted) < near(model), name
    training = TrainingSection(precision=precision)
    counted = stored_bytes(replace(model, sequence=37), training, storage, samples=2)
    assert saved(model, storage, precision, lora) == 2 * counted.total
    # With dropout also the microbatch's salt, once in each half of both blocks.
    assert saved(model, storage, precision, replace(lora, dropout=0.5)) == 2 * counted.total + 4 * 4


def test_without_gradients_nothing_is_packed(model: ModelSection, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise AssertionError("packed")

    monkeypatch.setattr("node.model.stored_layers.ops.norm_store", refuse)
    chunk = build_chunk(model, BLOCKS, 3, CPU, storage=PRESETS["agoq"])
    x, _ = input_and_gradient()
    with torch.no_grad():
        chunk(x)
    with pytest.raises(AssertionError, match="packed"):
        chunk(x)


def test_non_finite_values_reach_the_gradients(model: ModelSection) -> None:
    chunk = build_chunk(model, BLOCKS, 3, CPU, storage=PRESETS["agoq"])
    x, upstream = input_and_gradient()
    x[0, 5, 7] = torch.inf
    torch.autograd.backward(chunk(x.requires_grad_()), upstream)
    assert not all(bool(parameter.grad.isfinite().all()) for parameter in chunk.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "width"), [(4, 4, 33, 16), (6, 2, 20, 8), (3, 1, 1, 10)]
)
def test_attention_in_two_steps_is_torchs(heads: int, kv_heads: int, length: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, length, count, width, generator=generator).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=heads != kv_heads
    )
    upstream = torch.randn(wanted.shape, generator=generator)
    gradients = torch.autograd.grad(wanted, (query, key, value), upstream)
    with torch.no_grad():
        out, sums = attention(query, key, value)
        found = attention_backward(upstream, query, key, value, out, sums)
    assert torch.equal(out, wanted) and sums.shape == (2, heads, length)
    for part, exact in zip(found, gradients, strict=True):
        assert part.shape == exact.shape
        assert torch.allclose(part, exact, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
def test_norm_gradients_are_autograds(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(3, 5, 70, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
    weight, bias = (torch.randn(70, generator=generator, dtype=torch.float64) for _ in range(2))
    leaves = [t.float().requires_grad_() for t in ((x, weight, bias) if biased else (x, weight))]
    result = layers.norm(leaves[0], leaves[1], leaves[2] if biased else None, 1e-5)
    wanted = torch.autograd.grad(result, leaves, upstream.float())
    found = layers.norm_gradient(
        upstream.float(), x.float(), weight.float(), bias.float() if biased else None, 1e-5
    )
    for part, exact in zip(found, (*wanted, None), strict=False):
        assert part is exact is None or (part - exact).norm() < 1e-5 * exact.norm()  # type: ignore[operator, union-attr]


def test_inner_gradients_are_autograds_and_leave_their_input_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, upstream = torch.randn(3, 4, 70, generator=generator).unbind(0)
    kept = upstream.clone()
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    wanted = torch.autograd.grad(layers.gated(*leaves, False), leaves, upstream)
    for part, exact in zip(layers.gated_gradient(upstream, gate, up, False), wanted, strict=True):
        assert torch.allclose(part, exact, atol=1e-6)
    wanted = torch.autograd.grad(layers.gated(*leaves, True), leaves, upstream)
    for part, exact in zip(layers.gated_gradient(upstream, gate, up, True), wanted, strict=True):
        assert torch.allclose(part, exact, atol=1e-6)
    (of_gelu,) = torch.autograd.grad(layers.gelu(leaves[0]), leaves[:1], upstream)
    assert torch.allclose(layers.gelu_gradient(upstream, gate), of_gelu, atol=1e-6)
    assert torch.equal(upstream, kept)
