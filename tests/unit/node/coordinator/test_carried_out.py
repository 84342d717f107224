"""The coordinator carries out the state machine's actions: in order, recorded first, to the right process."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from node.config.schema import (
    PLANNED,
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.coordinator import coordinator as module
from node.coordinator.changes import DECIDED, SETTABLE
from node.coordinator.coordinator import MOST_BATCHES, Coordinator
from node.coordinator.enrolment import EnrolmentHandler
from node.coordinator.relays import RelayOffer
from node.coordinator.sessions import MOST_WAITING, ControlSession
from node.coordinator.store import EVICTED_WORDS, Member, PlacedNode, StepOutcome, StepRecord, Store
from node.data.data import Corpus
from node.model.labels import BatchPart
from node.run_file.loader import change_config, from_json
from node.run_state.actions import Stop
from node.run_state.failures import MAX_STRIKES
from node.run_state.run_plan import Past
from node.schedule.placement import stage_units
from node.state.families import tensors
from node.state.weights import CheckpointError
from node.telemetry import events
from wire.errors import (
    ConfigError,
    DataError,
    ProtocolViolationError,
    RefusalCode,
    RunError,
    ThinwireError,
)
from wire.identity.enrolment import Hardware
from wire.messages import (
    RELAY_LEFT,
    Abort,
    Applied,
    AwaitedSums,
    Begin,
    Commit,
    CoordinatorMessage,
    FailureKind,
    Finish,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Leave,
    NodeMessage,
    Placed,
    Placement,
    Ready,
    RelayTimes,
    Restore,
    StepFailed,
    Telemetry,
    Vote,
    Welcome,
)
from wire.version import PROTOCOL, VERSION

SECONDS = 20.0
CONFIG = RunConfig(
    run=RunSection(steps=3, snapshot_every=100),
    model=ModelSection(layers=2, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=256, sequence=8),
    training=TrainingSection(global_batch=2, microbatch=1, warmup_steps=0),
    pipeline=PipelineSection(stages=1, forward_codec="fp32", backward_codec="fp32"),
)


class FakeStore:
    """Remembers what is recorded; `refuse` makes a kind of record fail, as a full disk does."""

    def __init__(self) -> None:
        self.placements: list[tuple[int, list[PlacedNode]]] = []
        self.steps: list[StepRecord] = []
        self.refuse = ""
        self.out: list[str] = []
        self.looks = threading.Semaphore(0)
        """Released each time that somebody asks who was evicted."""
        self.came: list[str] = []
        """Nodes whose use of a token is spent."""

    def claim(self, node_ids: Collection[str]) -> None:
        self.came.extend(node_ids)

    def member(self, node_id: str) -> Member:
        return Member(node_id, b"", Hardware("cpu", 2, 0), joined=0.0)

    def evicted(self) -> list[str]:
        self.looks.release()
        self._check("evicted")
        return self.out

    def record_placement(self, epoch: int, nodes: Sequence[PlacedNode]) -> None:
        self._check("placement")
        self.placements.append((epoch, list(nodes)))

    def record_step(self, step: StepRecord, norms: Mapping[int, float] | None = None) -> StepOutcome:
        self._check("step")
        self.steps.append(step)
        return StepOutcome.NEW

    def _check(self, kind: str) -> None:
        if self.refuse == kind:
            raise RunError("the disk is full")


class Peer:
    """A node's session, without a wire."""

    def __init__(
        self, coordinator: Coordinator, node_id: str, nonce: int = 1, epoch: int = 0, arithmetic: str = ""
    ) -> None:
        hello = Hello(
            version=VERSION,
            protocol=PROTOCOL,
            peer_address=":1",
            hardware=Hardware("cpu", 2, 0, arithmetic=arithmetic),
            flops=1.0,
            download_rate=1e6,
            epoch=epoch,
            process_nonce=nonce,
            name="Ana",
        )
        self._coordinator = coordinator
        self.session = ControlSession(node_id, hello, f"{node_id}:1")
        coordinator.opened(self.session)

    def say(self, message: NodeMessage) -> None:
        self._coordinator.heard(self.session, message)

    async def hear(self) -> CoordinatorMessage | None:
        """The next message; None when the session is closed."""
        async with asyncio.timeout(SECONDS):
            return await self.session.next()

    async def into_step(self, epoch: int = 1) -> None:
        """From the greeting into the first step."""
        assert isinstance(await self.hear(), Welcome)
        assert isinstance(await self.hear(), Placement)
        self.say(Placed(epoch=epoch, held_step=-1, voted=False))
        assert await self.hear() == Restore(epoch=epoch, step=0, lineage=epoch)
        self.say(Ready(epoch=epoch, telemetry=Telemetry()))
        assert await self.hear() == Begin(epoch=epoch, step=0)

    def vote(self, epoch: int = 1) -> None:
        self.say(Vote(epoch=epoch, step=0, norms=dict.fromkeys(range(4), 1.0), loss=2.0))


