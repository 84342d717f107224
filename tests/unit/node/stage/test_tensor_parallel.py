"""Blocks between tensor-parallel ranks, each a thread, against whole blocks: losses and all gradients."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection
from node.model.chunk import Chunk, build_chunk, compute_precision
from node.model.shards import merge
from node.model.storage import PRESETS, Storage
from node.model.tensor_rank import TensorRank
from node.model.units import parameter_specs, unit_names
from tests.support.thread_ranks import thread_ranks

CPU = torch.device("cpu")
LLAMA = ModelSection(layers=2, hidden=48, heads=8, kv_heads=4, ffn=20, vocab=61, sequence=12)
GPT2 = replace(LLAMA, family="gpt2")
MIXTURE = replace(
    LLAMA,
    family="mixture",
    experts=5,
    experts_per_token=2,
    qkv_bias=True,
    all_biases=True,
    sinks=True,
    swiglu_limit=0.5,
    balance_loss=0.3,
    z_loss=0.1,
    init_std=0.1,
)
MODELS = {"llama": LLAMA, "gpt2": GPT2, "mixture": MIXTURE}
RECOMPUTED = Storage(ffn_input="recompute", attention="recompute", attention_output="recompute")
COMPUTED = Storage(attention_output="recompute")
EIGHT = Storage(norm_input="8", ffn_input="8", attention="8", attention_output="8")


def backward(chunk: Chunk, tokens: Tensor, labels: Tensor, precision: str) -> float:
    """Leaves gradients; returns the share of the loss."""
    rank = chunk.layers[0].rank
    assert isinstance(rank, TensorRank)
    mine = [part.chunk(rank.count, dim=1)[rank.index].contiguous() for part in (tokens, labels)]
    chunk.share_loss(1 / rank.count)
    with compute_precision(precision, CPU):
        loss = chunk.loss(*mine) / rank.count
    loss.backward()
    return float(loss.detach())


def between_ranks(
    model: ModelSection, storage: Storage, ranks: int, batch: tuple[Tensor, Tensor], precision: str
) -> tuple[float, dict[str, Tensor]]:
    """The loss and whole gradients of a model that threads share."""
    threads = thread_ranks(ranks)
    chunks = [build_chunk(model, unit_names(model), 3, CPU, torch.float32, storage, rank) for rank in threads]

    def work(chunk: Chunk) -> float:
        try:
            return backward(chunk, *batch, precision)
        except BaseException:
            threads[0].abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        losses = list(pool.map(work, chunks))
    gradients = {}
    for unit in unit_names(model):
        named = [chunk.unit_parameters(unit) for chunk in chunks]
        for spec in parameter_specs(model, unit):
            parts = [_gradient(parameters[spec.name]) for parameters in named]
            sharded = spec.pieces is not None
            whole = merge(spec, parts) if sharded else torch.stack(parts).sum(0)
            gradients[f"{unit} {spec.name}"] = whole
    return sum(losses), gradients


def alone(
    model: ModelSection, storage: Storage, batch: tuple[Tensor, Tensor], precision: str
) -> tuple[float, dict[str, Tensor]]:
    chunk = build_chunk(model, unit_names(model), 3, CPU, torch.float32, storage)
    loss = backward(chunk, *batch, precision)
    gradients = {
        f"{unit} {name}": _gradient(parameter)
        for unit, parameters in chunk.named_units()
        for name, parameter in parameters.items()
    }
    return loss, gradients


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def some_batch(model: ModelSection) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, model.vocab, (3, model.sequence + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "storage", [Storage(), RECOMPUTED, COMPUTED], ids=["plain", "recomputed", "computed"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_gradients_of_unsplit_blocks(
    model: ModelSection, storage: Storage, ranks: int
) -> None:
    batch = some_batch(model)
    loss, gradients = between_ranks(model, storage, ranks, batch, "float32")
    expected_loss, expected = alone(model, storage, batch, "float32")
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in expected.items():
        assert gradients[name].shape == gradient.shape
        # Equal but for the order of sums; GPT-2's key bias has no gradient but rounding.
        largest = max(float(gradient.abs().max()), 1e-3)
        assert float((gradients[name] - gradient).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize(
    ("model", "storage", "ranks", "precision"),
    [
        *(
            (model, storage, 2, "bfloat16")
            for model in (LLAMA, GPT2)
            for storage in (Storage(), RECOMPUTED, EIGHT)
        ),
        *((model, PRESETS[name], 4, "float32") for model in MODELS.values() for name in ("agoq", "compact")),
    ],
)
def test_ranks_that_round_are_as_near_as_whole_blocks(
    model: ModelSection, storage: Storage, ranks: int, precision: str
) -> None:
    """Each against float32. In bfloat16 sums of partial products are rounded once more or once less, and
    packed ranks have other blocks of 128: errors differ, and must not grow."""
    batch = some_batch(model)
    _, exact = alone(model, Storage(), batch, "float32")
    _, whole = alone(model, storage, batch, precision)
    _, shared = between_ranks(model, storage, ranks, batch, precision)
    for name, gradient in exact.items():
        assert error(shared[name], gradient) < 1.5 * error(whole[name], gradient) + 3e-3, name


def test_one_rank_has_the_bits_of_whole_blocks() -> None:
    """And not a copy more: its collectives give back what they are given."""
    only = TensorRank()
    x = torch.ones(1, 2, 3)
    assert only.gather(x) is x and only.reduce_scatter(x) is x
