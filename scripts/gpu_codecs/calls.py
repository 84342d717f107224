"""One encode and one decode of a tensor, straight to the kernels."""

from collections.abc import Callable
from typing import Any

import torch

from wire.codecs import tah as tah_codec
from wire.codecs.fixed import FixedCodec


def calls(
    name: str, x: torch.Tensor, **options: Any
) -> tuple[tuple[Callable[[], Any], Callable[[], Any]], torch.Tensor, torch.Tensor]:
    """Encode and decode of x, the packed payload and the decoded tensor; `options` go to the kernels."""
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
    layout = FixedCodec(int(name[6:]))._layout(tuple(x.shape))
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
