import sys

if sys.platform == "win32":
    # Checked before the import of modules that Windows lacks.
    sys.stderr.write(
        "thinwire: error: thinwire does not run on Windows directly: install WSL (`wsl --install`) and run "
        "it there, where the GPU works too\n"
    )
    raise SystemExit(2)
