"""Train between every two ways of connecting to the internet, and record which path the neighbours used.

Runs inside the private namespaces of `node.lab.namespaces`. For each pair of kinds (`node.lab.access`) the
internet is built anew. A coordinator and two nodes run in it as real processes that know only the join line.
The weights at the end must be those of the run between two open machines.
"""

import asyncio
import contextlib
import json
import shutil
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from node import program
from node.config.schema import RunConfig
from node.data.text import write_whole
from node.display.watch import HistoryWatch
from node.lab import tools
from node.lab.access import COORDINATOR_PORT, INTERNET, KINDS, Command, Site, lay_out_sites, moves
from node.lab.namespaces import SCRATCH
from node.lab.processes import LabProcesses
from node.lab.profile import read_run_sections, read_section
from node.lab.results import describe_machine
from node.run_file.loader import read_toml, section_types
from node.telemetry.events import JoinLine, NodeJoined, RunFinished, StepDone
from wire.errors import ConfigError, RunError, nearest
from wire.identity.names import join_address

FORMAT = "thinwire-reach-1"
RESULTS_FILE = "results.json"
PATH_CHECKS = ("nat", "direct path", "simultaneous open", "relay")
"""The checks of `thinwire doctor` that concern paths, in the order of its report."""


@dataclass(frozen=True, kw_only=True)
class ReachSection:
    """`[reach]`: which ways of connecting to the internet are tried."""

    name: str = "nat"
    """The name of the output directory."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Every two of these are paired, and each also with itself."""
    idle_seconds: float = 35.0
    """Seconds that the second node waits before it joins, where a firewall forgets silent flows."""
    start_seconds: float = 120.0
    """Time limit for each start, of the coordinator and of a node."""
    run_seconds: float = 180.0
    """Time limit from the last join to the end of the run."""


