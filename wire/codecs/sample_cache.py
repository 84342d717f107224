"""The sample cache of `aqsgd-b`: for every sample, the activation that was last sent over a boundary.

Both ends of a boundary keep one and update it from the same bytes, so the two stay equal. A step is a
transaction: its updates are staged, then applied by `commit` or dropped by `rollback`. Values are bf16 on
the CPU, whatever device the stage computes on. `since` is the step at which both ends started their caches.
Every tensor's header carries it, with a CRC32C of the entries that the tensor was packed against.
"""

from collections.abc import Mapping, Sequence

import google_crc32c
import torch

from wire.codecs.host_copies import HostCopies, Mark
from wire.errors import CacheMismatchError, RunError

VALUES, SAMPLES, SINCE = "values", "samples", "since"


class SampleCache:
    """The activations `[*shape]` of `samples` samples at one end of one boundary.

    RAM use grows as samples are seen. Only the thread that packs and unpacks may call the methods; any
    thread may read `since`.
    """

    def __init__(
        self, samples: int, shape: tuple[int, ...], since: int, copies: HostCopies | None = None
    ) -> None:
        """`copies` moves values from and to a GPU. By default it is created for the first GPU tensor."""
        self._copies = copies
        self.since = since
        self._values = torch.empty((samples, *shape), dtype=torch.bfloat16)
        self._crc: list[int | None] = [None] * samples
        # Host tensors. A tensor with a mark is complete only after the mark.
        self._staged: dict[int, tuple[tuple[int, ...], torch.Tensor, Mark | None]] = {}

    def knows(self, sample: int) -> bool:
        """Whether a committed step has sent this sample."""
        return self._crc[sample] is not None

    def recall(self, samples: Sequence[int], device: torch.device) -> torch.Tensor:
        """bf16 `[n, *shape]`: the cached values of known samples, as of the last commit."""
        self.crc(samples)
        rows = torch.tensor(samples, dtype=torch.int64)
        if (copies := self._copies_of(device)) is not None:
            return copies.rows(self._values, rows, device)
        return self._values[rows].to(device)

    def crc(self, samples: Sequence[int]) -> int:
        """CRC32C over the cached values of these samples; 0 for no samples.

        Raises `CacheMismatchError` for a sample that is missing although the run has already sent it.
        """
        total = 0
        for sample in samples:
            crc = self._crc[sample]
            if crc is None:
                raise CacheMismatchError(
                    f"sample {sample} is not in this stage's cache, though it was sent since step "
                    f"{self.since}: this stage goes back to the newest snapshot"
                )
            total = int(google_crc32c.extend(total, crc.to_bytes(4, "little")))
        return total

    def stage(self, place: int, samples: Sequence[int], values: torch.Tensor) -> None:
        """Stage bf16 `[n, *shape]`, on any device, for `commit`. `place` orders the tensors of a step.

        A copy from a GPU to the host starts on its current stream.
        """
        mark = None
        if (copies := self._copies_of(values.device)) is not None:
            values, mark = copies.fetch(values)
        self._staged[place] = (tuple(samples), values, mark)

    def commit(self) -> None:
        """Apply what the step staged. If a sample was staged twice, the last tensor wins."""
        for place in sorted(self._staged):
            samples, values, mark = self._staged[place]
            if mark is not None:
                mark.synchronize()
            for sample, value in zip(samples, values, strict=True):
                self._values[sample] = value
                self._crc[sample] = _crc(self._values[sample])
        self._staged.clear()

    def rollback(self) -> None:
        """Drop what the step staged."""
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
        """Load what `state` returned into an empty cache.

        Raises:
            RunError: tensors are missing or have another shape or dtype; nothing has changed.
        """
        count, shape = len(self._crc), tuple(self._values.shape[1:])
        if state.keys() != {VALUES, SAMPLES, SINCE}:
            raise RunError(f"a sample cache has the parts {sorted(state)}; use an older snapshot")
        values, samples, since = state[VALUES], state[SAMPLES], state[SINCE]
        expected = (values.shape[:1], torch.int64, (len(samples), *shape), torch.int16, (), torch.int64)
        actual = (samples.shape, samples.dtype, values.shape, values.dtype, since.shape, since.dtype)
        order = samples.tolist() if samples.dim() == 1 else [-1]
        if (
            actual != expected
            or sorted(set(order)) != order
            or (order and not 0 <= order[0] <= order[-1] < count)
        ):
            raise RunError(
                f"a sample cache {list(values.shape)} of {values.dtype} does not fit {count} samples "
                f"of {list(shape)}; use an older snapshot"
            )
        cached = values.view(torch.bfloat16)
        if not cached.isfinite().all():
            raise RunError("a sample cache holds infinities or NaNs; use an older snapshot")
        self.since = int(since)
        for sample, value in zip(order, cached, strict=True):
            self._values[sample] = value
            self._crc[sample] = _crc(value)

    def _copies_of(self, device: torch.device) -> HostCopies | None:
        if self._copies is None and device.type == "cuda":
            self._copies = HostCopies()
        return self._copies


def _crc(value: torch.Tensor) -> int:
    return int(google_crc32c.extend(0, value.contiguous().view(torch.uint8).numpy()))
