"""Laboratory profiles: read strict TOML and return a checked `Profile`. Only the check of codec names uses
torch.

A profile holds `[lab]`, `[network]`, one or more `[[sweep]]`, and any section of a run file, which changes
the base run file of `lab.base`. The docstring below each field describes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from node.config.schema import RunConfig, Window
from node.lab.shape import Matrix, Shape, read_matrix, uniform
from node.run_file.loader import (
    convert,
    default_config,
    load_config,
    read_toml,
    section_types,
    toml_scalar,
    toml_value,
)
from node.run_file.validate import validate
from node.schedule.routing import link_ends
from wire.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class LabSection:
    """`[lab]`: what is measured, and how often."""

    name: str = "lab"
    """The name of the output directory and of the figures."""
    base: str = ""
    """A run file, relative to the profile, that the profile's own run sections change. Empty means the
    defaults."""
    steps: int = 5
    """Steps measured in each cell."""
    warmup_steps: int = 2
    """Steps discarded after each change of the links."""
    warmup_round_trips: int = 120
    """Also discard steps for at least this many round trips, and then until one is no faster than those
    before. TCP finds its rate in round trips, not in steps."""
    unthrottled_steps: int = 3
    """Steps measured without shaping at the start of each run, for the compute time. 0 skips them."""
    seeds: tuple[int, ...] = (0,)
    """Every run is repeated with each of these as `run.seed`."""
    text_bytes: int = 0
    """Train on only this many bytes from the start of the text, so that samples repeat (`aqsgd-b` packs
    nothing before they do). 0 means the whole text."""
    device: str = "cpu"
    """`cpu` or `cuda`. With `cuda`, stage i computes on GPU i."""
    gpus: int = 0
    """With `device = "cuda"`, stage i computes on GPU i modulo this. It is for links so slow that stages can
    take turns on a GPU. 0 gives each stage its own."""
    threads: int = 1
    """CPU threads of each node. 0 means torch's default."""
    step_seconds: float = 600.0
    """Time limit of a step, in seconds."""


@dataclass(frozen=True, kw_only=True)
class NetworkSection:
    """`[network]`: how the nodes are connected."""

    topology: str = "links"
    """`links`: each pair of neighbours has its own link. `interfaces`: each node has one line for all its
    neighbours, as
    at home."""
    delay: str = "auto"
    """How packets are delayed: by `netem`, by the lab's own packet `relay`, or `auto`, which is netem where
    the kernel has it."""
    matrix: str = ""
    """A file of rates and round trips between regions, relative to the profile."""
    regions: tuple[str, ...] = ()
    """With `matrix`: each stage's region."""
    socket_buffer_mb: float = 32.0
    """The kernel's limit of TCP socket buffers inside the lab, in MB (10^6 bytes). It bounds a connection's
    bytes in flight."""
    congestion_control: str = ""
    """The congestion control of TCP between nodes: `cubic`, as on most machines, `bbr`, or another that the
    kernel has. Empty means the kernel's default."""
    slow_start_after_idle: bool = True
    """Whether TCP starts slowly again after a pause, which is the kernel's default
    (`net.ipv4.tcp_slow_start_after_idle`)."""


