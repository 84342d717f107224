"""What every codec would take on the links of a run, so that readers of its events need not load codecs."""

import torch

from node.config.explain import framed_bytes
from node.config.schema import RunConfig
from wire.codecs.registry import codec, codec_names
from wire.spec import TensorSpec


def codec_bits(config: RunConfig) -> dict[str, float]:
    """Bits an element of a boundary tensor, headers and frames included, of every codec without a memory."""
    training, model = config.training, config.model
    spec = TensorSpec(torch.float32, (training.microbatch, model.sequence, model.hidden))
    return {name: 8 * framed_bytes(codec(name).packed_bytes(spec)) / spec.elements for name in codec_names()}
