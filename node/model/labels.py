"""Labels that do not count, such as the user's part of a conversation. Torch-free: coordinator and model
agree on it.

The loss of a step is the mean over the labels that count in all of its microbatches, however they are spread.
Each microbatch computes its mean over all positions with 0 for ignored labels, and the step's `label_weight`
makes up for these.
"""

import numpy as np

IGNORED = -100
"""The value of a label that does not count, as in torch's cross entropy."""


def label_weight(labels: np.ndarray) -> float:
    """All labels of a step, [global batch, sequence], over those that count; 0 if none does."""
    counted = int(np.count_nonzero(labels != IGNORED))
    return labels.size / counted if counted else 0.0
