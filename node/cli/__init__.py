import signal
import sys

if sys.platform == "win32":
    # Checked before the import of modules that Windows lacks.
    sys.stderr.write(
        "thinwire: error: thinwire does not run on Windows directly: install WSL (`wsl --install`) and run "
        "it there, where the GPU works too\n"
    )
    raise SystemExit(2)

if sys.argv[0].endswith("/thinwire") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports ends the process without a traceback. `main.program` restores the handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
