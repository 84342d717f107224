"""The files of deploy/, every `thinwire` command that stands in them, and the variables that it is given."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "container" / "Dockerfile"
COMPOSE = DEPLOY / "compose.yaml"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KUBERNETES = DEPLOY / "kubernetes"
GRAFANA = DEPLOY / "grafana"
PROGRAM = "/opt/thinwire/bin/thinwire"
ADVERTISE = "203.0.113.7:7700"
NODE_OPTIONS = "--max-bandwidth 40 --max-memory 16"
_SPECIFIERS = {"%S": "/var/lib", "%C": "/var/cache", "%d": "/run/credentials"}
"""Of systemd, in units of the system."""


@dataclass(frozen=True)
class Command:
    """One `thinwire` command: where it stands, and its arguments."""

    where: str
    arguments: tuple[str, ...]


def instructions() -> list[dict[str, Any]]:
    """The Dockerfile's instructions in order, without comments."""
    with DOCKERFILE.open("rb") as file:
        parsed: list[dict[str, Any]] = DockerfileParser(fileobj=file).structure
    return [one for one in parsed if one["instruction"] != "COMMENT"]


def unit(path: Path) -> dict[str, list[str]]:
    """A unit's settings by `Section.Key`; a key may stand several times."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


def manifests() -> list[tuple[str, dict[str, Any]]]:
    """Kubernetes objects with the file that each stands in."""
    return [
        (path.name, whole)
        for path in sorted(KUBERNETES.glob("*.yaml"))
        for whole in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if path.name != "kustomization.yaml"
    ]


def compose() -> dict[str, Any]:
    """compose.yaml, with its one variable filled in."""
    text = re.sub(r"\$\{ADVERTISE:\?[^}]*\}", ADVERTISE, COMPOSE.read_text(encoding="utf-8"))
    whole: dict[str, Any] = yaml.safe_load(text)
    return whole


def container_arguments(kind: str) -> list[str]:
    """What the containers of a Kubernetes object of this kind are started with."""
    container = _container(kind)
    assert "command" not in container, "the image's entry point is meant"
    arguments: list[str] = container["args"]
    return arguments


def container_environment(kind: str) -> dict[str, str]:
    """The variables of those containers: of their image, and of their own."""
    container = _container(kind)
    own = {one["name"]: one["value"] for one in container.get("env", [])}
    return image_environment(container["image"].partition(":")[2]) | own


def _container(kind: str) -> dict[str, Any]:
    (found,) = (whole for _, whole in manifests() if whole["kind"] == kind)
    (container,) = found["spec"]["template"]["spec"]["containers"]
    whole: dict[str, Any] = container
    return whole


def image_environment(target: str) -> dict[str, str]:
    """The variables that the Dockerfile sets in the image of a target, which is made from its base."""
    found: dict[str, str] = {}
    stage = ""
    for one in instructions():
        if one["instruction"] == "FROM":
            stage = one["value"].split(" AS ")[1]
        elif one["instruction"] == "ENV" and stage in ("base", target):
            found |= _variables(one["value"])
    return found


def unit_environment(path: Path) -> dict[str, str]:
    """The variables that a unit sets, specifiers put in."""
    found: dict[str, str] = {}
    for line in unit(path)["Service.Environment"]:
        found |= _variables(_specified(line))
    return found


def _variables(line: str) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in shlex.split(line))}


def _specified(line: str) -> str:
    for name, value in _SPECIFIERS.items():
        line = line.replace(name, value)
    assert "%" not in line, line
    return line


def exec_start(path: Path) -> list[str]:
    """A unit's command without the program, specifiers put in."""
    (line,) = unit(path)["Service.ExecStart"]
    line = _specified(line).replace("$NODE_OPTIONS", NODE_OPTIONS)
    assert "$" not in line, line
    program, *arguments = shlex.split(line)
    assert program == PROGRAM
    return arguments


def commands() -> Iterator[Command]:
    """All of them, from units, compose, manifests, the Dockerfile and the README."""
    for path in UNITS:
        yield Command(path.name, tuple(exec_start(path)))
    yield Command("compose.yaml", tuple(compose()["services"]["coordinator"]["command"]))
    for kind in ("StatefulSet", "Job"):
        yield Command(kind, tuple(container_arguments(kind)))
    for one in instructions():
        if one["instruction"] == "CMD":
            yield Command("Dockerfile", tuple(json.loads(one["value"])))
    for arguments in written(DEPLOY / "README.md"):
        yield Command("README.md", arguments)


def written(path: Path) -> Iterator[tuple[str, ...]]:
    """A document's commands: in code blocks, in containers, and complete ones in the text."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if found := re.search(r"thinwire:cuda (join .*)", line):
            yield tuple(shlex.split(found[1]))
        elif line.startswith("    ") and (found := re.search(r"(?:^ +|-- |/)thinwire (.*)", line)):
            yield tuple(shlex.split(found[1], comments=True))
    # The text may also name a command without its arguments; those are left out.
    for span in re.findall(r"(?<!`)`([^`]+)`", text):
        if found := re.fullmatch(
            r"(?:docker compose exec \w+ )?thinwire ((?:[a-z]+ )+(?:[A-Z/]|[\w-]+[./]\w).*)", span, re.DOTALL
        ):
            yield tuple(shlex.split(found[1]))
