"""Write the golden digests of `trellis-R`: `python tests/golden/trellis_write.py`. Only when the format is to
change.

The inputs are made of integers here, so they need not be stored; `trellis.json` holds SHA-256 of the packed
bytes and of the decoded tensor's bytes.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from wire.codecs.registry import codec
from wire.spec import TensorSpec

HERE = Path(__file__).resolve().parent
RATES = ("trellis-2", "trellis-3.45", "trellis-4.41", "trellis-8.125", "dither-2", "dither-3.45")


def noise(*shape: int, seed: int) -> NDArray[np.float32]:
    """Nearly normal numbers of standard deviation 1, exact multiples of 2**-15."""
    position = np.arange(12 * int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed << 40)
    position *= np.uint64(0x9E3779B97F4A7C15)
    position ^= position >> np.uint64(31)
    position *= np.uint64(0xBF58476D1CE4E5B9)
    uniform = (position >> np.uint64(49)).astype(np.int64).reshape(12, *shape)
    return ((uniform.sum(0) - 6 * (1 << 15)) / float(1 << 15)).astype(np.float32)


def low_rank() -> torch.Tensor:
    # Products are rounded once each and added in a fixed order.
    made = noise(2, 96, 160, seed=1)
    for k in range(3):
        made += noise(2, 96, 1, seed=10 + k) * noise(160, seed=20 + k) * np.float32(2)
    return torch.from_numpy(made)


def outliers() -> torch.Tensor:
    made = noise(1, 64, 128, seed=2)
    made[..., 5] *= 1000
    made[0, 7, 9] = 1e6
    return torch.from_numpy(made)


def rows() -> torch.Tensor:
    made = noise(300, 96, seed=3) * np.ldexp(np.float32(1), np.arange(300) % 9)[:, None]
    return torch.from_numpy(made).half()


def peaked() -> torch.Tensor:
    # Not a power: numpy's differs by processor.
    normal = noise(64, 100, seed=4)
    return torch.from_numpy(normal * normal * normal * np.float32(2.0**-100))


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "low-rank": low_rank,
    "low-rank-bf16": lambda: low_rank().bfloat16(),
    "outliers": outliers,
    "rows-fp16": rows,
    "peaked": peaked,
    "two-blocks": lambda: torch.from_numpy(noise(1, 1100, 1024, seed=5)),
    "row": lambda: torch.from_numpy(noise(1, 77, seed=6)),
}


class Inputs(Mapping[str, torch.Tensor]):
    """Each is made when it is first asked for: the largest takes a second."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            self._made[name] = MADE[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(MADE)

    def __len__(self) -> int:
        return len(MADE)


@cache
def inputs() -> Inputs:
    return Inputs()


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def digests(name: str, which: str, x: torch.Tensor) -> dict[str, str]:
    packed = codec(which).encode(x)
    decoded = codec(which).decode(packed, TensorSpec(x.dtype, tuple(x.shape)))
    return {"input": digest(x), "packed": digest(packed), "decoded": digest(decoded)}


def main() -> None:
    found = {
        f"{name} {which}": digests(name, which, x)
        for name, x in inputs().items()
        for which in (RATES if x.numel() < 1 << 20 else ("trellis-4.41",))
    }
    (HERE / "trellis.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