class Scene:
    def __init__(self, directory: Path, config: RunConfig) -> None:
        self.store = FakeStore()
        self.events: list[events.Event] = []
        self.coordinator = Coordinator(
            config=config,
            directory=directory,
            run_id="test-run",
            store=cast(Store, self.store),
            enrolment=cast(EnrolmentHandler, None),
            corpus=Corpus(np.zeros(4096, dtype=np.uint8), sequence=16, global_batch=4, seed=0),
            emit=self.events.append,
            past=Past(),
        )
        self.running: asyncio.Task[Stop] = asyncio.create_task(self.coordinator.run())

    def peer(self, node_id: str, nonce: int = 1, epoch: int = 0) -> Peer:
        return Peer(self.coordinator, node_id, nonce, epoch)

    async def end(self, *peers: Peer) -> Stop:
        for peer in peers:
            self.coordinator.closed(peer.session)
        return await asyncio.wait_for(self.running, SECONDS)


@contextlib.asynccontextmanager
async def scene(directory: Path, config: RunConfig = CONFIG) -> AsyncIterator[Scene]:
    running = Scene(directory, config)
    try:
        yield running
    finally:
        running.running.cancel()
        await asyncio.wait([running.running], timeout=SECONDS)


async def test_a_commit_is_recorded_before_it_is_sent(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        node = run.peer("a")
        await node.into_step()
        node.vote()
        commit = await node.hear()
        assert isinstance(commit, Commit)
        (record,) = run.store.steps
        assert (record.step, record.clip, record.lr, record.loss) == (
            0,
            commit.clip_coefficient,
            commit.lr,
            2.0,
        )
        assert run.store.placements == [(1, [PlacedNode(0, "a", "a:1")])]
        assert commit.then == Begin(epoch=1, step=1)
        (done,) = [event for event in run.events if isinstance(event, events.StepDone)]
        assert (done.step, done.loss) == (1, 2.0)


@pytest.mark.parametrize(
    ("cards", "precision"),
    [(("sm_86", "gfx1100"), "bfloat16"), (("sm_86", "sm_75"), "float16"), (("sm_75", "sm_75"), "float16")],
)
async def test_a_run_computes_in_what_all_its_machines_have_when_it_starts(
    tmp_path: Path, cards: tuple[str, str], precision: str
) -> None:
    """Before any of them has a stage: they come back to a run in that precision, which is on record."""
    training = replace(CONFIG.training, precision=PLANNED)
    config = replace(CONFIG, training=training, pipeline=replace(CONFIG.pipeline, stages=2))
    async with scene(tmp_path, config) as run:
        peers = list[Peer]()
        for name, card in zip("ab", cards, strict=True):
            assert not run.running.done()
            peers.append(Peer(run.coordinator, name, arithmetic=f"torch 2.13.0, {card}"))
            assert isinstance(await peers[-1].hear(), Welcome)
        for peer in peers:
            finish = await peer.hear()
            assert isinstance(finish, Finish) and finish.soon and precision in finish.reason
        assert not (await run.end(*peers)).failed and run.store.placements == []
        changes = run.coordinator.changes.applied
        assert changes == (f"training.precision={precision}",)
        decided = change_config(config, changes, (*SETTABLE, *DECIDED))
        assert decided == replace(config, training=replace(training, precision=precision))
        with pytest.raises(ConfigError):
            change_config(config, changes, SETTABLE)


@pytest.mark.parametrize(
    ("error", "code", "bug"),
    [(DataError("rows.jsonl line 7 is not JSON"), 2, False), (KeyError("column"), 1, True)],
)
async def test_samples_that_cannot_be_read_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, bug: bool
) -> None:
    def fails(self: Corpus, step: int) -> np.ndarray:
        raise error

    monkeypatch.setattr(Corpus, "inputs", fails)
    async with scene(tmp_path) as run:
        node = run.peer("a")
        await node.into_step()
        for _ in range(2):
            with pytest.raises(ThinwireError) as told:
                await run.coordinator.batch("a", 0, part=BatchPart.INPUTS)
        outcome = await run.end(node)
        assert outcome.failed and outcome.reason == str(told.value)
        assert str(error) in outcome.reason and "\n" not in outcome.reason
        assert run.coordinator.exit_code == code
        assert (run.coordinator.bug is error) is bug


