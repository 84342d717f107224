"""The rules of a run file: each broken alone gives one line that names the key."""

from dataclasses import replace
from typing import Any

import pytest

from node.config.schema import RunConfig
from node.run_file.addresses import parse_listen
from node.run_file.loader import default_config
from node.run_file.validate import problems
from tests.support.cases import each
from wire.errors import ConfigError
from wire.identity.token import JoinToken

IN_FP8 = {"training.compute": "fp8", "training.precision": "bfloat16"}


def changed(values: dict[str, Any]) -> RunConfig:
    config = RunConfig()
    for name, value in values.items():
        section, _, key = name.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def test_the_defaults_break_no_rule() -> None:
    assert problems(RunConfig()) == []


def test_a_token_holds_every_list_of_addresses_that_is_allowed() -> None:
    for addresses in (("a:1",) * 255, tuple(f"{'ab.' * 82}c:{n}" for n in range(1, 12))):
        assert problems(changed({"coordinator.advertise": addresses})) == []
        token = JoinToken(addresses, "r" * 40, b"\xff" * 32, "z" * 8, b"\xff" * 16)
        assert JoinToken.parse(token.encode()) == token


def test_the_most_that_is_allowed() -> None:
    most = {"training.global_batch": 2 * 16_384, "coordinator.certificate_hours": 87_600.0}
    assert problems(changed(most)) == []


