"""Build the container image for CPUs and run it: `python -m scripts.checks.image [--builder podman]`.

Takes docker, podman or buildah, whichever is found first (rootless buildah comes from Debian). The image's
own entry point must say its version, find its machine ready, and train two steps with four nodes.
"""

import argparse
import shutil
import subprocess
from pathlib import Path

from scripts.report import ROOT
from wire.version import VERSION

BUILDERS = ("docker", "podman", "buildah")
IMAGE = "thinwire:check"
TINY = ("model.layers=4", "model.hidden=64", "model.ffn=96", "model.sequence=32", "training.global_batch=4")
RUNS = (
    (("--version",), f"thinwire {VERSION}"),
    (("doctor",), "this machine is ready"),
    (("demo", "--steps", "2", *TINY), "all steps are done"),
)
"""Arguments of the entry point, and what its output must contain."""


def run(*command: str) -> str:
    """A command's output. Raises SystemExit with it if the command fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def check(builder: str) -> None:
    """Build and run. Raises SystemExit for what fails."""
    name = Path(builder).name
    run(builder, "build", "-f", "deploy/container/Dockerfile", "--target", "cpu", "-t", IMAGE, ".")
    container = run(builder, "from", IMAGE).split()[-1] if name == "buildah" else ""
    try:
        for arguments, wanted in RUNS:
            # buildah runs what it is told, without the entry point.
            start = (
                ("run", container, "--", "tini", "--", "thinwire") if container else ("run", "--rm", IMAGE)
            )
            output = run(builder, *start, *arguments)
            if wanted not in output:
                raise SystemExit(
                    f"thinwire {' '.join(arguments)} in the image never says {wanted!r}:\n{output}"
                )
            print(f"{name}: thinwire {' '.join(arguments)}: {wanted}")
    finally:
        if container:
            run(builder, "rm", container)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the container image for CPUs and run it.")
    parser.add_argument("--builder", choices=BUILDERS, help="default: the first that is installed")
    wanted = parser.parse_args().builder
    found = [path for name in BUILDERS if wanted in (None, name) and (path := shutil.which(name))]
    if not found:
        parser.error(f"none of {', '.join(BUILDERS)} is installed (Debian: apt install buildah)")
    check(found[0])


if __name__ == "__main__":
    main()
