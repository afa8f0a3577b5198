"""Views of a tensor's bytes, and an installation without numpy."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from holdfast.system.rawbytes import copy_to, view_bytes
from programs import run_python

WITHOUT_NUMPY = """
import sys, warnings
sys.modules["numpy"] = None  # as where it is not installed
warnings.simplefilter("ignore")  # torch's own, of that
import torch
import holdfast
from holdfast.cli.demo.training import digest
from holdfast.checkpoint.state import rng
from holdfast.train.data.batches import fingerprint

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(2, 64)).sum().backward()
optimizer.step()
state = {"model": model, "optimizer": optimizer}
with holdfast.Checkpointer(sys.argv[1], state) as ckpt:
    ckpt.save(1)
before = digest(model, optimizer)
with torch.no_grad():
    model.weight.zero_()
with holdfast.Checkpointer(sys.argv[1], state) as ckpt:
    assert ckpt.restore() == 1
assert digest(model, optimizer) == before
assert holdfast.open(sys.argv[1]).verify().problems == ()
assert fingerprint([3, 1, 2]).startswith("3 of 6 tokens")
values = {"seed": 1, "torch": torch.get_rng_state()}
assert "seeded" in rng.derive(values, rank=1, world_size=2)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
def test_a_view_shares_the_bytes_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5).to(dtype)
    view = view_bytes(tensor)
    assert (len(view), view.format, view.readonly) == (tensor.nbytes, "B", False)
    assert bytes(view) == bytes(tensor.view(torch.uint8).flatten().tolist())
    view[:] = bytes(len(view))
    assert not tensor.view(torch.uint8).any()


@pytest.mark.parametrize("num_bytes", [1, (256 << 10) - 1, 256 << 10, (1 << 20) + 4095])
@pytest.mark.parametrize("at", [0, 8, 4095])
def test_a_copy_into_fresh_memory_changes_its_own_bytes_only(num_bytes: int, at: int) -> None:
    room = mmap.mmap(-1, at + num_bytes + 1)  # without pages until they are touched
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    data = os.urandom(num_bytes)
    copy_to(address + at, memoryview(data))
    assert room[:] == bytes(at) + data + b"\0"


def test_a_view_keeps_its_tensor_alive() -> None:
    view = view_bytes(torch.arange(1000))
    gc.collect()
    torch.zeros(1000, dtype=torch.int64).add_(7)
    assert view.cast("q")[999] == 999


def test_an_empty_tensor_has_an_empty_view() -> None:
    assert len(view_bytes(torch.empty(0))) == 0


def test_what_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        view_bytes(torch.ones(2, 3).t())


def test_nothing_needs_numpy(tmp_path: Path) -> None:
    run_python(WITHOUT_NUMPY, tmp_path / "home")


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("num_bytes", [0, 1, 4097])
def test_bytes_are_copied_to_an_address(kind: type[bytes | bytearray], num_bytes: int) -> None:
    """Read-only memory too; nothing around the target changes."""
    target = torch.zeros(num_bytes + 2, dtype=torch.uint8)
    source = kind(i % 251 + 1 for i in range(num_bytes))
    copy_to(target.data_ptr() + 1, memoryview(source))
    assert bytes(view_bytes(target)) == b"\0" + source + b"\0"


def test_a_copied_view_is_released() -> None:
    source, target = bytearray(9), torch.zeros(9)
    copy_to(target.data_ptr(), memoryview(source))
    source.append(1)  # a BufferError as long as a view exists


def test_bytes_with_gaps_are_not_copied() -> None:
    target = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(BufferError):
        copy_to(target.data_ptr(), memoryview(bytes(8))[::2])
    assert not target.any()
