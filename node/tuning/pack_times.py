"""Which stored forms a run's blocks may have, and what packing them takes. Torch-free."""

from dataclasses import dataclass
from itertools import chain

from node.config.schema import RunConfig, StorageSection
from node.model.families.known import family_of
from node.model.storage import KINDS, PACKED, configured
from wire.errors import ConfigError

GPU_PACKED, CPU_PACKED = 200e9, 200e6
"""Assumed elements a second that are packed, or unpacked."""


@dataclass(frozen=True, kw_only=True)
class PackTime:
    """Seconds that storing a block's tensors of one kind in few bits adds, for one microbatch."""

    kind: str
    """Of `node.model.storage.KINDS`,"""
    form: str
    """and of `PACKED`."""
    pack: float
    """To a forward,"""
    unpack: float
    """and to a backward."""


def stored_forms(config: RunConfig) -> list[tuple[str, str]]:
    """Kinds and forms in few bits that blocks of this run may be stored in: the run file's own, and those of
    `storage.allow`. Bits by stage may be any."""
    base, section = configured(config.storage), config.storage
    own = ((kind, getattr(base, kind)) for kind in KINDS)
    found = dict.fromkeys(chain(own, allowed_forms(section)))
    if section.bits_by_stage:
        wide = [kind for kind, form in found if form in PACKED and form != "bf16"]
        found |= dict.fromkeys((kind, form) for kind in wide for form in KINDS[kind] if form in PACKED)
    return [(kind, form) for kind, form in found if is_packed(config, kind, form)]


def allowed_forms(section: StorageSection) -> list[tuple[str, str]]:
    """Kinds and forms of `storage.allow`: `kind:form`, or a form alone for both inputs of norms and of
    feed-forwards. Raises ConfigError."""
    found = []
    for entry in section.allow:
        kind, colon, form = entry.rpartition(":")
        kinds = (kind,) if colon else ("norm_input", "ffn_input")
        for one in kinds:
            if one not in KINDS:
                raise ConfigError(f"storage.allow names {one!r}, which is none of {', '.join(KINDS)}")
            packed = [known for known in KINDS[one] if known in PACKED]
            if form not in packed:
                raise ConfigError(
                    f"storage.allow names {entry!r}: {one} may be stored in {', '.join(packed)}; recompute "
                    "and host memory change no bit, so each node decides on them for itself"
                )
            found.append((one, form))
    return found


def is_packed(config: RunConfig, kind: str, form: str) -> bool:
    """Whether this form is another than that in which the tensors are computed."""
    computed = config.training.precision == "bfloat16" and kind in ("attention", "attention_output")
    return form in PACKED and not (form == "bf16" and computed)


def assumed_packing(config: RunConfig, tokens: float, *, on_cpu: bool) -> tuple[PackTime, ...]:
    """From elements, at a typical speed of such a device; each form takes as long."""
    widths, rate = family_of(config.model).kept_widths(config.model), CPU_PACKED if on_cpu else GPU_PACKED
    return tuple(
        PackTime(kind=kind, form=form, pack=seconds, unpack=seconds)
        for kind, form in stored_forms(config)
        for seconds in (sum(widths[kind]) * tokens / rate,)
    )
