"""The parts of a step's samples that nodes receive, and labels that do not count, such as the user's part of
a conversation. It imports no torch, since the coordinator uses it too.

The loss of a step is the mean over the labels that count in all of its microbatches, however they are spread.
Each microbatch computes the mean over all positions, with 0 for ignored labels, and the step's `label_weight`
corrects for the ignored ones.
"""

from enum import StrEnum

import numpy as np

IGNORED = -100
"""The value of a label that does not count, as in torch's cross entropy."""


def label_weight(labels: np.ndarray) -> float:
    """The number of labels of a step, [global batch, sequence], divided by the number that count; 0 if none
    does."""
    counted = int(np.count_nonzero(labels != IGNORED))
    return labels.size / counted if counted else 0.0


class BatchPart(StrEnum):
    """A part of a step's samples that nodes fetch."""

    INPUTS = "inputs"
    """Token ids [rows, sequence], for the first stage."""
    LABELS = "labels"
    """Token ids or `IGNORED`, for the stage with the head."""
    DOCUMENTS = "documents"
    """Where documents begin, bool [rows, sequence]. With `data.separate_documents` every stage needs it."""


def to_bytes(part: BatchPart, rows: np.ndarray) -> bytes:
    """The bytes of rows [n, sequence]: little-endian int32, or for documents one bit per token, with each row
    padded to whole bytes."""
    if part is BatchPart.DOCUMENTS:
        return np.packbits(rows, axis=1).tobytes()
    return np.ascontiguousarray(rows).astype("<i4").tobytes()


def are_labels(packed: bytes, steps: int) -> list[bool]:
    """For each of `steps` steps, whether any of its labels count. `packed` comes from `to_bytes`."""
    rows = np.frombuffer(packed, dtype="<i4").reshape(steps, -1)
    return [bool(some) for some in (rows != IGNORED).any(axis=1)]


def bytes_of(part: BatchPart, rows: int, columns: int) -> int:
    """The number of bytes that `to_bytes` returns for this many rows."""
    return rows * (-(-columns // 8) if part is BatchPart.DOCUMENTS else 4 * columns)


MOST_STEPS_AT_ONCE = 16
"""The most steps whose samples one call fetches."""
SMALL_BYTES = 64 * 1024
"""The samples of several steps are fetched together only if they are at most this large in total."""


def steps_at_once(part: BatchPart, rows: int, columns: int) -> int:
    """How many steps' samples nodes may fetch in one call."""
    return max(1, min(MOST_STEPS_AT_ONCE, SMALL_BYTES // bytes_of(part, rows, columns)))


def from_bytes(part: BatchPart, data: bytes, rows: int, columns: int) -> np.ndarray:
    """The reverse of `to_bytes`: int64, or bool for documents."""
    if part is BatchPart.DOCUMENTS:
        bits = np.frombuffer(data, dtype=np.uint8).reshape(rows, -1)
        return np.unpackbits(bits, axis=1, count=columns).astype(bool)
    return np.frombuffer(data, dtype="<i4").astype(np.int64).reshape(rows, columns)
