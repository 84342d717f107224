"""What one end of a boundary remembers of every sample: the activation that the other end last had of it.

Both ends change their copies in the same way, from the same bytes, so they stay equal. A step is a
transaction: what its tensors taught waits until `commit` and is gone after `rollback`. Values are bf16 on the
CPU, whatever device the stage computes on. `since` is the step from which both ends have remembered; it and a
CRC32C of the values that a tensor was packed against travel in its header.
"""

from collections.abc import Mapping, Sequence

import google_crc32c
import torch

from wire.codecs.host_copies import HostCopies, Mark
from wire.errors import MemoryMismatchError, RunError

VALUES, SAMPLES, SINCE = "values", "samples", "since"


class SampleCache:
    """Activations `[*shape]` of `samples` samples at one end of one boundary.

    Memory is taken as samples are seen. The thread that packs or unpacks may call everything; `since` may be
    read by any.
    """

    def __init__(
        self, samples: int, shape: tuple[int, ...], since: int, copies: HostCopies | None = None
    ) -> None:
        """`copies` carries values from and to another device; if not given, a GPU's tensors bring it."""
        self._copies = copies
        self.since = since
        self._values = torch.empty((samples, *shape), dtype=torch.bfloat16)
        self._crc: list[int | None] = [None] * samples
        # On the host; not all there before the mark, if there is one.
        self._staged: dict[int, tuple[tuple[int, ...], torch.Tensor, Mark | None]] = {}

    def knows(self, sample: int) -> bool:
        """Whether a committed step has sent this sample."""
        return self._crc[sample] is not None

    def recall(self, samples: Sequence[int], device: torch.device) -> torch.Tensor:
        """bf16 `[n, *shape]` of samples that are all known, as the last committed step left them."""
        self.crc(samples)
        rows = torch.tensor(samples, dtype=torch.int64)
        if (copies := self._copies_of(device)) is not None:
            return copies.rows(self._values, rows, device)
        return self._values[rows].to(device)

    def crc(self, samples: Sequence[int]) -> int:
        """CRC32C over the remembered values of these samples; 0 for none.

        `MemoryMismatchError` for a sample that is not known, though its place in the run says that it is.
        """
        total = 0
        for sample in samples:
            crc = self._crc[sample]
            if crc is None:
                raise MemoryMismatchError(
                    f"no activation of sample {sample} is remembered here, though it was sent since step "
                    f"{self.since}: this stage goes back to the newest snapshot"
                )
            total = int(google_crc32c.extend(total, crc.to_bytes(4, "little")))
        return total

    def stage(self, place: int, samples: Sequence[int], values: torch.Tensor) -> None:
        """Keep bf16 `[n, *shape]`, on any device, for `commit`. `place` orders the tensors of a step.

        A GPU's begin to travel to the host, behind what its current stream has to do.
        """
        mark = None
        if (copies := self._copies_of(values.device)) is not None:
            values, mark = copies.fetch(values)
        self._staged[place] = (tuple(samples), values, mark)

    def commit(self) -> None:
        """The step is done: remember what it sent. Of a sample that it sent twice the last tensor counts."""
        for place in sorted(self._staged):
            samples, values, mark = self._staged[place]
            if mark is not None:
                mark.synchronize()
            for sample, value in zip(samples, values, strict=True):
                self._values[sample] = value
                self._crc[sample] = _crc(self._values[sample])
        self._staged.clear()

    def rollback(self) -> None:
        """The step was called off: forget what it sent."""
        self._staged.clear()

    def state(self) -> dict[str, torch.Tensor]:
        """A copy for a snapshot: values as int16 `[n, *shape]`, samples int64 `[n]`, since int64 0-d."""
        known = torch.tensor([index for index, crc in enumerate(self._crc) if crc is not None]).long()
        return {
            VALUES: self._values[known].view(torch.int16),
            SAMPLES: known,
            SINCE: torch.tensor(self.since),
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` returned, in a cache that is still empty.

        Raises:
            RunError: it has other tensors, or of another shape or dtype; nothing has changed.
        """
        count, shape = len(self._crc), tuple(self._values.shape[1:])
        if state.keys() != {VALUES, SAMPLES, SINCE}:
            raise RunError(f"remembered activations have the parts {sorted(state)}; use an older snapshot")
        values, samples, since = state[VALUES], state[SAMPLES], state[SINCE]
        wanted = (values.shape[:1], torch.int64, (len(samples), *shape), torch.int16, (), torch.int64)
        found = (samples.shape, samples.dtype, values.shape, values.dtype, since.shape, since.dtype)
        order = samples.tolist() if samples.dim() == 1 else [-1]
        if (
            found != wanted
            or sorted(set(order)) != order
            or (order and not 0 <= order[0] <= order[-1] < count)
        ):
            raise RunError(
                f"remembered activations {list(values.shape)} of {values.dtype} do not fit {count} samples "
                f"of {list(shape)}; use an older snapshot"
            )
        remembered = values.view(torch.bfloat16)
        if not remembered.isfinite().all():
            raise RunError("remembered activations hold infinities or NaNs; use an older snapshot")
        self.since = int(since)
        for sample, value in zip(order, remembered, strict=True):
            self._values[sample] = value
            self._crc[sample] = _crc(value)

    def _copies_of(self, device: torch.device) -> HostCopies | None:
        if self._copies is None and device.type == "cuda":
            self._copies = HostCopies()
        return self._copies


def _crc(value: torch.Tensor) -> int:
    return int(google_crc32c.extend(0, value.contiguous().view(torch.uint8).numpy()))
