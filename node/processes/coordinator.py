"""Starts or resumes a run: checks files, keys and ports, then runs the coordinator."""

import contextlib
import json
import math
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from node.config.schema import RunConfig
from node.coordinator.changes import DECIDED, SETTABLE
from node.coordinator.control_service import ControlService
from node.coordinator.coordinator import Coordinator
from node.coordinator.decisions import (
    record_splits,
    recorded_codecs,
    recorded_places,
    recorded_splits,
    recorded_storages,
)
from node.coordinator.disk import check_room
from node.coordinator.enrolment import EnrolmentHandler, token_uses_told
from node.coordinator.gateways import Gateways, gateway_count
from node.coordinator.kept_snapshots import kept_manifests, set_kept_aside
from node.coordinator.metrics import RunMetrics
from node.coordinator.ports import (
    check_ports,
    control_ports,
    nodes_wait,
    open_ports,
    own_addresses,
    where_reached,
)
from node.coordinator.reporter import Emit, codec_bits
from node.coordinator.sessions import MessageLimits
from node.coordinator.store import StepRecord, Store
from node.dashboard.feed import Feed
from node.dashboard.pages import live_page, reading_past
from node.data.shards import TrainingData, load_data
from node.display.status import copied_from, process_start
from node.display.terminal import on_ending_signals
from node.display.top import path_sentences
from node.model.units import ends_in_blocks
from node.processes.cycles import rare_full_collections
from node.processes.locks import run_lock
from node.run_file.addresses import page_listen, parse_listen, shares_port
from node.run_file.loader import change_config, stored_config, to_json, to_toml
from node.run_state.epoch import PROOF_STEPS, Committed
from node.run_state.run_plan import Past
from node.run_state.stage_assignment import Candidate, sharing, stage_needs, useless
from node.run_state.votes import HISTORY_STEPS, PastStep
from node.schedule.placement import block_counts, check_cache, decided, head_share, slices_of
from node.state.manifest import MANIFEST_NAME, Manifest, SnapshotDamagedError
from node.state.snapshot import (
    Checked,
    Tell,
    discard_incomplete,
    list_snapshots,
    read_manifest,
    set_aside,
    set_damaged_aside,
    snapshot_directory,
)
from node.state.start import check_weights, frozen_ends, original_config
from node.state.unit_state import has_weights_alone
from node.telemetry import events, points
from node.telemetry.history import highest_step, history_size, last_start
from node.training.loss_scale import SKIPPED, LossScales, loss_scales
from node.training.schedule import learning_rate
from node.tuning.decisions import StepHistory
from node.tuning.device_memory import devices_of
from node.tuning.storage_choice import narrowest, remedies
from node.view.view_builder import RunViewBuilder
from wire import event_loop
from wire.descriptors import raise_limit
from wire.errors import DataError, RunError, UserError
from wire.identity.authority import CertificateAuthority
from wire.identity.enrolment import Hardware
from wire.identity.files import write_private
from wire.identity.names import join_address, new_run_id

TOKEN_LIFETIME = timedelta(hours=24)
INTERRUPTED = 130
STOPPING = "ending the run after this step and a snapshot; press Ctrl-C again to end it at once"


@dataclass(frozen=True, kw_only=True)
class _Run:
    run_id: str
    store: Store
    authority: CertificateAuthority
    corpus: TrainingData
    past: Past
    news: str = ""
    """What to report about damaged snapshots once the run has started."""


