"""Unpickler with a fixed list of allowed names. Reading a pickle with it runs no code from the pickle."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from holdfast.checkpoint.exchange.pickle_check import check_pickle
from holdfast.checkpoint.format.dtypes import TORCH_NAMES
from holdfast.errors import Corrupt, Unsupported

DTYPE_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
"""safetensors dtype names by torch's names."""

Names = Mapping[tuple[str, str], Any]
"""Replacement for each allowed global, by module and name."""

_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


class StandIn:
    """Stand-in for an object whose class is not loaded. It keeps the object's fields, by name or in order."""

    def __init__(self, *args: Any) -> None:
        self.fields: dict[str, Any] = {}
        self.args: tuple[Any, ...] = args

    def __setstate__(self, state: Any) -> None:
        self.fields, self.args = (state, ()) if isinstance(state, dict) else ({}, tuple(state))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stand-in cannot be pickled")


def stand_in(name: str) -> type[StandIn]:
    """Return a new class of stand-ins with a name."""
    return type(name, (StandIn,), {})


def load(data: bytes, names: Names, what: str, *, storage: Callable[[Any], Any] | None = None) -> Any:
    """Return the object in a pickle, with stand-ins for everything but plain values.

    Only names in `names` are resolved and called; nothing is imported.

    Args:
        data: the pickle.
        names: replacement for each allowed global.
        what: description of the source, for error messages.
        storage: converts a persistent id; by default persistent ids are refused.
    """
    try:
        check_pickle(data)
        return _Unpickler(data, names, what, storage).load()
    except Unsupported:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise Corrupt(f"{what} cannot be unpickled: {error!r}. It is damaged.", key=what) from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: Names, what: str, storage: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._what = what
        self._storage = storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = self._names.get((module_name, global_name))
        if found is None:
            raise Unsupported(
                f"{self._what} is a pickle that needs {module_name}.{global_name}, which is not on the "
                "list of safe names. It was not loaded, and none of its code was run. If you trust its "
                "author, load it with the program that wrote it, and save its tensors and plain values "
                "again.",
                key=f"{module_name}.{global_name}",
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise pickle.UnpicklingError("it refers to a storage, which is not allowed here")
        return self._storage(pid)


def _dtypes() -> dict[tuple[str, str], Any]:
    names = [*TORCH_NAMES.values(), "complex128", "complex32", "qint8", "quint8", "qint32"]
    return {("torch", name): name for name in names}


def _text(*args: Any) -> str:
    return "/".join(str(arg) for arg in args)


_PLAIN = {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): tuple, **_dtypes()}

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
Tensor, Bytes, Index, Info, Chunk = map(stand_in, ("Tensor", "Bytes", "Index", "Info", "Chunk"))
"""Stand-ins for TensorStorageMetadata, BytesStorageMetadata, MetadataIndex, _StorageInfo and
ChunkStorageMetadata."""
_Other = stand_in("Other")


def _enum_member(kind: Any, name: Any) -> StandIn:
    """Return the stand-in for a member of an enum that is not loaded.

    Python 3.11.0 to 3.11.4 pickle a member as a call of `getattr` with the enum and the member's name.
    """
    if kind is not _Other or not isinstance(name, str):
        raise Unsupported(
            "A pickle reads an attribute of an object that is not an enum. It was not loaded, and no code "
            "of it was run.",
            key="builtins.getattr",
        )
    return _Other(name)


DCP_NAMES: Names = {
    **_PLAIN,
    (_METADATA, "Metadata"): stand_in("Metadata"),
    (_METADATA, "TensorStorageMetadata"): Tensor,
    (_METADATA, "BytesStorageMetadata"): Bytes,
    (_METADATA, "MetadataIndex"): Index,
    (_METADATA, "ChunkStorageMetadata"): Chunk,
    **{(module, "TensorProperties"): _Other for module in (_METADATA, _OLD)},
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Other,
    (_OLD, "MEM_FORMAT_ENCODING"): _Other,
    (_METADATA, "StorageMeta"): _Other,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Info,
    ("torch.serialization", "_get_layout"): _text,
    **{("torch", name): name for name in ("strided", "contiguous_format", "preserve_format")},
    **{
        (module, name): _text
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    ("builtins", "set"): set,
    ("builtins", "getattr"): _enum_member,
}
"""All names that a DCP `.metadata` needs."""


class TensorStandIn(StandIn):
    """Stand-in for a tensor: the arguments of torch's rebuild functions, from the storage on."""


TENSOR_NAMES: Names = {
    **_PLAIN,
    ("torch._utils", "_rebuild_tensor_v2"): TensorStandIn,
    ("torch._utils", "_rebuild_tensor_v3"): TensorStandIn,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch.storage", "UntypedStorage"): "untyped",
    **{("torch", name): dtype for name, dtype in _STORAGE_DTYPES.items()},
}
"""All names that a `torch.save` of a plain tensor needs."""
