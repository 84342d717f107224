"""Rounds: local steps of each gradient group, and the outer optimizer over their mean (`[sync] every`).

In a round each group starts from the same weights, takes `every` optimizer steps on parts of its samples, and
reports how its weights changed. The outer optimizer treats the mean change over groups as a gradient. It is
SGD, optionally with Nesterov momentum, as in DiLoCo (arXiv 2311.08105, algorithm 1).

Groups share all of their state, so any row may compute any group. AdamW's moments begin each round at values
from the last round's mean over groups. The first moment follows from the change itself: the change of a
weight, divided by steps and learning rate, is AdamW's mean over the root of its mean square. So local steps
continue with the momentum of the whole run, as in FedCM (arXiv 2106.10874). If moments began at 0, with
AdamW's bias correction, the first steps would be as long as later ones but follow one part's gradient alone,
which is all noise: at 124 million parameters losses rose from 4.5 to 10 (scripts/results/losses.md). Of the
second moment, a matrix keeps the means of its rows and columns and is rebuilt as their product, as in
Adafactor (arXiv 1804.04235, section 3). So a round sends little besides the change.

Weights do not change before the commit: the values at the beginning of a round are kept, and put back however
it ends. On a GPU they are kept in page-locked memory, which takes no memory of the card and is copied at the
bus's speed.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from node.config.schema import RunConfig
from node.model.host_memory import HostMemory, host_memory
from node.training.optimizer import StageOptimizer
from node.training.schedule import learning_rate
from node.training.update_rules import Step


class LocalSteps:
    """The local steps of the layer units that one process holds, on one device."""

    def __init__(
        self, config: RunConfig, optimizer: StageOptimizer, weights_changed: Callable[[], None] = lambda: None
    ) -> None:
        """`weights_changed` is called whenever a round has changed weights that its later passes read."""
        self._sync = config.sync
        self._groups = config.pipeline.groups
        self._config = config
        self._optimizer = optimizer
        self._weights_changed = weights_changed
        self._host: HostMemory | None = None
        self._kept: dict[nn.Parameter, tuple[Tensor, list[Tensor]]] = {}
        """Weights and moments at the beginning of the round, on the host."""
        self._steps: dict[str, int] = {}
        self._taken = 0
        self._means: dict[nn.Parameter, dict[str, Tensor]] = {}
        """The `UpdateRule.round_means` of the round that waits for its commit, as passed to `put`."""

    def begin_group(self) -> None:
        """Start the local steps of another group, from the state at the beginning of the round."""
        if self._kept:
            self._restore()
            self._weights_changed()
        else:
            self._keep()
        self._taken = 0

    def step(self, step: int) -> None:
        """Take the optimizer step of a part whose gradients are complete, in the run's step `step`.

        Raises:
            NonFiniteError: a gradient is not finite. The error names the layer unit.
        """
        config = self._config
        lr = learning_rate(step, config.training, config.run.steps)
        # Gradients are those of the mean over all samples of the round.
        self._optimizer.local_step(lr, self._taken, float(self._groups * self._sync.every))
        self._weights_changed()
        self._taken += 1

    def changes(self) -> dict[str, dict[str, Tensor]]:
        """The finished group's share of the means over groups, by layer unit, float32 on the device.

        The entry of a parameter's name is what was subtracted from its weights. The names of `model_pieces`
        stand for the means of its moments.
        """
        shares: dict[str, dict[str, Tensor]] = {}
        with torch.no_grad():
            for unit, named in self._optimizer.named.items():
                self._optimizer.streaming.use_weights(unit)
                shares[unit] = {
                    name: part.div_(self._groups)
                    for parameter_name, parameter in named.items()
                    for name, part in self._change(parameter_name, parameter).items()
                }
        return shares

    def end(self) -> None:
        """Put back the state at the beginning of the round, also after a failure in between."""
        if self._kept:
            self._restore()
            self._kept.clear()

    @torch.no_grad()
    def put(self, unit: str, values: dict[str, Tensor]) -> None:
        """Store the means over all groups, flat by name. Until the commit the change is the gradient."""
        named = self._optimizer.named[unit]
        self._optimizer.put_gradients(unit, values)
        for name, parameter in named.items():
            self._means[parameter] = {
                key.removesuffix(f".{name}"): value.clone()
                for key, value in values.items()
                if key.endswith(f".{name}")
            }

    @torch.no_grad()
    def apply(self, step: int) -> None:
        """Commit the run's step `step`, a round: take one step of the outer optimizer and drop the
        gradients."""
        optimizer, sync = self._optimizer, self._sync
        lr = learning_rate(step, self._config.training, self._config.run.steps)
        taken = {unit: steps + sync.every for unit, steps in optimizer.steps_taken.items()}
        for unit, named in optimizer.named.items():
            optimizer.streaming.use_weights(unit, changed=True)
            optimizer.streaming.use_gradients(unit)
            for parameter in named.values():
                change = optimizer.gradients.get(parameter)
                last = Step(lr=lr, weight_decay=self._config.training.weight_decay, number=taken[unit])
                means, updates = self._means.pop(parameter), optimizer.updates_of(parameter)
                moments = updates.moments_after_round(parameter, change, means, sync.every, last)
                optimizer.put_moments(parameter, moments)
                if sync.outer_momentum > 0.0:
                    held = optimizer.outer.get(parameter)
                    velocity = change.clone()
                    if held is not None:
                        velocity.add_(held.to(change.device, non_blocking=True), alpha=sync.outer_momentum)
                    optimizer.outer[parameter] = self._on_host(velocity, held)
                    change = change.add(velocity, alpha=sync.outer_momentum)
                parameter.add_(change, alpha=-sync.outer_lr)
        self._memory.wait_device()
        optimizer.steps_taken = taken
        optimizer.weights_changed()
        optimizer.zero_grad()

    @torch.no_grad()
    def _keep(self) -> None:
        """Keep the state at the beginning of the round."""
        optimizer = self._optimizer
        self._steps = optimizer.steps_taken
        for unit, named in optimizer.named.items():
            optimizer.streaming.use_weights(unit)
            for parameter in named.values():
                moments = [self._on_host(moment) for moment in optimizer.moments_of(parameter)]
                self._kept[parameter] = self._on_host(parameter), moments

    def _on_host(self, tensor: Tensor, target: Tensor | None = None) -> Tensor:
        """A copy on the host, in `target` if there is one. It is complete once the device's work is done."""
        if target is None:
            target = self._memory.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return target.copy_(tensor.detach(), non_blocking=True)

    @property
    def _memory(self) -> HostMemory:
        if self._host is None:
            self._host = host_memory(self._optimizer.parameters[0].device)
        return self._host

    def _change(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        weight, _ = self._kept[parameter]
        change = weight.to(parameter.device, non_blocking=True) - parameter.detach()
        moments = [moment.to(parameter.device) for moment in self._optimizer.moments_of(parameter)]
        means = self._optimizer.updates_of(parameter).round_means(moments)
        return {name: change, **{f"{kind}.{name}": mean for kind, mean in means.items()}}

    @torch.no_grad()
    def _restore(self) -> None:
        optimizer = self._optimizer
        for unit, named in optimizer.named.items():
            optimizer.streaming.use_weights(unit, changed=True)
            for parameter in named.values():
                weight, moments = self._kept[parameter]
                parameter.copy_(weight, non_blocking=True)
                optimizer.put_moments(parameter, moments)
        optimizer.steps_taken = self._steps
        optimizer.weights_changed()
        optimizer.zero_grad()
