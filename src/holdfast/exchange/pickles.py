"""Checks of a pickle's opcodes before anything reads it: small pickles can ask for any time and memory.

Source: the stack machine of `pickletools.dis`, which follows a pickle without building its objects.
"""

from __future__ import annotations

import io
import math
import mmap
import pickletools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

from holdfast.format.dtypes import ITEM_BYTES, TORCH_NAMES
from holdfast.format.limits import MAX_VALUE_DEPTH

_MAX_DEPTH = 2 * MAX_VALUE_DEPTH  # a call and its arguments are levels here, and not in the value
_MAX_COPIES = 10
_FREE_ITEMS = 100_000
_MAX_CLASHES = 1_000
_MAX_HASHED = 2**61 - 1  # integers below it have hashes of their own
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
"""Bytes of an element by torch's name of its dtype; those that are missing have one."""
_STORAGE_BYTES = {
    **{"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "QInt32": 4},
    **{"ComplexFloat": 8, "ComplexDouble": 16},
}
"""The same by the name of a class of storages, without its last word."""

Storages = Callable[[str, int], None]
"""Check of a storage, by its key and its bytes; raises ValueError."""


class _Global(str):
    """Name of a module's member."""

    __slots__ = ()


class _Tuple(list[Any]):
    """A tuple that is in a pickle."""

    __slots__ = ()


class _Call(list[Any]):
    """A function and what it is called with."""

    __slots__ = ()


class _Storage(list[Any]):
    """A persistent id that stands for a storage.

    Attributes:
        num_bytes: of the storage.
        item_bytes: of its elements.
    """

    __slots__ = ("item_bytes", "num_bytes")

    def __init__(self, items: list[Any], num_bytes: int, item_bytes: int) -> None:
        super().__init__(items)
        self.num_bytes = num_bytes
        self.item_bytes = item_bytes


def check_pickle(data: bytes | io.BytesIO | mmap.mmap, *, storages: Storages | None = None) -> None:
    """Check that reading a pickle takes time and memory in proportion to its length.

    Objects that are in it many times count each time, since walking, hashing and writing do not know that
    they are the same. A file is left behind the pickle.

    Args:
        data: the pickle, or a file in memory that is at it.
        storages: checks each storage once; tensors are then compared with their storages.

    Raises:
        ValueError: it is no whole pickle, or asks for more.
    """
    machine = _Machine(storages)
    file: Any = io.BytesIO(data) if isinstance(data, bytes) else data  # both read no more than there is
    num_bytes = data.getbuffer().nbytes if isinstance(data, io.BytesIO) else len(data)
    for opcode, argument, _ in pickletools.genops(file):
        machine.take(opcode, argument, num_bytes)
    machine.check()


class _Machine:
    """The stack of an unpickler: a container is a list of its items, everything else a leaf."""

    def __init__(self, storages: Storages | None) -> None:
        self._storages = storages
        self._known: dict[str, tuple[str, int]] = {}  # class and elements of each storage, by key
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._all: list[Any] = []  # what was ever taken from the stack for good
        self._clashes: defaultdict[int, set[int]] = defaultdict(set)
        self._num_opcodes = 0

    def take(self, opcode: pickletools.OpcodeInfo, argument: Any, num_bytes: int) -> None:
        """Follow one opcode."""
        name, stack = opcode.name, self._stack
        self._num_opcodes += 1
        if type(argument) is int and abs(argument) >= _MAX_HASHED:
            self._note_hash(argument)
        if name in _PUTS:
            if not 0 <= argument <= num_bytes:
                raise ValueError(f"it numbers an object {argument}")
            self._memo[argument] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in _GETS:
            if argument not in self._memo:
                raise ValueError(f"it has no object {argument}")
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "DUP":
            stack.append(self._top())
        elif name not in ("PROTO", "FRAME"):
            self._apply(opcode, argument)

    def check(self) -> None:
        """Check what was followed.

        Raises:
            ValueError: it takes too much.
        """
        most = _FREE_ITEMS + _MAX_COPIES * self._num_opcodes
        _check_size([*self._all, *(one for one in self._stack if one is not _MARK)], most)

    def _top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            message = "it takes an object from an empty stack"
            raise ValueError(message)
        return self._stack[-1]

    def _note_hash(self, number: int) -> None:
        same = self._clashes[hash(number)]
        same.add(number)
        if len(same) > _MAX_CLASHES:
            message = "it holds many integers with one hash"
            raise ValueError(message)

    def _taken(self, opcode: pickletools.OpcodeInfo) -> list[Any]:
        kinds, at = opcode.stack_before, -1
        if pickletools.markobject in kinds:
            at = len(self._stack) - 1
            while at >= 0 and self._stack[at] is not _MARK:
                at -= 1
            first = at - kinds.index(pickletools.markobject) if at >= 0 else -1
        else:
            first = len(self._stack) - len(kinds)
        if first < 0 or any(self._stack[i] is _MARK for i in range(first, len(self._stack)) if i != at):
            message = "it takes an object from an empty stack"
            raise ValueError(message)
        items = [one for one in self._stack[first:] if one is not _MARK]
        del self._stack[first:]
        return items

    def _apply(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        name = opcode.name
        if name == "POP" and self._stack and self._stack[-1] is _MARK:
            self._stack.pop()
            return
        items = self._taken(opcode)
        if name in _FILLS:
            if not items or not _is_container(items[0]):
                message = f"{name} is applied to what is no container"
                raise ValueError(message)
            items[0] += items[1:]
            self._stack.append(items[0])
        elif not opcode.stack_after:
            self._all += items
        elif name == "STACK_GLOBAL":
            self._stack.append(_Global(" ".join(one for one in items if type(one) is str)))
        elif name == "GLOBAL":
            self._stack.append(_Global(argument))
        elif name in _CALLS:
            call = _Call([_Global(argument), items] if name == "INST" else items)
            _check_call(call, has_storages=self._storages is not None)
            self._stack.append(call)
        elif name in _PERSISTENT and self._storages is not None:
            self._stack.append(self._storage(items))
        else:
            is_container = (
                bool(items) or name.startswith("EMPTY_") or pickletools.markobject in opcode.stack_before
            )
            made = _Tuple(items) if "TUPLE" in name else items
            self._stack.append(made if is_container else argument)

    def _storage(self, items: list[Any]) -> _Storage:
        """Return the storage that a persistent id stands for.

        Raises:
            ValueError: it refers to something else, or its size is not that of its bytes.
        """
        facts = items[0] if items and type(items[0]) is _Tuple else []
        kind, cls, key, _, num_items, view, *more = [*facts, *[None] * (6 - len(facts))]
        is_known = (kind, type(cls), type(key), type(num_items)) == ("storage", _Global, str, int)
        if not is_known or num_items < 0 or more:
            raise ValueError("it does not refer to a storage")
        item_bytes = _STORAGE_BYTES.get(cls.rpartition(" ")[2].removesuffix("Storage"), 1)
        if key not in self._known:
            self._known[key] = cls, num_items
            cast("Storages", self._storages)(key, num_items * item_bytes)
        if self._known[key] != (cls, num_items):
            raise ValueError(f"it refers to the storage {key[:100]!r} as two sizes")
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
    """Return True if an opcode may put items into a node: writing into tensors can take any time."""
    if type(node) is not _Call:
        return type(node) is list
    name = node[0].rpartition(" ")[2] if node and type(node[0]) is _Global else ""
    return not name.startswith("_rebuild") and not name.endswith(("Tensor", "Parameter", "Buffer", "Storage"))


def _check_call(call: _Call, *, has_storages: bool) -> None:
    """Refuse to make what is as large as a number says.

    Args:
        call: a function and the tuple of its arguments.
        has_storages: storages are known, so that tensors can be compared with them.

    Raises:
        ValueError: the call does so.
    """
    called = call[0] if call and type(call[0]) is _Global else ""
    module, _, name = called.partition(" ")
    given = call[1:]
    arguments = [one for item in given for one in (item if isinstance(item, list) else [item])]
    is_sized = module.startswith("torch") and name.endswith(("Storage", "Tensor"))
    if (is_sized and _holds_integer(arguments)) or (
        name == "bytearray" and any(type(one) is int for one in arguments)
    ):
        raise ValueError(f"it makes a {name} of a given size")
    if not has_storages or not name.startswith("_rebuild"):
        return
    if [type(item) for item in given] != [_Tuple]:
        message = "it rebuilds a tensor of arguments that are no tuple"
        raise ValueError(message)
    if name == "_rebuild_nested_tensor":  # torch reads its sizes before they are loaded
        message = "it holds a nested tensor, which no checkpoint can hold"
        raise ValueError(message)
    if name in _REBUILDS:
        _check_tensor(name, arguments)
    elif name.startswith("_rebuild_from_type"):
        function, _, inner, *_ = [*arguments, None, None, None]
        if type(function) is not _Global or type(inner) is not _Tuple:
            message = "it rebuilds a tensor in a way that is not known"
            raise ValueError(message)
        _check_call(_Call([function, inner]), has_storages=True)


def _holds_integer(node: Any) -> bool:
    left, seen = [node], set[int]()
    while left:
        one = left.pop()
        if type(one) is int:
            return True
        if isinstance(one, list) and id(one) not in seen and type(one) is not _Storage:
            seen.add(id(one))
            left += one
    return False


def _check_tensor(name: str, arguments: list[Any]) -> None:
    """Check that a tensor is inside its storage: torch enlarges a storage that is too small.

    Raises:
        ValueError: it is not, or its place is not given as plain numbers.
    """
    storage, first, size, stride, *rest = [*arguments, *[None] * (4 - len(arguments))]
    size, stride = _numbers(size), _numbers(stride)
    if type(storage) is not _Storage or not _are_counts([first, *size, *stride]) or len(size) != len(stride):
        message = "it places a tensor in a storage in a way that cannot be"
        raise ValueError(message)
    item_bytes = storage.item_bytes
    if name == "_rebuild_tensor_v3":
        dtype = rest[2] if len(rest) > 2 and type(rest[2]) is _Global else ""
        item_bytes = _DTYPE_BYTES.get(dtype.rpartition(" ")[2], 1)
    num_items = (
        0 if 0 in size else first + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    )
    if name == "_rebuild_qtensor":  # it is allocated without its strides
        num_items = max(num_items, math.prod(size))
    if num_items * item_bytes > storage.num_bytes:
        message = (
            f"a tensor of size {size} and strides {stride} at {first} needs more than the "
            f"{storage.num_bytes} bytes of its storage"
        )
        raise ValueError(message[:400])


def _numbers(node: Any) -> list[Any]:
    """Return the numbers of a tuple or of a torch.Size; what is neither is no number itself."""
    if type(node) is _Call and len(node) == 2 and node[0] == "torch Size" and type(node[1]) is _Tuple:
        node = node[1][0] if len(node[1]) == 1 else None
    return list(node) if type(node) is _Tuple else [None]


def _check_size(root: list[Any], most: int) -> None:
    """Check how many items a tree has when those that are in it many times are counted each time.

    Raises:
        ValueError: more than `most`, too many levels, or an object that contains itself.
    """
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
                message = "what is in it many times makes it too large"
                raise ValueError(message)
            if levels > _MAX_DEPTH:
                message = f"it is nested more than {_MAX_DEPTH} deep"
                raise ValueError(message)
            sizes[key] = total, levels
            open_ids.discard(key)
        elif key in open_ids:
            message = "an object in it contains itself"
            raise ValueError(message)
        elif key not in sizes:
            open_ids.add(key)
            left.append((node, True))
            left += [(one, False) for one in node if isinstance(one, list) and id(one) not in sizes]
