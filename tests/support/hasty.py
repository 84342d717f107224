"""`thinwire` with less patience for members that keep others waiting, so that a test of them takes seconds.

python -m tests.support.hasty coordinator RUN.toml ...
"""

import sys

from node.cli.main import main as thinwire
from node.run_state import failures, snapshot_schedule

SECONDS = 10.0
"""More than an honest process stands still on a busy machine."""


def main() -> int:
    failures.STEP_PATIENCE = snapshot_schedule.PATIENCE = SECONDS
    return thinwire()


if __name__ == "__main__":
    sys.exit(main())
