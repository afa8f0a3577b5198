"""One Checkpointer used by several threads at once."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import InvalidInput
from stage.training import make_checkpointer


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads that are switched as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_all(*bodies: Callable[[], None]) -> list[BaseException]:
    """Run functions in a thread each, and return what they raised."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        runs = [pool.submit(body) for body in bodies]
    return [error for one in runs if (error := one.exception()) is not None]


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("attempt", range(2))
def test_threads_that_save_and_wait_at_once_do_not_disturb_each_other(tmp_path: Path, attempt: int) -> None:
    steps, num_saves = itertools.count(1), 40
    home = tmp_path / f"home-{attempt}"
    with make_checkpointer(home, {"x": torch.ones(100)}, keep=3, memory="64MiB") as ckpt:
        ckpt.restore()
        is_done = threading.Event()

        def save() -> None:
            for _ in range(num_saves):
                with contextlib.suppress(InvalidInput):  # the other thread has saved a later step
                    ckpt.save(next(steps))

        def save_all() -> None:
            try:
                raised.extend(run_all(save, save))
            finally:
                is_done.set()

        def wait() -> None:
            while not is_done.is_set():
                ckpt.wait()
                ckpt.latest_step()

        raised: list[BaseException] = []
        raised += run_all(save_all, wait, wait)
        assert raised == []
        ckpt.wait()
        newest = ckpt.latest_step()
    assert holdfast.open(home).step == newest
    assert holdfast.open(home).verify().is_good
