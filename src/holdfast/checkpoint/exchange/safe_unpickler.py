"""Unpickler with a fixed list of allowed names, and the check of opcodes before any pickle is loaded.

Reading a pickle with it runs no code from the pickle. The check is needed because a small pickle may take any
time and memory. Source: the stack machine of `pickletools.dis`, which builds no objects of a pickle.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import pickletools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from holdfast.checkpoint.format.dtypes import ITEM_BYTES, TORCH_NAMES
from holdfast.checkpoint.format.limits import MAX_VALUE_DEPTH
from holdfast.errors import Corrupt, Unsupported

_MAX_DEPTH = 2 * MAX_VALUE_DEPTH  # a call and its arguments are levels here, but not in the value
_MAX_COPIES = 10
_FREE_ITEMS = 100_000
_MAX_CLASHES = 1_000
_MAX_HASHED = 2**61 - 1  # integers below it have distinct hashes
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_FILLS = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
_CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST"})
_PERSISTENT = frozenset({"PERSID", "BINPERSID"})
_MARK = object()
_REBUILDS = frozenset({"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"})
_DTYPE_BYTES = {
    **{name: ITEM_BYTES[dtype] for dtype, name in TORCH_NAMES.items()},
    **{"complex128": 16, "complex32": 4, "qint32": 4, "bits16": 2},
}
"""Size of an element by torch's name of its dtype; 1 if the dtype is missing."""
_STORAGE_DTYPES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"},
    **{"Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
"""Dtype by the name of a storage class without its last word."""
_STORAGE_BYTES = {"QInt32": 4, **{name: _DTYPE_BYTES[dtype] for name, dtype in _STORAGE_DTYPES.items()}}

StorageCheck = Callable[[str, int], None]
"""Check of a storage by key and size in bytes; raises ValueError."""


class _Global(str):
    """Name of a module's member."""

    __slots__ = ()


class _Tuple(list[Any]):
    """Tuple in a pickle."""

    __slots__ = ()


class _FunctionCall(list[Any]):
    """Function and its arguments."""

    __slots__ = ()


class _Storage(list[Any]):
    """Storage that a persistent id refers to."""

    __slots__ = ("item_bytes", "num_bytes")

    def __init__(self, items: list[Any], num_bytes: int, item_bytes: int) -> None:
        super().__init__(items)
        self.num_bytes, self.item_bytes = num_bytes, item_bytes


def check_pickle(data: bytes | io.BytesIO | mmap.mmap, *, storages: StorageCheck | None = None) -> None:
    """Check that loading a pickle takes time and memory in proportion to its length, or raise ValueError.

    An object that is referenced many times counts each time, because walking, hashing and writing repeat
    it. The position of a file is after the pickle. With `storages`, which checks each storage once, tensors
    are compared with their storages.
    """
    machine = _Machine(storages)
    file: Any = io.BytesIO(data) if isinstance(data, bytes) else data  # both read no more than the data
    num_bytes = data.getbuffer().nbytes if isinstance(data, io.BytesIO) else len(data)
    for opcode, argument, _ in pickletools.genops(file):
        machine.run(opcode, argument, num_bytes)
    machine.check()


class _Machine:
    """Stack machine of an unpickler. A container is a list of its items, everything else is a leaf."""

    def __init__(self, storages: StorageCheck | None) -> None:
        self._storages = storages
        self._seen: dict[str, tuple[str, int]] = {}  # class and number of elements of each storage, by key
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._all: list[Any] = []  # objects that were popped and not pushed again
        self._clashes: defaultdict[int, set[int]] = defaultdict(set)
        self._num_opcodes = 0

    def run(self, opcode: pickletools.OpcodeInfo, argument: Any, num_bytes: int) -> None:
        """Execute one opcode."""
        name, stack = opcode.name, self._stack
        self._num_opcodes += 1
        if type(argument) is int and abs(argument) >= _MAX_HASHED:
            self._check_hash(argument)
        if name in _PUTS:
            if not 0 <= argument <= num_bytes:
                raise ValueError(f"it stores an object as number {argument}")
            self._memo[argument] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in _GETS:
            if argument not in self._memo:
                raise ValueError(f"it loads object {argument}, which it does not store")
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "DUP":
            stack.append(self._top())
        elif name not in ("PROTO", "FRAME"):
            self._apply(opcode, argument)

    def check(self) -> None:
        """Check the objects that were built."""
        most = _FREE_ITEMS + _MAX_COPIES * self._num_opcodes
        _check_size([*self._all, *(one for one in self._stack if one is not _MARK)], most)

    def _top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("it pops from an empty stack")
        return self._stack[-1]

    def _check_hash(self, number: int) -> None:
        same = self._clashes[hash(number)]
        same.add(number)
        if len(same) > _MAX_CLASHES:
            raise ValueError("it contains many integers with the same hash")

    def _pop_arguments(self, opcode: pickletools.OpcodeInfo) -> list[Any]:
        kinds, at = opcode.stack_before, -1
        if pickletools.markobject in kinds:
            at = len(self._stack) - 1
            while at >= 0 and self._stack[at] is not _MARK:
                at -= 1
            first = at - kinds.index(pickletools.markobject) if at >= 0 else -1
        else:
            first = len(self._stack) - len(kinds)
        if first < 0 or any(self._stack[i] is _MARK for i in range(first, len(self._stack)) if i != at):
            raise ValueError("it pops from an empty stack")
        items = [one for one in self._stack[first:] if one is not _MARK]
        del self._stack[first:]
        return items

    def _apply(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        name = opcode.name
        if name == "POP" and self._stack and self._stack[-1] is _MARK:
            self._stack.pop()
            return
        items = self._pop_arguments(opcode)
        if name in _FILLS:
            if not items or not _is_container(items[0]):
                raise ValueError(f"{name} is applied to an object that is not a container")
            items[0] += items[1:]
            self._stack.append(items[0])
        elif not opcode.stack_after:
            self._all += items
        elif name == "STACK_GLOBAL":
            self._stack.append(_Global(" ".join(one for one in items if type(one) is str)))
        elif name == "GLOBAL":
            self._stack.append(_Global(argument))
        elif name in _CALLS:
            call = _FunctionCall([_Global(argument), items] if name == "INST" else items)
            _check_call(call, has_storages=self._storages is not None)
            self._stack.append(call)
        elif name in _PERSISTENT and self._storages is not None:
            self._stack.append(self._storage(items))
        else:
            may_be_empty = name.startswith("EMPTY_") or pickletools.markobject in opcode.stack_before
            made = _Tuple(items) if "TUPLE" in name else items
            self._stack.append(made if items or may_be_empty else argument)

    def _storage(self, items: list[Any]) -> _Storage:
        """Return the storage that a persistent id refers to."""
        fields = items[0] if items and type(items[0]) is _Tuple else []
        kind, cls, key, _, num_items, view, *more = [*fields, *[None] * (6 - len(fields))]
        is_valid = (kind, type(cls), type(key), type(num_items)) == ("storage", _Global, str, int)
        if not is_valid or num_items < 0 or more:
            raise ValueError("it does not refer to a storage")
        item_bytes = _STORAGE_BYTES.get(cls.rpartition(" ")[2].removesuffix("Storage"), 1)
        if key not in self._seen:
            self._seen[key] = cls, num_items
            cast("StorageCheck", self._storages)(key, num_items * item_bytes)
        if self._seen[key] != (cls, num_items):
            raise ValueError(f"it refers to the storage {key[:100]!r} with two sizes")
        if view is not None:  # a part of a storage: key, first element, elements
            part: Any = view if type(view) is _Tuple and len(view) == 3 else (None, None, None)
            _, first, length = part
            if not _are_counts([first, length]) or first + length > num_items:
                raise ValueError("it refers to a part that is not inside its storage")
            num_items = length
        return _Storage(items, num_items * item_bytes, item_bytes)


def _are_counts(numbers: Any) -> bool:
    return all(type(one) is int and one >= 0 for one in numbers)


def _is_container(node: Any) -> bool:
    """Return True if an opcode may add items to a node. It may not fill a tensor, which can take long."""
    if type(node) is not _FunctionCall:
        return type(node) is list
    name = node[0].rpartition(" ")[2] if node and type(node[0]) is _Global else ""
    return not name.startswith("_rebuild") and not name.endswith(("Tensor", "Parameter", "Buffer", "Storage"))


def _check_call(call: _FunctionCall, *, has_storages: bool) -> None:
    """Check that a call creates no object of any given size, and that tensors are inside checked storages."""
    called = call[0] if call and type(call[0]) is _Global else ""
    module, _, name = called.partition(" ")
    given = call[1:]
    arguments = [one for item in given for one in (item if isinstance(item, list) else [item])]
    is_torch = module.startswith("torch") and name.endswith(("Storage", "Tensor"))
    is_sized = name == "bytearray" and any(type(one) is int for one in arguments)
    if is_sized or (is_torch and _holds_integer(arguments)):
        raise ValueError(f"it creates a {name} of a given size")
    if not has_storages or not name.startswith("_rebuild"):
        return
    if [type(item) for item in given] != [_Tuple]:
        raise ValueError("it rebuilds a tensor from arguments that are not a tuple")
    if name == "_rebuild_nested_tensor":  # torch reads its sizes before they are loaded
        raise ValueError("it contains a nested tensor, which a checkpoint cannot hold")
    if name in _REBUILDS:
        _check_tensor(name, arguments)
    elif name.startswith("_rebuild_from_type"):
        function, _, inner, *_ = [*arguments, None, None, None]
        if type(function) is not _Global or type(inner) is not _Tuple:
            raise ValueError("it rebuilds a tensor in an unknown way")
        _check_call(_FunctionCall([function, inner]), has_storages=True)


def _holds_integer(node: Any) -> bool:
    left, seen = [node], set[int]()
    while left:
        item = left.pop()
        if type(item) is int:
            return True
        if isinstance(item, list) and id(item) not in seen and type(item) is not _Storage:
            seen.add(id(item))
            left += item
    return False


def _check_tensor(name: str, arguments: list[Any]) -> None:
    """Check that a tensor is inside its storage. Otherwise torch enlarges the storage."""
    storage, first, size, stride, *rest = [*arguments, *[None] * (4 - len(arguments))]
    size, stride = _numbers(size), _numbers(stride)
    if type(storage) is not _Storage or not _are_counts([first, *size, *stride]) or len(size) != len(stride):
        raise ValueError("it places a tensor in a storage with invalid sizes or strides")
    item_bytes = storage.item_bytes
    if name == "_rebuild_tensor_v3":
        dtype = rest[2] if len(rest) > 2 and type(rest[2]) is _Global else ""
        item_bytes = _DTYPE_BYTES.get(dtype.rpartition(" ")[2], 1)
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    num_items = 0 if 0 in size else last + 1
    if name == "_rebuild_qtensor":  # it is allocated without its strides
        num_items = max(num_items, math.prod(size))
    if num_items * item_bytes > storage.num_bytes:
        message = (
            f"a tensor of size {size} and strides {stride} at {first} needs more than the "
            f"{storage.num_bytes} bytes of its storage"
        )
        raise ValueError(message[:400])


def _numbers(node: Any) -> list[Any]:
    """Return the numbers in a tuple or torch.Size, or `[None]` for anything else."""
    if type(node) is _FunctionCall and len(node) == 2 and node[0] == "torch Size" and type(node[1]) is _Tuple:
        node = node[1][0] if len(node[1]) == 1 else None
    return list(node) if type(node) is _Tuple else [None]


def _check_size(root: list[Any], most: int) -> None:
    """Check the number of items in a tree, counting objects once per reference."""
    sizes: dict[int, tuple[int, int]] = {}  # items and levels, by id of a container
    open_ids: set[int] = set()
    left: list[tuple[list[Any], bool]] = [(root, False)]
    while left:
        node, is_entered = left.pop()
        key = id(node)
        if is_entered:
            inner = [sizes[id(one)] for one in node if isinstance(one, list)]
            total = 1 + len(node) + sum(num for num, _ in inner)
            levels = 1 + max((level for _, level in inner), default=0)
            if total > most:
                raise ValueError("objects that it refers to many times make it too large")
            if levels > _MAX_DEPTH:
                raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
            sizes[key] = total, levels
            open_ids.discard(key)
        elif key in open_ids:
            raise ValueError("an object in it contains itself")
        elif key not in sizes:
            open_ids.add(key)
            left.append((node, True))
            left += [(one, False) for one in node if isinstance(one, list) and id(one) not in sizes]


DTYPE_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
"""safetensors dtype names by torch's names."""

Names = Mapping[tuple[str, str], Any]
"""Replacement for each allowed global, by module and name."""


class StandIn:
    """Stand-in for an object whose class is not loaded. It keeps the object's fields, by name or in order."""

    def __init__(self, *args: Any) -> None:
        self.fields: dict[str, Any] = {}
        self.args: tuple[Any, ...] = args

    def __setstate__(self, state: Any) -> None:
        self.fields, self.args = (state, ()) if isinstance(state, dict) else ({}, tuple(state))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stand-in cannot be pickled")


def _stand_in(name: str) -> type[StandIn]:
    return type(name, (StandIn,), {})


def load(data: bytes, names: Names, what: str, *, storage: Callable[[Any], Any] | None = None) -> Any:
    """Return the object in a pickle, with stand-ins for everything but plain values.

    Only names in `names` are resolved and called; nothing is imported. Persistent ids are refused, or
    converted by `storage`.
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
        self._names, self._what, self._storage = names, what, storage

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


def _text(*args: Any) -> str:
    return "/".join(map(str, args))


_DTYPES = (*TORCH_NAMES.values(), "complex128", "complex32", "qint8", "quint8", "qint32")
_PLAIN = {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): tuple}
_PLAIN |= {("torch", name): name for name in _DTYPES}

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
Tensor, Bytes, Index, Info, Chunk = map(_stand_in, ("Tensor", "Bytes", "Index", "Info", "Chunk"))
"""Stand-ins for TensorStorageMetadata, BytesStorageMetadata, MetadataIndex, _StorageInfo and
ChunkStorageMetadata."""
_Other = _stand_in("Other")


def _enum_member(kind: Any, name: Any) -> StandIn:
    """Return the stand-in for a member of an enum, which Python 3.11.0 to 3.11.4 pickle as a getattr()."""
    if kind is not _Other or not isinstance(name, str):
        raise Unsupported(
            "A pickle reads an attribute of an object that is not an enum. It was not loaded, and no code "
            "of it was run.",
            key="builtins.getattr",
        )
    return _Other(name)


DCP_NAMES: Names = {
    **_PLAIN,
    (_METADATA, "Metadata"): _stand_in("Metadata"),
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
    **{("torch", f"{name}Storage"): dtype for name, dtype in _STORAGE_DTYPES.items()},
}
"""All names that a `torch.save` of a plain tensor needs."""
