"""I/O errors at the start of a run: each call to the system fails once."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError
from stage.training import make_checkpointer

CALLS = ("open", "scandir", "fstat", "pread", "preadv", "listdir", "stat", "lstat", "read")


class FailingCall:
    """One call of this thread to the system that fails: the n-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call: Any) -> Any:
        def once(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.left -= 1
                if self.left == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args, **options)

        return once


def test_each_io_error_of_a_restore_is_our_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_checkpointer(tmp_path / "home", {"w": torch.ones(20_000)}, keep=None) as ckpt:
        ckpt.save(1).wait_durable(600)
    number, has_failed = 0, True
    while has_failed:
        number += 1
        state = {"w": torch.zeros(20_000)}
        options = {"reads": holdfast.Reads(patience=5), "watches": [holdfast.CompileCache("off")]}
        with make_checkpointer(tmp_path / "home", state, **options) as ckpt:
            with monkeypatch.context() as patch:
                failing = FailingCall(patch, number)
                with contextlib.suppress(HoldfastError):
                    assert ckpt.restore() == 1
                    assert state["w"].eq(1).all()
            has_failed = failing.left <= 0
    assert number > 5
