"""The program: command line, configuration, coordinator, stage, model, training, telemetry."""

import sys


def program(module: str) -> list[str]:
    """The command that runs a module of this package, such as `cli.main`, with this interpreter.

    The package is `node` in a checkout and `thinwire.node` where a wheel is installed.
    """
    return [sys.executable, "-m", f"{__name__}.{module}"]
