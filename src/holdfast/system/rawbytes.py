"""Bytes in memory without numpy: of a tensor as a writable buffer, and copied to an address."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), 0)  # PyBUF_SIMPLE: contiguous bytes
    try:
        ctypes.memmove(address, buffer.buf, buffer.len)
    finally:
        _release_buffer(ctypes.byref(buffer))