def run_coordinator(
    config: RunConfig, *, run_dir: Path, emit: Emit, resume: bool, new_text: bool = False
) -> int:
    """Run a coordinator until the run ends. Returns the exit code. Raises UserError for bad input.

    `new_text`: whether a resumed run's text may differ from the text before.
    """

    def tell(text: str) -> None:
        emit(events.Notice(text=text))

    raise_limit()
    with contextlib.ExitStack() as held:
        if resume:
            # First, because if this run's ports are taken, its own coordinator is probably running.
            held.enter_context(run_lock(run_dir))
            _check_original(run_dir)
        check_ports(config.coordinator, None if shares_port(config) else page_listen(config))
        if resume:
            authority = CertificateAuthority.load(run_dir / "authority")
            with _nodes_wait(config, authority):
                run = _reopen(config, run_dir, authority, _load_corpus(config, tell), tell, new_text)
            config = _with_split(config, run.past)
        else:
            if config.model.from_:
                event_loop.run(check_weights(config.model, frozen_ends(config)))
            corpus = _load_corpus(config, tell)
            # After all checks, so that a failed start leaves no run behind.
            held.enter_context(run_lock(run_dir))
            config = decided(config)
            if (line := check_room(config, run_dir)) is not None:
                tell(line)
            run = _create(config, run_dir, corpus)
        again = False
        while True:
            with contextlib.closing(run.corpus), run.store:
                if run.past.newest_snapshot >= config.run.steps:
                    weights = snapshot_directory(run_dir / "snapshots", run.past.newest_snapshot)
                    done = f"all {config.run.steps} steps are done; the weights are in {weights}"
                    done += "; to train on, resume with run.steps=N"
                    emit(events.Notice(text=done))
                    return 0
                served = event_loop.run(_serve(config, run_dir, run, emit, again))
            if not served.changes:
                return served.code
            # As in `resume`, but nodes reconnect by themselves to the port that they know.
            again = True
            recorded = change_config(config, served.changes, (*SETTABLE, *DECIDED))
            listen = join_address(parse_listen(config.coordinator.listen)[0], served.port)
            config = replace(recorded, coordinator=replace(recorded.coordinator, listen=listen))
            with _nodes_wait(config, run.authority):
                corpus = _load_corpus(config, tell)
                run = _reopen(recorded, run_dir, run.authority, corpus, tell, new_text=False)
            config = _with_split(config, run.past)


def _check_original(directory: Path) -> None:
    """Raise UserError if `directory` is a copy of a run that goes on here: nodes could not tell the two
    coordinators apart, because both would have the run's keys."""
    with contextlib.suppress(RunError):  # an unreadable history is reported later
        started = last_start(directory)
        if started is not None and (original := copied_from(started, directory)) is not None:
            raise UserError(
                f"{directory} is a copy of {original}, which process {started.process_id} runs: end that "
                "process first, because nodes cannot tell two coordinators of one run apart"
            )


def _load_corpus(config: RunConfig, tell: Tell) -> TrainingData:
    corpus = load_data(config, tell)
    check_cache(config, corpus.windows)
    return corpus


def _nodes_wait(config: RunConfig, authority: CertificateAuthority) -> AbstractContextManager[None]:
    """Tell nodes to wait while the block runs, unless the port is chosen at start and they cannot know it."""
    host, port = parse_listen(config.coordinator.listen)
    if not port:
        return contextlib.nullcontext()
    return nodes_wait(join_address(host, control_ports(config.coordinator)[-1]), authority)


def _create(config: RunConfig, directory: Path, corpus: TrainingData) -> _Run:
    run_id = new_run_id(config.run.name)
    now = time.time()
    authority = CertificateAuthority.create(run_id, now)
    authority.save(directory / "authority")
    _write_run_file(directory, config)
    write_private(_corpus_file(directory), json.dumps({"sha256": corpus.fingerprint()}).encode())
    # The database is created last: a directory with a database is complete.
    store = Store.create(directory, run_id=run_id, config_json=to_json(config), pin=authority.pin, now=now)
    return _Run(
        run_id=run_id,
        store=store,
        authority=authority,
        corpus=corpus,
        past=Past(scales=loss_scales(config.training)),
    )


def _write_run_file(directory: Path, config: RunConfig) -> None:
    """Write run.toml, for people to read, atomically."""
    write_private(directory / "run.toml", to_toml(config).encode())


