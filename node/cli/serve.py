"""`thinwire serve RUN_DIR`: serve a snapshot's model to OpenAI clients.

The snapshot is exported into a cache and served by vLLM if it is installed, or else by transformers.
"""

import argparse
import importlib.util
import logging
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from node import program
from node.cli.parser import UsageError
from node.cli.snapshot_model import add_snapshot_arguments, first_layers, open_snapshot
from wire.errors import UserError
from wire.identity.names import join_address

log = logging.getLogger(__name__)

TRANSFORMERS, VLLM = "transformers", "vllm"
NEEDED = {
    TRANSFORMERS: ("transformers", "torch", "fastapi", "uvicorn", "openai", "accelerate"),
    VLLM: ("vllm",),
}
"""The packages that each server imports."""
DEFAULT_LISTEN = "127.0.0.1:8000"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a snapshot's model to OpenAI clients")
    add_snapshot_arguments(parser)
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"default: {DEFAULT_LISTEN}"
    )
    parser.add_argument(
        "--engine",
        choices=(VLLM, TRANSFORMERS),
        help=f"the server to start (default: {VLLM} if installed, else {TRANSFORMERS})",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.coordinator.ports import free_port
    from node.run_file.addresses import parse_listen

    host, port = parse_listen(args.listen)
    engine = args.engine or (VLLM if importlib.util.find_spec(VLLM) else TRANSFORMERS)
    check_installed(engine)
    port = free_port(host, port, "name another address")
    folder = exported(args)
    if not has_chat_template(folder):
        log.warning("the model has no chat template: it serves /v1/completions, but no chats")
    url = f"http://{join_address(host, port)}/v1"
    sys.stdout.write(f"{folder.name} at {url}, model {folder.name!r}; press Ctrl-C to stop\n")
    sys.stdout.flush()
    os.chdir(folder.parent)
    command = server_command(engine, folder.name, host, port)
    listed = {"HF_HUB_CACHE": str(listed_model(folder))} if engine == TRANSFORMERS else {}
    os.execve(command[0], command, server_environment() | listed)


def listed_model(folder: Path) -> Path:
    """A cache of the hub with the model alone, because `/v1/models` of transformers lists the cache."""
    cache = folder.parent / "hub"
    model = cache / f"models--{folder.name}"
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text("main")
    (model / "snapshots" / "main").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "config.json", model / "snapshots" / "main" / "config.json")
    return cache


def has_chat_template(folder: Path) -> bool:
    """Whether an exported model's tokenizer has a chat template."""
    from node.data.tokenizer import json_object

    template = folder / "chat_template.jinja"
    return template.is_file() or "chat_template" in json_object(folder / "tokenizer_config.json")


def check_installed(engine: str) -> None:
    """Raise UsageError if a package of the server is missing."""
    missing = [name for name in NEEDED[engine] if importlib.util.find_spec(name) is None]
    if missing:
        install = "vllm" if engine == VLLM else "'thinwire[serve]'"
        raise UsageError(
            f"the server of {engine} needs packages that are not installed ({', '.join(missing)}): "
            f"pip install {install}"
        )


def exported(args: argparse.Namespace) -> Path:
    """The cached export of the snapshot that `--step` names, with merged adapters.

    The folder is named after the run and the step, which is the model's name in the server. Its parent is
    named by the manifest's hash, so a step that ran again, or another run in the same place, is exported
    again. Earlier exports of the run are removed. Raises UserError and RunError.
    """
    from hashlib import sha256

    from node.cli.run_directory import existing_run_directory
    from node.state.export import export
    from node.state.manifest import MANIFEST_NAME
    from node.state.merging import merged_parameters
    from node.state.start import TOKENIZER
    from wire.identity.files import cache_folder

    directory = existing_run_directory(args.run_dir).resolve()
    config, step, snapshot = open_snapshot(args)
    parent = cache_folder() / "exports" / sha256(os.fsencode(directory)).hexdigest()[:16]
    version = sha256((snapshot / MANIFEST_NAME).read_bytes()).hexdigest()[:16]
    # The hub's cache writes the slash of a model's name as two hyphens.
    folder = parent / version / re.sub("-+", "-", f"{config.run.name}-{step}")
    if not folder.is_dir():
        for earlier in parent.glob("*"):
            if earlier.name != version:
                shutil.rmtree(earlier, ignore_errors=True)
        try:
            merge = partial(merged_parameters, known=first_layers(directory)) if config.lora.rank else None
            export(directory, folder, step=step, merge=merge)
        except UserError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            reason = f"the cache {folder.parent} cannot be written ({error.__cause__.strerror})"
            raise UserError(f"{reason}: set XDG_CACHE_HOME to another folder") from None
    if not (folder / TOKENIZER).is_file():
        shutil.rmtree(parent, ignore_errors=True)  # it may be there next time
        raise UserError(f"the tokenizer {config.data.tokenizer} is not on this machine: copy it there")
    return folder


def server_command(engine: str, name: str, host: str, port: int) -> list[str]:
    """The command line of a server for the model folder `name` in the working directory."""
    if engine == VLLM:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", name,
                "--host", host, "--port", str(port)]  # fmt: skip
    return [*program("cli.model_server"), "serve", name, "--host", host, "--port", str(port)]


def server_environment() -> dict[str, str]:
    """The environment of a server, which stays offline because the model is on this disk."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
