"""A pipeline without a network: one `StageExecutor` a stage, each on a thread of its own, joined by memory.

It plays the coordinator's part of a step (global norm, clipping, learning rate) with the product's own
functions, so what it shows about losses and weights holds for the arithmetic of a real run.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from math import inf, isfinite
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from node.config.schema import RunConfig
from node.data.data import Corpus
from node.data.samples import part_of
from node.model.labels import from_bytes, to_bytes
from node.model.optimizers import PARAMETER_PREFIX
from node.model.units import unit_names
from node.schedule.gradient_groups import RowShare
from node.schedule.routing import BETWEEN_ROWS, source_stage, target_stage
from node.stage.executor import StageExecutor, UnitState
from node.stage.inbox import Inbox, StepChange, StepInterrupted
from node.stage.stage_model import StageModel
from node.state.manifest import weights_sha256
from node.telemetry.clock import StageClock
from node.training.loss_scale import LEAST, SKIPPED, loss_scales
from node.training.schedule import clip_coefficient, global_norm, learning_rate
from node.tuning.memory_plan import Room
from tests.support.host_memory import LateHostMemory
from tests.support.reference_trainer import Boundary, ReferenceTrainer, Step
from tests.support.snapshots import unit_weights_sha256
from wire.codecs.registry import codec
from wire.messages import Vote
from wire.spec import Direction, TensorKey, TensorSpec

CPU = torch.device("cpu")
TAKE_SECONDS = 120.0
"""A neighbour may compile a codec first, on a busy machine."""

Result = TypeVar("Result")

TEXT = "".join(
    f"{sha256(str(n).encode()).hexdigest()} is line {n} of {n * n}.\n" for n in range(200)
).encode()


def _begin_thread() -> None:
    """Keep this thread, and those that it starts, on one core.

    On several, threads hand over the interpreter's lock at every operation of torch: up to two thirds more
    processor time.
    """
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})


def corpus(config: RunConfig, text: bytes = TEXT) -> Corpus:
    """A text that is neither constant nor random, so that its loss falls but not to nothing."""
    return Corpus(
        np.frombuffer(text, dtype=np.uint8),
        sequence=config.model.sequence,
        global_batch=config.training.global_batch,
        seed=config.run.seed,
        shift=config.data.shift,
        end=ord("\n") if config.data.separate_documents else None,
    )


class MemoryIO:
    """`LinksIO` of one stage of a row; what it sends lands in the receiving stage's inbox at once."""

    def __init__(
        self,
        stage: int,
        executors: Sequence[StageExecutor],
        inboxes: list[Inbox],
        rows: Sequence[tuple[StageExecutor, Inbox]] = (),
        row: int = 0,
    ) -> None:
        """`rows`: the same stage in every row; `row`: the own one."""
        self.row = row
        self.held: set[TensorKey] = set()
        """Taken and not yet released."""
        self._early: set[TensorKey] = set()
        """Released and not yet taken: they were unpacked before."""
        self.sent: list[tuple[TensorKey, int]] = []
        """Every tensor sent, with its packed bytes."""
        self._stage = stage
        self._executors = executors
        self._inboxes = inboxes
        self._rows = [*rows]

    def holds(self, key: TensorKey) -> bool:
        return self._inboxes[self._stage].holds(key)

    def wait_any(self, keys: Sequence[TensorKey], *, or_change: bool = False) -> None:
        self._inboxes[self._stage].wait_any(keys, TAKE_SECONDS, or_change=or_change)

    def take(self, key: TensorKey) -> Tensor:
        source = source_stage(key, len(self._inboxes))
        assert source not in (self._stage, BETWEEN_ROWS)
        if key in self._early:
            self._early.remove(key)
        else:
            self.held.add(key)
        return torch.frombuffer(self._inboxes[self._stage].take(key, TAKE_SECONDS), dtype=torch.uint8)

    def watch(self, key: TensorKey, call: Callable[[Tensor], None]) -> None:
        inbox = self._inboxes[self._stage]
        inbox.watch(key, lambda buffer: call(torch.frombuffer(buffer, dtype=torch.uint8)))

    def take_from_row(self, row: int, key: TensorKey, *, is_gone: bool = False) -> Tensor:
        if is_gone and (packed := self.take_of_gone(row, key)) is not None:
            return packed
        found = self._inboxes[self._stage].take(key, TAKE_SECONDS, row)
        return torch.frombuffer(found, dtype=torch.uint8)

    def take_of_gone(self, row: int, key: TensorKey) -> Tensor | None:
        found = self._inboxes[self._stage].take_now(key, (row, *range(len(self._rows))))
        return None if found is None else torch.frombuffer(found, dtype=torch.uint8)

    @property
    def has_change(self) -> bool:
        return self._inboxes[self._stage].has_change

    def take_change(self) -> StepChange | None:
        return self._inboxes[self._stage].take_change()

    def release(self, key: TensorKey) -> None:
        if key in self.held:
            self.held.remove(key)
        else:
            self._early.add(key)

    def send(self, key: TensorKey, packed: Tensor, elements: int) -> None:
        target = target_stage(key, len(self._inboxes))
        assert self._executors[target].expected_bytes(key) == packed.numel()
        self.sent.append((key, packed.numel()))
        self._inboxes[target].put(key, bytearray(packed.numpy()))

    def send_to_row(
        self,
        row: int,
        key: TensorKey,
        packed: Tensor,
        elements: int,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        executor, inbox = self._rows[row]
        assert executor.expected_bytes(key) == packed.numel()
        sync = self._rows[self.row][0]._sync
        assert sync is not None
        work = executor._share.work(sync._work.portions, *sync._work.seats)
        assert executor.comes(self.row, key, work), "it would wait until the step is over"
        self.sent.append((key, packed.numel()))
        inbox.put(key, bytearray(packed.numpy()), self.row)
        if arrived is not None:
            arrived()

    def missed(self, row: int) -> None:
        raise AssertionError(f"row {row} is to have handed something over")

    def link_to_row(self, row: int) -> Inbox:
        return self._rows[row][1]

    def interrupt(self, error: Exception) -> None:
        self._inboxes[self._stage].interrupt(str(error), error)

    def check(self) -> None:
        self._inboxes[self._stage].check()


class MemoryPipeline:
    """All stages of `config`, at step 0, in one row or several. A context manager: leaving it ends threads.

    Executors, inboxes and ios stand row after row.
    """

    def __init__(
        self,
        config: RunConfig,
        data: Corpus | None = None,
        fetch: Callable[[str], UnitState] | None = None,
        rows: Sequence[Sequence[int]] | None = None,
        room: Room | None = None,
    ) -> None:
        """`data` defaults to `corpus(config)`; `fetch` gives the weights of a checkpoint that the run starts
        from. `rows`: the gradient groups of each row; by default one row has all. `room`: of every stage."""
        stages = config.pipeline.stages
        groups = rows or [range(config.pipeline.groups)]
        self.rows = len(groups)
        self.config = config
        self.step = 0
        self._corpus = data or corpus(config)
        self.executors = [
            StageExecutor(
                config,
                CPU,
                StageClock(),
                StageModel(config, CPU, room=room, host=None if room is None else LateHostMemory()),
                room=Room(windows=self._corpus.windows),
            )
            for _ in range(self.rows * stages)
        ]
        self.inboxes = [Inbox() for _ in self.executors]
        members = list(zip(self.executors, self.inboxes, strict=True))
        self.ios = [
            MemoryIO(
                place % stages,
                self.executors[place - place % stages :][:stages],
                # The list itself in one row: a test puts another inbox in its place.
                self.inboxes if self.rows == 1 else self.inboxes[place - place % stages :][:stages],
                members[place % stages :: stages],
                place // stages,
            )
            for place in range(len(members))
        ]
        self.scales = loss_scales(config.training)
        self._pool = ThreadPoolExecutor(len(members), initializer=_begin_thread)
        for place, executor in enumerate(self.executors):
            executor.place(place % stages, stages, RowShare(config, place // stages, groups))
            executor.restore(0, fetch or _nothing_to_fetch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)

    def outcomes(self, epoch: int = 1) -> list[Vote]:
        """Run the step on every stage up to its vote. One stage's error ends all, and is raised."""

        def stage_step(stage: int) -> Vote:
            executor = self.executors[stage]
            samples = {}
            for part in executor.needs:
                rows = part_of(self._corpus, self.step, part)
                samples[part] = from_bytes(part, to_bytes(part, rows), *rows.shape)
            try:
                return executor.run_step(epoch, self.step, self.ios[stage], samples, self._factor)
            except BaseException as error:
                for inbox in self.inboxes:
                    inbox.interrupt(f"stage {stage} failed: {error}")
                raise

        futures = [self._pool.submit(stage_step, stage) for stage in range(len(self.executors))]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, StepInterrupted):
                raise error
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def commit(self, outcomes: Sequence[Vote]) -> Step:
        """Apply the optimizer on every stage as the coordinator would have it."""
        training, factor = self.config.training, self._factor or 1.0
        norms: dict[int, float] = {}
        sums: dict[int, bytes] = {}
        told = [norm for outcome in outcomes for norm in outcome.norms.values()]
        skipped = factor > LEAST and not all(map(isfinite, told))
        for outcome in outcomes:
            for unit, norm in outcome.norms.items():
                assert norms.setdefault(unit, norm) == norm or skipped, "rows disagree"
            for unit, digest in outcome.sums.items():
                assert sums.setdefault(unit, digest) == digest, "rows were sent different sums"
        by_group = {group: part for outcome in outcomes for group, part in outcome.group_losses.items()}
        if self.config.pipeline.groups > 1:
            assert sorted(by_group) == list(range(self.config.pipeline.groups))
            assert all(outcome.loss is None for outcome in outcomes)
            loss = 0.0
            for group in sorted(by_group):
                loss += by_group[group]
        else:
            (loss,) = (outcome.loss for outcome in outcomes if outcome.loss is not None)
        grad_norm = inf if skipped else global_norm(norms[unit] / factor**2 for unit in sorted(norms))
        lr = learning_rate(self.step, training, self.config.run.steps)
        clip = SKIPPED if skipped else clip_coefficient(grad_norm, training.clip) / factor
        if self.scales is not None:
            self.scales.committed(self.step, skipped=skipped)
        list(self._pool.map(lambda executor: executor.apply(lr, clip), self.executors))
        self.step += 1
        return Step(loss=loss, grad_norm=grad_norm, lr=lr)

    @property
    def _factor(self) -> float:
        """The loss's in this step; 0 in runs that scale none."""
        return 0.0 if self.scales is None else self.scales.at(self.step).factor

    def train(self, steps: int) -> list[Step]:
        return [self.commit(self.outcomes()) for _ in range(steps)]

    def restore(self, step: int, fetch: Callable[[str], UnitState]) -> None:
        """Put every stage at the state of `step`."""
        for executor in self.executors:
            executor.restore(step, fetch)
        self.step = step

    def forget(self) -> None:
        """What a node does at the end of an epoch: drop tensors and interruptions."""
        for inbox, io in zip(self.inboxes, self.ios, strict=True):
            inbox.reset()
            io.held.clear()

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """Run `work` on one of the stages' threads."""
        return self._pool.submit(work)

    def another_node(self, place: int, share: RowShare) -> None:
        """Another node has a place, with links of its own and the state at which the step began."""
        stages, executor = self.config.pipeline.stages, self.executors[place]
        row, stage = divmod(place, stages)
        inbox = self.inboxes[place] = Inbox()
        for other, io in enumerate(self.ios):
            if other // stages == row:
                io._inboxes[stage] = inbox
            if other % stages == stage:
                io._rows[row] = executor, inbox
        executor.place(stage, stages, share)
        executor.restore(self.step, _nothing_to_fetch)

    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """Weights and optimizer state of every unit."""
        row = self.executors[: len(self.executors) // self.rows]
        copies = [executor.copy_state() for executor in row]
        return {unit: copy.whole(unit) for copy in copies for unit in copy.units}

    def weights_sha256(self) -> str:
        """As a snapshot's manifest gives it."""
        state = self.state()
        prefix = PARAMETER_PREFIX
        return weights_sha256(
            unit_weights_sha256(
                {k.removeprefix(prefix): v.numpy() for k, v in state[unit].items() if k.startswith(prefix)}
            )
            for unit in unit_names(self.config.model)
        )


def changed(config: RunConfig, **sections: dict[str, object]) -> RunConfig:
    """It with other values in some sections."""
    return replace(
        config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def trained(
    config: RunConfig, steps: int, rows: Sequence[Sequence[int]] | None = None
) -> tuple[list[Step], str]:
    """As `reference_run`, by a pipeline."""
    with MemoryPipeline(config, rows=rows) as stages:
        return stages.train(steps), stages.weights_sha256()


def reference_run(
    config: RunConfig, steps: int, groups: Sequence[Sequence[str]] | None = None
) -> tuple[list[Step], str]:
    """Losses and weights hash of the unsplit trainer; with `groups` the config's codecs sit between them."""
    boundary = codec_boundary(config) if groups is not None else None
    trainer = ReferenceTrainer(config, corpus(config), groups=groups, boundary=boundary)
    return trainer.train(steps), trainer.weights_sha256()


def codec_boundary(config: RunConfig) -> Boundary:
    """What a link with the config's codecs does to a tensor."""
    spec = TensorSpec(torch.float32, (config.training.microbatch, config.model.sequence, config.model.hidden))
    codecs = {
        Direction.ACTIVATION: codec(config.pipeline.forward_codec),
        Direction.GRADIENT: codec(config.pipeline.backward_codec),
    }

    def cross(tensor: Tensor, key: TensorKey) -> Tensor:
        there = codecs[key.direction]
        return there.decode(there.encode(tensor), spec)

    return cross


def _nothing_to_fetch(unit: str) -> Mapping[str, Tensor]:
    raise AssertionError(f"{unit} was fetched at step 0")
