"""Reads only the needed tensors of a Hugging Face checkpoint, by byte ranges. Torch-free.

A safetensors file starts with the header's length in 8 bytes and a JSON header with each tensor's dtype,
shape and byte range. A checkpoint is one such file, or an index of several. Nothing is unpickled. All sizes
are checked before anything is loaded, so an error leaves nothing half loaded.
"""

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from node.config.schema import ModelSection
from node.data.text import LFS_POINTER, check_link
from node.model.families.family import FileTensor
from node.model.units import EMBED, HEAD, parameter_specs
from node.state.families import OUTPUT, tensors
from node.state.hub import INDEX, PIECE_BYTES, SINGLE, read_range
from wire.errors import DataError, shortened

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MOST_HEADER_BYTES = 16 << 20
"""The most bytes of a checkpoint's headers and index together. The largest models have a tenth of that."""
MOST_TENSORS = 100_000
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_FLOATS = (*_NUMPY, "BF16")
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "U8": 1}
_BLOCKS, _SCALES = "_blocks", "_scales"
"""The suffixes of a tensor's codes and scales in MXFP4."""
_MXFP4_BLOCK = 32
"""The number of elements per scale."""
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
_FP4_VALUES = np.concatenate((_FP4, -_FP4))
_PREFIXES = ("transformer.", "model.")
"""Prefixes of names that are missing in a checkpoint of a base model without its head."""

_ADAPTED = ("lora_A", "lora_B", "base_layer", "modules_to_save")
"""Parts of the names of tensors that PEFT adds or renames."""
_QUANTIZED = (
    ".qweight",
    ".qzeros",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".SCB",
    ".absmax",
)
"""Suffixes of tensors of quantized weights. The weights without these are other weights."""
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Suffixes of tensors that older versions saved although they follow from the configuration."""

_TINY = 1e-16
"""The largest value in a row that was never trained: Llama 3's reserved tokens have 1e-24."""

Weights = dict[str, dict[str, np.ndarray]]
"""Parameters by unit and name, in float32, or as the bits of bfloat16 if requested as stored."""
BITS = np.dtype(np.uint16)
"""The dtype that holds the bits of bfloat16, which numpy lacks."""


class CheckpointError(DataError):
    """The contents of a checkpoint's files are wrong, so another attempt to read them would not help."""


