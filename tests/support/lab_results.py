"""Made-up results of the laboratory: a calibration that found what was asked, cells, a whole file."""

from typing import Any

from node.lab.calibration import Calibration, Measured
from node.lab.results import FORMAT
from node.lab.shape import PAYLOAD_SHARE, Shape, uniform


def calibration(shape: Shape) -> Calibration:
    found = [
        Measured(
            sender=sender,
            receiver=1 - sender,
            asked_mbit=shape.links[0].up_mbit,
            payload_mbit=shape.links[0].up_mbit * PAYLOAD_SHARE,
            asked_rtt_ms=shape.rtt_ms,
            rtt_ms=shape.rtt_ms,
            seconds=1.5,
            congestion_control="bbr",
        )
        for sender in (0, 1)
    ]
    return Calibration(label=shape.label, attempts=1, links=tuple(found))


def cell(codecs: str, mbit: float, tokens: float, **key: Any) -> dict[str, Any]:
    forward, backward = codecs.split("/")
    spread = {"median": tokens, "least": 0.9 * tokens, "most": 1.1 * tokens}
    return {
        "key": {
            "forward_codec": forward,
            "backward_codec": backward,
            "microbatch": 1,
            "window": "auto",
            "seed": 0,
            "shape": f"{mbit:g}",
            **key,
        },
        "mbit": mbit,
        "rtt_ms": 0.0,
        "tokens_per_second": spread,
        "measured_steps": 3,
        "step_seconds": {"median": 1000 / tokens, "least": 1.0, "most": 1.0},
        "bits_forward": 4.41,
        "bits_backward": 6.25,
        "wires": [{"use": 0.5}, {"use": 0.97}],
        "floor": {"share": 0.93, "binds": "link 0 to 1"},
        "of_unthrottled": tokens / 2000,
        "curve": [[step, 0.5, 5.0 / (step + 1)] for step in range(20)],
    }


def results(*cells: dict[str, Any]) -> dict[str, Any]:
    shape = uniform("100", 0.0, 1)
    return {
        "format": FORMAT,
        "profile": "test",
        "profile_sha256": "0",
        "machine": {
            "commit": "0123456789abcdef with changes",
            "kernel": "6.1",
            "processor": "a processor",
            "cores": 2,
            "gpus": [],
            "versions": {"torch": "2.11"},
        },
        "network": {"topology": "links", "qdisc": "tbf", "delay_method": "none", "congestion_control": "bbr"},
        "model": {"family": "gpt2", "layers": 48, "hidden": 1600, "sequence": 1024},
        "training": {"global_batch": 32},
        "text": "books.txt, the first 2300 bytes",
        "stages": 4,
        "device": "cpu",
        "seeds": [0],
        "finished": True,
        "calibrations": [calibration(shape).as_json()],
        "runs": [{}],
        "cells": list(cells),
    }
