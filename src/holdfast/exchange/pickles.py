"""Checks of a pickle's opcodes before anything reads it: small pickles can ask for any time and memory.

Source: the stack machine of `pickletools.dis`, which follows a pickle without building its objects.
"""

from __future__ import annotations

import io
import mmap
import pickletools
from collections import defaultdict
from typing import Any

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


class _Global(str):
    """Name of a module's member."""

    __slots__ = ()


def check_pickle(data: bytes | mmap.mmap, *, max_elements: int | None = None) -> None:
    """Check that reading a pickle takes time and memory in proportion to its length.

    Objects that are in it many times count each time, since walking, hashing and writing do not know that
    they are the same. A mapped file is left behind the pickle.

    Args:
        data: the pickle, or a mapped file that is at it.
        max_elements: a storage that it refers to may have; None for any number.

    Raises:
        ValueError: it is no whole pickle, or asks for more.
    """
    machine = _Machine(max_elements)
    file: Any = io.BytesIO(data) if isinstance(data, bytes) else data  # both read no more than there is
    num_bytes = len(data)
    for opcode, argument, _ in pickletools.genops(file):
        machine.take(opcode, argument, num_bytes)
    machine.check()


class _Machine:
    """The stack of an unpickler: a container is a list of its items, everything else a leaf."""

    def __init__(self, max_elements: int | None) -> None:
        self._max_elements = max_elements
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
        kinds = opcode.stack_before
        if pickletools.markobject in kinds:
            at = len(self._stack) - 1
            while at >= 0 and self._stack[at] is not _MARK:
                at -= 1
            first = at - kinds.index(pickletools.markobject)
        else:
            first = len(self._stack) - len(kinds)
        if first < 0:
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
            if not items or type(items[0]) is not list:
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
        else:
            if name in _CALLS:
                _check_call([_Global(argument), items] if name == "INST" else items)
            elif name in _PERSISTENT and self._max_elements is not None:
                self._check_elements(items)
            is_container = (
                bool(items) or name.startswith("EMPTY_") or pickletools.markobject in opcode.stack_before
            )
            self._stack.append(items if is_container else argument)

    def _check_elements(self, items: list[Any]) -> None:
        facts = items[0] if items and type(items[0]) is list else []
        if any(type(one) is int and one > (self._max_elements or 0) for one in facts):
            message = "it refers to a storage that is larger than its file"
            raise ValueError(message)


def _check_call(items: list[Any]) -> None:
    """Refuse to make what is as large as a number says.

    Raises:
        ValueError: the call does so.
    """
    called = items[0] if items and type(items[0]) is _Global else ""
    module, _, name = called.partition(" ")
    arguments = [one for item in items[1:] for one in (item if type(item) is list else [item])]
    is_sized = name == "bytearray" or (module.startswith("torch") and name.endswith(("Storage", "Tensor")))
    if is_sized and any(type(one) is int for one in arguments):
        raise ValueError(f"it makes a {name} of a given size")


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
            inner = [sizes[id(one)] for one in node if type(one) is list]
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
            left += [(one, False) for one in node if type(one) is list and id(one) not in sizes]