@dataclass(frozen=True, kw_only=True)
class ReachProfile:
    reach: ReachSection
    config: RunConfig
    sha256: str
    file: str

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All pairs. The first kind is paired with itself first: the others must train to the same
        weights."""
        return list(combinations_with_replacement(self.reach.kinds, 2))


def is_reach_profile(path: Path) -> bool:
    """Whether a profile has a `[reach]` section. Raises ConfigError when it cannot be read."""
    return "reach" in read_toml(path, "profile", "see deploy/lab/")


def load_reach_profile(path: Path) -> ReachProfile:
    """Read a profile: `[reach]` and any section of a run file. Raises ConfigError in one line."""
    raw, where = read_toml(path, "profile", "see deploy/lab/"), str(path)
    known = ("reach", *section_types())
    for name in raw:
        if name not in known:
            raise ConfigError(f"{where}: unknown section [{name}]{nearest(name, known)}")
    reach = read_section(ReachSection, raw["reach"], "reach", where)
    for kind in reach.kinds:
        if kind not in KINDS:
            raise ConfigError(f"{where}: reach.kinds has an unknown kind {kind!r}{nearest(kind, KINDS)}")
    if len(set(reach.kinds)) < len(reach.kinds) or reach.kinds[:1] != ("open",):
        raise ConfigError(f'{where}: reach.kinds must begin with "open" and name each kind once')
    if min(reach.idle_seconds, reach.start_seconds, reach.run_seconds) <= 0:
        raise ConfigError(f"{where}: the times of [reach] must be above 0")
    config = read_run_sections(raw, None, where, owned=())
    if config.pipeline.stages != 2:
        raise ConfigError(f"{where}: pipeline.stages must be 2: a pair has two nodes")
    return ReachProfile(
        reach=reach, config=config, sha256=sha256(path.read_bytes()).hexdigest(), file=path.name
    )


async def run_reach(
    profile: ReachProfile, out: Path, tell: Callable[[str], None], only: Sequence[str] = ()
) -> bool:
    """Train every pair that `out` does not hold yet, and write results after each.

    Args:
        only: Pairs such as `nat-symmetric`, or single kinds. Empty means all.

    Returns whether all of them trained to the same weights.
    """
    tools.tool("nft")
    path = out / RESULTS_FILE
    values: dict[str, Any] = {
        "format": FORMAT,
        "profile": profile.file,
        "profile_sha256": profile.sha256,
        "machine": describe_machine(),
        "kinds": {kind: KINDS[kind][0] for kind in profile.reach.kinds},
        "model": asdict(profile.config.model),
        "steps": profile.config.run.steps,
        "pairs": [],
    }
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        same = ("format", "profile_sha256")
        if all(earlier.get(key) == values[key] for key in same):
            values["pairs"] = earlier["pairs"]
    for pair in profile.pairs:
        if not _wanted(pair, only) or any(tuple(row["pair"]) == pair for row in values["pairs"]):
            continue
        outcome = await _train_pair(profile, pair, out)
        values["pairs"].append(outcome)
        reference = next((row["weights"] for row in values["pairs"] if row["pair"] == ["open", "open"]), "")
        outcome["same_weights"] = bool(outcome["weights"]) and outcome["weights"] == reference
        tell(f"{' - '.join(pair)}: {pair_words(outcome)}")
        write_whole(path, json.dumps(values, indent=1) + "\n")
    return all(row["same_weights"] for row in values["pairs"])


def _wanted(pair: tuple[str, str], only: Sequence[str]) -> bool:
    return not only or pair == ("open", "open") or any(name in names_of(pair) for name in only)


def names_of(pair: tuple[str, str]) -> tuple[str, ...]:
    """The words of `--only` that select this pair."""
    return "-".join(pair), "-".join(reversed(pair)), *pair


def pair_words(outcome: dict[str, Any]) -> str:
    if outcome["failure"]:
        return f"FAILED: {outcome['failure']}"
    same = "the same weights" if outcome["same_weights"] else "OTHER WEIGHTS"
    why = f" ({outcome['why_not_direct']})" if outcome["why_not_direct"] else ""
    return f"{outcome['path']}{why}, {same}, {outcome['seconds']:.0f} s"


async def _train_pair(profile: ReachProfile, pair: tuple[str, str], out: Path) -> dict[str, Any]:
    logs = out / "logs" / "-".join(pair)
    logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    outcome: dict[str, Any] = {
        "pair": list(pair),
        "path": "",
        "why_not_direct": "",
        "weights": "",
        "failure": "",
    }
    directory = SCRATCH / "reach"
    directory.mkdir()
    try:
        with built(lay_out_sites(pair)) as sites:
            async with PairRun(profile, pair, sites, directory, logs) as run:
                outcome |= await run.train()
    except RunError as error:
        outcome["failure"] = str(error)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    outcome["seconds"] = round(time.monotonic() - began, 1)
    return outcome


@contextlib.contextmanager
def built(sites: list[Site]) -> Iterator[list[Site]]:
    """Builds the internet with these sites for the duration of the block."""
    names = [INTERNET, *(name for site in sites for name in site.namespaces)]
    try:
        for name in names:
            tools.ip("", "netns", "add", name)
        set_all(
            (INTERNET, "ipv4/ip_forward", "1"),
            (INTERNET, "ipv6/conf/all/forwarding", "1"),
        )
        for site in sites:
            execute(site.commands)
            set_all(*site.settings)
        yield sites
    finally:
        for name in names:
            with contextlib.suppress(RunError):
                tools.ip("", "netns", "del", name)


def execute(commands: Sequence[Command]) -> None:
    for namespace, name, arguments in commands:
        if name == "ip":
            tools.ip(namespace, *arguments)
        else:
            tools.call("nsenter", *tools.prefix(namespace)[1:], tools.tool(name), *arguments)


def set_all(*settings: tuple[str, str, str]) -> None:
    for namespace, name, value in settings:
        place = Path("/proc/sys/net", name)
        tools.inside(namespace, lambda place=place, value=value: place.write_text(value))  # type: ignore[misc]


class PairRun(LabProcesses):
    """A coordinator and two nodes in their sites."""

    def __init__(
        self, profile: ReachProfile, pair: tuple[str, str], sites: list[Site], directory: Path, logs: Path
    ) -> None:
        super().__init__(directory, logs, threads=1)
        self._reach = profile.reach
        self._pair = pair
        desk, *self._sites = sites
        reached = (desk.public, desk.moved, desk.public6)
        self._config = replace(
            profile.config,
            coordinator=replace(
                profile.config.coordinator,
                listen=f"0.0.0.0:{COORDINATOR_PORT}",
                advertise=tuple(join_address(host, COORDINATOR_PORT) for host in reached),
            ),
        )

    async def train(self) -> dict[str, Any]:
        """Train to the end; return path, reason and weights. Raises RunError."""
        for site in self._sites:
            if site.helper is not None:
                await self._start_helper(*site.helper)
        for site in self._sites:
            command = [*program("cli.lab_node"), "cpu"]
            await self._spawn(site.machine, command, environment=site.environment, stdin=PIPE)
        await self._start_coordinator(self._config)
        line = await self._next(JoinLine, self._reach.start_seconds, "the join line")
        token = line.line.split()[-1]
        doctor = await self._ask_doctor(token) if len(set(self._pair)) == 1 else {}
        for number, site in enumerate(self._sites):
            if number and "idle" in self._pair:
                await asyncio.sleep(self._reach.idle_seconds)
            self._send_join(site.machine, token, number, "--device", "cpu")
            await self._next(NodeJoined, self._reach.start_seconds, f"the join of node {number}")
        try:
            async with asyncio.timeout(self._reach.run_seconds):
                finished = await self._to_the_end()
        except TimeoutError:
            raise RunError(f"the run did not end within {self._reach.run_seconds:g} s") from None
        if finished.failed or finished.summary is None:
            raise RunError(finished.reason)
        links = HistoryWatch(self.run_directory).view().links
        path, why = next(((link.path, link.why_not_direct) for link in links), ("", ""))
        outcome = {"path": path, "why_not_direct": why, "weights": finished.summary.weights_sha256}
        return outcome | ({"doctor": doctor} if doctor else {})

    async def _ask_doctor(self, token: str) -> dict[str, str]:
        """What `thinwire doctor` reports of paths at the first site, by the names of its checks. Raises
        RunError."""
        site = self._sites[0]
        state = str(self._directory / "state0")
        arguments = [*program("cli.main"), "doctor", token, "--state-dir", state, "--json"]
        child = await self._spawn(
            site.machine, arguments, name="doctor", environment=site.environment, stdout=PIPE
        )
        try:
            async with asyncio.timeout(self._reach.start_seconds):
                output, _ = await child.communicate()
        except TimeoutError:
            raise RunError(f"`thinwire doctor` took over {self._reach.start_seconds:g} s") from None
        del self._children["doctor"]  # it has ended
        if not output:
            raise RunError(f"`thinwire doctor` failed; see {self._logs}")
        checks = json.loads(output)["checks"]
        return {check["name"]: check["detail"] for check in checks if check["name"] in PATH_CHECKS}

    async def _to_the_end(self) -> RunFinished:
        moved = False
        assert self._events is not None
        async for event in self._events:
            if isinstance(event, RunFinished):
                return event
            if isinstance(event, StepDone) and not moved and 3 * event.step >= self._config.run.steps:
                moved = True
                for site, kind in zip(self._sites, self._pair, strict=True):
                    if kind == "moving":
                        await asyncio.to_thread(execute, moves(site))
        raise RunError(f"the coordinator ended before the run did; see {self._logs}")

    async def _start_helper(self, namespace: str, module: str, address: str) -> None:
        helper = await self._spawn(namespace, [*program(module), address], stdout=PIPE)
        assert helper.stdout is not None
        if (await helper.stdout.readline()).strip() != b"ready":
            raise RunError(f"{module} did not start at {address}; see {self._logs}")


def read_reach_results(path: Path) -> dict[str, Any] | None:
    """The results of `run_reach` in a file or in the folder that it wrote to. None if there are none."""
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((path / RESULTS_FILE if path.is_dir() else path).read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("format") == FORMAT:
            return values
    return None


def reach_table(values: dict[str, Any]) -> list[list[str]]:
    """The rows of a table of the path of each pair of kinds. The first row is the head."""
    kinds = list(values["kinds"])
    paths = {}
    for row in values["pairs"]:
        words = "failed" if row["failure"] else row["path"] if row["same_weights"] else "other weights"
        paths[tuple(row["pair"])] = paths[tuple(reversed(row["pair"]))] = words
    return [["", *kinds], *([kind, *(paths.get((kind, other), "-") for other in kinds)] for kind in kinds)]
