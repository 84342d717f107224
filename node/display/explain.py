"""Prints what a run file means and costs, as text for a terminal or as JSON."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from node.config.schema import RunConfig
from node.model.storage import KINDS, OUTLIERS_APART, configured, unit_bytes
from node.model.units import units_text
from node.run_file.loader import to_fields, toml_value
from node.run_state.snapshot_schedule import BEST_PAUSE, CHEAP_SECONDS
from node.schedule.placement import slice_ranges
from node.telemetry.format import bytes_text, count_text, duration_text, table_lines
from node.tuning.device_memory import Devices
from node.tuning.snapshot_place import last_snapshot_bytes, stage_state_bytes
from node.tuning.storage_choice import allowed_storages, kept_bytes, words_of
from node.view.explain import DeviceNeed, Explanation, HeadPlace, StageNeed, TextPlan
from node.view.machines import PAYLOAD_SHARE, Machine
from node.view.totals import (
    MOST_PASSES,
    Totals,
    codec_advice,
    machine_bytes,
    order_advice,
    snapshots_need,
    totals,
)
from wire.codecs.formats import codec_format, ladder

WIDTH = 100
"""The most columns of a line, except for values of the run file."""
_TITLE = 9
"""The columns of a title, such as `text`, before its sentence."""
UPLOADS_MBIT = (5, 20, 100, 1000)
"""The rates of a machine's line to show, in Mbit/s."""
RATES_MBIT = (10, 100, 1000)
"""The link rates for which to show transfer times, in Mbit/s."""


def transfer_seconds(count: int, mbit: float) -> float:
    """The seconds that `count` bytes take at `mbit` Mbit/s."""
    return count * 8 / (mbit * 1e6)


def explanation_json(explanation: Explanation, machines: Sequence[Machine] = ()) -> str:
    """The whole explanation as one JSON object, including sums and transfer times."""
    busiest = explanation.busiest
    whole: dict[str, Any] = asdict(explanation)
    resolved = _resolved(explanation.config)
    whole["defaults"] = [
        f"{section}.{key}" for section, keys in resolved for key, _, default in keys if default
    ]
    for flow, row in zip(explanation.flows, whole["flows"], strict=True):
        row["bits_per_element"] = flow.bits_per_element
    whole["links"] = [
        asdict(direction)
        | {"seconds_at_mbit": {str(rate): transfer_seconds(direction.bytes, rate) for rate in RATES_MBIT}}
        for direction in explanation.directions
    ]
    each, most = snapshots_need(explanation.config)
    whole["machines"] = [asdict(machine) for machine in machine_bytes(explanation)]
    whole["snapshot_bytes"], whole["snapshots_bytes"] = each, most
    whole["last_snapshot_bytes"] = last_snapshot_bytes(explanation.config)
    if machines:
        sums = totals(explanation, machines)
        whole["step_seconds"], whole["run_seconds"] = sums.seconds, sums.run_seconds
        whole["step_seconds_between"], whole["window"] = sums.between, sums.window
        whole["expected_memory"], whole["most_memory"] = sums.memory, sums.most_memory
    whole["busiest"] = asdict(busiest) if busiest else None
    return json.dumps(whole, indent=2)


