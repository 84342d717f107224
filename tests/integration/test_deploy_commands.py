"""Run the commands of deploy/'s files; only paths, ports and the device are replaced."""

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.telemetry.events import (
    NodeJoined,
    NodeLeft,
    PageServed,
    PlacementMade,
    RunFinished,
    RunStarted,
    StepDone,
    TokenUses,
    from_json,
)
from tests.support.deploy import (
    DEPLOY,
    ROOT,
    commands,
    compose,
    container_arguments,
    container_environment,
    exec_start,
    image_environment,
    instructions,
    unit_environment,
)
from tests.support.fault_prefork import Prefork
from tests.support.ports import free_port
from tests.support.process import Process
from tests.support.run_harness import MARK, SMALL, Run
from wire.version import VERSION

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=120, snapshot_every=40),
    pipeline=replace(SMALL.pipeline, stages=1),
)


TINY = (
    *("model.layers=2", "model.hidden=64", "model.ffn=96", "model.sequence=32", "training.global_batch=4"),
    *("pipeline.stages=1", "pipeline.forward_codec=bf16", "pipeline.backward_codec=bf16"),
)
"""A demo of one node that compiles no codec."""

PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Deployed(Run):
    """A run whose processes have the environment variables of a file in deploy/, and none of the test's.

    HOME is a folder that does not exist, so that all files go to the places named in deploy/.
    """

    given: Mapping[str, str] = {}

    @property
    def environment(self) -> dict[str, str]:
        least = {"PATH": PATH, "HOME": str(self.directory / "home"), MARK: super().environment[MARK]}
        return {**least, **self.given}

    def deployed(self, given: Mapping[str, str], *arguments: str, name: str, really: bool = False) -> Process:
        """Start a command with these variables, their paths put under the run's directory.

        `really` starts it by itself: others are forked from what was imported with the test's variables.
        """
        self.given = dict(zip(given, here(list(given.values()), self.directory), strict=True))
        # What is wrapped is not forked.
        process = self.command(*arguments, name=name, wrapper=("env",) if really else ())
        self.given = {}
        return process


def here(arguments: Sequence[str], directory: Path, **changes: str) -> list[str]:
    """A command with the machine's paths put under `directory`, on loopback, on a CPU."""
    places = {
        "/tmp/triton": str(directory / "triton"),
        "/var/lib/thinwire-coordinator": str(directory / "state"),
        "/var/lib/thinwire": str(directory / "state"),
        "/var/cache": str(directory / "cache"),
        "/etc/thinwire": str(directory / "etc"),
        "/run/credentials": str(directory / "etc"),
        "0.0.0.0:7710": "127.0.0.1:0",
        "cuda:0": "cpu",
        **changes,
    }
    # A unit's own XDG_STATE_HOME; none of it is left if one of the above was found.
    places["/var/lib"] = str(directory / "lib")
    found = []
    for argument in arguments:
        for there, instead in places.items():
            argument = argument.replace(there, instead)
        found.append(argument)
    return found


def healthy(url: str) -> bool:
    """The result of the image's health check."""
    (value,) = (one["value"] for one in instructions() if one["instruction"] == "HEALTHCHECK")
    program, *arguments = json.loads(value[value.index("CMD ") + 4 :])
    assert program == "python"
    probe = [sys.executable, "-I", *arguments]
    return subprocess.run(probe, env={"HEALTH_URL": url}, capture_output=True, timeout=150).returncode == 0


def seen(process: Process, kind: type[Any], number: int = 1) -> Any:
    """The `number`-th event of a kind, past or to come."""
    name = f'"event": "{kind.event}"'
    process.wait_line(
        lambda line: name in line and [name in past for past in process.lines].count(True) >= number
    )
    return [from_json(line) for line in process.lines if name in line][number - 1]


class Written:
    """The commands of deploy/README.md; the test must run each of them."""

    def __init__(self) -> None:
        self.left = [one.arguments for one in commands() if one.where == "README.md"]

    def take(self, *words: str) -> list[str]:
        """The command that contains all these words."""
        (found,) = (one for one in self.left if set(words) <= set(one))
        self.left.remove(found)
        return list(found)


def token_by(run: Run, directory: Path, written: Sequence[str]) -> None:
    """Make a token by that command, into the file that the nodes' commands read."""
    made = run.command(*here(written, directory), name="token")
    assert made.wait_exit() == 0, made.report()
    (directory / "etc" / "token").write_text(made.lines[0] + "\n")


def said(run: Run, *arguments: str) -> str:
    """The output of a command that ends by itself."""
    process = run.command(*arguments, name=arguments[0])
    assert process.wait_exit() == 0, process.report()
    return "\n".join(process.lines)


