"""What a plan of memory chooses for a stage. Torch-free."""

from dataclasses import dataclass, replace
from typing import ClassVar

from node.model.storage import RECOMPUTE, Storage
from node.tuning.memory import StageMemory
from node.tuning.state_moves import STAYS, Moved

ALL = "all"
"""As `node.model.offload.ALL`."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a block does with what it keeps for backward."""

    KEPT: ClassVar["Choice"]
    FFN: ClassVar["Choice"]
    AGAIN: ClassVar["Choice"]
    MOVED: ClassVar["Choice"]
    INPUT_MOVED: ClassVar["Choice"]
    again: bool = False
    """Keep the block's input alone, and run the block again in backward."""
    recomputed: tuple[str, ...] = ()
    """Kinds (`node.model.storage.KINDS`) that backward computes again."""
    moved: tuple[str, ...] = ()
    """Kinds that wait in host memory, or `all`."""

    def storage(self, base: Storage) -> Storage:
        """How a block keeps its activations, where `base` is the run's storage at this stage."""
        forms = dict.fromkeys(self.recomputed, RECOMPUTE)
        return replace(base, again=self.again, offload=self.moved, **forms)

    def __str__(self) -> str:
        if self.again:
            return "computed again in backward" + (", input in host memory" if self.moved else "")
        parts = [f"{kind} again" for kind in self.recomputed]
        parts += [f"{kind} in host memory" for kind in self.moved]
        return ", ".join(parts) or "kept"


Choice.KEPT = Choice()
Choice.FFN = Choice(recomputed=("ffn_input",))
Choice.AGAIN = Choice(again=True)
Choice.MOVED = Choice(moved=(ALL,))
Choice.INPUT_MOVED = Choice(again=True, moved=(ALL,))


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What one stage does, and what that takes."""

    choices: tuple[Choice, ...]
    """Of its blocks, in the order of its units."""
    state: Moved = STAYS
    """What is in host memory of the optimizer, weights and main gradients."""
    graphs: bool = True
    """CUDA graphs stay, if the run has them."""
    memory: StageMemory
    host_bytes: int = 0
    """Host memory that takes."""
    added: float
    """Time over that of forward and backward with everything kept."""
    seconds: float = 0.0
    """Of forward and backward of a microbatch, by the times that it was planned with."""
    moving: float = 0.0
    """Seconds of a microbatch's share of copying state for norms and the optimizer's step."""
    fits: bool

    @property
    def again(self) -> int:
        """Blocks that compute something again."""
        return sum(choice.again or bool(choice.recomputed) for choice in self.choices)

    @property
    def moves(self) -> bool:
        """Whether any block's tensors wait in host memory."""
        return any(choice.moved for choice in self.choices)

    @property
    def streams(self) -> bool:
        """Whether passes fetch weights or gradients from host memory."""
        return self.state.weights + self.state.gradients + self.state.codes > 0

    def storages(self, base: Storage) -> tuple[Storage, ...]:
        """How each block keeps its activations, where `base` is the run's storage at this stage."""
        return tuple(choice.storage(base) for choice in self.choices)

    def text(self) -> str:
        """What is done to fit, in words; empty if nothing is."""
        counts: dict[str, int] = {}
        for choice in self.choices:
            counts[str(choice)] = counts.get(str(choice), 0) + 1
        parts = [
            f"{count} of {len(self.choices)} blocks: {words}"
            for words, count in counts.items()
            if words != str(Choice.KEPT)
        ]
        state, blocks = self.state, len(self.choices)
        parts += ["the optimizer's moments in host memory"] * bool(state.moments)
        parts += [f"weights of {state.weights} of {blocks} blocks in host memory"] * bool(state.weights)
        parts += [f"gradients of {state.gradients} of {blocks} blocks in host memory"] * bool(state.gradients)
        parts += [f"codes of {state.codes} of {blocks} blocks in host memory"] * bool(state.codes)
        return "; ".join(parts)
