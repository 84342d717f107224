"""The commands of deploy/'s files, run for real: only paths, ports and the device are this test's own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.telemetry.events import PageServed, RunFinished, RunStarted, StepDone, from_json
from tests.support.deploy import DEPLOY, ROOT, compose, container_arguments, exec_start, instructions
from tests.support.fault_prefork import Prefork
from tests.support.ports import free_port
from tests.support.process import Process
from tests.support.run_harness import SMALL, Run

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=80, snapshot_every=40),
    pipeline=replace(SMALL.pipeline, stages=1),
)


def here(arguments: Sequence[str], directory: Path, **changes: str) -> list[str]:
    """A command with the machine's paths put under `directory`, on loopback, on a CPU."""
    places = {
        "/var/lib/thinwire-coordinator": str(directory / "state"),
        "/var/lib/thinwire": str(directory / "state"),
        "/etc/thinwire": str(directory / "etc"),
        "/run/credentials": str(directory / "etc"),
        "0.0.0.0:7710": "127.0.0.1:0",
        "cuda:0": "cpu",
        **changes,
    }
    found = []
    for argument in arguments:
        for there, instead in places.items():
            argument = argument.replace(there, instead)
        found.append(argument)
    return found


def healthy(url: str) -> bool:
    """What the image's health check says."""
    (value,) = (one["value"] for one in instructions() if one["instruction"] == "HEALTHCHECK")
    program, *arguments = json.loads(value[value.index("CMD ") + 4 :])
    assert program == "python"
    probe = [sys.executable, "-I", *arguments]
    return subprocess.run(probe, env={"HEALTH_URL": url}, capture_output=True, timeout=60).returncode == 0


def seen(process: Process, kind: type[Any], number: int = 1) -> Any:
    """The `number`-th event of a kind, past or to come."""
    name = f'"event": "{kind.event}"'
    process.wait_line(
        lambda line: name in line and [name in past for past in process.lines].count(True) >= number
    )
    return [from_json(line) for line in process.lines if name in line][number - 1]


def token_for(run: Run, directory: Path) -> None:
    """As deploy/README.md has it made, into the file that the nodes' commands read."""
    (line,) = re.findall(r"thinwire (token create .*30d)", (DEPLOY / "README.md").read_text())
    made = run.command(*here(line.split(), directory), name="token")
    assert made.wait_exit() == 0, made.report()
    (directory / "etc" / "token").write_text(made.lines[0] + "\n")


@pytest.mark.timeout(240)
def test_a_coordinator_and_nodes_as_deployed(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen) as run:
        (tmp_path / "etc").mkdir()
        shutil.copy(run.run_file, tmp_path / "etc" / "run.toml")
        start = here(container_arguments("StatefulSet"), tmp_path)
        assert start[:1] == ["coordinator"] and "--resume" in start and "--stay" in start

        coordinator = run.command(*start, "--json", name="first")
        page = seen(coordinator, PageServed).url
        assert healthy(f"{page}healthz") and not healthy(f"{page}nothing")
        token_for(run, tmp_path)
        port = free_port()
        pool = here(container_arguments("Job"), tmp_path, **{"0.0.0.0:7703": f"127.0.0.1:{port}"})
        node = run.command(*pool, name="pool")
        node.wait_line(lambda line: "stage 0" in line)
        assert healthy(health_url_of_a_pod().replace("7703", str(port)))
        seen(coordinator, StepDone, 5)
        coordinator.send(signal.SIGTERM)
        assert coordinator.wait_exit() == 130, coordinator.report()
        assert node.wait_exit() == 0, node.report()

        # The same command goes on with the run; the volunteer's service takes the stage this time.
        again = run.command(*start, "--json", name="second")
        assert seen(again, RunStarted).first_step >= 5
        token_for(run, tmp_path)
        service = here(exec_start(DEPLOY / "systemd" / "thinwire-node.service"), tmp_path)
        volunteer = run.command(*service, "--device", "cpu", name="volunteer")
        assert not seen(again, RunFinished).failed
        assert volunteer.wait_exit() == 0, volunteer.report()

        # The run is over and its page is there; so it is after one more start.
        last = run.command(*start, "--json", name="third")
        for process, number in ((again, 2), (last, 1)):
            served = seen(process, PageServed, number)
            with urllib.request.urlopen(f"{served.url}api/view", timeout=60) as answer:
                view = json.load(answer)["view"]
            assert (view["state"], view["step"]) == ("finished", CONFIG.run.steps)
            # From the first step on, which another coordinator told of.
            assert view["loss_curve"]["steps"] == list(range(1, CONFIG.run.steps + 1))
            assert view["coordinator_starts"] == 2
            assert healthy(f"{served.url}healthz")
            process.send(signal.SIGTERM)
            assert process.wait_exit() == 0, process.report()
        run.assert_quiet()


