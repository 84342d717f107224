"""Shapers' parameters, and the laboratory on paper."""

import socket

import pytest

from node.lab.calibration import Measured, arrived, steady
from node.lab.relay import VNET_HEADER, Way
from node.lab.shape import (
    PAYLOAD_SHARE,
    burst_bytes,
    netem_packets,
    queue_bytes,
    shaper_commands,
    uniform,
)
from node.lab.topology import COORDINATOR_ADDRESS, LAB, lay_out, node_address, node_name

CHAIN = ((0, 1), (1, 2), (2, 3))


def measured(payload: float, rtt: float = 20.0) -> Measured:
    return Measured(
        sender=0,
        receiver=1,
        asked_mbit=100.0,
        payload_mbit=payload,
        asked_rtt_ms=20.0,
        rtt_ms=rtt,
        seconds=1.5,
        congestion_control="cubic",
    )


@pytest.mark.parametrize(
    ("mbit", "burst"), [(1, 3072), (6, 3072), (10, 5000), (100, 50_000), (1000, 500_000)]
)
def test_a_bucket_holds_4_ms_and_never_less_than_two_packets(mbit: float, burst: int) -> None:
    assert burst_bytes(mbit) == burst


def test_queues_grow_with_the_round_trip() -> None:
    assert queue_bytes(100, 0) == 50_000 + 1_250_000
    assert queue_bytes(100, 100) == 50_000 + 2_500_000
    # netem must hold all that is on its way, as full packets.
    assert netem_packets(1000, 200) * 1500 > 125e6 * 0.2


def test_what_the_kernel_is_asked_for() -> None:
    (tbf,) = shaper_commands("link0", 20.0, 0.0, netem=False)
    assert " ".join(tbf) == (
        "qdisc add dev link0 root handle 1: tbf rate 20000000bit burst 10000 limit 260000"
    )
    _, netem = shaper_commands("link0", 20.0, 30.0, netem=True)
    assert "parent 1:1 handle 10: netem delay 15ms limit" in " ".join(netem)
    (slow,) = shaper_commands("link0", 0.5, 0.0, netem=False)
    assert "tbf rate 500000bit burst 3072 limit" in " ".join(slow)


def test_a_rate_of_two_directions() -> None:
    shape = uniform("100/20", 50.0, 3)
    assert shape.label == "100/20 + 50 ms"
    assert (shape.links[2].up_mbit, shape.links[2].down_mbit, shape.rtt_ms) == (100.0, 20.0, 50.0)
    assert shape.busiest_mbit == 20.0
    for wrong in ("", "-1", "1/0", "inf", "nan", "1/2/3", "10 Mbit"):
        with pytest.raises(ValueError):
            uniform(wrong, 0.0, 1)


def test_a_measured_link_may_be_five_percent_off() -> None:
    right = 100 * PAYLOAD_SHARE
    assert measured(right).fault() is None
    assert measured(1.049 * right).fault() is None
    assert measured(0.951 * right).fault() is None
    slow, fast = measured(0.9 * right).fault(), measured(1.1 * right).fault()
    assert slow is not None and "off by -10.0 %" in slow and "found 90 (" in slow
    assert fast is not None and "lets too much through" in fast


def test_a_measured_round_trip_may_be_five_percent_off() -> None:
    right = 100 * PAYLOAD_SHARE
    assert measured(right, rtt=20.9).fault() is None
    late = measured(right, rtt=21.5).fault()
    assert late == "the link from stage 0 to 1 has a round trip of 21.50 ms instead of 20 ms"
    assert measured(right, rtt=18.0).fault() is not None


def test_a_rate_counts_once_it_is_even() -> None:
    even = [(100, 1.0)] * 6
    assert steady(even)
    assert not steady(even[:5])
    assert not steady([*even[:5], (150, 1.0)])
    # What came before does not matter any more.
    assert steady([(10, 1.0), (300, 1.0), *even])