def explanation_text(explanation: Explanation, machines: Sequence[Machine] = ()) -> str:
    """The whole explanation as text for a terminal. `machines`: one per stage, or none."""
    lines = ["# values; a * marks defaults"]
    for section, keys in _resolved(explanation.config):
        lines.append(f"[{section}]")
        lines += [f"{key} = {toml_value(value)}{'  *' if default else ''}" for key, value, default in keys]
    rest = ["", *_step_lines(explanation), "", *_stage_lines(explanation), ""]
    rest += [*_storage_lines(explanation), "", *memory_lines(explanation.memory), ""]
    rest += _link_lines(explanation)
    lines += [*_wrapped(rest), "", *total_lines(explanation, machines)]
    return "\n".join(lines)


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Wrap sentences to `WIDTH` columns, indented under their title. Tables stay unchanged."""
    wrapped = []
    for line in lines:
        if len(line) <= WIDTH or "  " in line[_TITLE:]:
            wrapped.append(line)
            continue
        margin = len(line) - len(line.lstrip())
        indent = " " * (_TITLE if "  " in line[margin:_TITLE] else margin + 2)
        wrapped += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False)
    return wrapped


def _resolved(config: RunConfig) -> list[tuple[str, list[tuple[str, Any, bool]]]]:
    """Each section's (key, value, whether it is the default)."""
    defaults = to_fields(RunConfig())
    return [
        (name, [(key, value, value == defaults[name][key]) for key, value in values.items()])
        for name, values in to_fields(config).items()
    ]


def _step_lines(explanation: Explanation) -> list[str]:
    config = explanation.config
    return [
        f"model    {config.model.family}, {count_text(explanation.parameters)} parameters",
        f"step     {config.training.global_batch} samples of {config.model.sequence} tokens = "
        f"{count_text(explanation.tokens_per_step)} tokens, in {explanation.microbatches} microbatches of "
        f"{config.training.microbatch}",
        *_slice_lines(config),
        *(_codec_lines(config) if config.pipeline.plans_codecs else []),
        *(_head_lines(explanation.head) if explanation.head is not None else []),
        *(_group_lines(explanation) if config.pipeline.groups > 1 else []),
        *(_text_lines(config, explanation.text) if explanation.text is not None else []),
    ]


def _slice_lines(config: RunConfig) -> list[str]:
    """How samples are cut along the sequence."""
    slices = slice_ranges(config)
    if len(slices) == 1:
        return []
    least = ", the fewest with a short fill and drain" * (config.pipeline.sequence_chunks == "auto")
    graphs = "; passes are not captured as CUDA graphs" * config.training.cuda_graphs
    return [
        f"slices   {len(slices)} per sample along the sequence{least}: {len(slices[0])} tokens in the first "
        f"to {len(slices[-1])} in the last, which take equally long{graphs}"
    ]


def _codec_lines(config: RunConfig) -> list[str]:
    """The codecs from which the coordinator chooses."""
    pipeline = config.pipeline
    rungs = ladder(pipeline.min_bits)
    first = pipeline.first_codecs[0]
    cheap = [name for name in rungs if codec_format(name).family != codec_format(first).family]
    return [
        f"codecs   planned for each link and direction, from {rungs[0]} to {rungs[-1]}, or "
        f"{' or '.join(cheap)} where packing is the limit; {first} until links are measured and in the "
        "figures below"
    ]


def _head_lines(head: HeadPlace) -> list[str]:
    """The stage of a tied model's head, and the reason."""
    stage, other = ("first", "last") if head.first else ("last", "first")
    hidden = f"hidden states and their gradients, {bytes_text(head.boundary_bytes)} per step"
    weight = f"the tied weight's gradient, {bytes_text(head.exchange_bytes)} per step"
    crosses, spared = (hidden, weight) if head.first else (weight, hidden)
    return [f"head     on the {stage} stage: {crosses}, cross the network; on the {other} stage: {spared}"]


def _group_lines(explanation: Explanation) -> list[str]:
    """Gradient groups, and the bytes between rows."""
    config, pipeline = explanation.config, explanation.config.pipeline
    line = (
        f"groups   {pipeline.groups}, of {explanation.microbatches // pipeline.groups} microbatches each, "
        f"summed in {pipeline.sync_codec}; up to {pipeline.most_rows} rows of nodes share a step"
    )
    lines = [line, *_sent_lines(explanation.sync_bytes, "per step")]
    if config.sync.every > 1:
        part = explanation.microbatches // pipeline.groups // config.sync.every
        lines.append(
            f"rounds   from step {config.sync.warmup + 1} on, each step is a round: each group takes "
            f"{config.sync.every} local steps of {part} microbatches, and the changes of the weights are "
            f"averaged in {config.sync.codec}"
        )
        lines += _sent_lines(explanation.round_bytes, "per round")
    return lines