@pytest.mark.timeout(240)
def test_a_coordinator_and_nodes_as_deployed(
    prefork: Prefork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These would appear if any process had the test's variables.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("THINWIRE_LOG", "debug")
    # Where it comes back: what nodes know of it holds for its second start.
    listen = f"127.0.0.1:{free_port(neighbours=2)}"
    config = replace(CONFIG, coordinator=replace(CONFIG.coordinator, listen=listen))
    with Deployed(tmp_path, config, launch=prefork.popen) as run:
        (tmp_path / "etc").mkdir()
        shutil.copy(run.run_file, tmp_path / "etc" / "run.toml")
        written = Written()
        # What they are parsed for elsewhere is all that can be done with a name and a token that are made up.
        assert written.take("config", "FILE") and written.take("join", "TOKEN")
        places = {"RUN.toml": str(tmp_path / "etc" / "new.toml"), "NAME": "demo"}
        said(run, *here(written.take("--recipe"), tmp_path, **places))
        start, pod = here(container_arguments("StatefulSet"), tmp_path), container_environment("StatefulSet")
        assert start[:1] == ["coordinator"] and "--resume" in start and "--stay" in start

        coordinator = run.deployed(pod, *start, "--json", name="first")
        page = seen(coordinator, PageServed).url
        assert healthy(f"{page}healthz") and not healthy(f"{page}nothing")
        assert seen(coordinator, TokenUses).left == CONFIG.pipeline.stages
        token_by(run, tmp_path, written.take("token", "create", "30d"))
        assert said(run, *here(written.take("token", "list"), tmp_path)).count("usable") == 2
        address = page.removeprefix("http://").rstrip("/")
        top = here(written.take("top", "203.0.113.7:7700"), tmp_path, **{"203.0.113.7:7700": address})
        assert "0 of 1" in said(run, *top, "--once")
        port = free_port()
        pool = here(container_arguments("Job"), tmp_path, **{"0.0.0.0:7703": f"127.0.0.1:{port}"})
        node = run.deployed(container_environment("Job"), *pool, name="pool")
        node.wait_line(lambda line: "stage 0" in line)
        assert healthy(health_url_of_a_pod().replace("7703", str(port)))

        # A container of its own is one more node, and a spare; its health check asks for its metrics.
        token, metrics = str(tmp_path / "etc" / "token"), f"127.0.0.1:{free_port()}"
        line = here(written.take("--token-file", "/token"), tmp_path, **{"127.0.0.1:7703": metrics})
        container = run.deployed(
            image_environment("cuda"),
            *(token if word == "/token" else word for word in line),
            *("--listen", "127.0.0.1:0", "--device", "cpu"),
            name="container",
        )
        seen(coordinator, NodeJoined, 2)
        assert healthy(f"http://{metrics}/metrics")
        seen(coordinator, StepDone, 5)
        coordinator.send(signal.SIGTERM)
        assert coordinator.wait_exit() == 130, coordinator.report()
        # Steps are left, so both wait; the container's owner needs it elsewhere.
        for stopped in (node, container):
            stopped.wait_line(lambda line: "stopped before" in line)
            stopped.wait_line(lambda line: "1h00m" in line)
        container.send(signal.SIGTERM)
        assert container.wait_exit() == 130, container.report()
        # It kept its key in the volume, as it was told no folder.
        assert list((tmp_path / "state" / "state" / "thinwire").rglob("identity.json"))

        # Its coordinator is gone; its page comes from its history.
        history = written.take("dashboard")
        shown = run.command(
            *here(history, tmp_path, **{"runs/books-1": str(tmp_path / "state" / "run")}),
            *("--listen", "127.0.0.1:0"),
            name="dashboard",
        )
        served = re.findall(r"http://\S+", shown.wait_line(lambda line: "page at" in line))[0]
        assert view_at(served)["state"] == "stopped"
        shown.send(signal.SIGINT)
        shown.wait_exit()

        # The same command goes on with the run, and so does the node by itself.
        unit = unit_environment(DEPLOY / "systemd" / "thinwire-coordinator.service")
        again = run.deployed(unit, *start, "--json", name="second")
        assert seen(again, RunStarted).first_step >= 5
        seen(again, PageServed)
        assert seen(again, PlacementMade).nodes == seen(coordinator, PlacementMade).nodes
        seen(again, StepDone)
        node.send(signal.SIGTERM)
        assert node.wait_exit() == 130, node.report()
        assert seen(again, NodeLeft).reason == "it left"

        # The volunteer's service takes the stage then.
        token_by(run, tmp_path, written.take("token", "create", "7d"))
        path = DEPLOY / "systemd" / "thinwire-node.service"
        service, unit = here(exec_start(path), tmp_path), unit_environment(path)
        volunteer = run.deployed(unit, *service, "--device", "cpu", name="volunteer")
        assert not seen(again, RunFinished).failed
        assert volunteer.wait_exit() == 0, volunteer.report()
        assert list((tmp_path / "lib" / "thinwire").rglob("identity.json"))

        # The run is over and its page is served, also after another start.
        last = run.deployed(pod, *start, "--json", name="third", really=True)
        for process, number in ((again, 2), (last, 1)):
            served = seen(process, PageServed, number)
            assert process is again or variables_of(process) == {"PATH", "HOME", MARK, *pod}
            view = view_at(served.url)
            assert (view["state"], view["step"]) == ("finished", CONFIG.run.steps)
            # From the first step on, which another coordinator reported.
            assert view["loss_curve"]["steps"] == list(range(1, CONFIG.run.steps + 1))
            assert view["coordinator_starts"] == 2
            assert healthy(f"{served.url}healthz")
            process.send(signal.SIGTERM)
            assert process.wait_exit() == 0, process.report()

        # Over TLS, as whoever has the run's CA certificate looks at it from elsewhere.
        safe = run.deployed(pod, *start, "--json", "dashboard.tls=true", name="tls")
        places = {
            "https://203.0.113.7:7700": seen(safe, PageServed).url.rstrip("/"),
            "ca.pem": str(tmp_path / "state" / "run" / "authority" / "ca.pem"),
        }
        assert places["https://203.0.113.7:7700"].startswith("https://127.0.0.1:")
        assert "finished" in said(run, *here(written.take("--ca"), tmp_path, **places), "--once")
        safe.send(signal.SIGTERM)
        assert safe.wait_exit() == 0, safe.report()
        assert written.left == []
        run.assert_quiet()
        assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "home").exists()
        assert not [process for process in run.processes if " DEBUG " in process.stderr]