def _reopen(
    config: RunConfig,
    directory: Path,
    authority: CertificateAuthority,
    corpus: TrainingData,
    tell: Tell,
    new_text: bool,
) -> _Run:
    original_config(config.model)
    other_text = _check_text(config, directory, corpus, new_text)
    checked = _newest_whole(directory / "snapshots", tell)
    held = sum(path.stat().st_size for path in (directory / "snapshots").glob("step-*/*"))
    if (line := check_room(config, directory, held=held)) is not None:
        tell(line)
    store = Store.open(directory)
    for step, _ in checked.damaged:
        store.delete_snapshot(step)
    newest, kept = _on_record(directory, store, tell)
    if other_text is not None:
        other_text(newest)
        tell(f"from step {newest + 1} on the text is the one at {_named(config)}")
    recorded = store.run().config_json
    before = stored_config(recorded)
    if (line := _other_length(before, config, newest)) is not None:
        tell(line)
    if newest >= config.run.steps:
        # A finished run's training settings stay as recorded; only its page and metrics may change.
        config = replace(
            before,
            coordinator=config.coordinator,
            dashboard=config.dashboard,
            telemetry=config.telemetry,
        )
    elif newest > 0:
        _check_optimizer_state(directory, before, newest)
    splits = _splits(store, before, config, newest)
    config = _with_split(config, Past(newest_snapshot=newest, splits=splits))
    if (config_json := to_json(config)) != recorded:
        store.set_config(config_json)
        _write_run_file(directory, config)
    last_epoch, last_step = store.last_epoch(), store.last_step()
    committed = None
    # A rebuilt database has a step's results, but not its clip coefficient.
    if last_step is not None and not math.isnan(last_step.clip):
        committed = Committed(step=last_step.step, clip_coefficient=last_step.clip, lr=last_step.lr)
    held_out, placed = store.held_out(), store.placement(last_epoch)
    norms = store.unit_norms(newest - 1 - HISTORY_STEPS)
    hosts, planned = tuple(node.node_id for node in placed), recorded_places(store)
    if planned is not None and planned[0] == last_epoch and len(planned[1].grid.hosts) == len(hosts):
        hosts = planned[1].grid.hosts  # decided, but not applied yet
    past = Past(
        last_epoch=last_epoch,
        newest_snapshot=newest,
        committed=committed,
        hosts=hosts,
        rows=1 + max((node.replica for node in placed), default=0),
        codecs=recorded_codecs(store),
        splits=splits,
        shown=planned[1].shown if planned is not None else {},
        moves=planned[2] if planned is not None else 0,
        storages=recorded_storages(store),
        scales=_scales(config, store, directory / "snapshots", newest, kept),
        validated=frozenset(held_out),
        best=min(filter(math.isfinite, held_out.values()), default=math.inf),
        later=_later(store, before, config, newest, same_text=other_text is None),
        newest=tuple(
            _past_step(record, norms)
            for record in store.steps(newest - 1 - HISTORY_STEPS)
            if record.step < newest and config.is_round(record.step) == config.is_round(newest)
        ),
    )
    return _Run(
        run_id=store.run().run_id,
        store=store,
        authority=authority,
        corpus=corpus,
        past=past,
        news=checked.news() if checked.damaged else "",
    )


def _scales(
    config: RunConfig, store: Store, snapshots: Path, newest: int, kept: Sequence[Manifest]
) -> LossScales | None:
    """The loss scales of a run in float16, from the newest snapshot and the skipped steps on record."""
    if config.training.precision != "float16":
        return None
    directory = snapshot_directory(snapshots, newest)
    own = [read_manifest(directory)] if (directory / MANIFEST_NAME).exists() else []
    scales = [
        manifest.loss_scale
        for manifest in (*kept, *own)
        if manifest.step == newest and manifest.loss_scale is not None
    ]
    skipped = store.steps_with_clip(SKIPPED)
    return loss_scales(config.training, skipped, (newest, scales[0]) if scales else None)


def _splits(store: Store, before: RunConfig, config: RunConfig, step: int) -> StepHistory[tuple[int, ...]]:
    """The splits of the run's steps, if they are kept. `step` is the next step, from which a change applies.
    After a return to an older snapshot, steps have their recorded split."""
    history, stages = recorded_splits(store), config.pipeline.stages
    if not config.pipeline.measures_places or before.pipeline.stages != stages:
        return StepHistory()
    old, new = (block_counts(each, stages) for each in (before, config))
    usable = history.changes and all(len(split) == stages for _, split in history.changes)
    splits = history if usable else StepHistory(((0, old),))
    if new not in (old, splits.at(step)):
        splits = splits.instead(step, new)
    if splits != history:
        record_splits(store, splits)
    return splits


