"""Lent memory: never lent twice at once, lent again when nothing refers to it, bounded; no page faults."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from node.stage.host_buffers import LEAST_BYTES, HostBuffers

ROOT = Path(__file__).resolve().parents[4]
ROWS = LEAST_BYTES // 4096


def test_a_buffer_is_reused_only_after_its_last_view_is_gone() -> None:
    buffers = HostBuffers()
    first = buffers.empty((ROWS, 1024), torch.float32)
    place = first.data_ptr()
    assert first.shape == (ROWS, 1024) and first.dtype == torch.float32 and first.is_contiguous()
    assert place % 64 == 0
    view = memoryview(first[3:5].numpy().data)
    del first
    second = buffers.empty((ROWS, 1024), torch.float32)
    assert second.data_ptr() != place, "the view still refers to it"
    view.release()
    del view
    third = buffers.empty((2 * ROWS, 1024), torch.bfloat16)
    assert third.data_ptr() == place, "as many bytes, whatever the dtype"
    assert buffers.most_lent == 2 * LEAST_BYTES


def test_buffers_that_autograd_keeps_are_not_reused() -> None:
    buffers = HostBuffers()
    x = buffers.empty((ROWS, 1024), torch.float32).fill_(3.0).requires_grad_()
    place = x.data_ptr()
    y = (x * x).sum()
    del x
    other = buffers.empty((ROWS, 1024), torch.float32).fill_(5.0)
    assert other.data_ptr() != place
    y.backward()  # type: ignore[no-untyped-call]
    del y
    assert buffers.empty((ROWS, 1024), torch.float32).data_ptr() == place


def test_small_tensors_have_no_owner() -> None:
    buffers = HostBuffers()
    small = buffers.empty((LEAST_BYTES // 4 - 1,), torch.float32)
    assert small.numel() == LEAST_BYTES // 4 - 1
    assert buffers.most_lent == 0
    del small
    assert buffers.idle_bytes == 0


def test_another_thread_may_drop_what_was_lent() -> None:
    buffers = HostBuffers()
    lent = [buffers.empty((LEAST_BYTES,), torch.uint8) for _ in range(8)]
    places = {tensor.data_ptr() for tensor in lent}
    assert len(places) == 8
    thread = threading.Thread(target=lent.clear)
    thread.start()
    thread.join()
    assert buffers.idle_bytes == 8 * LEAST_BYTES
    lent += [buffers.empty((LEAST_BYTES,), torch.uint8) for _ in range(8)]
    assert {tensor.data_ptr() for tensor in lent} == places


def test_all_blocks_together_are_bounded_and_the_oldest_go_first() -> None:
    buffers = HostBuffers()
    for size in range(1, 9):
        lent = buffers.empty((size * LEAST_BYTES,), torch.uint8)
        del lent
        assert buffers.idle_bytes <= 2 * buffers.most_lent == 2 * size * LEAST_BYTES
    # Of 1 to 8 these fit into 16.
    assert buffers.idle_bytes == (7 + 8) * LEAST_BYTES
    eight = buffers.empty((8 * LEAST_BYTES,), torch.uint8)
    three = buffers.empty((3 * LEAST_BYTES,), torch.uint8)
    assert buffers.most_lent == 11 * LEAST_BYTES
    assert buffers.idle_bytes + eight.nbytes + three.nbytes <= 2 * buffers.most_lent


FAULTS = """
import resource, sys, threading
import torch
from node.stage.device_transfer import CpuTransfer
from wire.codecs.registry import codec
from wire.spec import TensorSpec

torch.set_num_threads(1)
spec = TensorSpec(torch.float32, (2, 2048, 2176))  # more than 32 MiB, which malloc maps again each time
x = torch.linspace(-1, 1, spec.elements).view(spec.shape)

def round_trips(transfer, chosen):
    for _ in range(4):
        packed = transfer.pack(chosen, x, None)
        transfer.unpack(chosen, packed, spec)

def faults(name):
    transfer, chosen = CpuTransfer(), codec(name)
    round_trips(transfer, chosen)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    round_trips(transfer, chosen)
    print(name, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)

for name in sys.argv[1:]:
    # As the transfer thread, not the one whose memory malloc keeps.
    thread = threading.Thread(target=faults, args=(name,))
    thread.start()
    thread.join()
"""


@pytest.mark.timeout(240)
def test_packing_and_unpacking_take_no_new_pages() -> None:
    """One tensor is 8704 pages; what a codec uses meanwhile is some bytes for each of the 139,264 tiles."""
    names = ["tah", "fixed-8", "bf16", "fp16", "fp32"]
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *names], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = dict(line.split() for line in done.stdout.splitlines())
    assert list(found) == names
    assert all(int(pages) < 1000 for pages in found.values()), found
