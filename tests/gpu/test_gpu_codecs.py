"""The Triton kernels on a GPU: the CPU's bits for any launch, no waiting, graphs, no write outside.

`scripts/checks/sanitizer.py` runs more values under compute-sanitizer; `scripts/bench/gpu_codecs.py` times.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.common.dispatch import Launch
from kernels.fixed import reference as fixed
from kernels.tah import reference as tah
from tests.support.poison import needs_kernels
from wire.codecs import tah as tah_codec
from wire.codecs.base import Layout
from wire.codecs.fixed import FixedCodec
from wire.codecs.formats import FixedFormat, codec_format
from wire.codecs.registry import codec
from wire.spec import TensorSpec

GUARD = 256
POISON = 0xA5
LAUNCHES = (Launch(16, 1), Launch(32, 1), Launch(32, 4), Launch(128, 4))


def sections_of(name: str, payload: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor]:
    return layout_of(name, shape).views(payload)


def layout_of(name: str, shape: tuple[int, ...]) -> Layout:
    return (
        tah_codec._layout(shape) if name == "tah" else FixedCodec(FixedFormat(int(name[6:])))._layout(shape)
    )


def split(shape: tuple[int, ...]) -> tuple[int, int]:
    """Samples, and 4-bit tiles in each."""
    samples, tiles = tah_codec.samples_and_tiles(shape)
    return samples, tah_codec.four_bit_tiles(tiles)


def encoder(name: str, x: torch.Tensor, payload: torch.Tensor, exponent: torch.Tensor) -> Callable[[], None]:
    sections = sections_of(name, payload, tuple(x.shape))
    if name == "tah":
        from kernels.tah.triton import encode as triton_tah

        samples, four_bit = split(tuple(x.shape))
        return lambda: triton_tah.encode(x, *sections, exponent, samples=samples, four_bit=four_bit)
    from kernels.fixed import triton as triton_fixed

    return lambda: triton_fixed.encode(x, *sections, exponent)


def decoder(
    name: str, payload: torch.Tensor, out: torch.Tensor, exponent: torch.Tensor
) -> Callable[[], torch.Tensor]:
    sections = sections_of(name, payload, tuple(out.shape))
    if name == "tah":
        from kernels.tah.triton import decode as triton_tah_decode

        samples, four_bit = split(tuple(out.shape))
        return lambda: triton_tah_decode.decode(*sections, out, exponent, samples=samples, four_bit=four_bit)
    from kernels.fixed import triton as triton_fixed

    return lambda: triton_fixed.decode(*sections, out, exponent)


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 3e-3, x * 30, x)
    x.view(-1, shape[-1])[::7] *= 1e-3
    x.view(-1, shape[-1])[3] = 0
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8).cpu()


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 96, 256), (3, 50, 200), (1000, 64), (77,)], ids=str)
@pytest.mark.parametrize("name", ["tah", "fixed-2", "fixed-8", "fixed-10"])
def test_bits_are_the_cpus_between_guards(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = sample(shape, dtype) if len(shape) > 1 else torch.randn(shape).to(dtype)
    packed = codec(name).encode(x)
    nbytes = packed.numel() - 64
    whole = torch.full((nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device="cuda")
    payload = whole[GUARD:-GUARD]
    layout_of(name, shape).clear_gaps(payload)
    exponent = torch.zeros(1, dtype=torch.int32, device="cuda")
    encoder(name, x.cuda(), payload, exponent)()
    assert torch.equal(payload.cpu(), packed[64:])
    assert exponent.item() == packed[48:52].view(torch.int32).item()
    room = torch.full((x.nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device="cuda")
    out = room[GUARD:-GUARD].view(dtype).view(shape)
    assert not decoder(name, payload, out, exponent)().any()
    assert torch.equal(bits(out), bits(codec(name).decode(packed, TensorSpec(dtype, shape))))
    for made in (whole, room):
        assert (made[:GUARD] == POISON).all() and (made[-GUARD:] == POISON).all()


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_tah_is_the_same_for_any_launch(launch: Launch) -> None:
    from kernels.tah.triton import decode as triton_tah_decode
    from kernels.tah.triton import encode as triton_tah

    x = sample((2, 300, 256), torch.bfloat16)
    samples, four_bit = split(tuple(x.shape))
    layout = tah_codec._layout(tuple(x.shape))
    expected = torch.zeros(layout.nbytes, dtype=torch.uint8)
    sections = tah.TahSections(*layout.views(expected))
    wanted = tah.encode(x, sections, samples=samples, four_bit=four_bit)
    decoded = torch.empty_like(x)
    tah.decode(sections, decoded, int(wanted))
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
    exponent = torch.zeros(1, dtype=torch.int32, device="cuda")
    triton_tah.encode(
        x.cuda(),
        *layout.views(payload),
        exponent,
        samples=samples,
        four_bit=four_bit,
        measure=launch,
        quantize=launch,
        select=Launch(launch.tiles * 8, 4),
    )
    assert torch.equal(payload.cpu(), expected)
    out = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    triton_tah_decode.decode(
        *layout.views(payload),
        out,
        exponent,
        samples=samples,
        four_bit=four_bit,
        launch=launch,
    )
    assert torch.equal(bits(out), bits(decoded))


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_fixed_is_the_same_for_any_launch(launch: Launch) -> None:
    from kernels.fixed import triton as triton_fixed

    x = sample((600, 256), torch.bfloat16)
    layout = FixedCodec(FixedFormat(6))._layout(tuple(x.shape))
    expected = torch.zeros(layout.nbytes, dtype=torch.uint8)
    fixed.encode(x, fixed.FixedSections(*layout.views(expected)))
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
    exponent = torch.zeros(1, dtype=torch.int32, device="cuda")
    triton_fixed.encode(x.cuda(), *layout.views(payload), exponent, launch=launch, finish=launch)
    assert torch.equal(payload.cpu(), expected)


@pytest.mark.parametrize("name", ["tah", "fixed-8"])
def test_a_graph_packs_what_its_input_holds_and_nothing_waits(name: str, no_waiting: None) -> None:
    needs_kernels(codec_format(name).KERNELS)
    shape = (2, 64, 320)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    nbytes = codec(name).packed_bytes(TensorSpec(x.dtype, shape)) - 64
    payload = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    exponent = torch.zeros(1, dtype=torch.int32, device="cuda")
    pack, unpack = encoder(name, x, payload, exponent), decoder(name, payload, out, exponent)
    torch.cuda.set_sync_debug_mode("default")
    x.copy_(sample(shape, x.dtype))
    # Compiles, and looks tables up.
    pack(), unpack()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    pack(), unpack()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack(), unpack()
    torch.cuda.set_sync_debug_mode("default")
    for seed, scale in enumerate((1e-3, 1.0, 1e20)):
        host = (sample(shape, torch.float32, seed) * scale).bfloat16()
        x.copy_(host)
        graph.replay()
        packed = codec(name).encode(host)
        assert torch.equal(payload.cpu(), packed[64:])
        assert torch.equal(bits(out), bits(codec(name).decode(packed, TensorSpec(x.dtype, shape))))