def health_url_of_a_pod() -> str:
    text = (DEPLOY / "kubernetes" / "nodes.yaml").read_text()
    (url,) = re.findall(r"value: (http://\S+)", text)
    found: str = url
    return found


def test_the_others_start_a_coordinator_alike() -> None:
    """So one of them stands for all."""

    def plain(arguments: Sequence[str]) -> list[str]:
        text = " ".join(arguments).replace("--run-dir=", "--run-dir ").replace("-coordinator/", "/")
        return sorted(word for word in text.split() if not word.startswith("coordinator.advertise="))

    kinds = (
        container_arguments("StatefulSet"),
        compose()["services"]["coordinator"]["command"],
        exec_start(DEPLOY / "systemd" / "thinwire-coordinator.service"),
    )
    assert plain(kinds[0]) == plain(kinds[1]) == plain(kinds[2])


@pytest.mark.timeout(180)
def test_what_the_image_copies_installs_and_starts(tmp_path: Path) -> None:
    """As the Dockerfile's RUN, but for the dependencies: they are here already, and large."""
    context = tmp_path / "context"
    context.mkdir()
    for one in instructions():
        if one["instruction"] == "COPY":
            *sources, _ = one["value"].split()
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(
                        ROOT / source, context / source, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy(ROOT / source, context / source)
    (install,) = (one["value"] for one in instructions() if one["value"].startswith("pip install"))
    assert "-c constraints.txt" in install and install.endswith("&& thinwire --version")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-compile", "--disable-pip-version-check", "--target", str(site), "."]
    done = subprocess.run(command, cwd=context, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    # Of the installed files alone: not one module may come from this checkout.
    environment = {"PYTHONPATH": str(site), "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    look = (
        "import sys; import importlib.metadata as m; print(m.version('thinwire'));"
        "from node.dashboard.assets import assets; import node.cli.main as main; print(main.__file__);"
        "print(*sorted(assets())); sys.exit(main.main(['--version']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", look],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    version, module, assets = done.stdout.splitlines()[:3]
    assert done.stdout.splitlines()[-1] == f"thinwire {version}", done.stderr
    assert module.startswith(str(site))
    pages = {f"/{path.name}" for path in (ROOT / "node/dashboard/page").iterdir()}
    assert set(assets.split()) == pages - {"/index.html"} | {"/"}


@pytest.mark.skipif(
    shutil.which("apt-get") is None or not any(Path("/var/lib/apt/lists").glob("*Packages*")),
    reason="needs Debian's package lists (apt-get update)",
)
def test_debian_has_the_packages_that_the_image_installs() -> None:
    wanted = [
        package
        for one in instructions()
        for listed in re.findall(r"apt-get install -y --no-install-recommends ([^&]*)", one["value"])
        for package in listed.split()
    ]
    assert set(wanted) == {"tini", "gcc", "libc6-dev"}
    show = ["apt-cache", "show", "--no-all-versions", *wanted]
    done = subprocess.run(show, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Package: ") == len(wanted)
