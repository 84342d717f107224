"""`thinwire config`: check a run file before a start (`explain`), or write one for your machines (`init`)."""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.cli.parser import add_run_file, number

if TYPE_CHECKING:
    from node.config.schema import RunConfig
    from node.view.first_run import Text
    from node.view.machines import Machine

MACHINE_HELP = (
    "a machine's card and line in Mbit/s, such as 'rtx 4090,20/100' (up and down) or 'cpu,10'; repeat it in "
    "the order of stages; the last one also stands for all further stages"
)
MOST_MACHINES = 64


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("config", help="check a run file before starting it, or write one")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    explain = actions.add_parser("explain", help="show resolved values, memory, bytes and seconds per step")
    add_run_file(explain)
    explain.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    explain.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine's CPU for the speed of machines given as 'cpu'",
    )
    explain.set_defaults(run=run, parser=explain)
    init = actions.add_parser("init", help="write a run file that fits the machines you have")
    init.add_argument("run_file", metavar="RUN.toml", type=Path, help="the file to write")
    init.add_argument("--days", type=number, default=7.0, help="how many days the run may train (default: 7)")
    init.add_argument("--data", default="stdlib", metavar="PATH", help="your text: a file or a folder")
    init.add_argument("--tokenizer", default="bytes", metavar="PATH", help="a tokenizer's file or folder")
    init.add_argument(
        "--recipe",
        metavar="NAME",
        help="copy an installed run file, with its comments, instead; with --machine, for these machines",
    )
    init.set_defaults(run=run_init, parser=init)
    for action in (explain, init):
        action.add_argument(
            "--machine", action="append", default=[], metavar="CARD[,UP[/DOWN]]", help=MACHINE_HELP
        )


def run(args: argparse.Namespace) -> int:
    import asyncio

    from node.data.tokenizer import load_tokenizer
    from node.display.explain import explanation_json, explanation_text
    from node.run_file.loader import load_config
    from node.state.hub import PREFIX
    from node.state.start import check_weights, frozen_ends
    from node.view.explain import explain, text_plan
    from node.view.machines import machines_for, parse_machine
    from wire.errors import DataError

    given = [parse_machine(text) for text in args.machine]
    config = load_config(args.run_file, args.overrides)
    explanation = explain(config, text_plan(config, _tell))
    vocabulary = load_tokenizer(config.data.tokenizer).vocabulary
    if config.model.vocab > vocabulary:
        _tell(
            f"model.vocab = {config.model.vocab} exceeds the {vocabulary} tokens of the tokenizer: the "
            "remaining rows of embedding and head are never used"
        )
    machines = machines_for(config.pipeline.stages, given) if given else ()
    if args.measure:
        machines = _as_fast_as_here(config, machines)
    shown = explanation_json if args.json else explanation_text
    sys.stdout.write(shown(explanation, machines) + "\n")
    sys.stdout.flush()
    if explanation.text is not None and explanation.text.problem:
        raise DataError(explanation.text.problem)
    if config.model.from_ and not config.model.from_.startswith(PREFIX):
        asyncio.run(check_weights(config.model, frozen_ends(config)))
    return 0


def _as_fast_as_here(config: "RunConfig", machines: "tuple[Machine, ...]") -> "tuple[Machine, ...]":
    from node.cli.measured_times import measured_times
    from node.cli.parser import UsageError
    from node.view.machines import measured_machine

    if not any(machine.on_cpu for machine in machines):
        raise UsageError(
            "--measure measures this machine's CPU: give a machine with a CPU, such as --machine cpu,20"
        )
    times = measured_times(config, "cpu")
    return tuple(
        measured_machine(machine, config, times) if machine.on_cpu else machine for machine in machines
    )


def run_init(args: argparse.Namespace) -> int:
    from node.cli.parser import UsageError
    from node.display.explain import total_lines
    from node.telemetry.format import count_text
    from node.view.first_run import SEQUENCE, Text, first_run, run_file
    from node.view.machines import parse_machine
    from node.view.totals import MOST_PASSES

    if args.run_file.exists():
        raise UsageError(f"{args.run_file} already exists: give the name of a new file")
    if args.recipe is not None:
        return _copy(args)
    if not 0 < args.days <= 3660:
        raise UsageError(f"--days must be above 0 and at most 3660, got {args.days:g}")
    texts = args.machine or _ask()
    machines = [parse_machine(text) for text in texts]
    proposed = first_run(machines, days=args.days, text=_text(args.data, args.tokenizer, SEQUENCE))
    _write(args.run_file, run_file(proposed))
    sys.stdout.write("\n".join(total_lines(proposed.explanation, proposed.machines)) + "\n")
    if args.data == "stdlib":
        most = first_run(machines, days=args.days, text=Text())
        tokens = most.config.run.steps * most.explanation.tokens_per_step
        size = count_text(most.explanation.parameters)
        sys.stdout.write(
            f"stdlib is only an example: with --data PATH and a text of at least "
            f"{count_text(tokens / MOST_PASSES)} tokens, read {MOST_PASSES} times, "
            f"{args.days:g} days suffice to train {size} parameters on {count_text(tokens)} tokens\n"
        )
    given = dict(zip(machines, texts, strict=True))
    order = " ".join(f"--machine {shlex.quote(given[machine])}" for machine in proposed.machines)
    quoted = shlex.quote(str(args.run_file))
    sys.stdout.write(f"see what the run costs: thinwire config explain {quoted} {order}\n")
    sys.stdout.write(f"wrote {args.run_file}; start it with: thinwire coordinator {quoted}\n")
    return 0


