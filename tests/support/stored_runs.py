"""Small runs by what blocks store and in which numbers they compute, for tests of memory."""

from dataclasses import replace
from typing import Any

import torch

from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection

CPU = torch.device("cpu")
LEAST, MOST = 1.0, 1.3
"""Limit of the estimate over the measurement, which it never undercuts. It decides which nodes may join."""
SIZES = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 352, "vocab": 512, "sequence": 128}
TRAINING = TrainingSection(microbatch=2, global_batch=8)
FP8 = replace(TRAINING, gradients="fp8", moments="fp8")
HALF = replace(FP8, precision="bfloat16", weights="bfloat16")
FORMS = {
    "plain": (TRAINING, StorageSection()),
    "autocast": (replace(TRAINING, precision="bfloat16"), StorageSection()),
    "agoq": (TRAINING, StorageSection(preset="agoq")),
    "outliers apart": (TRAINING, StorageSection(preset="agoq", norm_input="4+outliers")),
    "compact, fp8": (FP8, StorageSection(preset="compact")),
    "compact, fp8 gradients": (replace(FP8, moments="float32"), StorageSection(preset="compact")),
    "agoq, fp8, bf16": (HALF, StorageSection(preset="agoq")),
    "float32 gradients, bf16": (replace(HALF, gradients="float32"), StorageSection()),
    "bf16 moments": (replace(TRAINING, moments="bfloat16"), StorageSection()),
}


def run(form: str, family: str = "llama", **pipeline: Any) -> RunConfig:
    training, storage = FORMS[form]
    sizes = SIZES if family == "llama" else {**SIZES, "kv_heads": 4}
    return RunConfig(
        model=ModelSection(family=family, **sizes),
        training=training,
        storage=storage,
        pipeline=PipelineSection(stages=2, **pipeline),
    )