def variables_of(process: Process) -> set[str]:
    """The names of those that a process was started with."""
    words = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
    return {word.partition("=")[0] for word in words if word}


def view_at(url: str) -> dict[str, Any]:
    """The view that a page has."""
    with urllib.request.urlopen(f"{url.rstrip('/')}/api/view", timeout=150) as answer:
        view: dict[str, Any] = json.load(answer)["view"]
    return view


def health_url_of_a_pod() -> str:
    text = (DEPLOY / "kubernetes" / "nodes.yaml").read_text()
    (url,) = re.findall(r"value: (http://\S+)", text)
    found: str = url
    return found


def test_the_others_start_a_coordinator_alike() -> None:
    """All of them are equal, so the test runs one of them."""

    def plain(arguments: Sequence[str]) -> list[str]:
        text = " ".join(arguments).replace("--run-dir=", "--run-dir ").replace("-coordinator/", "/")
        return sorted(word for word in text.split() if not word.startswith("coordinator.advertise="))

    kinds = (
        container_arguments("StatefulSet"),
        compose()["services"]["coordinator"]["command"],
        exec_start(DEPLOY / "systemd" / "thinwire-coordinator.service"),
    )
    assert plain(kinds[0]) == plain(kinds[1]) == plain(kinds[2])


@pytest.mark.timeout(900)
def test_what_the_image_copies_installs_and_trains(tmp_path: Path) -> None:
    """By the Dockerfile's RUN, but without the dependencies: they are here already, and large.

    Nothing of it stands at the top under a name that others use, as Hugging Face does `kernels`.
    """
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
                    (context / source).parent.mkdir(exist_ok=True)
                    shutil.copy(ROOT / source, context / source)
    gpu, install = (one["value"] for one in instructions() if one["value"].startswith("pip install"))
    index = '--extra-index-url "$TORCH_INDEX" '
    assert install.replace(index, "", 1) == gpu and index in install, "only CPUs' torch is another"
    assert "constraints.txt" in install and install.endswith("&& thinwire --version")
    install = install.replace("/opt/thinwire", str(context))
    site, pip = tmp_path / "site", tmp_path / "pip"
    options = f"--quiet --no-deps --no-build-isolation --no-compile --target '{site}'"
    pip.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m pip \"$@\" {options}\n")
    pip.chmod(0o755)
    others = tmp_path / "others"
    for name in ("kernels", "node", "wire"):
        (others / name).mkdir(parents=True)
        (others / name / "__init__.py").write_text("raise ImportError('not of thinwire')\n")
    # Use the installed files only: no module and no program may come from this checkout.
    environment = {
        **image_environment("cpu"),
        "PYTHONPATH": f"{others}:{site}",
        "PATH": f"{tmp_path}:{site}/bin:{PATH}",
        "HOME": str(tmp_path),
    }
    # An index of one's own is asked for nothing as long as dependencies are left out.
    done = subprocess.run(
        ["/bin/sh", "-ec", install],
        cwd=context,
        env={**environment, "TORCH_INDEX": "https://index.invalid/simple"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"thinwire {VERSION}\n")
    assert (site / f"thinwire-{VERSION}.dist-info").is_dir()
    assert {path.name.split("-")[0] for path in site.iterdir()} == {"bin", "thinwire"}
    pages = [path.name for path in (ROOT / "node/dashboard/page").iterdir()]
    assert set(pages) == {path.name for path in (site / "thinwire/node/dashboard/page").iterdir()}

    assert (site / "thinwire/deploy/lab/README.md").is_file(), "doctor sends people there"
    # On the standard library's sources, as nothing else is said.
    demo = ["thinwire", "demo", "--steps", "2", "--run-dir", str(tmp_path / "run"), *TINY]
    done = subprocess.run(demo, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "step 2/2" in done.stdout and "all steps are done" in done.stdout