def _copy(args: argparse.Namespace) -> int:
    """Write a recipe for the given text, tokenizer and machines, with steps for at most a few passes over the
    text."""
    from node.display.explain import total_lines
    from node.run_file.loader import load_config, recipe, toml_value
    from node.view.first_run import for_machines, most_steps
    from node.view.machines import parse_machine

    source = recipe(args.recipe)
    config = load_config(source)
    text = _text(args.data, args.tokenizer, config.model.sequence)
    steps = min(config.run.steps, most_steps(config, text))
    changed = {
        "steps": steps,
        "warmup_steps": min(config.training.warmup_steps, max(1, steps // 5)),
        # Adapters are for an existing model with its own vocabulary.
        "vocab": max(text.vocabulary, config.model.vocab if config.lora.rank else 0),
        "path": text.path,
        "tokenizer": text.tokenizer,
    }
    totals: list[str] = []
    if args.machine:
        proposed = for_machines(config, [parse_machine(text) for text in args.machine])
        totals = total_lines(proposed.explanation, proposed.machines)
        training, pipeline = proposed.config.training, proposed.config.pipeline
        changed |= {
            "stages": pipeline.stages,
            "base": proposed.config.lora.base,
            "precision": training.precision,
            "balance_loss": proposed.config.model.balance_loss,
            "forward_codec": pipeline.forward_codec,
            "backward_codec": pipeline.backward_codec,
        }
    written = source.read_text(encoding="utf-8")
    for key, value in changed.items():
        line = f"{key} = {toml_value(value)}"
        written = _with_line(written, key, line)
    _write(args.run_file, written)
    sys.stdout.write("".join(f"{line}\n" for line in totals))
    machines = "".join(f" --machine {shlex.quote(machine)}" for machine in args.machine)
    explained = f"thinwire config explain {shlex.quote(str(args.run_file))}{machines}"
    sys.stdout.write(f"wrote {args.run_file}; see what it costs: {explained}\n")
    return 0


def _write(path: Path, text: str) -> None:
    from node.cli.parser import UsageError
    from node.data.text import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): give the name of another") from error


def _with_line(written: str, key: str, line: str) -> str:
    """A run file in which `line` replaces the key's line. A comment keeps its column."""

    def replaced(match: re.Match[str]) -> str:
        return f"{line:<30}#" if match[1] else line

    return re.sub(rf"^{key} = [^#\n]*(#?)", replaced, written, flags=re.MULTILINE)


def _text(path: str, tokenizer: str, sequence: int) -> "Text":
    """The text for `first_run`, with its tokens counted. The held-out part depends on the sequence length."""
    from node.data.tokenizer import load_tokenizer
    from node.run_file.loader import default_config
    from node.view.explain import text_plan
    from node.view.first_run import Text
    from wire.errors import DataError

    vocabulary = load_tokenizer(tokenizer).vocabulary
    sizes = (f"model.vocab={vocabulary}", f"model.sequence={sequence}")
    keys = (f"data.path={path}", f"data.tokenizer={tokenizer}", *sizes)
    plan = text_plan(default_config(keys), _tell)
    if plan.problem:
        raise DataError(plan.problem)
    return Text(path=path, tokenizer=tokenizer, vocabulary=vocabulary, tokens=plan.tokens)


def _ask() -> list[str]:
    """Ask for the machines on the terminal, in the form that `parse_machine` reads."""
    from node.cli.parser import UsageError
    from node.view.machines import CARDS, parse_machine
    from wire.errors import UserError

    if not sys.stdin.isatty():
        raise UsageError("name each machine, as in --machine 'rtx 4090,20/100'")
    machines: list[str] = []
    _tell(f"Which machines take part? Known cards: {', '.join(CARDS)}. Give others as 40tflops,16gb.")
    while len(machines) < MOST_MACHINES:
        _tell(f"machine {len(machines) + 1}, as CARD,UP/DOWN in Mbit/s (press Enter when done):")
        line = sys.stdin.readline().strip()
        if not line and machines:
            break
        try:
            parse_machine(line)
        except UserError as error:
            _tell(str(error).removeprefix("--machine "))
        else:
            machines.append(line)
    return machines


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
