"""Which layer units each chunk of the pipeline holds. Torch-free, for the coordinator.

A chunk is a contiguous run of units. The first also holds "embed", the last also holds "head", and every
chunk holds at least one block.
"""

from node.config.schema import ModelSection
from node.model.units import EMBED, HEAD, block_name, check_model, unit_cost
from wire.errors import ConfigError


def split_units(model: ModelSection, chunks: int, split: tuple[int, ...] = ()) -> tuple[tuple[str, ...], ...]:
    """Units of each chunk, in pipeline order.

    Args:
        chunks: stages times chunks a stage.
        split: blocks of each chunk; empty splits so that the costliest chunk costs least.

    Raises:
        ConfigError: more chunks than blocks, or a split that does not fit.
    """
    check_model(model)
    if chunks < 1:
        raise ConfigError(f"[pipeline] asks for {chunks} chunks; it must be at least 1")
    if chunks > model.layers:
        raise ConfigError(
            f"[pipeline] asks for {chunks} chunks (stages x chunks) but [model] layers is {model.layers}; "
            "each chunk needs a block: lower stages or chunks, or raise layers"
        )
    counts = split or _even_split(model, chunks)
    if len(counts) != chunks:
        raise ConfigError(
            f"[pipeline] split has {len(counts)} numbers; stages x chunks needs {chunks}, one for each chunk"
        )
    if min(counts) < 1:
        raise ConfigError(f"[pipeline] split holds {min(counts)}; each chunk needs at least one block")
    if sum(counts) != model.layers:
        raise ConfigError(
            f"[pipeline] split sums to {sum(counts)} blocks but [model] layers is {model.layers}; "
            "make them equal"
        )

    names = [block_name(index) for index in range(model.layers)]
    first = 0
    runs: list[tuple[str, ...]] = []
    for chunk, count in enumerate(counts):
        embed = (EMBED,) if chunk == 0 else ()
        head = (HEAD,) if chunk == chunks - 1 else ()
        runs.append((*embed, *names[first : first + count], *head))
        first += count
    return tuple(runs)


def _even_split(model: ModelSection, chunks: int) -> tuple[int, ...]:
    """Blocks of each chunk. All blocks cost the same, so only the two ends differ from the middle.

    Gives each block in turn to the chunk that is then cheapest; of equals the later one, because earlier
    stages hold more microbatches. This is optimal for equal blocks.
    """
    block = unit_cost(model, block_name(0))
    fixed = [0.0] * chunks
    fixed[0] += unit_cost(model, EMBED)
    fixed[-1] += unit_cost(model, HEAD)
    counts = [1] * chunks
    for _ in range(model.layers - chunks):
        cheapest = min(range(chunks), key=lambda chunk: (fixed[chunk] + counts[chunk] * block, -chunk))
        counts[cheapest] += 1
    return tuple(counts)
