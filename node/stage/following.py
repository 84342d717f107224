"""A node without a stage follows the run: it holds a stage's state and updates it with every step, until it
gets the stage.

It loads a snapshot and applies the steps that the run commits meanwhile, from the gradient sums that the
stage's nodes keep. So training continues while the node fetches its state. When its epoch begins, the node
has the same state as the others, bit for bit.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol, TypeVar

from torch import Tensor

from node.model.units import unit_names
from node.stage.executor import StageExecutor
from node.stage.gradient_sync import digest_of_sum
from node.stage.progress import Progress
from node.state.serialization import as_frozen, deserialize_unit
from node.telemetry import points
from node.training.loss_scale import SKIPPED
from wire.errors import (
    DeviceLostError,
    NonFiniteError,
    PackedMismatchError,
    RunError,
    ThinwireError,
    first_error,
)
from wire.messages import Follow, Following, FollowStep, NodeMessage, PlacedStage

Result = TypeVar("Result")
FETCHES = 4
"""Layers that are fetched at a time."""
MOST_TRIES = 9
"""How often a step's gradients are fetched if they differ from what the run committed."""
SETTLE_SECONDS = 60.0
"""The seconds for a node that gets its stage to apply the committed steps that it knows of. They are fewer
than those that the coordinator waits for the node to take its place."""


class StateServices(Protocol):
    """What loading a state needs from the node."""

    executor: StageExecutor
    progress: Progress

    def state_bytes(self, units: Collection[str]) -> int:
        """About how many bytes the state of these units takes in a snapshot."""
        ...

    async def compute(self, work: Callable[[], Result]) -> Result: ...

    async def fetch_layer(self, step: int, unit: str) -> bytes:
        """A layer unit's snapshot file, from any source."""
        ...

    async def fetch_weights(self, unit: str) -> Mapping[str, Tensor]:
        """A unit's weights from the checkpoint that the run starts from, under their names in the state."""
        ...


async def load_state(services: StateServices, step: int) -> None:
    """Set the placed executor's state to that of `step`, from its snapshot or, at step 0, from the seed."""
    executor = services.executor
    adapters = executor.config.lora.rank > 0
    from_checkpoint = bool(executor.config.model.from_) and (step == 0 or adapters)
    sources = executor.sources if step > 0 or from_checkpoint else ()
    if sources:
        services.progress.fetching(services.state_bytes(sources))
    in_memory = asyncio.Semaphore(FETCHES)

    # If snapshots hold only adapters and there is no checkpoint, the other weights are drawn.
    is_drawn = not from_checkpoint and (step == 0 or adapters)

    async def fetch(unit: str) -> Mapping[str, Tensor]:
        await in_memory.acquire()
        state: Mapping[str, Tensor] = {}
        if step > 0:
            points.reach(points.Phase.STATE_FETCH, stage=executor.stage, step=step)
            state = await asyncio.to_thread(deserialize_unit, await services.fetch_layer(step, unit))
        own = from_checkpoint and unit in executor.units
        weights = await services.fetch_weights(unit) if own else {}
        # With adapters, the checkpoint's weights are frozen and are in no snapshot.
        return {**state, **(as_frozen(weights) if adapters else weights)}

    try:
        async with asyncio.TaskGroup() as group:
            fetching = {unit: group.create_task(fetch(unit)) for unit in sources}
            # The stage is built while its state arrives, and each unit is loaded when it has arrived.
            await services.compute(functools.partial(executor.begin_restore, is_drawn=is_drawn))
            while fetching:
                unit = next(iter(fetching))
                state = await fetching.pop(unit)
                await services.compute(functools.partial(executor.restore_unit, unit, state))
                in_memory.release()
    except* ThinwireError as errors:
        raise first_error(errors) from None
    services.progress.doing("loading its state")
    await services.compute(lambda: executor.end_restore(step))


async def several(units: Collection[str], fetch: Callable[[str], Awaitable[Result]]) -> dict[str, Result]:
    """The result of `fetch` for each unit. `FETCHES` run at a time."""
    turn = asyncio.Semaphore(FETCHES)

    async def fetch_in_turn(unit: str) -> Result:
        async with turn:
            return await fetch(unit)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = {unit: group.create_task(fetch_in_turn(unit)) for unit in units}
    except* ThinwireError as errors:
        raise first_error(errors) from None
    return {unit: task.result() for unit, task in tasks.items()}


FetchSums = Callable[[tuple[PlacedStage, ...], int, str, int], Awaitable[bytes]]
"""(holders in the order to ask them, step, unit, exact bytes) -> its packed sum. Raises LinkError."""