@each(
    ("values", "words"),
    [
        ({"run.name": ""}, "run.name '' must be 1 to 64 letters"),
        ({"run.name": "../up"}, "run.name '../up'"),
        ({"run.name": "a b"}, "run.name 'a b'"),
        ({"run.name": ".hidden"}, "run.name '.hidden'"),
        ({"run.name": "x" * 65}, "run.name"),
        ({"run.seed": -1}, "run.seed must be at least 0"),
        ({"run.steps": 0, "training.warmup_steps": 0}, "run.steps must be at least 1, got 0"),
        ({"run.snapshot_every": 0}, "run.snapshot_every must be at least 1"),
        ({"pipeline.sequence_chunks": 0}, "pipeline.sequence_chunks must be from 1 to model.sequence (256)"),
        ({"pipeline.sequence_chunks": 257}, 'or "auto", got 257'),
        (
            {"pipeline.sequence_chunks": 64, "training.global_batch": 1024},
            "(64) of 512 microbatches come to more than 16384 parts of a step",
        ),
        (
            {"pipeline.sequence_chunks": 2, "pipeline.chunks": 2},
            "without more bytes: set pipeline.chunks = 1",
        ),
        (
            {"pipeline.sequence_chunks": 2, "pipeline.forward_codec": "aqsgd-4", "data.shift": False},
            "remembers whole samples: set pipeline.sequence_chunks = 1",
        ),
        ({"pipeline.groups": 0}, "pipeline.groups must be at least 1"),
        (
            {"pipeline.groups": 3},
            "must divide the 8 microbatches of a step (training.global_batch / training.",
        ),
        ({"pipeline.groups": 3}, "take 2 or 4"),
        ({"pipeline.groups": 9}, "take 8"),
        (
            {"audit.rate": 0.1},
            "audit.rate needs rows to compare: set pipeline.groups to 2",
        ),
        (
            {"audit.rate": 0.1, "pipeline.groups": 2, "pipeline.replicas": 1},
            "pipeline.replicas to auto",
        ),
        (
            {"audit.rate": 0.1, "pipeline.groups": 2, "training.deterministic": False},
            "audit.rate compares bits, which training.deterministic = false gives up",
        ),
        ({"sync.every": 0}, "sync.every must be at least 1"),
        ({"sync.every": 2}, "sync.every above 1 needs gradient groups: set pipeline.groups to 2 or more"),
        (
            {"sync.every": 3, "pipeline.groups": 2},
            "sync.every (3) must divide the 4 microbatches of a gradient group",
        ),
        (
            {"sync.every": 2, "pipeline.groups": 2, "training.moments": "fp8"},
            "sync.every above 1 needs training.moments = \"float32\", got 'fp8'",
        ),
        (
            {"sync.every": 2, "pipeline.groups": 2, "audit.rate": 0.1},
            "audit.rate compares only exact steps: set it to 0, or sync.every to 1",
        ),
        (
            {"sync.every": 2, "pipeline.groups": 2, "model.tied": True},
            "sync.every above 1 needs a tied model's head on the first stage: set pipeline.head",
        ),
        ({"sync.codec": "dither-4"}, "sync.codec: dither-4 does not pack sums of gradients"),
        ({"sync.outer_momentum": 1.0}, "sync.outer_momentum must be at least 0 and below 1"),
        ({"audit.rate": 1.5, "pipeline.groups": 2}, "audit.rate must be from 0 to 1, got 1.5"),
        (
            {"pipeline.groups": 2, "pipeline.forward_codec": "aqsgd-4", "data.shift": False},
            "set pipeline.groups = 1",
        ),
        ({"pipeline.replicas": 0}, "pipeline.replicas must be at least 1"),
        ({"pipeline.sync_codec": "fixed-11"}, "pipeline.sync_codec: "),
        ({"pipeline.sync_codec": "tah"}, "pipeline.sync_codec: tah does not pack sums of gradients"),
        ({"run.keep_snapshots": 0}, "run.keep_snapshots must be at least 1"),
        ({"model.family": "lama"}, "model.family 'lama' is unknown; did you mean 'llama'?"),
        ({"model.family": "x"}, "known: llama, mixture, gpt2"),
        ({"model.qk_norm": "heads"}, "model.qk_norm 'heads' is unknown; did you mean 'head'?"),
        ({"model.window": 8, "model.family": "gpt2"}, "model.window is for model.family llama"),
        ({"model.qk_norm": "head", "model.family": "gpt2"}, "model.qk_norm is for model.family llama"),
        ({"model.activation": "relu"}, "model.activation 'relu' is unknown"),
        ({"training.export_every": -1}, "training.export_every must be at least 0"),
        ({"training.compute": "fp4"}, "training.compute"),
        ({"training.compute": "fp8"}, 'needs training.precision = "bfloat16"'),
        (IN_FP8 | {"model.ffn": 684}, "needs model.ffn to be a multiple of 16, got 684"),
        (IN_FP8 | {"model.kv_heads": 1, "model.head_width": 8}, "model.kv_heads times the width of one"),
        (IN_FP8 | {"model.qk_norm": "head"}, "for blocks with norms or activations"),
        (IN_FP8 | {"lora.rank": 4}, "cannot train adapters"),
        ({"training.weight_gradients": "fp8"}, 'training.weight_gradients = "fp8" needs training.compute'),
        ({"model.layers": 0}, "model.layers must be at least 1"),
        ({"model.hidden": 250}, "model.hidden (250) must be a multiple of model.heads (8)"),
        ({"model.hidden": 24, "model.heads": 8, "model.kv_heads": 8}, "must be even"),
        ({"model.kv_heads": 3}, "model.heads (8) must be a multiple of model.kv_heads (3)"),
        ({"model.vocab": 255}, "model.vocab must be at least 256 for byte tokens"),
        ({"model.sequence": -1}, "model.sequence must be at least 1"),
        ({"model.norm_eps": 0.0}, "model.norm_eps must be a finite number above 0"),
        ({"model.init_std": float("inf")}, "model.init_std must be a finite number"),
        ({"model.rope_theta": 0.0}, "model.rope_theta must be"),
        ({"data.path": ""}, "data.path must name"),
        ({"data.path": "a\0b"}, "data.path must name a file, a folder or stdlib, and no path holds a zero"),
        ({"data.tokenizer": "a\0b"}, "and no path holds a zero character"),
        (
            {"training.global_batch": 2 * 16_385},
            "training.global_batch (32770) comes to more than 16384 microbatches of training.microbatch (2)",
        ),
        (
            {"coordinator.certificate_hours": 1e300},
            "must be at most 87600 (ten years), got 1e+300",
        ),
        (
            {"coordinator.certificate_hours": 87_601.0},
            "must be at most 87600 (ten years), got 87601",
        ),
        ({"data.tokenizer": ""}, "data.tokenizer must be bytes, or name a folder or file"),
        (
            {"pipeline.forward_codec": "aqsgd-4"},
            "pipeline.forward_codec: aqsgd-4 packs what changed since the same sample was last sent, so "
            "every pass must cut the text alike: set data.shift = false",
        ),
        (
            {"pipeline.backward_codec": "aqsgd-4"},
            "pipeline.backward_codec: aqsgd-4 does not pack gradients of activations",
        ),
        (
            {"pipeline.forward_codec": "auto"},
            "pipeline.backward_codec: fixed-8 beside pipeline.forward_codec = auto: plan codecs for both "
            "directions of a link or for neither; set pipeline.backward_codec = auto too",
        ),
        (
            {"pipeline.forward_codec": "auto", "pipeline.backward_codec": "auto", "pipeline.min_bits": 9.0},
            "pipeline.min_bits is 9; it must be at most 8",
        ),
        (
            {"pipeline.sync_codec": "dither-4"},
            "pipeline.sync_codec: dither-4 does not pack sums of gradients",
        ),
        ({"pipeline.cache_gb": 0.0}, "pipeline.cache_gb must be a finite number above 0, got 0.0"),
        ({"training.global_batch": 15}, "training.global_batch (15) must be a multiple of"),
        (
            {"model.tied": True, "pipeline.head": "last", "model.vocab": 2**20, "model.hidden": 2**10},
            "model.vocab x model.hidden makes a tensor of 4,294,967,296 bytes between stages, and a link",
        ),
        (
            {"model.sequence": 2**20, "model.hidden": 2**10},
            "training.microbatch x model.sequence x model.hidden makes a tensor of 8,589,934,592 bytes",
        ),
        ({"training.microbatch": 0}, "training.microbatch must be at least 1"),
        ({"training.lr": 0.0}, "training.lr must be a finite number above 0"),
        ({"training.lr": float("nan")}, "training.lr must be a finite number above 0, got nan"),
        ({"training.lr": 1e300}, "training.lr must be from 1e-37 to 1e+18, got 1e+300"),
        ({"training.eps": 1e-50}, "training.eps must be from 1e-37 to 1e+18, got 1e-50"),
        ({"training.weight_decay": 1e300}, "training.weight_decay must be from 1e-37 to 1e+18"),
        ({"training.min_lr_ratio": 1.5}, "training.min_lr_ratio must be from 0 to 1"),
        ({"training.warmup_steps": -1}, "training.warmup_steps"),
        ({"training.beta1": 1.0}, "training.beta1 must be at least 0 and below 1"),
        ({"training.beta2": -0.1}, "training.beta2"),
        ({"training.eps": 0.0}, "training.eps"),
        ({"training.weight_decay": -0.1}, "training.weight_decay must be a finite number of at least 0"),
        ({"training.clip": float("inf")}, "training.clip"),
        ({"training.precision": "auto", "training.gradients": "fp8"}, 'precision = "auto" needs'),
        ({"training.precision": "auto", "training.compute": "fp8"}, 'needs training.precision = "bfloat16"'),
        ({"training.precision": "bf16"}, "training.precision 'bf16' is unknown"),
        ({"pipeline.stages": 0}, "pipeline.stages must be at least 1"),
        ({"pipeline.chunks": 0}, "pipeline.chunks must be at least 1"),
        ({"pipeline.head": "both"}, "pipeline.head"),
        ({"pipeline.min_stages": -1}, "pipeline.min_stages must be from 0 (wait for every node)"),
        ({"pipeline.min_stages": 5}, "to pipeline.stages (4), got 5"),
        ({"coordinator.regroup_seconds": 0.0}, "coordinator.regroup_seconds must be"),
        ({"coordinator.gateways": -1}, "coordinator.gateways must be at least 0, got -1"),
        ({"coordinator.gateways": 257}, "coordinator.gateways must be at most 256, got 257"),
        ({"pipeline.window": -1}, "pipeline.window must be at least 0"),
        ({"pipeline.window_gb": -0.5}, "pipeline.window_gb must be a finite number of at least 0"),
        ({"pipeline.stages": 9}, "9 stages need at least 9 blocks, but model.layers is 8"),
        ({"pipeline.chunks": 3}, "4 stages x 3 chunks need at least 12 blocks"),
        ({"pipeline.stages": 1, "pipeline.chunks": 2}, "needs pipeline.stages of at least 2"),
        ({"pipeline.split": (4, 4)}, "pipeline.split has 2 numbers, but 4 stages need 4"),
        ({"pipeline.split": (2, 2, 2, 3)}, "pipeline.split adds up to 9 blocks, but model.layers is 8"),
        ({"pipeline.split": (4, 4, 0, 0)}, "pipeline.split must give every chunk at least 1 block"),
        ({"pipeline.forward_codec": "tahh"}, "pipeline.forward_codec: "),
        ({"pipeline.backward_codec": "fixed-99"}, "pipeline.backward_codec: "),
        ({"coordinator.listen": "7700"}, "coordinator.listen: '7700' is not host:port"),
        ({"coordinator.listen": "host:99999"}, "no port from 0 to 65535"),
        ({"coordinator.listen": f"host:{'9' * 5000}"}, "no port from 0 to 65535"),
        ({"coordinator.listen": "10.0.0..5:7700"}, "coordinator.listen: '10.0.0..5:7700' names no host"),
        ({"dashboard.listen": "10.0.0..5:7700"}, "dashboard.listen: '10.0.0..5:7700' names no host"),
        ({"coordinator.advertise": (f"{'x' * 64}.example:1",)}, "must be 1 to 63 letters"),
        (
            {"coordinator.advertise": (f"{'ab.' * 100}c:7700",)},
            "is longer than the 255 bytes that a join token",
        ),
        (
            {"coordinator.advertise": tuple(f"{'ab.' * 80}c:{n}" for n in range(1, 21))},
            "coordinator.advertise has 20 addresses, 4891 bytes together, and a join token holds at most 255",
        ),
        ({"coordinator.advertise": ("a:1",) * 256}, "has 256 addresses"),
        ({"coordinator.listen": "0.0.0.0:65535", "coordinator.one_port": False}, "leaves no next port"),
        (
            {"coordinator.listen": "0.0.0.0:65534", "coordinator.one_port": False},
            "there is no port two above",
        ),
        ({"dashboard.listen": "7702"}, "dashboard.listen: '7702' is not host:port"),
        ({"dashboard.listen": "atuo"}, "`auto` chooses"),
        ({"dashboard.listen": "0.0.0.0:7700"}, "port 7700 is the coordinator's; `auto` shares it"),
        (
            {"dashboard.listen": "0.0.0.0:7701", "coordinator.one_port": False},
            "is one of the coordinator's two",
        ),
        ({"dashboard.listen": "", "dashboard.tls": True}, "there is no page to serve"),
        ({"telemetry.trace": "5:3"}, "telemetry.trace: '5:3' names no steps"),
        ({"telemetry.trace_mb": 0}, "telemetry.trace_mb must be at least 1, got 0"),
        ({"coordinator.advertise": ("ok:1", "bad")}, "coordinator.advertise: 'bad' is not host:port"),
        ({"coordinator.advertise": ("host:0",)}, "must carry the port that nodes dial"),
        ({"coordinator.heartbeat_seconds": 0.0}, "coordinator.heartbeat_seconds must be"),
        ({"coordinator.certificate_hours": float("nan")}, "coordinator.certificate_hours must be"),
        ({"coordinator.silent_seconds": 1.0}, "coordinator.silent_seconds (1.0) must be above"),
    ],
)
def test_each_broken_rule_is_one_line(values: dict[str, Any], words: str) -> None:
    found = problems(changed(values))
    assert len(found) == 1, found
    assert words in found[0]
    assert "\n" not in found[0]


