"""Tests of Triton kernels on a CPU, under Triton's interpreter.

Triton chooses the interpreter when a kernel is defined, so these tests, which are marked `inside`, run in a
process of their own: `tests/unit/kernels/test_in_interpreter.py` starts it and asks whether they passed; `-k`
and the name of a file choose that file. One process runs the files of a whole session, as it takes longer to
start than many of their tests. Names of these files end in `_interpreter.py`. Without Triton, which torch for
CPUs does not bring, they are skipped.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SECONDS = 1800
"""Limit for the process: it takes minutes where nothing else runs. The tests in it have their own."""

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
_there = pytest.mark.skipif(not INTERPRETED, reason="tests/unit/kernels/test_in_interpreter.py runs it")
inside = [needs_triton, _there]
"""The marks of a file whose tests all run under the interpreter."""
outside = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")


def in_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """Mark one test that runs under the interpreter, in a file that has others, too."""
    return needs_triton(_there(test))


def skip_overflow_checks() -> None:
    """Skip the interpreter's checks for overflow: half of its time, and only debugging reports them."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def accept_loop_bounds() -> None:
    """Let `tl.range` take a kernel's numbers as bounds: its own conversion fails on NumPy 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_convert(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_convert


class Interpreted:
    """Runs the tests of `files` under the interpreter, once.

    pytest writes their results, as JUnit's XML, and its output to `folder`.
    """

    def __init__(self, files: Sequence[Path], folder: Path) -> None:
        self._report, self._printed = folder / "report.xml", folder / "printed.txt"
        self._cases: list[ElementTree.Element] | None = None
        # Other installed plugins may warn, and a warning is an error here.
        plugins = ["-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
        with self._printed.open("wb") as printed:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-qo",
                    "timeout=600",
                    *plugins,
                    f"--junit-xml={self._report}",
                    *files,
                ],
                env={
                    **os.environ,
                    "TRITON_INTERPRET": "1",
                    "OMP_NUM_THREADS": "1",
                    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                    "PYTEST_ADDOPTS": "",
                },
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def passed(self, file: Path) -> None:
        """Fails as the tests of `file` did, or if none of them ran."""
        if self._cases is None:
            self._process.wait(SECONDS)
            self._cases = []
            if self._report.exists():
                self._cases = list(ElementTree.parse(self._report).iter("testcase"))
        cases = [case for case in self._cases if file.stem in case.get("classname", "").split(".")]
        wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        ran = [case for case in cases if case.find("skipped") is None]
        printed = self._printed.read_text(encoding="utf-8", errors="replace")[-4000:]
        assert ran and not wrong, "\n".join([f"{len(ran)} ran", *map(_failure, wrong), printed])

    def end(self) -> None:
        """End the process, if nobody has waited for it."""
        self._process.kill()
        self._process.wait()


def _failure(case: ElementTree.Element) -> str:
    """The report of a test that did not pass."""
    said = [part.text or part.get("message", "") for part in case if part.tag in ("failure", "error")]
    return f"{case.get('name')}:\n" + "\n".join(said)[-3000:]


def _patch_once() -> None:
    """Patch Triton's language once a launch, not again at each of a program's hundreds of calls of device
    functions: a third of the interpreter's time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:
        return  # another version of Triton

    def patch_once(fn: Callable[..., object]) -> object:
        """The scope that restores the language at the end of a launch; empty for a call within one."""
        # A kernel finds the language in one of these modules.
        if all(lang.static_print is print for lang in (tl, tl.core)):
            return scope()
        return patch(fn)

    interpreter._patch_lang = patch_once


def _remember_dtypes() -> None:
    """Look up each dtype once: the interpreter builds the table of all dtypes for every tensor."""
    from triton.runtime import interpreter

    look_up = getattr(interpreter, "_get_np_dtype", None)
    if look_up is None:
        return  # another version of Triton
    remembered = cache(look_up)

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar  # a block's own type cannot be remembered, nor a pointer's
        return look_up(scalar) if scalar.is_ptr() else remembered(scalar)

    interpreter._get_np_dtype = np_dtype


