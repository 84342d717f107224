"""One file in place of many: the raw steps, the histories and the words of a laboratory's runs, packed."""

import shutil
import tarfile
from pathlib import Path

FOLDERS = ("raw", "logs", "runs")


def pack_logs(out: Path) -> Path | None:
    """Move the `FOLDERS` of an output directory into one `logs.tar.xz`; None when there is nothing.

    A laboratory that goes on in the same directory makes new folders, and the next archive has a number.
    The folders go only once the archive is whole.
    """
    folders = [out / name for name in FOLDERS if (out / name).is_dir()]
    if not folders:
        return None
    names = (f"logs{f'-{number}' if number > 1 else ''}.tar.xz" for number in range(1, 10_000))
    path = next(out / name for name in names if not (out / name).exists())
    partial = path.with_name(path.name + ".partial")
    with tarfile.open(partial, "w:xz") as archive:
        for folder in folders:
            archive.add(folder, arcname=folder.name)
    partial.replace(path)
    for folder in folders:
        shutil.rmtree(folder)
    return path
