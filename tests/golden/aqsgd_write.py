"""Write the golden vectors of `aqsgd-b`: `python tests/golden/aqsgd_write.py`. Only when the format is to
change.

What both ends of a boundary send, decode and remember in four passes over the same samples: all new, all
known, in another order, and new ones among known ones. Inputs are made of integers (`trellis_write.noise`),
so they need not be stored. `aqsgd.json` holds SHA-256 of each pass: of the packed bytes, of the decoded
tensor and of what each end remembers after it. `aqsgd.safetensors` holds the packed bytes of `aqsgd-4` whole.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from trellis_write import noise

from wire.codecs.aqsgd import AqsgdCodec, SampleBatch
from wire.codecs.registry import codec
from wire.codecs.sample_cache import SampleCache
from wire.spec import TensorSpec

HERE = Path(__file__).resolve().parent
BITS = range(2, 9)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE = "aqsgd-4"
SAMPLES = 5
SHAPE = (3, 70)
SINCE = 7
PASSES = ((0, 1, 2), (0, 1, 2), (2, 0, 1), (3, 1, 4, 0))
"""The samples of each pass, in the order of its tensor."""


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor for each pass: samples that move a little from pass to pass, one channel far out."""
    still = noise(SAMPLES, *SHAPE, seed=30)
    still[..., 17] *= 40
    found = []
    for number, samples in enumerate(PASSES):
        moved = noise(SAMPLES, *SHAPE, seed=31 + number) * np.float32(0.125)
        found.append(torch.from_numpy((still + moved)[list(samples)]).to(dtype))
    return found


class End:
    """One end of a boundary."""

    def __init__(self, name: str) -> None:
        found = codec(name)
        assert isinstance(found, AqsgdCodec)
        self._codec = found
        self.cache = SampleCache(SAMPLES, SHAPE, SINCE)

    def _of(self, samples: tuple[int, ...]) -> SampleBatch:
        return SampleBatch(self.cache, samples, tuple(map(self.cache.knows, samples)), 0)

    def encode(self, x: torch.Tensor, samples: tuple[int, ...]) -> torch.Tensor:
        return self._codec.of(self._of(samples)).encode(x)

    def decode(self, packed: torch.Tensor, spec: TensorSpec, samples: tuple[int, ...]) -> torch.Tensor:
        return self._codec.of(self._of(samples)).decode(packed, spec)

    def remembered(self) -> torch.Tensor:
        return self.cache.state()["values"]


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def passes(name: str, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, dict[str, str]]]:
    """Of every pass the packed bytes, and digests of all that both ends make of it."""
    sender, receiver = End(name), End(name)
    for x, samples in zip(inputs(dtype), PASSES, strict=True):
        packed = sender.encode(x, samples)
        decoded = receiver.decode(packed, TensorSpec(x.dtype, tuple(x.shape)), samples)
        for end in (sender, receiver):
            end.cache.commit()
        yield (
            packed,
            {
                "input": digest(x),
                "packed": digest(packed),
                "decoded": digest(decoded),
                "sender remembers": digest(sender.remembered()),
                "receiver remembers": digest(receiver.remembered()),
            },
        )


def main() -> None:
    digests, tensors = {}, {}
    for bits in BITS:
        for dtype_name, dtype in DTYPES.items():
            name = f"aqsgd-{bits}"
            for number, (packed, made) in enumerate(passes(name, dtype), start=1):
                digests[f"{name} {dtype_name} pass {number}"] = made
                if name == WHOLE:
                    tensors[f"{dtype_name}.{number}"] = packed
    save_file(tensors, HERE / "aqsgd.safetensors")
    (HERE / "aqsgd.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
