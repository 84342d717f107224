"""A head's loss in pieces against the plain one: values, gradients, memory."""

import pytest
import torch
from torch import Tensor

from node.config.schema import LoraSection, ModelSection
from node.model import storage
from node.model.chunk import Chunk, build_chunk, compute_precision
from node.model.labels import IGNORED
from node.model.storage import HEAD_LOGITS, head_piece
from node.model.units import HEAD
from node.stage.passes import AutogradPasses, ChunkCall

CPU = torch.device("cpu")
MODEL = ModelSection(layers=2, hidden=48, heads=3, kv_heads=3, ffn=100, vocab=1001, sequence=37)
TOKENS = 3 * MODEL.sequence


def head(weights: torch.dtype = torch.float32, lora: LoraSection | None = None) -> Chunk:
    chunk = build_chunk(MODEL, [HEAD], 7, CPU, weights, lora=lora)
    chunk.masks_labels = True
    return chunk


def batch(ignored: bool) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, MODEL.sequence, MODEL.hidden, generator=random)
    labels = torch.randint(0, MODEL.vocab, (3, MODEL.sequence), generator=random)
    if ignored:
        labels[:, ::3] = IGNORED
        labels[1] = IGNORED  # a whole piece
    return hidden, labels


def loss_and_gradients(chunk: Chunk, precision: str, *, ignored: bool) -> list[Tensor]:
    hidden, labels = batch(ignored)
    passes = AutogradPasses(ChunkCall(chunk), precision, CPU, 3)
    loss = passes.forward(0, hidden, labels)
    of_hidden = passes.backward(0, None)
    assert of_hidden is not None and of_hidden.dtype == torch.float32
    made = [parameter.grad for parameter in chunk.parameters()]
    return [loss, of_hidden, *(gradient.float() for gradient in made if gradient is not None)]


def make_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the kernel's reference."""
    for module in ("head_loss", "chunk"):
        monkeypatch.setattr(f"node.model.{module}.is_fused", lambda device: True)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_pieces_in_float16_keep_small_gradients(
    frozen: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made before the loss is scaled, and would be 0 for most tokens of the vocabulary."""
    lora = LoraSection(rank=2, targets=("query",), base="float32") if frozen else None
    exact = loss_and_gradients(head(lora=lora), "float32", ignored=False)
    monkeypatch.setattr(storage, "HEAD_LOGITS", TOKENS * MODEL.vocab // 3)
    if fused:
        make_fused(monkeypatch)
    hidden, labels = batch(ignored=False)
    chunk = head(lora=lora)
    passes = AutogradPasses(ChunkCall(chunk), "float16", CPU, 3, weighs_loss=True)
    passes.begin_step(4096.0)
    loss = passes.forward(0, hidden, labels)
    of_hidden = passes.backward(0, None)
    assert of_hidden is not None
    made = [parameter.grad for parameter in chunk.parameters()]
    found = [loss, of_hidden, *(gradient.float() for gradient in made if gradient is not None)]
    assert len(found) == len(exact)
    for half, full in zip(found, exact, strict=True):
        assert (half / 4096.0 - full).norm() < 0.01 * full.norm()


@pytest.mark.parametrize(("pieces", "fused"), [(2, False), (5, False), (TOKENS, False), (1, True), (4, True)])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize(
    ("precision", "weights", "tolerance"),
    [("float32", torch.float32, 1e-5), ("bfloat16", torch.float32, 0.01), ("bfloat16", torch.bfloat16, 0.01)],
)
def test_pieces_give_the_plain_loss_and_gradients(
    pieces: int,
    fused: bool,
    ignored: bool,
    precision: str,
    weights: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = loss_and_gradients(head(weights), precision, ignored=ignored)
    limit = "FUSED_LOGITS" if fused else "HEAD_LOGITS"
    monkeypatch.setattr(storage, limit, -(-TOKENS // pieces) * MODEL.vocab)
    assert head_piece(TOKENS, MODEL.vocab, fused=fused) == -(-TOKENS // pieces)
    if fused:
        make_fused(monkeypatch)
    ours = loss_and_gradients(head(weights), precision, ignored=ignored)
    assert len(ours) == len(plain) == 4  # loss, hidden, norm, output
    for mine, expected in zip(ours, plain, strict=True):
        assert (mine - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("base", ["float32", "bf16"])
def test_a_frozen_head_passes_its_gradient_on(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = LoraSection(rank=2, base=base)
    plain = loss_and_gradients(head(lora=lora), "float32", ignored=True)
    monkeypatch.setattr(storage, "HEAD_LOGITS", 10 * MODEL.vocab)
    ours = loss_and_gradients(head(lora=lora), "float32", ignored=True)
    assert len(ours) == len(plain) == 2  # nothing of the head is trained
    for mine, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-8)


def test_without_gradients_only_the_loss_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, (hidden, labels) = head(), batch(ignored=True)
    with torch.no_grad():
        plain = chunk.loss(hidden, labels)
        monkeypatch.setattr(storage, "HEAD_LOGITS", 10 * MODEL.vocab)
        with compute_precision("float32", CPU):
            loss = chunk.loss(hidden, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain)
    assert chunk.loss(hidden, labels).detach() == loss


def test_pieces_follow_from_shapes() -> None:
    assert head_piece(1024, 50257) == 1024
    assert head_piece(8192, 50257) == -(-8192 // 7)
    for tokens, vocab in ((1, 1), (1, 1 << 27), (8192, 128256), (4097, 151936), (131072, 32000)):
        piece = head_piece(tokens, vocab)
        assert 1 <= piece <= tokens
        # No more than there may be, but for rounding up to a whole token.
        assert (piece - 1) * vocab < HEAD_LOGITS
        assert piece <= head_piece(tokens, vocab, fused=True) <= min(tokens, 4 * piece)