@dataclass(frozen=True, kw_only=True)
class SweepSection:
    """`[[sweep]]`: every combination of these is a cell. Sweeps and their values run in the order given."""

    rates: tuple[str, ...] = ()
    """Mbit/s, `"100"` or `"UP/DOWN"` as in `"100/20"`. On links, up is from the lower stage to the higher. On
    interfaces, up is out of the node."""
    matrix_shares: tuple[float, ...] = ()
    """With `network.matrix`, instead of `rates`: shares of the matrix's rates."""
    delays_ms: tuple[float, ...] = (0.0,)
    """Round trips in milliseconds. With `network.matrix` they come from the matrix."""
    codecs: tuple[str, ...] = ("fp32/fp32", "tah/fixed-6")
    """Codec pairs, `"FORWARD/BACKWARD"`."""
    microbatches: tuple[int, ...] = ()
    """Values of `training.microbatch`. Empty uses the run file's."""
    windows: tuple[str, ...] = ()
    """Values of `pipeline.window`, `"auto"` or a number as in `"4"`. Empty uses the run file's."""
    steps: int = 0
    """Steps measured in each cell of this sweep. 0 uses `lab.steps`. Two are enough where a link is the
    limit."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A resolved sweep: its shapes and the runs' variations, in order."""

    shapes: tuple[Shape, ...]
    codecs: tuple[tuple[str, str], ...]
    microbatches: tuple[int, ...]
    windows: tuple[Window, ...]
    steps: int
    """Steps measured in each cell."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A whole profile, checked."""

    lab: LabSection = field(default_factory=LabSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    sweeps: tuple[Sweep, ...]
    config: RunConfig
    """The run file that every run varies."""
    sha256: str
    """Digest of the profile, its overrides, run file and matrix. Results with different digests are not
    combined."""
    file: str
    """The profile's file name."""
    overrides: tuple[str, ...]
    """The overrides as given, without the folders of absolute paths."""


Section = TypeVar("Section")

CHOICES = {
    "lab.device": ("cpu", "cuda"),
    "network.topology": ("links", "interfaces"),
    "network.delay": ("auto", "netem", "relay"),
}
OWNED = ("run.steps", "run.seed", "run.snapshot_every", "pipeline.forward_codec", "pipeline.backward_codec")
"""Run-file keys that the lab sets itself; a profile must not set them."""


def load_profile(path: Path, overrides: Sequence[str] = ()) -> Profile:
    """Read a profile and the files that it names, and apply overrides such as `lab.steps=10`.

    Raises ConfigError in one line that names the file, the key and the expected value.
    """
    raw = read_toml(path, "profile", "see deploy/lab/")
    where = str(path)
    for override in overrides:
        _override(raw, override)
    known = ("lab", "network", "sweep", *section_types())
    for name in raw:
        if name not in known:
            raise ConfigError(f"{where}: unknown section [{name}]{nearest(name, known)}")
    lab = read_section(LabSection, raw.get("lab", {}), "lab", where)
    network = read_section(NetworkSection, raw.get("network", {}), "network", where)
    entries = raw.get("sweep", [])
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: give at least one [[sweep]], with its rates and codecs")
    sections = [read_section(SweepSection, entry, f"sweep {i + 1}", where) for i, entry in enumerate(entries)]

    base = path.parent / lab.base if lab.base else None
    config = read_run_sections(raw, base, where)
    _check_lab(lab, where)
    _check_network(network, config.pipeline.stages, where)
    matrix_path = path.parent / network.matrix if network.matrix else None
    matrix = read_matrix(matrix_path) if matrix_path else None
    sweeps = tuple(
        _sweep(section, lab, network, matrix, config, f"{where}: sweep {i + 1}")
        for i, section in enumerate(sections)
    )
    files = [
        path.read_bytes(),
        "\n".join(overrides).encode(),
        *(file.read_bytes() for file in (base, matrix_path) if file),
    ]
    digest = sha256(b"\0".join(sha256(data).digest() for data in files)).hexdigest()
    return Profile(
        lab=lab,
        network=network,
        sweeps=sweeps,
        config=config,
        sha256=digest,
        file=path.name,
        overrides=tuple(map(_without_folders, overrides)),
    )


def _override(raw: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into the parsed TOML. Its section is checked later."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or section == "sweep":
        raise ConfigError(
            f"override {override!r}: expected section.key=value, as in lab.steps=10; sweeps "
            "cannot be overridden"
        )
    table = raw.setdefault(section, {})
    if isinstance(table, dict):
        table[key] = toml_scalar(text, text.strip())


def _without_folders(override: str) -> str:
    """`data.path=/some/where/text.txt` becomes `data.path=text.txt`. Other overrides are returned
    unchanged."""
    name, equals, value = override.partition("=")
    path = value.strip().strip("\"'")
    return f"{name}{equals}{Path(path).name}" if path.startswith(("/", "~")) else override


def read_section(kind: type[Section], table: Any, name: str, where: str) -> Section:
    """A section of a profile as its dataclass. Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: [{name}] must be a section of keys")
    types = get_type_hints(kind)
    values = {}
    for key, value in table.items():
        if key not in types:
            raise ConfigError(f"{where}: unknown key {key!r} in [{name}]{nearest(key, types)}")
        values[key] = convert(value, types[key], where=where, name=f"{name}.{key}")
    section = kind(**values)
    for full, choices in CHOICES.items():
        prefix, _, key = full.partition(".")
        if prefix == name and getattr(section, key) not in choices:
            value = getattr(section, key)
            raise ConfigError(f"{where}: {full} {value!r} is unknown{nearest(value, choices)}")
    return section


def read_run_sections(
    raw: Mapping[str, Any], base: Path | None, where: str, owned: Sequence[str] = OWNED
) -> RunConfig:
    """The base run file with the profile's run sections applied, read by the run file's own strict reader.

    Raises ConfigError, also for a key in `owned`, which the lab sets itself.
    """
    overrides = []
    for section in section_types():
        table = raw.get(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: [{section}] must be a section of keys")
        for key, value in table.items():
            if f"{section}.{key}" in owned or section == "coordinator":
                raise ConfigError(
                    f"{where}: {section}.{key} is set by the lab itself (from [lab], [[sweep]] and its own "
                    "addresses): remove it"
                )
            overrides.append(f"{section}.{key}={toml_value(value)}")
    try:
        return load_config(base, overrides) if base else default_config(overrides)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_lab(lab: LabSection, where: str) -> None:
    least = {"steps": 1, "warmup_steps": 1, "warmup_round_trips": 0}
    least |= {"unthrottled_steps": 0, "gpus": 0, "threads": 0, "text_bytes": 0}
    for key, value in least.items():
        if getattr(lab, key) < value:
            raise ConfigError(f"{where}: lab.{key} must be at least {value}, got {getattr(lab, key)}")
    if not lab.name.replace("-", "").replace("_", "").isalnum() or not lab.name.isascii():
        raise ConfigError(f"{where}: lab.name {lab.name!r} must be letters, digits, '-' and '_'")
    if not lab.seeds or min(lab.seeds) < 0:
        raise ConfigError(f"{where}: lab.seeds must be one or more numbers of at least 0")
    if lab.step_seconds <= 0:
        raise ConfigError(f"{where}: lab.step_seconds must be above 0, got {lab.step_seconds:g}")


def _check_network(network: NetworkSection, stages: int, where: str) -> None:
    if stages < 2:
        raise ConfigError(f"{where}: pipeline.stages must be at least 2: a single stage has no link")
    if not 0 < network.socket_buffer_mb <= 1000:
        raise ConfigError(f"{where}: network.socket_buffer_mb must be above 0 and at most 1000")
    if bool(network.matrix) != bool(network.regions):
        raise ConfigError(f"{where}: network.matrix and network.regions need each other: set both or neither")
    if network.matrix and network.topology != "links":
        raise ConfigError(f'{where}: a matrix gives each pair a rate: set network.topology = "links"')
    if network.regions and len(network.regions) != stages:
        raise ConfigError(f"{where}: network.regions has {len(network.regions)} names for {stages} stages")


def _sweep(
    section: SweepSection,
    lab: LabSection,
    network: NetworkSection,
    matrix: Matrix | None,
    config: RunConfig,
    where: str,
) -> Sweep:
    shapes = _matrix_shapes(section, network, matrix, config, where) if matrix else ()
    if not matrix:
        if section.matrix_shares or not section.rates or not section.delays_ms:
            raise ConfigError(f"{where} needs rates and delays_ms (matrix_shares go with network.matrix)")
        shapes = tuple(
            _uniform(rate, delay, network, config, where)
            for delay in section.delays_ms
            for rate in section.rates
        )
    microbatches = section.microbatches or (config.training.microbatch,)
    windows = tuple(_window(text, where) for text in section.windows) or (config.pipeline.window,)
    codecs = []
    for text in section.codecs:
        forward, slash, backward = text.partition("/")
        if not slash:
            raise ConfigError(f'{where}: codec pair {text!r} must be "FORWARD/BACKWARD", as in "tah/fixed-6"')
        codecs.append((forward, backward))
    if not codecs:
        raise ConfigError(f"{where} names no codecs")
    if section.steps < 0:
        raise ConfigError(f"{where}: steps cannot be negative, got {section.steps}")
    for forward, backward in codecs:
        for microbatch in microbatches:
            for window in windows:
                validate(vary(config, forward, backward, microbatch, window), where=where)
    return Sweep(
        shapes=shapes,
        codecs=tuple(codecs),
        microbatches=microbatches,
        windows=windows,
        steps=section.steps or lab.steps,
    )


def _window(text: str, where: str) -> Window:
    if text == "auto":
        return "auto"
    if text.isascii() and text.isdigit():
        return int(text)
    raise ConfigError(f'{where}: window {text!r} must be "auto" or a number in quotes, as in "4"')


def vary(config: RunConfig, forward: str, backward: str, microbatch: int, window: Window) -> RunConfig:
    """The config of one run of a sweep."""
    return replace(
        config,
        training=replace(config.training, microbatch=microbatch),
        pipeline=replace(config.pipeline, forward_codec=forward, backward_codec=backward, window=window),
    )


def _uniform(rate: str, delay: float, network: NetworkSection, config: RunConfig, where: str) -> Shape:
    wires = len(link_ends(config)) if network.topology == "links" else config.pipeline.stages
    try:
        return uniform(rate, delay, wires)
    except ValueError:
        raise ConfigError(
            f'{where}: rate {rate!r} with {delay:g} ms: a rate is "100" or "UP/DOWN" in Mbit/s, above 0 and '
            "below a million; a delay from 0 to 10000 ms"
        ) from None


def _matrix_shapes(
    section: SweepSection, network: NetworkSection, matrix: Matrix, config: RunConfig, where: str
) -> tuple[Shape, ...]:
    if section.rates or not section.matrix_shares or min(section.matrix_shares) <= 0:
        raise ConfigError(f"{where}: with network.matrix give matrix_shares (above 0) in place of rates")
    for region in network.regions:
        if region not in matrix.regions:
            raise ConfigError(
                f"{where}: region {region!r} is not in the matrix{nearest(region, matrix.regions)}"
            )
    ends = link_ends(config)
    return tuple(matrix.shape(network.regions, ends, share) for share in section.matrix_shares)