class Follower:
    """The followed state of one node. Call everything on the event loop."""

    def __init__(
        self,
        services: StateServices,
        fetch_sums: FetchSums,
        group: asyncio.TaskGroup,
        post: Callable[[NodeMessage], None],
        tell: Callable[[str], None],
        keep: Callable[[int, str, bytes], None],
    ) -> None:
        """
        Args:
            post: queues a message for the coordinator.
            tell: shows the volunteer a line of text.
            keep: keeps a step's packed sum of a unit for nodes that follow later from the same snapshot.
        """
        self._services = services
        self._fetch_sums = fetch_sums
        self._group = group
        self._post = post
        self._tell = tell
        self._keep = keep
        self._steps: asyncio.Queue[FollowStep] = asyncio.Queue()
        self._of = Follow(step=0)
        self._task: asyncio.Task[None] | None = None

    def follow(self, order: Follow) -> None:
        """Load a snapshot and follow from there; a repeated order has no effect. Without sources: stop."""
        if order == self._of and self._task is not None and not self._task.done():
            return
        if self._task is not None:
            self.stop()
            self._services.progress.idle("waiting for a stage")
        if order.sources:
            self._of, self._steps = order, asyncio.Queue()
            self._task = self._group.create_task(self._run(order, self._steps))

    def committed(self, step: FollowStep) -> None:
        """A step after the snapshot is committed."""
        if self._task is not None and step.snapshot == self._of.step:
            self._steps.put_nowait(step)

    async def settle(self) -> None:
        """This node gets its stage: apply the committed steps that it knows of, then stop following."""
        if self._task is None:
            return
        applied = asyncio.ensure_future(self._steps.join())
        await asyncio.wait([applied, self._task], timeout=SETTLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        applied.cancel()
        self.stop()

    def stop(self) -> None:
        """Stop following. The state is kept until the node gets a stage."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    # ---- inside

    async def _run(self, order: Follow, steps: "asyncio.Queue[FollowStep]") -> None:
        services, executor = self._services, self._services.executor
        try:

            def place() -> bool:
                held = executor.place(order.stage, order.stages)
                is_other = executor.use_storages(order.storages)
                executor.uncompressed = False
                if held >= order.step and executor.lineage == order.lineage and not is_other:
                    return True  # the node had the stage in another row
                executor.forget()
                return False

            if not await services.compute(place):
                await load_state(services, order.step)
            executor.lineage = order.lineage
            self._tell(
                f"follows the run from step {order.step}, to take stage {order.stage} of {order.stages}"
            )
            self._show_step(order)
            while True:
                step = await steps.get()
                if step.step >= executor.state_step:
                    await self._apply(order, step)
                    self._show_step(order)
                steps.task_done()
        except DeviceLostError:
            raise
        except ThinwireError as error:
            await services.compute(executor.forget)
            services.progress.idle("waiting for a stage")
            self._tell(f"no longer follows the run: {error}")
            self._post(Following(snapshot=order.step, step=0, failed=str(error)))

    def _show_step(self, order: Follow) -> None:
        held = self._services.executor.state_step
        self._services.progress.doing(f"following the run to take stage {order.stage}, at step {held}")
        self._post(Following(snapshot=order.step, step=held))

    async def _apply(self, order: Follow, step: FollowStep) -> None:
        """Apply a committed step. Raises RunError if no source has the gradients that were voted for."""
        services, executor = self._services, self._services.executor
        if step.step != executor.state_step:
            raise RunError(f"step {executor.state_step} is missing before step {step.step}")
        if step.clip_coefficient == SKIPPED:
            await services.compute(lambda: executor.apply(step.lr, SKIPPED))
            return
        trouble = ""
        # From all sources first. If that is wrong, from each alone, because one that lies keeps nobody out.
        for first in (None, *range(len(order.sources)))[:MOST_TRIES]:
            sums = await self._fetch(order.sources, step.step, first)
            if not await asyncio.to_thread(self._are_those, sums, step):
                trouble = "it is not the one that was voted for"
                continue

            def put(sums: Mapping[str, bytes] = sums) -> Mapping[int, float]:
                return executor.put_sums(sums)

            def keep(sums: Mapping[str, bytes] = sums) -> None:
                for unit, data in sums.items():
                    self._keep(step.step, unit, data)

            try:
                if await services.compute(put) == step.norms:
                    await services.compute(lambda: executor.apply(step.lr, step.clip_coefficient))
                    # All who had them from the step itself may die before the next node follows.
                    await services.compute(keep)
                    return
                trouble = "its norms differ from those that were voted for"
            except (PackedMismatchError, NonFiniteError) as error:
                trouble = str(error)
        raise RunError(f"no node has the right gradient of step {step.step}: {trouble}")

    def _are_those(self, sums: Mapping[str, bytes], step: FollowStep) -> bool:
        """Whether these sums have the digests that were voted for, if any were."""
        names = unit_names(self._services.executor.config.model)
        return all(digest_of_sum([sums[names[unit]]]) == digest for unit, digest in step.sums.items())

    async def _fetch(self, holders: tuple[PlacedStage, ...], step: int, only: int | None) -> dict[str, bytes]:
        """The packed sums of all units, from all holders at once; or, with `only`, from that one if it has
        them."""
        executor = self._services.executor
        units = executor.units

        async def fetch(unit: str) -> bytes:
            points.reach(points.Phase.STATE_FETCH, stage=executor.stage, step=step)
            if not executor.sum_bytes(unit):
                return b""
            first = units.index(unit) % len(holders) if only is None else only
            order = (*holders[first:], *holders[:first])
            return await self._fetch_sums(order, step, unit, executor.sum_bytes(unit))

        return await several(units, fetch)
