"""`node.processes.reach_check`: what it says of a NAT, of paths and of the line."""

from dataclasses import replace

import pytest
import torch

from node.processes.doctor import Status, healthy
from node.processes.reach_check import Findings, Seen, check_reach, judged, nat_words

HOME, OUTSIDE = "192.168.1.7", "203.0.113.9"


def through(*ports: int, there: str = OUTSIDE, here: tuple[str, int] = (HOME, 40000)) -> tuple[Seen, ...]:
    """Connections to as many targets, as those see their ports."""
    return tuple(
        Seen(target=f"198.51.100.{number}:443", here=here, there=(there, port))
        for number, port in enumerate(ports)
    )


FOUND = Findings(
    host=OUTSIDE,
    seen=through(40000, 40000),
    not_mapped="NAT-PMP: the gateway does not answer",
    relayed=True,
    near=(("198.51.100.4:7710", 0.012), ("198.51.100.5:7710", 0.030)),
    round_trip=0.02,
    down=5e6,
    up=1e6,
)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (through(40000, 40000), f"NAT at {OUTSIDE} that maps a port in the same way for every target (2"),
        (through(1025, 1025), f"NAT at {OUTSIDE} that maps a port in the same way for every target (2"),
        (through(1025, 1026), f"NAT at {OUTSIDE} with another port for each target (symmetric)"),
        (through(40000), f"NAT at {OUTSIDE}; it keeps ports"),
        (through(1025), f"NAT at {OUTSIDE} that changes ports; only one target could be asked"),
        (through(40000, there=HOME), f"none: others see this machine's own address {HOME}"),
        ((), f"others see {OUTSIDE}; nobody could be asked"),
    ],
)
def test_the_kind_of_nat_in_words(seen: tuple[Seen, ...], words: str) -> None:
    assert nat_words(replace(FOUND, seen=seen)).startswith(words)


def said(found: Findings) -> dict[str, str]:
    return {check.name: check.detail for check in judged(found)}


def test_each_path_has_a_line() -> None:
    assert healthy(list(judged(FOUND)))
    assert list(said(FOUND)) == ["nat", "direct path", "simultaneous open", "relay", "line"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reached": True}, "others can dial this machine"),
        (
            {"mapped_port": 7001, "mapped_by": "UPnP", "mapped_reached": True},
            "others can dial this machine at port 7001 of its router (UPnP)",
        ),
        (
            {"mapped_port": 7001, "mapped_by": "UPnP"},
            "promised its port 7001 (UPnP), but it does not lead here",
        ),
        ({"not_mapped": ""}, "none of its ports answers the coordinator"),
    ],
)
def test_the_direct_path_in_words(changes: dict[str, object], words: str) -> None:
    assert said(replace(FOUND, **changes))["direct path"].endswith(words)  # type: ignore[arg-type]


def test_a_symmetric_nat_and_a_proxy_rule_out_simultaneous_open() -> None:
    assert "does not work" in said(replace(FOUND, seen=through(1, 2)))["simultaneous open"]
    behind_proxy = said(replace(FOUND, proxy="192.168.1.1:3128", seen=()))
    assert behind_proxy["simultaneous open"] == "not through a proxy"
    assert behind_proxy["nat"].startswith("everything goes through the proxy 192.168.1.1:3128")


def test_without_any_relay_a_machine_that_cannot_be_dialled_fails() -> None:
    alone = replace(FOUND, relayed=False, near=())
    (relay,) = (check for check in judged(alone) if check.name == "relay")
    assert relay.status is Status.FAIL and "coordinator.relay" in relay.fix
    assert healthy(list(judged(replace(alone, reached=True))))


def test_a_slow_line_and_a_token_that_is_used_up_are_said() -> None:
    slow = {check.name: check for check in judged(replace(FOUND, up=1e5, refusal="it is used up"))}
    assert slow["line"].status is Status.WARN and "0.8 Mbit/s up" in slow["line"].detail
    assert slow["token"].status is Status.FAIL and slow["token"].detail == "it is used up"


def test_a_token_that_cannot_be_read_is_left_to_its_own_check() -> None:
    assert list(check_reach("tw1_truncated", torch.device("cpu"))) == []