async def test_groups_that_do_not_exist_or_come_twice_are_refused(tmp_path: Path) -> None:
    async with scene(tmp_path, replace(CONFIG, pipeline=replace(CONFIG.pipeline, groups=2))) as run:
        node = run.peer("a")
        await node.into_step()
        parts = [await run.coordinator.batch("a", 0, part=BatchPart.INPUTS, groups=(one,)) for one in (0, 1)]
        assert await run.coordinator.batch("a", 0, part=BatchPart.INPUTS, groups=(0, 1)) == b"".join(parts)
        for groups in ((2,), (0, 10**9), (1, 1), (0,) * 10**6):
            with pytest.raises(ProtocolViolationError):
                await run.coordinator.batch("a", 0, part=BatchPart.INPUTS, groups=groups)
        assert run.coordinator.bug is None and not run.running.done()


async def test_a_node_gets_its_samples_a_few_times_in_a_step(tmp_path: Path) -> None:
    """Else a single member could take all of the coordinator's line, and two of its threads."""
    async with scene(tmp_path) as run:
        node = run.peer("a")
        await node.into_step()

        async def got() -> int:
            for count in range(10 * MOST_BATCHES):
                try:
                    await run.coordinator.batch("a", count % 3, part=BatchPart.INPUTS)
                except ProtocolViolationError:
                    return count
            return -1

        assert await got() == MOST_BATCHES and await got() == 0
        node.vote()
        assert isinstance(await node.hear(), Commit)
        assert await got() == MOST_BATCHES, "each step has its own"


