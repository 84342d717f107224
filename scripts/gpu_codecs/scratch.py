"""Scratch memory between poisoned guards: whatever a codec asks torch for while it runs."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpu_codecs.tensors import GUARD, POISON


class GuardedScratch(TorchFunctionMode):
    """Within it, tensors that torch.empty, torch.zeros and torch.empty_like give on `device` have guards.

    Those that are not zeroed are poisoned, so that bits cannot depend on what was there before.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._whole: list[torch.Tensor] = []

    @property
    def made(self) -> int:
        return len(self._whole)

    def intact(self) -> bool:
        return all(
            bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all())
            for whole in self._whole
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in (torch.empty, torch.zeros, torch.empty_like) or made.device.type != self._device:
            return made
        whole = torch.full((made.nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=made.device)
        self._whole.append(whole)
        room = whole[GUARD : GUARD + made.nbytes].view(made.dtype).view(made.shape)
        return room.zero_() if func is torch.zeros else room