def test_gpt2_needs_no_key_value_heads_or_even_head_width() -> None:
    gpt2 = changed({"model.family": "gpt2", "model.kv_heads": 3, "model.hidden": 24})
    assert problems(gpt2) == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("0.0.0.0:7700", ("0.0.0.0", 7700)),
        ("[::]:0", ("::", 0)),
        ("host.example:65535", ("host.example", 65535)),
    ],
)
def test_listen_addresses(address: str, expected: tuple[str, int]) -> None:
    assert parse_listen(address) == expected


@each(
    "address",
    [
        *("", ":", "host", "host:", ":7", "::1:7", "a b:7", "host:-1", "host:\u0663", "[]:7"),
        *(f"host:{'7' * 5000}", f"{'a.' * 3000}.:7"),
        *(".:7", "a..b:7", f"{'a' * 64}:7", "a\0b:7", "a\udcffb:7"),
    ],
)
def test_addresses_that_are_none(address: str) -> None:
    """Said in a line of a readable length."""
    with pytest.raises(ConfigError, match=r"^'.*' (is not host:port|has no port|names no host)") as caught:
        parse_listen(address)
    assert len(str(caught.value)) < 200


@each(
    ("values", "words"),
    [
        (["training.schedule=cosin"], "training.schedule 'cosin' is unknown; did you mean 'cosine'?"),
        (["training.decay_steps=301"], "training.decay_steps must be from 0 to run.steps (300), got 301"),
        (["telemetry.loggers=wanbd"], "telemetry.loggers 'wanbd' is unknown; did you mean 'wandb'?"),
        (["data.sources=a,b", "data.weights=1"], "data.weights has 1 numbers for 2 data.sources"),
        (["data.sources=a", "data.weights=0"], "data.weights must be finite numbers above 0"),
        (["data.sources=a,b", "data.weights=1e308,1e308"], "data.weights must be finite numbers above 0"),
        (["data.sources=a", "data.path=b"], "data.sources takes the place of data.path"),
        (["model.rope_factor=4"], "model.rope_factor (4.0) needs model.rope_scaling"),
        (["model.no_window=1"], "model.no_window names blocks without the window"),
        (["model.window=9", "model.no_window=8"], "model.no_window must name blocks from 0 to 7, got (8,)"),
        (["model.no_rope=-1"], "model.no_rope must name blocks from 0 to 7, got (-1,)"),
        (["data.format=chat"], "needs a tokenizer with a chat template"),
        (["data.prompts_every=0"], "data.prompts_every must be at least 1, got 0"),
        (['data.prompts=["a", ""]'], "data.prompts must hold texts of 1 to 1000 characters"),
        ([f"data.prompts={'x' * 1001}"], "none of them zero, got one of 1001"),
        ([f"data.prompts={','.join('x' * 17)}"], "data.prompts has 17 texts: give at most 16"),
        (["data.sources=a", "data.order=whole"], 'data.order = "whole" takes one text source'),
        (
            ["data.sources=a", "data.shift=false", "pipeline.forward_codec=aqsgd-4"],
            "aqsgd-4 needs every sample's number beforehand",
        ),
    ],
)
def test_rules_of_data_and_schedules(values: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        default_config(values)
    assert words in str(raised.value)