@pytest.mark.parametrize("relay", [False, True])
def test_neighbours_have_a_wire_and_the_coordinator_one_to_each(relay: bool) -> None:
    plan = lay_out(4, CHAIN, topology="links", relay=relay)
    assert [(wire.lower, wire.higher) for wire in plan.wires] == list(CHAIN)
    for wire in plan.wires:
        assert wire.up.namespace == node_name(wire.lower)
        assert wire.down.namespace == node_name(wire.higher)
    routes = [(where, words[2]) for where, words in plan.commands if words[:2] == ("route", "add")]
    for low, high in CHAIN:
        assert (node_name(low), f"{node_address(high)}/32") in routes
        assert (node_name(high), f"{node_address(low)}/32") in routes
    for stage in range(4):
        assert ("coordinator", f"{node_address(stage)}/32") in routes
    # Stages that are no neighbours cannot reach each other: no traffic takes a way that is not shaped.
    assert (node_name(0), f"{node_address(2)}/32") not in routes
    assert len(plan.ways) == (6 if relay else 0)
    assert not plan.forwards


@pytest.mark.parametrize("topology", ["links", "interfaces"])
def test_congestion_control_is_set_only_on_routes_between_nodes(topology: str) -> None:
    def routes(name: str) -> dict[tuple[str, str], tuple[str, ...]]:
        plan = lay_out(4, CHAIN, topology=topology, relay=False, congestion_control=name)
        return {(where, words[2]): words for where, words in plan.commands if words[:2] == ("route", "add")}

    plain, named = routes(""), routes("cubic")
    assert not any("congctl" in words for words in plain.values())
    chosen = {key for key, words in named.items() if words[-2:] == ("congctl", "cubic")}
    assert named.keys() == plain.keys()
    assert {where for where, _ in chosen} == {node_name(stage) for stage in range(4)}
    assert not any(target.startswith(COORDINATOR_ADDRESS) for _, target in chosen)


def test_no_two_devices_of_a_namespace_share_a_name() -> None:
    for topology in ("links", "interfaces"):
        for relay in (False, True):
            plan = lay_out(4, CHAIN, topology=topology, relay=relay)
            made = []
            for _, words in plan.commands:
                if words[:2] == ("link", "add"):
                    where = [words[i + 1] for i, word in enumerate(words) if word == "netns"]
                    ends = [words[2], words[words.index("name") + 1]]
                    made += list(zip([*where, LAB][:2], ends, strict=True))
            assert len(made) == len(set(made)) > 8
            assert all(len(name) < 16 for _, name in made)


def test_interfaces_forward_every_pair() -> None:
    plan = lay_out(3, (), topology="interfaces", relay=True)
    assert {(way.source, way.target) for way in plan.ways} == {
        (f"port{a}", f"port{b}") for a in range(3) for b in range(3) if a != b
    }
    assert all(set(way.wires) == {int(way.source[4:]), int(way.target[4:])} for way in plan.ways)
    assert lay_out(3, (), topology="interfaces", relay=False).forwards
    assert plan.lab_devices == ("port0", "port1", "port2")


def test_the_relay_gives_frames_to_whom_they_are_for() -> None:
    way = Way("port0", None, "02:00:0a:4d:00:02")  # type: ignore[arg-type]  # where it leads is not asked
    header = bytes(VNET_HEADER)
    assert way.takes(header + bytes.fromhex("02000a4d0002") + bytes(50))
    assert way.takes(header + bytes.fromhex("ffffffffffff") + bytes(50))
    assert not way.takes(header + bytes.fromhex("02000a4d0003") + bytes(50))
    assert Way("relay0a", None, "").takes(header + bytes.fromhex("02000a4d0003"))  # type: ignore[arg-type]


def test_what_arrived_counts_before_a_program_takes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sender:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        with receiver:
            full = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            assert arrived(sender, receiver) == 0
            sender.sendall(bytes(3 * full))
            there = receiver.recv(3 * full, socket.MSG_PEEK | socket.MSG_WAITALL)
            assert len(there) == arrived(sender, receiver) == 3 * full