class Files(Protocol):
    """A checkpoint's files."""

    where: str
    """The name of the checkpoint in messages."""
    piece_bytes: int
    """The most bytes to read at a time."""

    async def size(self, name: str) -> int | None:
        """The size of a file in bytes; None if it does not exist."""
        ...

    async def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` to `end` of a file. Raises DataError if they cannot be read."""
        ...

    def digest(self, name: str) -> str:
        """The file's SHA-256 in hex; empty if unknown."""
        ...


class FolderFiles:
    """Implements `Files` for a folder on disk."""

    piece_bytes = sys.maxsize

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder

    async def size(self, name: str) -> int | None:
        path = self._folder / name
        check_link(path)
        return path.stat().st_size if path.is_file() else None

    async def read(self, name: str, start: int, end: int) -> bytes:
        return await asyncio.to_thread(read_range, self._folder / name, start, end)

    def digest(self, name: str) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a tensor's data."""

    tensor: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


_Stored = tuple[_Place, ...]
"""The position of a tensor, or the positions of its codes and scales."""


class Checkpoint:
    def __init__(self, files: Files) -> None:
        self._files = files
        self._map: dict[str, str] | None = None
        self._headers: dict[str, tuple[bytes, dict[str, _Place]]] = {}
        self._json_left = MOST_HEADER_BYTES
        self._tensors_left = MOST_TENSORS

    async def read(self, model: ModelSection, units: Sequence[str], *, as_stored: bool = False) -> Weights:
        """The parameters of these units; with `as_stored`, bfloat16 parameters as their bits.

        Raises CheckpointError with one line for a missing tensor, another shape or dtype, infinities and
        NaNs, a truncated file or, if a whole file is read, another SHA-256. Raises DataError for files that
        cannot be read.
        """
        wanted: list[tuple[str, str, FileTensor, _Stored]] = []
        for unit in units:
            for name, parts in tensors(model, unit).items():
                for tensor in parts:
                    wanted.append((unit, name, tensor, await self._find(model, unit, tensor)))
        contents = await self._read_places({place for *_, stored in wanted for place in stored})
        # On a thread, because a unit may have gigabytes.
        return await asyncio.to_thread(self._assembled, model, units, wanted, contents, as_stored)

    def _assembled(
        self,
        model: ModelSection,
        units: Sequence[str],
        wanted: Sequence[tuple[str, str, FileTensor, _Stored]],
        contents: Mapping[_Place, memoryview],
        as_stored: bool,
    ) -> Weights:
        """The units' parameters from their tensors' bytes. Raises CheckpointError."""
        pieces: dict[tuple[str, str], list[np.ndarray]] = {}
        for unit, name, tensor, (place, *scales) in wanted:
            if scales:
                array = _from_mxfp4(contents[place], contents[scales[0]], place.shape)
            else:
                array = _as_stored(contents[place], place)
            if not _is_finite(array):
                count = array.size - np.count_nonzero(np.isfinite(_float32(array)))
                raise CheckpointError(
                    f"{self._files.where}/{place.file}: tensor {place.tensor} has {count:,} infinities or "
                    f"NaNs among {array.size:,} values: copy the file again, or use another checkpoint"
                )
            if tensor.first_rows:
                array = array[: tensor.shape[0]]
            pieces.setdefault((unit, name), []).append(tensor.read(array))
        weights: Weights = {unit: {} for unit in units}
        for unit in units:
            for spec in parameter_specs(model, unit):
                own = pieces.pop((unit, spec.name))
                if not as_stored or any(piece.dtype != BITS for piece in own):
                    own = [_float32(piece) for piece in own]
                whole = own[0] if len(own) == 1 else np.concatenate(own)
                weights[unit][spec.name] = np.ascontiguousarray(whole.reshape(spec.shape))
        return weights

    async def check(self, model: ModelSection, units: Sequence[str]) -> list[str]:
        """Check every tensor of these units by the files' headers alone. Raises the errors of `read`, and
        CheckpointError for a tensor that is in two files.

        Returns the tensors in these files that the units do not need. Refused are those without which a
        needed weight is another one.
        """
        needed = {OUTPUT} if model.tied else set()
        self._map = self._map or await self._weight_map()
        if model.tied and OUTPUT in self._map:
            await self._place(OUTPUT, tensors(model, EMBED)["tokens.weight"][0])
        for unit in units:
            for parts in tensors(model, unit).values():
                for tensor in parts:
                    needed |= {place.tensor for place in await self._find(model, unit, tensor)}
        files: dict[str, str] = {}
        for file, (_, places) in self._headers.items():
            for name in places:
                if files.setdefault(name, file) != file and name in needed:
                    raise CheckpointError(
                        f"{self._files.where} has tensor {name} in {files[name]} and in {file}: save it again"
                    )
        left = sorted(name for name in files.keys() - needed if not name.endswith(_BUFFERS))
        if wrong := _not_whole(left):
            raise CheckpointError(f"{self._files.where} has {wrong}")
        return left

    async def heads_differ(self, model: ModelSection) -> bool:
        """Whether the checkpoint of a tied model has a head that differs from its embedding. Raises the
        errors of `read`."""
        self._map = self._map or await self._weight_map()
        (embed,) = tensors(model, EMBED)["tokens.weight"]
        names = [_present(self._map, name) for name in (embed.name, OUTPUT)]
        if None in names:
            return False
        places = [await self._place(name, embed) for name in names if name is not None]
        first, second = places
        if first.dtype != second.dtype:
            return True  # rounding may make them differ; transformers keeps both
        for start in range(0, first.end - first.start, PIECE_BYTES):
            stop = min(first.end - first.start, start + PIECE_BYTES)
            embed_bytes, head_bytes = [
                await self._files.read(place.file, place.start + start, place.start + stop)
                for place in places
            ]
            if embed_bytes != head_bytes:
                return True
        return False

    async def untrained(self, model: ModelSection, tokens: Iterable[int]) -> list[int]:
        """The tokens whose rows of the head are as good as zero. Raises the errors of `read`."""
        (embed,) = tensors(model, EMBED)["tokens.weight"]
        (place,) = await self._find(model, HEAD, replace(embed, name=OUTPUT))
        found = []
        width = (place.end - place.start) // place.shape[0]
        for token in (token for token in tokens if token < place.shape[0]):
            start = place.start + token * width
            data = await self._files.read(place.file, start, start + width)
            row = _float32(_as_stored(memoryview(data), replace(place, shape=place.shape[1:])))
            if np.abs(row).max() <= _TINY:
                found.append(token)
        return found

    async def _find(self, model: ModelSection, unit: str, tensor: FileTensor) -> _Stored:
        self._map = self._map or await self._weight_map()
        names = [tensor.name]
        (embed,) = tensors(model, EMBED)["tokens.weight"]
        if model.tied and tensor.name in (OUTPUT, embed.name):
            # Both names mean one weight, which may have either name, so both units read the same.
            names = [embed.name, OUTPUT]
        stored = (_present(self._map, name) for name in names)
        name = next((name for name in stored if name is not None), None)
        if name is None and (blocks := _present(self._map, f"{tensor.name}{_BLOCKS}")) is not None:
            return await self._packed_places(blocks, tensor)
        if name is None:
            hint = _hint(self._map, tensor.name)
            if tensor.name == OUTPUT and not hint:
                hint = (
                    ": save it with its head (from the class that ends in ForCausalLM or LMHeadModel), or, "
                    "if its head is the embedding, set tie_word_embeddings to true in config.json"
                )
            hint = hint or ": copy the checkpoint again, or save it again with save_pretrained"
            raise CheckpointError(
                f"{self._files.where} has no tensor {tensor.name}, which unit {unit} needs{hint}"
            )
        return (await self._place(name, tensor),)

    async def _packed_places(self, blocks: str, tensor: FileTensor) -> _Stored:
        """The positions of an MXFP4 tensor's codes and scales, whose blocks run along the inputs."""
        *leading, inputs, outputs = tensor.shape
        if inputs % _MXFP4_BLOCK:
            raise CheckpointError(
                f"{self._files.where}: {blocks} has blocks of {_MXFP4_BLOCK} inputs, and there are {inputs}"
            )
        shapes = {
            blocks: (*leading, outputs, inputs // _MXFP4_BLOCK, _MXFP4_BLOCK // 2),
            f"{blocks.removesuffix(_BLOCKS)}{_SCALES}": (*leading, outputs, inputs // _MXFP4_BLOCK),
        }
        places = []
        for name, shape in shapes.items():
            if self._map is None or name not in self._map:
                raise CheckpointError(f"{self._files.where} has no tensor {name}, which {blocks} needs")
            places.append(await self._place(name, FileTensor(name, shape), ("U8",)))
        return tuple(places)

    async def _place(self, name: str, tensor: FileTensor, dtypes: Sequence[str] = _FLOATS) -> _Place:
        """The position of a tensor in the weight map, after checking its shape and dtype."""
        assert self._map is not None, "the name is from the map"
        where = self._files.where
        place = (await self._header(self._map[name]))[1].get(name)
        if place is None:
            raise CheckpointError(
                f"{where}/{self._map[name]} lacks tensor {name}, which {INDEX} puts there: copy both again"
            )
        if place.dtype not in dtypes:
            expected = f"expected {', '.join(dtypes)}: save it as one of these"
            raise CheckpointError(f"{where}: tensor {name} is {place.dtype}; {expected}")
        shape = place.shape
        if tensor.first_rows and len(shape) == 2 and shape[0] >= tensor.shape[0]:
            shape = (tensor.shape[0], *shape[1:])
        if shape != tensor.shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(place.shape)}, expected {list(tensor.shape)}: its "
                "config.json describes another model"
            )
        return place

    async def _weight_map(self) -> dict[str, str]:
        """The file of each tensor: the single file or else by the index, as in transformers."""
        files = self._files
        if await files.size(SINGLE) is not None:
            return dict.fromkeys((await self._header(SINGLE))[1], SINGLE)
        if (size := await files.size(INDEX)) is not None:
            where = f"{files.where}/{INDEX}"
            self._count_json(size, where)
            data = await files.read(INDEX, 0, size)
            self._count_tensors(data.count(b".safetensors"), where)
            values = _json(data, where).get("weight_map")
            if not isinstance(values, dict):
                raise CheckpointError(f"{where} has no weight_map of tensors to files: copy it again")
            for file in values.values():
                if not _is_file_name(file):
                    raise CheckpointError(
                        f"{where} puts a tensor into {shortened(repr(file), 100)}, but names of files beside "
                        "it are expected: copy the whole folder again"
                    )
            return values
        for name in PICKLED:
            if await files.size(name) is not None:
                raise CheckpointError(
                    f"{files.where} has only pickled weights ({name}), which are not read because they can "
                    "run code: load them with transformers and save them with save_pretrained, which writes "
                    "safetensors"
                )
        raise CheckpointError(
            f"{files.where} has neither {SINGLE} nor {INDEX}: copy what is missing, or give a folder as "
            "save_pretrained writes it"
        )

    def _count_json(self, size: int, where: str) -> None:
        self._json_left -= size
        if self._json_left < 0:
            raise CheckpointError(
                f"{where} has {size:,} bytes of JSON; with the checkpoint's other headers that exceeds "
                f"{MOST_HEADER_BYTES:,}, more than any model needs"
            )

    def _count_tensors(self, count: int, where: str) -> None:
        self._tensors_left -= count
        if self._tensors_left < 0:
            raise CheckpointError(
                f"{where} names more than {MOST_TENSORS:,} tensors, more than any model has"
            )

    async def _header(self, name: str) -> tuple[bytes, dict[str, _Place]]:
        """A file's bytes before its data, and its tensors."""
        if name not in self._headers:
            self._headers[name] = await self._read_header(name)
        return self._headers[name]

    async def _read_header(self, name: str) -> tuple[bytes, dict[str, _Place]]:
        where = f"{self._files.where}/{name}"
        size = await self._files.size(name)
        if size is None:
            raise CheckpointError(f"{where}, which {INDEX} names, is missing: copy it there")
        if size < 8:
            raise CheckpointError(f"{where} is truncated: {size} bytes, less than a header: copy it again")
        first = await self._files.read(name, 0, 8)
        length = int.from_bytes(first, "little")
        if not 2 <= length <= size - 8:
            if first == LFS_POINTER[:8]:
                raise CheckpointError(f"{where} is a pointer of Git LFS; fetch the file itself: git lfs pull")
            raise CheckpointError(
                f"{where} is truncated or not a safetensors file: a header of {length} bytes in {size}: copy "
                "it again"
            )
        self._count_json(length, where)
        text = await self._files.read(name, 8, 8 + length)
        self._count_tensors(text.count(b'"data_offsets"'), where)
        places: dict[str, _Place] = {}
        for tensor, entry in _json(text, where).items():
            if tensor == "__metadata__":
                continue
            try:
                dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            except (TypeError, KeyError, ValueError):
                dtype, shape, start, end = None, (), None, None
            numbers = (*shape, start, end)
            if type(dtype) is not str or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
                raise CheckpointError(
                    f"{where} is not a safetensors file: its header is damaged at {tensor[:100]}"
                )
            width = _DTYPES.get(dtype)
            if start > end or (width and (len(shape) > 8 or end - start != width * prod(shape))):
                raise CheckpointError(
                    f"{where} is damaged: {tensor[:100]} has {end - start} bytes for {list(shape[:8])} "
                    f"{dtype[:20]}"
                )
            if (last := 8 + length + end) > size:
                raise CheckpointError(
                    f"{where} is truncated: {tensor[:100]} ends at byte {last} of {size}: copy it again"
                )
            places[tensor] = _Place(tensor, name, dtype, shape, 8 + length + start, last)
        ordered = sorted(places.values(), key=lambda place: (place.start, place.end))
        edges = [("its header", 8 + length), *((place.tensor[:100], place.end) for place in ordered)]
        starts = [*((place.tensor[:100], place.start) for place in ordered), ("its end", size)]
        for (before, end), (after, start) in zip(edges, starts, strict=True):
            if start != end:
                wrong = "overlap" if start < end else f"are {start - end} bytes apart"
                raise CheckpointError(f"{where} is damaged: {before} and {after} {wrong}")
        return first + text, places

    async def _read_places(self, places: set[_Place]) -> dict[_Place, memoryview]:
        """The bytes of every tensor, read file by file in order. Adjacent tensors are read together."""
        contents: dict[_Place, memoryview] = {}
        ordered = sorted(places, key=lambda place: (place.file, place.start))
        for name in dict.fromkeys(place.file for place in ordered):
            own = [place for place in ordered if place.file == name]
            head, every = await self._header(name)
            expected = self._files.digest(name)
            digest = sha256(head)
            for run in _runs(own):
                first, end = run[0].start, run[-1].end
                most = self._files.piece_bytes
                pieces = [
                    await self._files.read(name, start, min(end, start + most))
                    for start in range(first, end, most)
                ]
                data = pieces[0] if len(pieces) == 1 else await asyncio.to_thread(b"".join, pieces)
                if expected:
                    await asyncio.to_thread(digest.update, data)
                for place in run:
                    contents[place] = memoryview(data)[place.start - first : place.end - first]
            if expected and set(own) == set(every.values()) and digest.hexdigest() != expected:
                raise CheckpointError(
                    f"{self._files.where}/{name} is damaged: its SHA-256 is {digest.hexdigest()}, "
                    f"expected {expected}"
                )
        return contents


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or len(name.encode(errors="replace")) > 255:
        return False
    return name.isprintable() and PurePosixPath(name).name == name


def _present(weight_map: Mapping[str, str], name: str) -> str | None:
    """The name of a tensor in a checkpoint, with or without its prefix; None if it is missing. Raises
    CheckpointError if both names exist."""
    shorter = [name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)]
    present = [candidate for candidate in (name, *shorter) if candidate in weight_map]
    if len(present) > 1:
        raise CheckpointError(
            f"the checkpoint has both {' and '.join(present)}, which mean the same: remove one of them"
        )
    return present[0] if present else None


def _hint(weight_map: Mapping[str, str], name: str) -> str:
    """What to do about a missing tensor that has another name, as of a wrapped model; else empty."""
    parts = name.split(".")
    short = ".".join(parts[1:] if len(parts) > 2 else parts)
    if wrong := _not_whole(weight_map):
        return f"; it has {wrong}"
    for other in weight_map:
        if other.endswith(f".{short}"):
            return f"; it has {other[:100]}: save the model itself, not a model that wraps it"
    return ""


def _not_whole(names: Iterable[str]) -> str:
    """A tensor of adapters or quantized weights among these, with what to do about it; else empty."""
    for name in names:
        if any(part in _ADAPTED for part in name.split(".")):
            return f"{name[:100]}: merge the adapters first (merge_and_unload)"
        if name.endswith(_QUANTIZED):
            return f"{name[:100]}, of quantized weights: use the model before it was quantized"
    return ""


def _runs(places: Sequence[_Place]) -> list[list[_Place]]:
    """Group tensors of one file that follow each other without a gap."""
    runs: list[list[_Place]] = []
    for place in places:
        if runs and runs[-1][-1].end == place.start:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _as_stored(data: memoryview, place: _Place) -> np.ndarray:
    if place.dtype == "BF16":
        return np.frombuffer(data, dtype=BITS).reshape(place.shape)
    array = np.frombuffer(data, dtype=_NUMPY[place.dtype]).reshape(place.shape)
    if place.dtype != "F64":
        return array
    with np.errstate(over="ignore"):  # infinities are refused
        return array.astype(np.float32)


def _float32(array: np.ndarray) -> np.ndarray:
    if array.dtype != BITS:
        return array.astype(np.float32)
    values = array.astype(np.uint32)
    values <<= 16
    return values.view(np.float32)


def _is_finite(array: np.ndarray) -> bool:
    """Whether all elements are finite. Others are a minimum or maximum; as bits, their sign's largest."""
    if not array.size:
        return True
    if array.dtype == BITS:
        return int(array.view(np.int16).max()) < 0x7F80 and int(array.max()) < 0xFF80
    return bool(np.isfinite((array.min(), array.max())).all())


def _from_mxfp4(codes: memoryview, scales: memoryview, shape: tuple[int, ...]) -> np.ndarray:
    """Decode float32 [..., inputs, outputs] from codes [..., outputs, blocks, 16], two per byte with the
    lower half first, and exponents of 2 with a bias of 127 (OCP Microscaling Formats 1.0, section 5.3).

    Args:
        shape: the shape of the codes.
    """
    packed = np.frombuffer(codes, dtype=np.uint8).reshape(-1, _MXFP4_BLOCK // 2)
    values = np.empty((len(packed), _MXFP4_BLOCK), dtype=np.float32)
    values[:, 0::2] = _FP4_VALUES[packed & 15]
    values[:, 1::2] = _FP4_VALUES[packed >> 4]
    exponents = np.frombuffer(scales, dtype=np.uint8).astype(np.int32) - 127
    np.ldexp(values, exponents[:, None], out=values)
    *rows, blocks, _ = shape
    return values.reshape(*rows, blocks * _MXFP4_BLOCK).swapaxes(-1, -2)


def _json(data: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: its JSON cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is damaged: a JSON object is expected")
    return values
