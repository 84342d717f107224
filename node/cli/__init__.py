import sys

if sys.platform == "win32":
    # Before modules that Windows lacks are imported.
    sys.stderr.write(
        "thinwire: error: this program does not run on Windows itself, which lacks parts of it: install WSL "
        "(`wsl --install`) and run it in there, where the GPU works too\n"
    )
    raise SystemExit(2)
