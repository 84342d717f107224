"""Detects overflow: a step in which a gradient of the scaled loss is not finite."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from node.training.loss_scale import LEAST


class Overflow:
    """The overflow of one step. Codecs cannot carry values that are not finite, so such a gradient is sent as
    zeros and remembered."""

    def __init__(self, loss_scale: float = 0.0) -> None:
        """At a `loss_scale` of `LEAST` and below nothing is changed, and codecs refuse values that are not
        finite."""
        self._looks = loss_scale > LEAST
        self._found = False

    @torch.no_grad()
    def cleared(self, gradient: Tensor) -> Tensor:
        """The gradient. It is set to zeros in place if any value is not finite."""
        if self._looks and not bool(torch.isfinite(gradient).all()):
            self._found = True
            gradient.zero_()
        return gradient

    def clear(self, gradients: Iterable[Mapping[str, object]]) -> None:
        """Apply `cleared` to float32 gradients by parameter."""
        for named in gradients:
            for gradient in named.values():
                if isinstance(gradient, Tensor):
                    self.cleared(gradient)

    def told(self, norms: Mapping[int, float]) -> dict[int, float]:
        """The squared norms that a stage votes. All are infinite if a gradient was not finite."""
        finite = all(map(math.isfinite, norms.values())) and not self._found
        return dict(norms) if finite or not self._looks else dict.fromkeys(norms, math.inf)
