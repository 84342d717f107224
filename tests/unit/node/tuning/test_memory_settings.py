"""Plans of random settings: a stage never takes more than its plan says."""

import random

import pytest
import torch

from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.stage.stage_model import StageModel
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_memory
from node.tuning.memory_plan import Room, least_stage_bytes
from tests.support.memory_meter import measured

STAGES = 2


def draw(random: random.Random) -> tuple[RunConfig, int, int]:
    """A run, a stage of it, and a memory between what that needs at least and with everything kept."""
    family = random.choice(("llama", "llama", "mixture", "gpt2"))
    experts = random.choice((2, 4)) if family == "mixture" else 0
    heads, width = random.choice((2, 4, 8)), random.choice((16, 32))
    hidden = heads * width
    model = ModelSection(
        family=family,
        layers=STAGES * random.randint(1, 3),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if family == "gpt2" else random.choice([n for n in (1, 2, 4, 8) if heads % n == 0]),
        ffn=int(hidden * random.choice((1, 2, 2.75, 4))),
        vocab=random.choice((256, 512, 2048)),
        sequence=random.choice((32, 64, 128)),
        experts=experts,
        experts_per_token=random.randint(1, experts) if experts else 0,
    )
    half, fp8 = random.random() < 0.5, random.random() < 0.5
    microbatch = random.choice((1, 2, 4))
    training = TrainingSection(
        microbatch=microbatch,
        global_batch=microbatch * random.choice((4, 8)),
        precision="bfloat16" if half else "float32",
        weights="bfloat16" if half and fp8 else "float32",
        gradients=random.choice(("float32", "fp8")),
        moments="fp8" if fp8 else "float32",
    )
    config = RunConfig(
        model=model,
        training=training,
        storage=StorageSection(preset=random.choice(("off", "agoq", "compact"))),
        pipeline=PipelineSection(stages=STAGES, window=0),
    )
    stage = random.randrange(STAGES)
    most = stage_memory(config, STAGES)[stage].total
    least = least_stage_bytes(config, STAGES, Devices())[stage]
    return config, stage, least + int((most - least) * random.random())


@pytest.mark.parametrize("seed", range(1, 8))
def test_a_stage_never_takes_more_than_its_plan_says(seed: int) -> None:
    config, stage, memory_bytes = draw(random.Random(seed))
    room = Room(memory_bytes=memory_bytes)
    memory = room.plan(config, STAGES, stage).memory
    estimate = memory.state + max(memory.passes, memory.applying)
    peak = measured(config, StageModel(config, torch.device("cpu"), room=room), stage, STAGES - stage)
    assert peak <= estimate <= 1.6 * peak