def _reduce_by_halves() -> None:
    """Reduce with a kernel's own function by halves, as a GPU does, not with one call an element."""
    from triton.runtime import interpreter

    reduce = getattr(interpreter.ReduceOps, "generic_reduce", None)
    if reduce is None:
        return  # another version of Triton

    def by_halves(self: Any, inputs: Any) -> Any:
        if self.axis is None or self.keep_dims:
            return reduce(self, inputs)
        parts = [np.moveaxis(each.handle.data, self.axis, 0) for each in inputs]
        while (half := len(parts[0]) // 2) > 0:
            sides = [part[side] for side in (slice(half), slice(half, None)) for part in parts]
            tensors = map(self.to_tensor, sides, [each.dtype for each in inputs] * 2)
            made = self.combine_fn.fn(*tensors)
            parts = [each.handle.data for each in (made if isinstance(made, tuple) else (made,))]
        return [self.to_tensor(part[0], each.dtype) for part, each in zip(parts, inputs, strict=True)]

    interpreter.ReduceOps.generic_reduce = by_halves


def _remember_types() -> None:
    """Make the type of a shape's blocks once, with what its tensors share, and a tuple's type when it is
    asked for: the interpreter makes them anew for every operand, which takes a third of its time."""
    from triton.language import core

    if not all(hasattr(core, name) for name in ("tuple", "tuple_type", "_type_for_tuple_values")):
        return  # another version of Triton
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[object, dict[str, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        extents = tuple([getattr(extent, "value", extent) for extent in shape])
        # The name of a pointer's type does not say what it points to.
        named = element_ty.name if type(element_ty) is core.dtype else str(element_ty)
        key = (type(element_ty), named, extents)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {**vars(self), "of_tensors": {}, "extents": extents}
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shared = vars(type).setdefault("of_tensors", {})
        if not shared:
            make_tensor(self, handle, type)
            shared.update((name, vars(self)[name]) for name in ("shape", "numel", "dtype"))
        vars(self).update(shared, handle=handle, type=type)

    def tuple_of(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        self.of_values = type if type is None or isinstance(type, core.tuple_type) else core.tuple_type(type)

    def type_of(self: Any) -> Any:
        if self.of_values is None:
            self.of_values = core._type_for_tuple_values(self.values)
        return self.of_values

    core.block_type.__init__, core.tensor.__init__, core.tuple.__init__ = block, tensor, tuple_of
    core.tuple.type = property(type_of, lambda self, type: setattr(self, "of_values", type))


def _skip_what_is_alike() -> None:
    """Operands of one type and shape need neither be cast nor broadcast, and a number beside a block is made
    a block once: the interpreter compares and makes them for every operation, half of its time."""
    from triton.language import core, semantic

    of = getattr(semantic, "TritonSemantic", None)
    known = ("binary_op_type_checking_impl", "broadcast_impl_value")
    if not all(hasattr(of, name) for name in known):
        return  # another version of Triton
    check, broadcast = (getattr(of, name) for name in known)
    # Two of such a type make another of it, divided too, and so does one with a number that it can hold.
    floats = frozenset(map(id, (core.float32, core.float64)))
    numbers = floats | frozenset(map(id, (core.int32, core.int64)))
    constants: dict[object, Any] = {}

    def extents(operand: Any) -> Any:
        return vars(operand.type).get("extents")  # None of a scalar

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if extents(lhs) == extents(rhs) else broadcast(self, lhs, rhs)

    def beside(self: Any, block: Any, number: float) -> Any:
        """The number as another block like this one; None if the interpreter must look for a type."""
        dtype = block.type.scalar
        held = type(number) is int and -(2**31) <= number < 2**31 and id(dtype) in numbers
        if not held and not (type(number) is float and id(dtype) in floats):
            return None
        key = (type(number), repr(number), dtype.name, extents(block))
        if key not in constants:
            constants[key] = broadcast(self, block, self.scalar_constant(number, dtype))[1]
        return constants[key]

    def check_unless_alike(self: Any, lhs: Any, rhs: Any, *allowed: Any, **named: Any) -> Any:
        blocks = isinstance(lhs, core.tensor), isinstance(rhs, core.tensor)
        if all(blocks):
            if lhs.type.scalar is rhs.type.scalar and id(lhs.type.scalar) in numbers:
                return broadcast_unless_alike(self, lhs, rhs)
        elif blocks[0] and (made := beside(self, lhs, rhs)) is not None:
            return lhs, made
        elif blocks[1] and (made := beside(self, rhs, lhs)) is not None:
            return made, rhs
        return check(self, lhs, rhs, *allowed, **named)

    for name, replaced in zip(known, (check_unless_alike, broadcast_unless_alike), strict=True):
        setattr(of, name, replaced)


if INTERPRETED and HAS_TRITON:
    _remember_types()
    _skip_what_is_alike()
    _patch_once()
    _remember_dtypes()
    _reduce_by_halves()
