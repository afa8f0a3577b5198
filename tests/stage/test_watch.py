"""Watches: the kernel's record of written pages shows every write, and only to the watched tensor."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.stage.watch import LARGE_BYTES, Watcher
from holdfast.checkpoint.stage.write_tracker import WriteTracker

SIZE = 1_000_000
PAGE = mmap.PAGESIZE
COMPACT = Path("/proc/sys/vm/compact_memory")
_libc = ctypes.CDLL(None)


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    found = Watcher()
    if found.refusal is not None:
        pytest.skip(f"this kernel keeps no record of writes: {found.refusal}")
    yield found
    found.close()


def written(
    watcher: Watcher, tensors: list[torch.Tensor], write: Callable[[], object]
) -> tuple[list[int], list[torch.Tensor]]:
    """Return the tensors written while they were watched, and copies made after the write."""
    large = [i for i, tensor in enumerate(tensors) if tensor.nbytes >= LARGE_BYTES]
    watcher.locate(tensors, large)
    watch = watcher.start({i: tensors[i] for i in large})
    assert set(watch.tensors) == set(large)
    write()
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return watch.end(copies), copies


def from_file(tensor: torch.Tensor) -> None:
    with Path("/dev/zero").open("rb", buffering=0) as file:
        file.readinto(memoryview(tensor.numpy())[5000:7000])  # pyright: ignore[reportArgumentType] - an array is a buffer


def in_child(write: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        write()
        os._exit(0)
    os.waitpid(child, 0)


def drop_page(tensor: torch.Tensor) -> None:
    address = -(-tensor.data_ptr() // PAGE) * PAGE
    assert _libc.madvise(ctypes.c_void_p(address + PAGE), ctypes.c_size_t(PAGE), 4) == 0  # MADV_DONTNEED


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "one element": lambda t: t[SIZE // 2].fill_(3),
    "past the counter": lambda t: t.data[SIZE // 2].fill_(3),
    "the same value": lambda t: t[SIZE // 2].fill_(1),
    "numpy": lambda t: t.numpy().__setitem__(SIZE // 3, 5),
    "memset": lambda t: ctypes.memset(t.data_ptr() + 9999, 7, 1),
    "the kernel": from_file,
    "a dropped page": drop_page,
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("is_huge", [False, True])
def test_exactly_the_written_pages_are_detected(watcher: Watcher, name: str, is_huge: bool) -> None:
    tensors = [torch.ones(SIZE) for _ in range(3)]
    if is_huge:
        watcher.locate(tensors, [0, 1, 2])
        watcher.use_huge_pages(dict(enumerate(tensors)), until=lambda: False)
    assert written(watcher, tensors, lambda: WRITES[name](tensors[1]))[0] == [1]
    assert written(watcher, tensors, lambda: None)[0] == []


def placed(offset: int) -> torch.Tensor:
    """Return SIZE ones that begin `offset` bytes after the start of a page."""
    memory = torch.ones(SIZE + 2 * PAGE // 4)
    start = (-memory.data_ptr() % PAGE + offset) // memory.itemsize
    return memory[start : start + SIZE]


@pytest.mark.parametrize(("at", "offset"), [(0, 64), (SIZE - 1, 64), (0, 0), (SIZE - 1, -SIZE * 4 % PAGE)])
def test_bytes_on_pages_with_other_data_are_copied_when_the_watch_begins_and_others_watched(
    watcher: Watcher, at: int, offset: int
) -> None:
    """A change there is no tear: the copy gets what was there when the watch began."""
    tensor, is_shared = placed(offset), offset == 64
    assert not is_shared or (tensor.data_ptr() + tensor.nbytes) % PAGE, "it ends within a page"
    found, copies = written(watcher, [tensor], lambda: tensor[at].fill_(3))
    assert found == ([] if is_shared else [0])
    assert tensor[at] == 3
    assert not is_shared or torch.equal(copies[0], torch.ones(SIZE))


@pytest.mark.parametrize("is_zero_page", [False, True])
def test_untouched_memory_is_watched(watcher: Watcher, is_zero_page: bool) -> None:
    tensor = torch.empty(50_000_000)  # fresh from the kernel
    if is_zero_page:
        tensor.sum()
    assert written(watcher, [tensor], lambda: None)[0] == []
    assert written(watcher, [tensor], lambda: tensor[30_000_000].fill_(1))[0] == [0]


def test_writes_of_a_forked_child_are_ignored(watcher: Watcher) -> None:
    tensor = torch.ones(SIZE)
    assert written(watcher, [tensor], lambda: in_child(lambda: tensor[5000].fill_(3)))[0] == []
    assert written(watcher, [tensor], lambda: (in_child(lambda: None), tensor[5000].fill_(3)))[0] == [0]


def test_a_state_that_loses_a_tensor_in_a_file_is_located(watcher: Watcher, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * SIZE))
    kept, in_file = torch.ones(SIZE), torch.from_file(str(path), shared=False, size=SIZE)
    watcher.locate([kept, in_file], [0, 1])
    assert watcher.shared == {1}
    watcher.locate([kept], [0])
    assert set(watcher.start({0: kept}).tensors) == {0}


def test_shared_memory_is_recognized_and_not_watched(watcher: Watcher, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * SIZE))
    tensors = [
        torch.ones(SIZE).share_memory_(),
        torch.from_file(str(path), shared=True, size=SIZE),
        torch.from_file(str(path), shared=False, size=SIZE),
        torch.ones(10).share_memory_(),
        torch.ones(10),
    ]
    watcher.locate(tensors, [0, 1, 2])
    assert watcher.shared == {0, 1, 2, 3}, "pages of a private mapping follow the file until they are written"
    tensors[2][: SIZE // 2] = 2
    watcher.locate(tensors, [0, 1, 2])
    assert watcher.shared == {0, 1, 2, 3}
    tensors[2].fill_(2)
    watcher.locate(tensors, [0, 1, 2])
    assert watcher.shared == {0, 1, 3}
    watch = watcher.start({i: tensors[i] for i in range(3)})
    assert set(watch.tensors) == {2}
    tensors[2][5000] = 1
    assert watch.end(tensors) == [2]


def test_memory_that_becomes_shared_after_a_save_is_recognized(watcher: Watcher) -> None:
    tensors = [torch.ones(SIZE), torch.ones(SIZE)]
    watcher.locate(tensors, [0, 1])
    assert not watcher.shared
    tensors[1].share_memory_()  # the same object, in other memory
    watcher.locate(tensors, [0, 1])
    assert watcher.shared == {1}
    assert set(watcher.start(dict(enumerate(tensors))).tensors) == {0}


def test_writes_to_neighbours_on_the_heap_are_ignored(watcher: Watcher) -> None:
    """Two watches over tensors that take turns in memory, with small tensors between them, are apart."""
    tensors = [torch.ones(20_000 if i % 2 else 50) for i in range(64)]
    large = list(range(1, 64, 2))
    watcher.locate(tensors, large)
    first = watcher.start({i: tensors[i] for i in large[::2]})
    second = watcher.start({i: tensors[i] for i in large[1::2]})
    for i in range(0, 64, 2):
        tensors[i].fill_(3)
    tensors[large[3]].fill_(2)
    assert second.end(tensors) == [large[3]]
    assert first.end(tensors) == []


def test_a_transposed_tensor_is_watched(watcher: Watcher) -> None:
    tensor = torch.ones(1000, 1000).t()
    assert written(watcher, [tensor], lambda: tensor[500, 500].fill_(3))[0] == [0]
    assert written(watcher, [tensor], lambda: None)[0] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_bytes_on_shared_pages_have_their_positions_in_another_order(
    watcher: Watcher, order: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A change there is no tear, also where the copy has its elements in another order."""
    shape = 30, 7, 41, 35
    memory = placed(64).view(torch.uint8)[: math.prod(shape) * dtype.itemsize].view(dtype)
    memory.copy_(torch.rand(memory.shape).mul_(100))
    tensor = memory.view(shape).permute(0, *(d + 1 for d in order)).unsqueeze(2)
    assert not tensor.is_contiguous()
    before = tensor.clone(memory_format=torch.contiguous_format)
    ends = memory[:2], memory[-1:]
    changed, (copy,) = written(watcher, [tensor], lambda: [part.logical_not_() for part in ends])
    assert changed == []
    assert torch.equal(copy, before)


@pytest.mark.slow
@pytest.mark.skipif(not os.access(COMPACT, os.W_OK), reason="only root may have the kernel move pages")
@pytest.mark.usefixtures("watcher")
def test_pages_that_the_kernel_moves_while_a_watch_starts_do_not_count_as_written() -> None:
    """Under memory pressure, saves were dropped that nothing had written to."""
    tracker, num_bytes, cluster = WriteTracker(), 1 << 30, 16 * PAGE
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    has_ended = threading.Event()

    def move_pages() -> None:
        while not has_ended.is_set():
            COMPACT.write_text("1")

    mover = threading.Thread(target=move_pages)
    mover.start()
    try:
        for byte in range(1, 17):
            ctypes.memset(start, byte, num_bytes)
            for offset in range(0, num_bytes, cluster):  # holes, which the kernel fills with other pages
                memory.madvise(mmap.MADV_DONTNEED, offset, cluster * 3 // 4)
            for _ in range(30):
                tracker.start([(start, start + num_bytes)])
                found = tracker.find_written([(start, start + num_bytes)])
                tracker.stop([(start, start + num_bytes)])
                assert not found
    finally:
        has_ended.set()
        mover.join()
        tracker.close()