def _with_split(config: RunConfig, past: Past) -> RunConfig:
    """`config` with the recorded split of the next step."""
    split = past.splits.at(past.newest_snapshot)
    return config if split is None else replace(config, pipeline=replace(config.pipeline, split=split))


def _check_text(
    config: RunConfig, directory: Path, corpus: TrainingData, new_text: bool
) -> Callable[[int], None] | None:
    """None if the text is the run's. If it may and does differ, what records that, given the steps done.

    Raises DataError if it may not differ.
    """
    try:
        known = json.loads(_corpus_file(directory).read_bytes())
        expected, earlier = known["sha256"], list(known.get("earlier", []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{_corpus_file(directory)} cannot be read ({error}): restore a copy of it") from None
    own = corpus.fingerprint()
    if own == expected:
        return None
    if not new_text:
        raise DataError(
            f"the text at {_named(config)} is not the text that the run began with, or gives other tokens "
            f"with {config.data.tokenizer}: restore it, so that steps run on the same tokens, or give "
            "--new-text to continue with this one"
        )

    def record(done: int) -> None:
        fields = {"sha256": own, "earlier": [*earlier, {"sha256": expected, "steps": done}]}
        write_private(_corpus_file(directory), json.dumps(fields).encode())

    return record


def _other_length(before: RunConfig, config: RunConfig, done: int) -> str | None:
    """How a change of the run's length affects the learning rate, or None. Raises UserError if it is too
    short."""
    steps = config.run.steps
    if steps == before.run.steps:
        return None
    if steps < done:
        raise UserError(f"run.steps = {steps} is too few: {done} steps are done and saved; give more")
    if steps == done:
        return None
    rate = learning_rate(done, config.training, steps)
    old = learning_rate(done, before.training, before.run.steps)
    return (
        f"the run has {steps} steps now instead of {before.run.steps}: by schedule "
        f"{config.training.schedule} the learning rate of step {done + 1} is {rate:.2e} (before: {old:.2e})"
    )


def _named(config: RunConfig) -> str:
    return ", ".join(config.data.sources) or config.data.path


def _newest_whole(snapshots: Path, tell: Tell) -> Checked:
    """The newest intact snapshot. Raises UserError if there are snapshots and all are damaged."""
    discard_incomplete(snapshots)
    points.reach(points.Phase.RESUMING, at=points.At.COORDINATOR)
    checked = set_damaged_aside(snapshots, tell)
    if checked.damaged and not checked.whole:
        damage = "; ".join(what for _, what in checked.damaged)
        raise UserError(
            f"no snapshot of this run is intact ({damage}): restore a copy of one, then resume, or start a "
            "new run"
        )
    return checked


def _on_record(directory: Path, store: Store, tell: Tell) -> tuple[int, list[Manifest]]:
    """The newest snapshot, and those that nodes hold, if their layers match the record. Others are set
    aside.

    Raises UserError if no snapshot is left.
    """
    snapshots, wrong = directory / "snapshots", []
    whole, kept = 0, []
    for step in list_snapshots(snapshots):
        path = snapshot_directory(snapshots, step)
        try:
            is_known = store.is_on_record(read_manifest(path))
        except SnapshotDamagedError:
            continue  # it is older than the newest intact one
        if is_known:
            whole = step
        else:
            wrong.append(step)
            set_aside(path)
    for manifest in kept_manifests(directory):
        if store.is_on_record(manifest):
            kept.append(manifest)
        else:
            wrong.append(manifest.step)
            set_kept_aside(directory, manifest.step)
    for step in wrong:
        tell(f"the snapshot of step {step} is set aside: its layers differ from those on record")
    if wrong and not whole and not kept:
        raise UserError(
            f"no snapshot of this run matches the record (steps {', '.join(map(str, wrong))}): restore a "
            "copy of one that does, then resume, or start a new run"
        )
    newest = max([whole, *(manifest.step for manifest in kept)])
    known = (record.step for record in store.snapshots() if record.complete and record.step not in wrong)
    if (recorded := max(known, default=0)) > newest:
        gone = f"the snapshot of step {recorded} is not in {snapshots}"
        if not newest:
            raise UserError(f"{gone}, nor is any other: put it back, then resume, or start a new run")
        tell(f"{gone}: the run goes on from step {newest}")
    return newest, kept


def _later(
    store: Store, before: RunConfig, config: RunConfig, newest: int, *, same_text: bool
) -> dict[int, PastStep]:
    """The recorded steps that run again, if they must give the same results."""
    same = all(
        getattr(before, part) == getattr(config, part) for part in ("model", "training", "data", "sync")
    )
    if not same_text or not same:
        return {}
    norms = store.unit_norms(newest - 1)
    return {
        record.step: _past_step(record, norms)
        for record in store.steps(newest - 1)[:PROOF_STEPS]
        if record.step in norms
    }


def _past_step(record: StepRecord, norms: Mapping[int, Mapping[int, float]]) -> PastStep:
    """A recorded step. `norms` are by step and layer unit."""
    return PastStep(
        loss=record.loss,
        grad_norm=record.grad_norm,
        seconds=record.seconds,
        norms=norms.get(record.step, {}),
    )


def _check_optimizer_state(directory: Path, recorded: RunConfig, newest: int) -> None:
    """Raise UserError if the snapshot to continue from has only weights."""
    if not has_weights_alone(recorded, newest):
        return
    folder = snapshot_directory(directory / "snapshots", newest)
    raise UserError(
        f"the snapshot of step {newest} has weights and no optimizer state (snapshots.last = "
        f'"{recorded.snapshots.last}"), so this run cannot continue: start another from it with `thinwire '
        f'export {shlex.quote(str(directory))} FOLDER` and model.from = "FOLDER", or move {folder} away to '
        "continue from the snapshot before"
    )


def _unreported(newest: StepRecord | None, reported: int) -> StepRecord | None:
    """The newest commit, if its coordinator died before reporting it. `reported`: steps in the history."""
    return newest if newest is not None and reported == newest.step else None


def _reported(directory: Path) -> int:
    """The steps in the history; -1 if it cannot be read, which its writer reports."""
    try:
        return highest_step(directory)
    except RunError:
        return -1


def _corpus_file(directory: Path) -> Path:
    return directory / "corpus.json"


@dataclass(frozen=True, kw_only=True)
class _Served:
    code: int
    """The exit code, if the run does not continue."""
    changes: tuple[str, ...]
    """The changes with which the run continues immediately."""
    port: int
    """The port at which nodes joined."""


async def _serve(config: RunConfig, directory: Path, run: _Run, say: Emit, again: bool) -> _Served:
    """`again`: this process has run the coordinator before, and nodes and join line stay the same."""
    # Before the first event is written to it.
    past_end = history_size(directory)
    feed = Feed(RunViewBuilder(), past_comes=True)
    metrics = RunMetrics(feed.view)

    async def paths() -> list[str]:
        return path_sentences(await feed.view())

    def emit(event: events.Event) -> None:
        say(event)
        now = time.time()
        feed.apply(event, now)
        metrics.apply(event, now)

    settings = config.coordinator
    lifetime = timedelta(hours=settings.certificate_hours)
    needs = stage_needs(narrowest(config), run.corpus.windows)
    what_fits = partial(remedies, config, windows=run.corpus.windows)
    counts = range(config.pipeline.min_stages or config.pipeline.stages, config.pipeline.stages + 1)

    why_not = sharing(config)

    def of_no_use(hardware: Hardware) -> str | None:
        offer = Candidate(node_id="", memory_bytes=hardware.memory_bytes, devices=devices_of(hardware))
        return useless(offer, counts, needs, why_not, what_fits)

    enrolment = EnrolmentHandler(run.store, run.authority, lifetime, time.time, of_no_use)
    coordinator = Coordinator(
        config=config,
        directory=directory,
        run_id=run.run_id,
        store=run.store,
        enrolment=enrolment,
        corpus=run.corpus,
        emit=emit,
        past=run.past,
        unreported=_unreported(run.store.last_step(), _reported(directory)),
    )
    metrics.accounting = coordinator.accounting
    count = gateway_count(config, os.cpu_count() or 1)
    async with contextlib.AsyncExitStack() as stack:
        ports = await stack.enter_async_context(
            open_ports(
                settings,
                run.authority,
                enrolment,
                lambda front: ControlService(
                    coordinator, front, partial(MessageLimits, config), relays=settings.relay
                ),
                lambda desk, own: Gateways(count, config, desk, own) if count else None,
            )
        )
        metrics.gateways = ports.gateways
        if ports.relay is not None:
            coordinator.relays.allow_here = ports.relay.allow
            metrics.relay = ports.relay
            ports.looks.relays = coordinator.relays.addresses
            ports.looks.relayed = True
        ports.looks.links = paths
        ports.looks.precision, ports.looks.compute = config.training.precision, config.training.compute
        addresses = settings.advertise or own_addresses(parse_listen(settings.listen)[0], ports.port)
        run.store.set_addresses(addresses)
        emit(_started(config, directory, run))
        if not again and not settings.advertise and parse_listen(settings.listen)[0] in ("0.0.0.0", "::"):
            emit(events.Notice(text=where_reached(addresses)))
        if run.news:
            emit(events.Notice(text=run.news))
        page = live_page(
            config,
            directory=directory,
            feed=feed,
            controls=coordinator,
            store=run.store,
            authority=run.authority,
            metrics=metrics.render,
            emit=emit,
            ports=ports,
        )
        await stack.enter_async_context(page)
        if not again:
            uses = config.pipeline.stages * config.pipeline.most_rows
            _, token = run.store.create_token(time.time(), TOKEN_LIFETIME, uses)
            emit(events.JoinLine(line=f"thinwire join {token.encode()}"))
        await stack.enter_async_context(rare_full_collections())
        async with token_uses_told(run.store, emit), reading_past(directory, past_end, feed):
            code, changes = await _until_done(coordinator, emit)
            return _Served(code=code, changes=changes, port=ports.port)


async def _until_done(coordinator: Coordinator, emit: Emit) -> tuple[int, tuple[str, ...]]:
    interrupted = False

    def interrupt(number: signal.Signals) -> None:
        nonlocal interrupted
        if interrupted and number is signal.SIGHUP:
            return  # a closing terminal sends SIGHUP more than once
        if not interrupted:
            emit(events.Notice(text=STOPPING))
        # Only a second signal stops immediately: a stop requested on the page promises a snapshot.
        coordinator.stop("stopped by the operator", at_once=interrupted)
        interrupted = True

    with on_ending_signals(interrupt):
        outcome = await coordinator.run()
    if coordinator.bug is not None:
        raise coordinator.bug
    if outcome.failed:
        return coordinator.exit_code, ()
    return INTERRUPTED if interrupted else 0, coordinator.changes.applied


def _started(config: RunConfig, directory: Path, run: _Run) -> events.RunStarted:
    return events.RunStarted(
        run_id=run.run_id,
        name=config.run.name,
        directory=str(directory),
        stages=config.pipeline.stages,
        steps=config.run.steps,
        first_step=run.past.newest_snapshot,
        tokens_per_step=config.training.global_batch * config.model.sequence,
        forward_codec=config.pipeline.forward_codec,
        backward_codec=config.pipeline.backward_codec,
        microbatches=config.microbatches,
        chunks=config.pipeline.chunks,
        slices=slices_of(config),
        head_share=head_share(config, config.pipeline.stages),
        codec_bits=codec_bits(config),
        ends_in_blocks=ends_in_blocks(config.model),
        host=socket.gethostname(),
        process_id=os.getpid(),
        process_start=process_start(os.getpid()),
    )