def _sent_lines(sent: Mapping[int, int], when: str) -> list[str]:
    """`sent`: bytes by number of rows."""
    words = ", ".join(f"{bytes_text(size)} with {rows} rows" for rows, size in sent.items())
    return [f"         a node sends other rows at most {words}, {when}"] if words else []


def _text_lines(config: RunConfig, plan: TextPlan) -> list[str]:
    if plan.problem:
        return [f"text     not read: {plan.problem}"]
    lines = [
        f"text     {'about ' if plan.estimated else ''}{count_text(plan.tokens)} tokens to train on, "
        f"{count_text(plan.held_out)} held out; "
        f"{count_text(plan.samples)} samples per pass; {config.run.steps} steps are {plan.passes:.3g} passes"
    ]
    if (cache := plan.sample_cache) is not None:
        stages = ", ".join(bytes_text(count) for count in cache.stages)
        lines.append(
            f"cache    {config.pipeline.forward_codec} caches up to {stages} of activations at the stages "
            f"({config.pipeline.cache_gb:g} GB allowed); a snapshot grows by {bytes_text(cache.snapshot)}; "
            f"the first pass takes {cache.first_pass_bits:.3g} bits per element"
        )
    return lines


def _stage_lines(explanation: Explanation) -> list[str]:
    rows = [
        [
            str(plan.stage),
            units_text(plan.units),
            count_text(plan.parameters),
            str(plan.held_activations),
        ]
        for plan in explanation.stages
    ]
    return table_lines(["stage", "holds", "parameters", "most activations held"], rows)


def _storage_lines(explanation: Explanation) -> list[str]:
    """What a block keeps per microbatch: form, size in U (hidden states at 2 bytes) and size in megabytes."""
    config = explanation.config
    unit = unit_bytes(config.model, config.training.microbatch)
    if all(plan.stored is None for plan in explanation.stages):
        less = "storage.preset agoq or compact, or storage.allow, keeps less"
        return [f"activations: kept by autograd ({less})", *_allowed_lines(config)]
    rows = []
    for plan in explanation.stages:
        if plan.stored is None:
            continue
        kinds = [f"{getattr(plan.storage, kind)}: {plan.stored[kind] / unit:.3f} U" for kind in KINDS]
        total = sum(plan.stored.values())
        rows.append([str(plan.stage), *kinds, f"{total / unit:.3f} U", f"{total / 1e6:.3f} MB"])
    header = ["stage", *(kind.replace("_", " ") for kind in KINDS), "per block", "bytes"]
    return [
        f"a block keeps for backward (1 U = hidden states of a microbatch at 2 bytes = {unit / 1e6:.3f} MB):",
        *table_lines(header, rows),
        *_outlier_lines(explanation),
        *_allowed_lines(config),
    ]


def _outlier_lines(explanation: Explanation) -> list[str]:
    """Advice for a pretrained model whose norms' inputs are in 4 bits."""
    stages = explanation.stages
    if not explanation.config.model.from_ or all(stage.storage.norm_input != "4" for stage in stages):
        return []
    return [
        f'storage.norm_input = "{OUTLIERS_APART}" keeps the large channels of pretrained models in 16 bits '
        "and the others in 4, at a cost of 0.25 bits"
    ]


def _allowed_lines(config: RunConfig) -> list[str]:
    """With `storage.allow`: the memory of the largest stage in the most bits and in the fewest."""
    if not config.storage.allow:
        return []
    stages, gpu = config.pipeline.stages, Devices(on_cpu=False)
    most = kept_bytes(config, configured(config.storage), stages, gpu)
    stage = most.index(max(most))
    allowed = allowed_storages(config)
    rows = [
        [words_of(storage), bytes_text(kept_bytes(config, storage, stages, gpu)[stage])]
        for storage in (allowed[0], allowed[-1])
    ]
    return [
        f"storage.allow: {len(allowed)} ways to store a stage; at placement the coordinator takes the "
        "fastest that fits, from nodes' measurements (see thinwire plan --gb). On a GPU, with everything "
        f"kept, stage {stage} takes",
        *table_lines(["stored", "memory"], rows),
    ]


