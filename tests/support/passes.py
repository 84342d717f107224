"""Settings in which passes are compared, by name, and a plan of what runs again."""

from dataclasses import replace

from node.config.schema import LoraSection, RunConfig, StorageSection, TrainingSection
from node.tuning.memory_plan import Choice, MemoryPlan, Room
from node.tuning.state_moves import STAYS, Moved

PLAIN = TrainingSection(global_batch=8, microbatch=2, warmup_steps=0, precision="bfloat16")
FP8 = replace(PLAIN, gradients="fp8", moments="fp8")
_WHOLE = {
    "float32": (replace(PLAIN, precision="float32"), StorageSection()),
    "autocast": (PLAIN, StorageSection()),
    "fp8": (FP8, StorageSection()),
    # More microbatches than are rounded to nearest.
    "fp8, long steps": (replace(FP8, global_batch=64), StorageSection()),
    "bf16 weights": (replace(PLAIN, moments="fp8", weights="bfloat16"), StorageSection()),
    "agoq": (PLAIN, StorageSection(preset="agoq")),
    "compact": (PLAIN, StorageSection(preset="compact")),
    "recompute": (PLAIN, StorageSection(preset="agoq", attention="recompute", ffn_input="recompute")),
    "products in fp8": (replace(PLAIN, compute="fp8"), StorageSection()),
    "products in fp8, agoq, bf16": (
        replace(FP8, compute="fp8", weights="bfloat16"),
        StorageSection(preset="agoq"),
    ),
    "agoq, fp8, bf16": (replace(FP8, weights="bfloat16"), StorageSection(preset="agoq")),
}
CASES = {name: (*sections, LoraSection()) for name, sections in _WHOLE.items()} | {
    "lora": (PLAIN, StorageSection(), LoraSection(rank=4)),
    "lora, 4 bits, dropout": (FP8, StorageSection(), LoraSection(rank=4, base="4", dropout=0.3)),
}


class Forced(Room):
    """Takes these choices, with this state in host memory, whatever the memory is."""

    def __init__(self, choices: tuple[Choice, ...], state: Moved = STAYS) -> None:
        super().__init__()
        self._choices = choices
        self._state = state

    def plan(self, config: RunConfig, stages: int, stage: int) -> MemoryPlan:
        return replace(super().plan(config, stages, stage), choices=self._choices, state=self._state)
