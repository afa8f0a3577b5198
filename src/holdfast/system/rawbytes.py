"""Bytes in memory without numpy: of a tensor as a writable buffer, and copied to an address."""

from __future__ import annotations

import ctypes
import sys
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MADV_POPULATE_WRITE = 23
_MAPPED_AT_ONCE = 256 << 10
"""Bytes of a copy from which on its pages are mapped by one call."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a writable view, which keeps the tensor alive."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"Only contiguous CPU tensors have such a view; got one on {tensor.device}.")
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # the memory must outlive the view
    return memoryview(array).cast("B")


class _Buffer(ctypes.Structure):
    """`Py_buffer` of CPython's stable interface, which has it since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None


def copy_to(address: int, view: memoryview) -> None:
    """Copy contiguous bytes to an address. The GIL is released, also if the view is read-only."""
    if _libc and len(view) >= _MAPPED_AT_ONCE:
        _map_pages(_libc, address, len(view))
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), 0)  # PyBUF_SIMPLE: contiguous bytes
    try:
        ctypes.memmove(address, buffer.buf, buffer.len)
    finally:
        _release_buffer(ctypes.byref(buffer))


def _map_pages(libc: ctypes.CDLL, address: int, num_bytes: int) -> None:
    """Map the pages of fresh memory in one call, which costs less than a fault for each."""
    first, last = -(-address // PAGESIZE) * PAGESIZE, (address + num_bytes) // PAGESIZE * PAGESIZE
    is_mapped = ctypes.c_ubyte(1)
    # Memory in use gains nothing, and the call takes about as long as the copy there (note 043).
    libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(PAGESIZE), ctypes.byref(is_mapped))
    if not is_mapped.value & 1:  # where the kernel has no such advice (before Linux 5.14), the copy maps them
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_POPULATE_WRITE)
