"""What every codec would take on the links of a run, so that readers of its events need not know any."""

from math import prod

from node.analysis.remedies import LADDER
from node.config.schema import RunConfig
from node.display.explain import framed_bytes
from wire.codecs.forms import codec_names, form


def codec_bits(config: RunConfig) -> dict[str, float]:
    """Bits an element of a boundary tensor, headers and frames included, of every codec without a memory and
    of whatever else may be proposed."""
    training, model = config.training, config.model
    shape = (training.microbatch, model.sequence, model.hidden)
    names = dict.fromkeys((*codec_names(), *LADDER))
    return {name: 8 * framed_bytes(form(name).packed_bytes(shape)) / prod(shape) for name in names}
