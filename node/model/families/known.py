"""The list of model families."""

from collections.abc import Iterator

from node.config.schema import ModelSection
from node.model.families.family import Family
from node.model.families.gpt2 import Gpt2
from node.model.families.llama import Llama
from node.model.families.mixture import Mixture
from wire.errors import ConfigError

LLAMA, MIXTURE, GPT2 = Llama(), Mixture(), Gpt2()
_ALL: tuple[Family, ...] = (LLAMA, MIXTURE, GPT2)
FAMILIES = {family.name: family for family in _ALL}


def family_of(model: ModelSection) -> Family:
    """The family of a model.

    Raises:
        ConfigError: there is no such family.
    """
    if model.family not in FAMILIES:
        raise ConfigError(f"[model] family is {model.family!r}; it must be one of {', '.join(FAMILIES)}")
    return FAMILIES[model.family]


def model_problems(model: ModelSection) -> Iterator[str]:
    """What is wrong with a model of a known family, one line each. All sizes are at least 1."""
    family, plain = family_of(model), ModelSection()
    for key in dict.fromkeys(key for other in FAMILIES.values() for key in other.options):
        if key not in family.options and getattr(model, key) != getattr(plain, key):
            names = " or ".join(other.name for other in FAMILIES.values() if key in other.options)
            yield f"model.{key} is for model.family {names}, and this model is {family.name}"
    yield from family.problems(model)