async def test_a_node_that_is_shut_out_makes_no_more_calls(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        node = run.peer("a")
        await node.into_step()
        for _ in range(MAX_STRIKES):
            assert await run.coordinator.refusal_for("a") is None
            run.coordinator.refused("a", "nonsense")
        assert isinstance(await node.hear(), Finish) and await node.hear() is None
        refusal = await run.coordinator.refusal_for("a")
        assert refusal is not None and refusal.code is RefusalCode.EVICTED


@pytest.mark.parametrize(
    ("texts", "names"),
    [({"path": "a/text"}, {"path": "text"}), ({"sources": ("b", "c/d")}, {"sources": ("b", "d")})],
)
async def test_nodes_learn_no_paths(tmp_path: Path, texts: dict[str, Any], names: dict[str, Any]) -> None:
    folder = "/home/somebody/"
    files = {name: f"{folder}{name}" for name in ("valid", "tokenizer", "chat_template")}
    data = DataSection(
        **files,
        **{
            key: folder + value if isinstance(value, str) else tuple(folder + name for name in value)
            for key, value in texts.items()
        },
    )
    config = replace(CONFIG, data=data, model=replace(CONFIG.model, from_=f"{folder}models/small"))
    async with scene(tmp_path, config) as run:
        welcome = await run.peer("a").hear()
        assert isinstance(welcome, Welcome)
        told = from_json(welcome.config_json)
        shown = DataSection(**dict(zip(files, files, strict=True)), **names)
        assert told == replace(config, data=shown, model=replace(config.model, from_="small"))
        run.coordinator.fail(f"{folder}texts/a.jsonl line 3 is not JSON; its folder is {folder}texts")
        assert await run.peer("a").hear() == welcome
        assert (await run.end()).reason.startswith(folder)
        assert run.coordinator._machine.goodbye.reason == "a.jsonl line 3 is not JSON; its folder is texts"


async def test_a_damaged_checkpoint_ends_the_run_by_its_name(tmp_path: Path) -> None:
    """A node asks for its part of it, or cannot read its own copy."""
    model = ModelSection(**{**vars(CONFIG.model), "from_": str(tmp_path / "model")})
    (tmp_path / "model").mkdir()
    arrays = {
        tensor.name: np.ones(tensor.shape, np.float32)
        for parts in tensors(model, "block.0001").values()
        for tensor in parts
    }
    arrays["model.layers.1.mlp.up_proj.weight"][0, 3] = np.nan
    save_file(arrays, tmp_path / "model" / "model.safetensors")
    async with scene(tmp_path, replace(CONFIG, model=model)) as run:
        with pytest.raises(CheckpointError):
            await run.coordinator.layer(0, "block.0001")
        outcome = await run.end()
        assert outcome.failed and run.coordinator.exit_code == 2
        place = f"{tmp_path}/model/model.safetensors: tensor model.layers.1.mlp.up_proj.weight "
        assert outcome.reason.startswith(place)


async def test_a_node_that_never_reads_its_answers_fills_no_memory(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        node = run.peer("a")
        for at in range(10 * MOST_WAITING):
            node.say(Heartbeat(telemetry=Telemetry(), sent_at=float(at)))
        assert isinstance(await node.hear(), Welcome)
        for at in range(MOST_WAITING - 1):
            answer = await node.hear()
            assert isinstance(answer, HeartbeatReply) and answer.sent_at == at
        assert isinstance(await node.hear(), Placement)
        node.say(Heartbeat(telemetry=Telemetry(), sent_at=0.5, awaited=AwaitedSums(1, is_total=True)))
        answer = await node.hear()
        assert isinstance(answer, HeartbeatReply)
        assert run.coordinator._machine._stragglers._does["a"][2] == AwaitedSums(1, is_total=True)
        assert (answer.sent_at, answer.pause) == (0.5, CONFIG.coordinator.heartbeat_seconds)


async def test_a_commit_that_cannot_be_recorded_is_not_heard_of(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        node = run.peer("a")
        await node.into_step()
        run.store.refuse = "step"
        node.vote()
        assert await node.hear() == Finish(reason="the disk is full", failed=True, paused=True)
        assert await run.end(node) == Stop(reason="the disk is full", failed=True)


async def test_a_placement_that_cannot_be_recorded_is_not_heard_of(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        run.store.refuse = "placement"
        node = run.peer("a")
        assert isinstance(await node.hear(), Welcome)
        assert await node.hear() == Finish(reason="the disk is full", failed=True, paused=True)
        assert (await run.end(node)).failed


async def test_a_database_that_cannot_be_read_now_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    async with scene(tmp_path) as run:
        run.store.refuse = "evicted"
        node = run.peer("a")
        await node.into_step()
        for _ in range(3):
            assert await asyncio.to_thread(run.store.looks.acquire, timeout=SECONDS)
        node.vote()
        assert isinstance(await node.hear(), Commit)
        run.store.out, run.store.refuse = ["a"], ""
        evicted = Finish(reason=f"you were {EVICTED_WORDS}", failed=True)
        assert await node.hear() == evicted and run.store.came == ["a"]
        assert not run.running.done()


async def test_only_the_nodes_of_the_epoch_that_asked_hand_its_snapshot_in(tmp_path: Path) -> None:
    """Each the layers that it holds, while that epoch lasts and when it is over."""
    config = replace(
        CONFIG,
        run=replace(CONFIG.run, snapshot_every=1),
        pipeline=replace(CONFIG.pipeline, stages=2, window=0),
    )
    async with scene(tmp_path, config) as run:
        first, last, spare = (run.peer(name) for name in ("a", "b", "c"))
        for node, heard in ((first, 2), (last, 2), (spare, 1)):
            for _ in range(heard):
                await node.hear()
        for message in (
            Placed(epoch=1, held_step=-1, voted=False),
            Ready(epoch=1, telemetry=Telemetry()),
            Vote(epoch=1, step=0, norms={0: 1.0, 1: 1.0}, loss=None),
            Applied(epoch=1, step=0, telemetry=Telemetry()),
        ):
            for node in (first, last):
                voted = isinstance(message, Vote) and node is last
                node.say(Vote(epoch=1, step=0, norms={2: 1.0, 3: 1.0}, loss=2.0) if voted else message)
            for node in (first, last):
                await node.hear()
        upper, lower = stage_units(config, 2)

        def permitted(node: str) -> list[str]:
            found = []
            for unit in (*upper, *lower):
                with contextlib.suppress(ProtocolViolationError):
                    found.append(run.coordinator.upload_permit(node, 1, unit).unit)
            return found

        def check() -> None:
            assert permitted("a") == list(upper)
            assert permitted("b") == list(lower)
            assert permitted("c") == []
            assert permitted("stranger") == []

        check()
        first.say(StepFailed(epoch=1, step=1, kind=FailureKind.INTERNAL, message="a fault"))
        while not isinstance(await first.hear(), Placement):
            pass
        check()


async def test_the_newer_of_two_processes_of_a_node_stays(tmp_path: Path) -> None:
    """The older is sent home: if it came back instead, each would throw out the other for ever."""
    async with scene(tmp_path) as run:
        older = run.peer("a", nonce=1)
        await older.into_step()
        newer = run.peer("a", nonce=2)
        finish = await older.hear()
        assert isinstance(finish, Finish) and finish.failed and "another process" in finish.reason
        assert await older.hear() is None
        older.vote()
        older.say(Leave(reason="late"))
        run.coordinator.closed(older.session)
        await newer.into_step(epoch=2)
        newer.vote(epoch=2)
        assert isinstance(await newer.hear(), Commit)
        assert [step.epoch for step in run.store.steps] == [2]
        assert not [event for event in run.events if isinstance(event, events.NodeLeft)]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("cpu ran out of memory at stage 0 of 1", "it ended: cpu ran out of memory at stage 0 of 1"),
        ("", "it ended without a reason"),
    ],
)
async def test_an_ending_node_is_released_at_once_and_its_reason_reported(
    tmp_path: Path, reason: str, told: str
) -> None:
    async with scene(tmp_path) as run:
        node = run.peer("a")
        await node.into_step()
        node.say(Leave(reason=reason, failed=True))
        assert await node.hear() is None, "the end of its session is the answer"
        (left,) = [event for event in run.events if isinstance(event, events.NodeLeft)]
        assert (left.node_id, left.reason) == ("a", told)
        (over,) = [event for event in run.events if isinstance(event, events.StepAborted)]
        assert (over.kind, over.reason) == ("lost", f"node a is gone: {told}")
        again = run.peer("a", nonce=2)
        await again.into_step(epoch=2)


async def test_a_relay_that_a_node_left_is_named_once(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        node = run.peer("a")
        run.coordinator.relays.plan.offers["r"] = RelayOffer(address="r:1", rate=1e9)
        for times in ({"r": 0.1}, {"r": RELAY_LEFT, "unknown": RELAY_LEFT}, {"r": RELAY_LEFT}):
            node.say(RelayTimes(times=times))
        told = [event.text for event in run.events if isinstance(event, events.Notice)]
        assert len(told) == 1 and "node a left the relay of node r:" in told[0]


async def test_a_session_opened_again_goes_on_where_it_was(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        first = run.peer("a")
        await first.into_step()
        second = run.peer("a", epoch=1)
        assert await first.hear() is None, "no word of another process"
        assert isinstance(await second.hear(), Welcome)
        assert await second.hear() == Begin(epoch=1, step=0)
        second.vote()
        assert isinstance(await second.hear(), Commit)
        (joined,) = [event for event in run.events if isinstance(event, events.NodeJoined)]
        assert (joined.name, joined.address, joined.listens) == ("Ana", "a:1", True)


@pytest.mark.parametrize("epoch", [3, 9])
async def test_a_node_from_another_epoch_is_refused_with_the_reason(tmp_path: Path, epoch: int) -> None:
    config = replace(CONFIG, pipeline=replace(CONFIG.pipeline, stages=2))
    async with scene(tmp_path, config) as run:
        node = run.peer("a", epoch=epoch)
        assert isinstance(await node.hear(), Welcome)
        assert await node.hear() == Abort(epoch=epoch, reason="that epoch is over")
