"""Reads the tensors of a Hugging Face checkpoint by byte ranges, only those that are needed. Torch-free.

A safetensors file starts with 8 bytes of header length and a JSON header with each tensor's dtype, shape and
byte range. A checkpoint is one such file or an index of several. Nothing is unpickled. All sizes are checked
before anything is loaded, so an error leaves nothing half loaded.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from node.checkpoints.families import FileTensor, tensors
from node.checkpoints.hub import INDEX, SINGLE
from node.config.schema import ModelSection
from node.model.units import EMBED, HEAD
from wire.errors import DataError

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PIECE_BYTES = 32 << 20
"""Longest single read."""
MOST_HEADER_BYTES = 100 << 20
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
_PREFIX = "transformer."
"""GPT-2 checkpoints of the base model have no such prefix."""

Weights = dict[str, dict[str, np.ndarray]]
"""float32 parameters by unit and name."""


class Files(Protocol):
    """A checkpoint's files."""

    where: str
    """Names the checkpoint in messages."""

    async def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is no such file."""
        ...

    async def read(self, name: str, start: int, end: int) -> bytes:
        """Exactly the bytes `start` to `end` of a file. Raises DataError."""
        ...

    def digest(self, name: str) -> str:
        """The file's SHA-256 in hex; empty if it is not known."""
        ...


