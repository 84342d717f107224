"""Write the golden vectors: `python tests/golden/codecs_write.py`. Only when the format is to change.

`codecs.safetensors`: `input.NAME`, and `packed.NAME.CODEC` for the tiled codecs, whole.
`codecs.json`: SHA-256 of the packed bytes and of the decoded tensor's bytes, for each input and codec.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from wire.codecs.registry import codec, codec_names
from wire.spec import TensorSpec

HERE = Path(__file__).resolve().parent
WHOLE = ("tah", "fixed-3", "fixed-8", "fixed-10")


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2026)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    activation = normal(2, 8, 192)
    activation[..., 17] *= 30
    activation[1, 3] = 0
    activation[0, 5, 64:128] = -2.5
    return {
        "activation": activation,
        "activation-bf16": activation.bfloat16(),
        "activation-fp16": activation.half(),
        "gradient": normal(2, 8, 128) ** 3 * 1e-6,
        "odd": normal(3, 5, 70),
        "subnormal": normal(100) * 1e-40,
        "wide-range": normal(4, 64) * torch.tensor([1e-3, 1.0, 1e3, 1e4])[:, None],
        "single": torch.tensor([-3.0]),
    }


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    tensors, digests = {}, {}
    for name, x in inputs().items():
        tensors[f"input.{name}"] = x
        for which in codec_names():
            packed = codec(which).encode(x)
            decoded = codec(which).decode(packed, TensorSpec(x.dtype, tuple(x.shape)))
            digests[f"{name}.{which}"] = {"packed": digest(packed), "decoded": digest(decoded)}
            if which in WHOLE:
                tensors[f"packed.{name}.{which}"] = packed
    save_file(tensors, HERE / "codecs.safetensors")
    (HERE / "codecs.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
