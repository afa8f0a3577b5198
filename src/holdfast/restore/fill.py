"""Verified bytes of a checkpoint into torch tensors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping

import torch

from holdfast.errors import InvalidInput, NotFound, Unsupported
from holdfast.format.dtypes import TORCH_NAMES
from holdfast.format.layout import Piece
from holdfast.format.manifest import Manifest
from holdfast.restore.boxes import run_bytes, run_start
from holdfast.restore.parts import Parts
from holdfast.restore.read import Job, ReadStats, Sink, Want, read
from holdfast.store.contract import Store

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_DTYPES = {name: getattr(torch, torch_name, None) for name, torch_name in TORCH_NAMES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name.

    Raises:
        Unsupported: the installed torch has no such dtype.
    """
    dtype = _DTYPES[name]
    if dtype is None:
        raise Unsupported(f"torch {torch.__version__} has no dtype for {name}; a newer one has.")
    return dtype


class TensorSink:
    """Puts bytes into a contiguous tensor, as its row-major bytes from byte `base` on.

    Args:
        tensor: contiguous, of any dtype and device; filled in place, also if it requires grad.
        base: byte of the tensor that byte 0 of what is wanted goes to.
    """

    __slots__ = ("_address", "_base", "_limit", "_tensor")

    def __init__(self, tensor: torch.Tensor, base: int = 0) -> None:
        self._tensor = tensor  # keeps the memory behind the address alive
        self._limit = tensor.nbytes
        self._base = base
        self._address = tensor.data_ptr() if tensor.is_cpu else 0
        if not tensor.is_contiguous():
            raise InvalidInput(f"A tensor of shape {list(tensor.shape)} must be contiguous to be filled.")

    def write(self, offset: int, view: memoryview) -> None:
        """Copy `view` to byte `base + offset` of the tensor. A large copy does not hold the GIL."""
        num_bytes, at = len(view), self._base + offset
        assert 0 <= at <= self._limit - num_bytes, (at, num_bytes, self._limit)
        if self._address:
            # Not Tensor.copy_: it costs five times as much for a small piece, and its thread pool for a large
            # one competes with the reader's threads. ctypes gives the GIL up while memmove runs.
            source = ctypes.addressof(ctypes.c_char.from_buffer(view))
            ctypes.memmove(self._address + at, source, num_bytes)
            return
        flat = self._tensor.detach().view(-1).view(torch.uint8)
        flat[at : at + num_bytes].copy_(torch.frombuffer(view, dtype=torch.uint8))


class RegionSink:
    """Collects a piece that is no single run of bytes in its tensor, then copies it to its place."""

    def __init__(self, tensor: torch.Tensor, piece: Piece) -> None:
        self._tensor = tensor
        self._piece = piece
        self._left = piece.num_bytes
        self._lock = threading.Lock()
        self._whole: torch.Tensor | None = None
        self._sink: TensorSink | None = None

    def write(self, offset: int, view: memoryview) -> None:
        """Take bytes of the piece; with the last ones, the piece is copied into the tensor."""
        with self._lock:
            if self._sink is None:  # not earlier: pieces come in turn, so few are in memory at once
                self._whole = torch.empty(self._piece.lengths, dtype=torch_dtype(self._piece.dtype))
                self._sink = TensorSink(self._whole)
            sink = self._sink
        sink.write(offset, view)
        with self._lock:
            self._left -= len(view)
            if self._left:
                return
        self._place()

    def _place(self) -> None:
        assert self._whole is not None
        same_size = _SAME_SIZE[self._whole.element_size()]  # as integers, so that no copy rule touches a bit
        region = self._tensor.detach().view(same_size)
        for dim, (at, length) in enumerate(zip(self._piece.offsets, self._piece.lengths, strict=True)):
            region = region.narrow(dim, at, length)
        region.copy_(self._whole.view(same_size))
        self._whole = self._sink = None


def fill(
    store: Store,
    manifest: Manifest,
    targets: Mapping[str, torch.Tensor],
    rank: int,
    *,
    num_threads: int = 4,
    on_bytes: Callable[[int], None] | None = None,
    parts: Parts | None = None,
) -> ReadStats:
    """Fill tensors with what a checkpoint holds under their names, verified; read nothing else.

    Args:
        store: the home.
        manifest: the checkpoint.
        targets: name or alias of a saved tensor -> contiguous tensor of the saved dtype and shape.
        rank: whose copies of per-rank tensors are taken, modulo the saved world size.
        num_threads: threads that read, hash and copy.
        on_bytes: called with the bytes of each read when it is done; never by two threads at once.
        parts: parts of this checkpoint that have been read already.

    Raises:
        NotFound: a name that the checkpoint does not hold, or a missing file.
        InvalidInput: a target of another dtype or shape, or not contiguous; nothing has been changed.
        Corrupt: damage was found; targets may have been partly filled.
        RetryLater: the store failed; targets may have been partly filled.

    Ranks: not collective.
    Blocks: until all targets are filled.
    """
    parts = parts or Parts(store, manifest)
    missing = [name for name in targets if name not in manifest.tensors and name not in manifest.tied]
    if missing:
        shown = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise NotFound(f"Step {manifest.step} holds no tensor {shown}.", step=manifest.step, key=missing[0])
    wanted: dict[int, list[Want]] = {}
    for name, target in targets.items():
        _check_target(parts, name, target, rank)
        for owner, piece, start in parts.pieces_of(manifest.tied.get(name, name), rank):
            if piece.num_bytes:
                wanted.setdefault(owner, []).append(Want(start, piece.num_bytes, _sink(target, piece)))
    jobs = [Job(parts.part(owner), wants) for owner, wants in sorted(wanted.items())]
    return read(store, jobs, num_threads=num_threads, on_bytes=on_bytes)


def _check_target(parts: Parts, name: str, target: torch.Tensor, rank: int) -> None:
    saved = parts.shape_of(parts.manifest.tied.get(name, name), rank)
    if saved is None:
        return  # pieces_of names what is missing
    dtype, shape = saved
    if target.dtype is not torch_dtype(dtype) or target.shape != shape:
        message = (
            f"{name} of step {parts.manifest.step} is {dtype}{list(shape)}; the tensor to be filled is "
            f"{target.dtype}{list(target.shape)}. Nothing was changed."
        )
        raise InvalidInput(message, step=parts.manifest.step, key=name)


def _sink(target: torch.Tensor, piece: Piece) -> Sink:
    if piece.is_whole:
        return TensorSink(target)
    if run_bytes(piece) == piece.num_bytes:
        return TensorSink(target, run_start(piece, 0))
    return RegionSink(target, piece)
