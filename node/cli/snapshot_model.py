"""Common parts of `eval` and `sample`: the run's settings, a snapshot, and the device to compute on.

They read only the run directory, so they work during the run and without a network.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.cli.parser import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from node.config.schema import RunConfig
    from node.state.whole_model import WholeModel

LAST = "last"
NEWEST = (LAST, "newest")
BEST = "best"
SNAPSHOT_TRIES = 5
"""How many snapshots to try, because a run may remove one while it is read."""


def add_snapshot_arguments(parser: Any) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
    parser.add_argument(
        "--step", default=LAST, metavar="N", help="snapshot to use: a step, `best` or `last` (default)"
    )


def add_arguments(parser: Any) -> None:
    add_snapshot_arguments(parser)
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu (default) or cuda:N")


def open_snapshot(args: argparse.Namespace) -> "tuple[RunConfig, int, Path]":
    """The run's settings, and step and directory of the snapshot that `--step` names. Raises UserError."""
    from node.cli.run_directory import existing_run_directory
    from node.state.object_store import bring

    directory = existing_run_directory(args.run_dir)
    config, step, folder = chosen_snapshot(directory, args.step)
    return config, step, bring(directory, step) if folder is None else folder


def chosen_snapshot(directory: Path, wanted: str) -> "tuple[RunConfig, int, Path | None]":
    """The run's settings, and the step and folder of a snapshot; None if it is only in an object store.

    Args:
        directory: the run's directory.
        wanted: a step, `BEST`, or one of `NEWEST`.

    Raises:
        UserError: there is no such snapshot.
    """
    from node.coordinator.store import Store
    from node.run_file.loader import stored_config
    from node.state.object_store import stored_steps
    from node.state.snapshot import held_by_nodes, list_models
    from wire.errors import UserError

    with Store.open(directory) as store:
        config = stored_config(store.run().config_json)
        local, stored = list_models(directory), stored_steps(directory)
        steps = sorted({*local, *stored})
        best = store.best_of(steps)
    existing = ", ".join(map(str, steps)) or "none"
    if wanted in NEWEST and not steps:
        hint = held_by_nodes(directory) or ": wait for run.snapshot_every steps"
        raise UserError(f"{directory} has no complete snapshot yet{hint}")
    if wanted in NEWEST:
        step = steps[-1]
    elif wanted == BEST and best is not None:
        step = best
    elif wanted == BEST:
        raise UserError(
            "no snapshot has a held-out loss: set data.valid_every in the run file, or name a step"
        )
    elif wanted.isdecimal() and int(wanted) in steps:
        step = int(wanted)
    else:
        hint = held_by_nodes(directory)
        raise UserError(f"{directory} has no snapshot of step {wanted}; it has: {existing}{hint}")
    return config, step, local.get(step)


def load_model(args: argparse.Namespace) -> "tuple[int, WholeModel]":
    """Load the snapshot that `--step` names onto `--device`. Returns its step and the model.

    If a running run removes the snapshot meanwhile, `last` and `best` load the next one.

    Raises the errors of `open_snapshot` and `build_model`.
    """
    from node.cli.importing import importing
    from node.state.snapshot import is_complete
    from wire.errors import RunError

    with importing():
        from node.state import whole_model  # noqa: F401 - imports torch, which takes seconds

    tries_left = SNAPSHOT_TRIES
    while True:
        config, step, directory = open_snapshot(args)
        tries_left -= 1
        try:
            return step, build_model(config, directory, args.device, first_layers(args.run_dir))
        except RunError:
            if not tries_left or args.step not in (*NEWEST, BEST) or is_complete(directory):
                raise


def first_layers(directory: Path) -> dict[str, str]:
    """The SHA-256 of the units of the checkpoint that the run in `directory` started from."""
    from node.coordinator.store import Store

    with Store.open(directory) as store:
        return store.first_layers()


def build_model(
    config: "RunConfig", directory: Path, device: str, known: Mapping[str, str] = {}
) -> "WholeModel":
    """The model of the snapshot in `directory`.

    Args:
        known: the SHA-256 of the checkpoint's units, as in `node.state.start.first_weights`.

    Raises RunError for a snapshot that is damaged or gone, and DataError if the checkpoint with a run's
    frozen weights cannot be read, or has changed.
    """
    from node.state.start import first_weights
    from node.state.whole_model import WholeModel

    def frozen(unit: str) -> "Mapping[str, np.ndarray]":
        return first_weights(config.model, unit, known)

    from_checkpoint = config.lora.rank > 0 and config.model.from_ != ""
    return WholeModel(config, directory, _device(device), frozen if from_checkpoint else None)


def _device(name: str) -> "torch.device":
    import torch

    if name != "cpu" and not (name.startswith("cuda") and torch.cuda.is_available()):
        raise UsageError(
            f"this machine has no device {name}: use --device cpu"
            + (" or cuda:N" if "cuda" not in name else "")
        )
    try:
        return torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device must be cpu or cuda:N, got {name!r}") from None
