"""`python -m node.stage.measure_block gpu|cpu`: times of a block of the run that standard input describes, as
JSON. A process of its own, so that who asks needs no torch (`thinwire plan --measure`)."""

import sys

import torch

from node.run_file.loader import from_json
from node.stage.block_measure import measured_times
from node.stage.machine_info import fix_order


def main() -> int:
    kind = sys.argv[1]
    if kind == "gpu" and not torch.cuda.is_available():
        sys.stderr.write("torch finds no GPU here: measure this machine's CPU with --device cpu\n")
        return 2
    device = torch.device("cuda" if kind == "gpu" else "cpu", 0)
    fix_order(device)
    times = measured_times(from_json(sys.stdin.read()), device)
    if times is None:
        sys.stderr.write(f"a block of this run could not be computed on this machine's {kind}\n")
        return 2
    sys.stdout.write(times.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
