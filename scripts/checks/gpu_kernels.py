"""Test tensors that take every path through the Triton kernels, and buffers between poisoned guards."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from wire.codecs import tah as tah_codec
from wire.codecs.fixed import FixedCodec
from wire.codecs.formats import FixedFormat

GUARD = 256
POISON = 0xA5


def sample(shape: tuple[int, ...], seed: int, spikes: float = 1e-4) -> torch.Tensor:
    """Normal values, a share `spikes` of them 30 times larger; at 1e-4 one tile in 160 is an outlier tile."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    return torch.where(torch.rand(shape, generator=generator, device="cuda") < spikes, x * 30, x)


def cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors on the CPU that take every path."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def mixed() -> torch.Tensor:
        a = normal(2, 50, 256)
        a[0, 0, :64] = 0
        a[0, 1, :64] = 1.5
        a[0, 2] *= 1e-3
        a[0, 3, 64:128] *= 1e-6
        a[1, 4:9] *= torch.logspace(-7, -1, 5)[:, None]
        a[1, ::3, 70] = 100
        a[1, 11, 255] = -300
        return a

    whole = {
        "mixed": mixed(),
        "many tiles": normal(7, 300, 128) ** 3,
        "one tile": normal(1, 64),
        "ties": torch.randint(-5, 6, (40, 192), generator=generator).float(),
        "ones": torch.ones(2, 33, 64),
        "zeros": torch.zeros(5, 64),
        "outliers": torch.eye(64).repeat(3, 1) + normal(192, 64) * 0.01,
        "massive": normal(64, 128) * torch.logspace(-4, 0, 64)[:, None],
        "negative": -normal(9, 64).abs() - 1,
    }
    odd = {
        "width 200": normal(3, 64, 200) ** 3,
        "width 1": normal(70, 1),
        "width 63": normal(2, 9, 63),
        "width 65": normal(33, 65) - 2,
        "vector": normal(1000),
        "single": torch.tensor([-3.0]),
        "columns": normal(30, 512)[:, 64:192],
        "every other row": normal(31, 128)[::2],
        "transposed": normal(128, 40).t(),
        "unaligned": normal(8 * 64 + 3)[3:].view(8, 64),
    }
    extreme = {
        "tiny": normal(6, 130) * 1e-38,
        "subnormal": normal(6, 64) * 1e-44,
        "huge": normal(40, 64).clamp(-3, 3) * 1e38,
        "wide": normal(40, 64) * torch.logspace(-38, 37, 40)[:, None],
        "one huge": torch.cat((normal(20, 64), torch.full((1, 64), 1e30))),
        "one spike": torch.cat((torch.zeros(20, 64), torch.eye(64)[:1] * 1e-30)),
    }
    for name, x in {**whole, **odd}.items():
        # Keep the strides of a view: its layout is part of the test.
        yield name, x if dtype == torch.float32 else x.to(dtype)
    if dtype != torch.float16:
        yield from ((name, x.to(dtype)) for name, x in extreme.items())
    else:
        yield (
            "fp16's range",
            (normal(20, 128) * torch.logspace(-7, 4, 20)[:, None]).clamp(-65504, 65504).half(),
        )


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """The same values and strides on the GPU."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    store = torch.full((x.storage_offset() + span,), float("nan"), dtype=x.dtype, device="cuda")
    view = store.as_strided(x.shape, x.stride(), x.storage_offset())
    return view.copy_(x)


class Guarded:
    """A payload between guards, poisoned, on the GPU."""

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        self.whole = torch.full((nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
        self.payload = self.whole[GUARD : GUARD + nbytes]

    def intact(self) -> bool:
        return bool((self.whole[:GUARD] == POISON).all() and (self.whole[-GUARD:] == POISON).all())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8).cpu()


class GuardedScratch(TorchFunctionMode):
    """Surround the tensors that torch.empty, torch.zeros and torch.empty_like make on `device` with guards.

    Tensors that are not zeroed are poisoned, so that results cannot depend on earlier contents.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._whole: list[torch.Tensor] = []

    @property
    def made(self) -> int:
        return len(self._whole)

    def intact(self) -> bool:
        return all(
            bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all())
            for whole in self._whole
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in (torch.empty, torch.zeros, torch.empty_like) or made.device.type != self._device:
            return made
        whole = torch.full((made.nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=made.device)
        self._whole.append(whole)
        room = whole[GUARD : GUARD + made.nbytes].view(made.dtype).view(made.shape)
        return room.zero_() if func is torch.zeros else room


def calls(
    name: str, x: torch.Tensor, **options: Any
) -> tuple[tuple[Callable[[], Any], Callable[[], Any]], torch.Tensor, torch.Tensor]:
    """Functions that encode and decode x, the packed payload and the decoded tensor."""
    from kernels.fixed import triton as triton_fixed
    from kernels.tah.triton import decode as triton_tah_decode
    from kernels.tah.triton import encode as triton_tah

    exponent = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)
    encode_options, decode_options = options.get("encode", {}), options.get("decode", {})
    if name == "tah":
        samples, tiles = tah_codec.samples_and_tiles(tuple(x.shape))
        layout = tah_codec._layout(tuple(x.shape))
        payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
        parts = layout.views(payload)
        split = {"samples": samples, "four_bit": tah_codec.four_bit_tiles(tiles)}
        return (
            (
                lambda: triton_tah.encode(x, *parts, exponent, **split, tau=tah_codec.TAU, **encode_options),
                lambda: triton_tah_decode.decode(*parts, out, exponent, **split, **decode_options),
            ),
            payload,
            out,
        )
    layout = FixedCodec(FixedFormat(int(name[6:])))._layout(tuple(x.shape))
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
    parts = layout.views(payload)
    return (
        (
            lambda: triton_fixed.encode(x, *parts, exponent, constant=1.0, **encode_options),
            lambda: triton_fixed.decode(*parts, out, exponent, constant=1.0, **decode_options),
        ),
        payload,
        out,
    )
