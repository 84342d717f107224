"""Loads a whole model from a snapshot in one process, to measure held-out loss and generate text.

Layers are read one file at a time, so loading takes the memory of the model and of one layer's state.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.attention.reach import Documents
from node.config.schema import RunConfig
from node.data.samples import Samples
from node.model.chunk import Chunk, build_chunk, compute_precision, weight_dtype
from node.model.units import unit_names
from node.state.serialization import load_unit
from node.state.unit_state import PARAMETER_PREFIX
from wire.errors import DataError, UserError


class WholeModel:
    """The model of a run at one snapshot, without optimizer state."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        device: torch.device,
        frozen: Callable[[str], Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        """
        Args:
            directory: a complete snapshot.
            frozen: returns a unit's weights in the checkpoint that a run with adapters started from, float32
                by name; None if frozen weights follow from the seed.

        Raises RunError if the snapshot is damaged or belongs to another model.
        """
        self.config = config
        self.device = device
        units = unit_names(config.model)
        dtype = weight_dtype(config.training.weights)
        self.chunk: Chunk = build_chunk(config.model, units, config.run.seed, device, dtype, lora=config.lora)
        self.chunk.masks_labels = config.data.masks_labels
        with torch.no_grad():
            for unit in units:
                if frozen is not None:
                    given = frozen(unit)
                    weights = {name: torch.from_numpy(np.array(given[name])) for name in given}
                    self.chunk.load_frozen(unit, weights)
                state = load_unit(directory, unit)
                for name, parameter in self.chunk.unit_parameters(unit).items():
                    parameter.copy_(state[f"{PARAMETER_PREFIX}{name}"])

    @torch.no_grad()
    def loss(self, samples: Samples) -> float | None:
        """The mean cross-entropy in nats per labelled token; None without labels. DataError if empty."""
        if not len(samples):
            raise DataError("the text is too short to measure a loss: give more text")
        if not samples.labelled:
            return None
        size = self.config.training.microbatch
        total = 0.0
        for first in range(0, len(samples), size):
            rows = samples[first : first + size]
            inputs, labels = (
                torch.from_numpy(ids.copy()).to(self.device) for ids in (rows.windows[:, :-1], rows.labels)
            )
            documents = None
            if self.config.data.separate_documents:
                documents = Documents.of(torch.from_numpy(rows.documents), self.device)
            with compute_precision(self.config.training.precision, self.device):
                total += float(self.chunk.loss(inputs, labels, documents)) * len(rows)
        return total / len(samples) * samples.label_weight

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] float32 for the token after `ids`, of which only the last `sequence` count."""
        window = torch.tensor([list(ids)[-self.config.model.sequence :]], device=self.device)
        with compute_precision(self.config.training.precision, self.device):
            logits_bsv: Tensor = self.chunk(window)
        return logits_bsv[0, -1].float()

    def generate(
        self,
        prompt: Sequence[int],
        *,
        tokens: int,
        temperature: float,
        top_k: int,
        seed: int,
        ends: Collection[int] = (),
    ) -> Iterator[int]:
        """Generate token ids after `prompt`, recomputing the whole text for each token.

        Args:
            prompt: at least one id.
            tokens: the most tokens to generate.
            temperature: the sampling temperature; 0 takes the likeliest token.
            top_k: how many of the likeliest tokens to sample from; 0 for all.
            seed: the random seed. The same seed gives the same text on the same kind of hardware.
            ends: ids that end the text. They are not yielded.
        """
        if not prompt:
            raise UserError("the prompt is empty: give at least one character")
        random = torch.Generator().manual_seed(seed)
        ids = list(prompt)
        for _ in range(tokens):
            token = pick(self.logits(ids).cpu(), temperature=temperature, top_k=top_k, random=random)
            if token in ends:
                return
            ids.append(token)
            yield token


def pick(logits_v: Tensor, *, temperature: float, top_k: int, random: torch.Generator) -> int:
    """Sample a token id from logits [V]. The arguments are as in `WholeModel.generate`."""
    if temperature == 0.0:
        return int(logits_v.argmax())
    if 0 < top_k < len(logits_v):
        values, ids = logits_v.topk(top_k)
    else:
        values, ids = logits_v, torch.arange(len(logits_v))
    # The largest quotient is 0, because those of a tiny temperature would be infinite.
    shares = torch.softmax((values.double() - values.max()) / temperature, dim=0)
    return int(ids[torch.multinomial(shares, 1, generator=random)])