class FolderFiles:
    """`Files` of a folder on disk."""

    def __init__(self, folder: Path, digests: Mapping[str, str] | None = None) -> None:
        self.where = str(folder)
        self._folder = folder
        self._digests = digests or {}

    async def size(self, name: str) -> int | None:
        path = self._folder / name
        return path.stat().st_size if path.is_file() else None

    async def read(self, name: str, start: int, end: int) -> bytes:
        def work() -> bytes:
            with (self._folder / name).open("rb") as file:
                file.seek(start)
                return file.read(end - start)

        try:
            data = await asyncio.to_thread(work)
        except OSError as error:
            raise DataError(f"cannot read {self._folder / name}: {error.strerror}") from error
        if len(data) != end - start:
            raise DataError(f"{self._folder / name} is truncated: {start + len(data)} of {end} bytes")
        return data

    def digest(self, name: str) -> str:
        return self._digests.get(name, "")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Checkpoint:
    """One checkpoint; headers are read once."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._map: dict[str, str] | None = None
        self._headers: dict[str, tuple[bytes, dict[str, _Place]]] = {}

    async def read(self, model: ModelSection, units: Sequence[str]) -> Weights:
        """The parameters of these units.

        Raises DataError in one line for a missing tensor, another shape or dtype, a truncated file or, where
        a file is read as a whole, another SHA-256.
        """
        wanted: list[tuple[str, str, FileTensor, _Place]] = []
        for unit in units:
            for name, tensor in tensors(model, unit).items():
                wanted.append((unit, name, tensor, await self._find(model, unit, tensor)))
        found = await self._read_places({place for *_, place in wanted})
        weights: Weights = {unit: {} for unit in units}
        for unit, name, tensor, place in wanted:
            array = _float32(found[place], place)
            if tensor.first_rows:
                array = array[: tensor.shape[0]]
            weights[unit][name] = np.ascontiguousarray(array.T if tensor.transposed else array)
        return weights

    async def check(self, model: ModelSection, units: Sequence[str]) -> None:
        """Look for every tensor of these units by the files' headers alone. Raises as `read`."""
        for unit in units:
            for tensor in tensors(model, unit).values():
                await self._find(model, unit, tensor)

    async def _find(self, model: ModelSection, unit: str, tensor: FileTensor) -> _Place:
        if self._map is None:
            self._map = await self._weight_map()
        names = [tensor.name]
        if model.tied and tensor.name == "lm_head.weight":
            names += [other.name for name, other in tensors(model, EMBED).items() if name == "tokens.weight"]
        names += [name.removeprefix(_PREFIX) for name in names]
        name = next((name for name in names if name in (self._map or {})), None)
        where = self._files.where
        if name is None:
            hint = "" if unit != HEAD else "; is model.tied right?"
            raise DataError(f"{where} has no tensor {tensor.name}, which unit {unit} needs{hint}")
        place = (await self._header(self._map[name]))[1].get(name)
        if place is None:
            raise DataError(f"{where}/{self._map[name]} lacks tensor {name}, which {INDEX} puts there")
        shape = place.shape
        if tensor.first_rows and len(shape) == 2 and shape[0] >= tensor.shape[0]:
            shape = (tensor.shape[0], *shape[1:])
        if shape != tensor.shape:
            raise DataError(
                f"{where}: tensor {name} has shape {list(place.shape)}, expected {list(tensor.shape)}"
            )
        if place.dtype not in _DTYPES:
            raise DataError(f"{where}: tensor {name} is {place.dtype}; expected {', '.join(_DTYPES)}")
        return place

    async def _weight_map(self) -> dict[str, str]:
        """The file of each tensor."""
        files = self._files
        if (size := await files.size(INDEX)) is not None:
            values = _json(await files.read(INDEX, 0, size), f"{files.where}/{INDEX}").get("weight_map")
            if not isinstance(values, dict) or not all(
                isinstance(name, str) and PurePosixPath(name).name == name for name in values.values()
            ):
                raise DataError(f"{files.where}/{INDEX} has no weight_map of tensors to files")
            return values
        if await files.size(SINGLE) is not None:
            return dict.fromkeys((await self._header(SINGLE))[1], SINGLE)
        for name in PICKLED:
            if await files.size(name) is not None:
                raise DataError(
                    f"{files.where} has only pickled weights ({name}), which are not read because they can "
                    "run code: load them with transformers and save them with save_pretrained, which writes "
                    "safetensors"
                )
        raise DataError(f"{files.where} has neither {SINGLE} nor {INDEX}")

    async def _header(self, name: str) -> tuple[bytes, dict[str, _Place]]:
        """A file's first bytes, up to its data, and its tensors."""
        if name not in self._headers:
            self._headers[name] = await self._read_header(name)
        return self._headers[name]

    async def _read_header(self, name: str) -> tuple[bytes, dict[str, _Place]]:
        where = f"{self._files.where}/{name}"
        size = await self._files.size(name)
        if size is None:
            raise DataError(f"{where} is missing")
        if size < 8:
            raise DataError(f"{where} is truncated: {size} bytes")
        first = await self._files.read(name, 0, 8)
        length = int.from_bytes(first, "little")
        if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            raise DataError(
                f"{where} is truncated or no safetensors file: a header of {length} bytes in {size}"
            )
        text = await self._files.read(name, 8, 8 + length)
        places: dict[str, _Place] = {}
        for tensor, entry in _json(text, where).items():
            if tensor == "__metadata__":
                continue
            try:
                dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
                start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            except (TypeError, KeyError, ValueError) as error:
                raise DataError(
                    f"{where} is no safetensors file: its header is damaged at {tensor}"
                ) from error
            width = _DTYPES.get(dtype)
            if not 8 + length <= start <= end or (width and end - start != width * prod(shape)):
                raise DataError(
                    f"{where} is damaged: {tensor} has {end - start} bytes for {list(shape)} {dtype}"
                )
            if end > size:
                raise DataError(f"{where} is truncated: {tensor} ends at byte {end} of {size}")
            places[tensor] = _Place(name, dtype, shape, start, end)
        return first + text, places

    async def _read_places(self, places: set[_Place]) -> dict[_Place, bytes]:
        """Every tensor's bytes, file by file in ascending order; neighbours are read together."""
        found: dict[_Place, bytes] = {}
        ordered = sorted(places, key=lambda place: (place.file, place.start))
        for name in dict.fromkeys(place.file for place in ordered):
            own = [place for place in ordered if place.file == name]
            head, every = await self._header(name)
            digest = sha256(head)
            for run in _runs(own):
                data = bytearray()
                for start in range(run[0].start, run[-1].end, PIECE_BYTES):
                    data += await self._files.read(name, start, min(run[-1].end, start + PIECE_BYTES))
                digest.update(data)
                for place in run:
                    first = place.start - run[0].start
                    found[place] = bytes(memoryview(data)[first : first + place.end - place.start])
            expected = self._files.digest(name)
            if expected and set(own) == set(every.values()) and digest.hexdigest() != expected:
                raise DataError(
                    f"{self._files.where}/{name} is damaged: its SHA-256 is {digest.hexdigest()}, "
                    f"expected {expected}"
                )
        return found


def _runs(places: Sequence[_Place]) -> list[list[_Place]]:
    """Tensors of one file that follow each other without a gap."""
    runs: list[list[_Place]] = []
    for place in places:
        if runs and runs[-1][-1].end == place.start:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _float32(data: bytes, place: _Place) -> np.ndarray:
    if place.dtype == "BF16":
        values = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, dtype="<f4" if place.dtype == "F32" else "<f2").astype(np.float32)
    return values.reshape(place.shape)


def _json(data: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is damaged: its JSON cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise DataError(f"{where} is damaged: a JSON object is expected")
    return values