def memory_lines(needs: tuple[StageNeed, ...]) -> list[str]:
    """The memory of each stage; CPU and GPU share columns if they need the same."""
    alike = all(need.gpu == need.cpu for need in needs)
    parts = ["total", "weights, gradients, optimizer", "kept activations"]
    short = ["total", "state", "kept"]
    header = ["stage", *(parts if alike else [f"{kind} {part}" for kind in ("GPU", "CPU") for part in short])]
    rows = [
        [str(stage), *_cells(need.gpu), *([] if alike else _cells(need.cpu))]
        for stage, need in enumerate(needs)
    ]
    return [
        "estimated memory of a stage on a node with one device (with several: thinwire doctor --run-file):",
        *table_lines(header, rows, left=1),
        *([] if alike else ["state: weights, gradients and optimizer; kept: activations"]),
    ]


def _cells(need: DeviceNeed) -> list[str]:
    return [bytes_text(need.total), bytes_text(need.state), bytes_text(need.kept)]


def _link_lines(explanation: Explanation) -> list[str]:
    busiest = explanation.busiest
    if busiest is None:
        return ["a single stage: only batches and snapshots cross the network"]
    header = ["link", "what", "codec", "tensors", "bytes per step", "bits/element", "FP32", "BF16"]
    rows = [
        [
            f"{flow.sender} -> {flow.receiver}",
            flow.what.replace("_", " "),
            flow.codec,
            str(flow.tensors),
            bytes_text(flow.bytes),
            f"{flow.bits_per_element:.3f}",
            bytes_text(flow.bytes_fp32),
            bytes_text(flow.bytes_bf16),
        ]
        for flow in explanation.flows
    ]
    lines = ["what each step sends over the links:", *table_lines(header, rows, left=3), ""]
    lines.append("time per step on each direction of a link (both run at once):")
    times = [
        [
            f"{direction.sender} -> {direction.receiver}",
            bytes_text(direction.bytes),
            *(duration_text(transfer_seconds(direction.bytes, rate)) for rate in RATES_MBIT),
            *(duration_text(transfer_seconds(direction.bytes_fp32, rate)) for rate in RATES_MBIT),
        ]
        for direction in explanation.directions
    ]
    rates = [f"{rate} Mbit/s" for rate in RATES_MBIT]
    lines += table_lines(["link", "bytes", *rates, *(f"FP32 {rate}" for rate in RATES_MBIT)], times, left=1)
    return lines


def _snapshot_lines(config: RunConfig, each: int) -> list[str]:
    """The cost of a snapshot for each place where it may be kept."""
    part, held = max(stage_state_bytes(config, config.pipeline.stages)), config.run.keep_snapshots + 1

    def times(size: int) -> str:
        return ", ".join(
            f"{duration_text(transfer_seconds(size, rate * PAYLOAD_SHARE))} at {rate}"
            for rate in UPLOADS_MBIT
        )

    lines = [
        f'snapshots.keep = "{config.snapshots.keep}"; one takes, while steps continue, at Mbit/s of a line:',
        f"  coordinator: {bytes_text(each)} through its line: {times(each)}",
        f"  nodes: up to {bytes_text(part)} to a second machine: {times(part)}; up to "
        f"{bytes_text(2 * held * part)} on a node's disk",
    ]
    if (last := last_snapshot_bytes(config)) < each:
        cost = f"{bytes_text(last)} through the coordinator's line: {times(last)}"
        lines.append(f"  the last step, only weights: {cost}")
    if config.run.keep_best and config.data.valid_every:
        most = -(-config.run.steps // config.data.valid_every)
        lines.append(
            f"  run.keep_best: one more at each new best of {most} measurements, if it takes at most "
            f"{CHEAP_SECONDS:g} s or 1/{BEST_PAUSE:g} of the time since the last; otherwise the next regular "
            "one is measured and may be the best"
        )
    return lines


def total_lines(explanation: Explanation, machines: Sequence[Machine] = ()) -> list[str]:
    """The cost of the run: each machine's line, seconds per step, the whole run, snapshots on disk."""
    config = explanation.config
    each, most = snapshots_need(config)
    loads = machine_bytes(explanation)
    lines = ["in total:"]
    if len(loads) > 1:
        header = [
            "stage",
            "upload per step",
            "download",
            *(f"{r} Mbit/s up" for r in UPLOADS_MBIT),
        ]
        rows = [
            [
                str(load.stage),
                bytes_text(load.up),
                bytes_text(load.down),
                *(duration_text(transfer_seconds(load.up, rate * PAYLOAD_SHARE)) for rate in UPLOADS_MBIT),
            ]
            for load in loads
        ]
        fullest = max(loads, key=lambda load: load.up)
        lines += [*table_lines(header, rows, left=1)]
        lines.append(
            f"a machine's links share its line; no step is faster than the upload of stage {fullest.stage}"
        )
    if machines:
        sums = totals(explanation, machines)
        lines.append(
            f"a step takes about {duration_text(sums.seconds)}, limited by {sums.floor.binds}; "
            f"{config.run.steps} steps take {duration_text(sums.run_seconds)} "
            f"({count_text(explanation.tokens_per_step / sums.seconds)} tokens/s)"
        )
        lines += _uncertainty_lines(sums)
        lines += _expected_memory_lines(sums, machines)
        needs = zip(machines, explanation.memory, strict=True)
        for stage, (machine, need) in enumerate(needs):
            total = (need.cpu if machine.on_cpu else need.gpu).total
            if total > machine.card.memory_gb * 1e9:
                lines.append(
                    f"stage {stage} needs {bytes_text(total)}, more than the "
                    f"{machine.card.memory_gb:g} GB of {machine.name}"
                )
        advice = codec_advice(explanation, machines), order_advice(explanation, machines)
        lines += [line for line in advice if line is not None]
    elif len(loads) > 1:
        lines.append(
            "give --machine 'rtx 4090,20/100' for each machine to see seconds per step and the run's length"
        )
    lines.append(
        f"snapshots take {bytes_text(each)} each, up to {bytes_text(most)} on the coordinator's disk"
    )
    lines += _snapshot_lines(config, each)
    if explanation.text is not None and explanation.text.passes > MOST_PASSES:
        lines.append(
            f"{explanation.text.passes:.3g} passes over the text: more than {MOST_PASSES} add little; "
            "use more text or fewer steps"
        )
    return _wrapped(lines)


def _uncertainty_lines(sums: Totals) -> list[str]:
    """The uncertainty of a step's time if a CPU's speed is assumed."""
    least, most = sums.between
    if most <= 1.02 * least:
        return []
    return [
        f"CPUs are assumed to be one core of a server; if they are twice or half as fast, a step takes "
        f"{duration_text(least)} or {duration_text(most)}; --measure measures this machine's CPU"
    ]


def _expected_memory_lines(sums: Totals, machines: Sequence[Machine]) -> list[str]:
    """The expected memory of processes on CPUs, and the bound that plans use."""
    rows = [
        [str(stage), bytes_text(expected), bytes_text(most)]
        for stage, (machine, expected, most) in enumerate(
            zip(machines, sums.memory, sums.most_memory, strict=True)
        )
        if machine.on_cpu
    ]
    if not rows:
        return []
    return [
        "memory of stages on CPUs; at most: during a snapshot, with delays, and while codecs are compiled:",
        *table_lines(["stage", "expected in steps", "at most"], rows, left=1),
    ]
