"""Partition: a tree of plain values and tensors, with a record of the objects in it."""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import importlib
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from msgspec import Struct

from holdfast.checkpoint.format.containers import kind_of
from holdfast.checkpoint.format.values import encode
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.state.entry import is_stateful
from holdfast.checkpoint.state.tensors import is_savable, unsavable
from holdfast.checkpoint.state.tree import Extraction, insert_tensors, references, tensors_in
from holdfast.errors import Corrupt, InvalidInput, Unsupported

Path = tuple[Any, ...]
"""Keys and indices of a node in a tree."""

KNOWN = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
"""Classes of other libraries that are restored as such. Only their attributes are saved, never code."""
_NAMESPACES: dict[str, type] = {"namespace": argparse.Namespace, "simple-namespace": types.SimpleNamespace}
_LABELS = {kind: label for label, kind in _NAMESPACES.items()}
_STATE_DICT, _VERSIONS = "state-dict", "versions"
_SEQUENCES = (list, tuple, collections.deque)


class StateDict(collections.OrderedDict[Any, Any]):
    """State dict of a module or optimizer that was saved whole.

    Both `model.load_state_dict(it)` and `model.load_state_dict(it.state_dict())` work.
    """

    def state_dict(self) -> StateDict:
        """Return itself."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error, because a checkpoint does not contain code."""
        raise Unsupported(
            "This is the state dict of an object, not the object itself: a checkpoint holds no code. "
            "Create the object again and call its load_state_dict() with this."
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"A checkpoint holds no code, so an object is loaded as its state dict, which does not have the "
            f"attribute {name!r}. Create the object again and call its load_state_dict() with this."
        )


class Packed(Struct):
    """Partition that is ready to be saved."""

    tree: Any  # of plain values and tensors
    kinds: list[tuple[Path, str, Any]] = []  # of objects, outer before inner
    devices: dict[Path, str] = {}  # devices of tensors that were not on the CPU

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors, once per occurrence."""
        return tensors_in(self.tree)

    def check(self, name: str) -> None:
        """Check that the partition can be saved."""

        def emit(path: str, tensor: torch.Tensor) -> None:
            if not is_savable(tensor):
                raise unsavable(tensor, path)

        encode(Extraction(emit, composites=False).extract(self.tree, name), name)

    def copied(self) -> Packed:
        """Return the partition with copies of all tensors on the CPU."""
        copies: dict[Any, torch.Tensor] = {}

        def copy(_: Path, tensor: torch.Tensor) -> torch.Tensor:
            view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            if view not in copies or not tensor.numel():
                copies[view] = tensor.detach().to("cpu", copy=True)
            return copies[view]

        return Packed(rebuild(self.tree, copy), self.kinds, self.devices)


def pack(value: Any, name: str) -> Packed:
    """Pack the value of a partition. Its tensors are not copied.

    Modules, optimizers and other objects with state_dict() and load_state_dict() become their state dicts,
    at any depth. Dicts of other types become plain ones; enum members that are numbers or strings become
    plain numbers and strings.
    """
    packed = Packed(None)
    try:
        packed.tree = _pack(value, (), packed)
    except RecursionError as error:
        raise InvalidInput(f"{name} contains itself, or is too deeply nested.", key=name) from error
    return packed


def _pack(value: Any, path: Path, into: Packed) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            into.devices[path] = str(value.device)
        return value
    if isinstance(value, dict) and kind is not collections.Counter:
        return _pack_dict(value, path, into)
    if kind in _SEQUENCES and (container := kind_of(value)) is not None:
        pairs = container.items(value)
        return container.rebuild(value, [(i, _pack(item, (*path, i), into)) for i, item in pairs])
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value, (int, str)) else value
    name = f"{kind.__module__}.{kind.__qualname__}"
    label = _LABELS.get(kind) or (name if name in KNOWN else None)
    if label is not None:
        into.kinds.append((path, label, None))
        return _pack(dict(vars(value)), path, into)
    if is_stateful(value) and not isinstance(value, type):
        into.kinds.append((path, _STATE_DICT, None))
        state: Any = value
        return _pack(state.state_dict(), path, into)
    return value


def _pack_dict(value: dict[Any, Any], path: Path, into: Packed) -> dict[Any, Any]:
    items = [(key, _pack(item, (*path, key), into)) for key, item in value.items()]
    if not isinstance(value, collections.OrderedDict):
        return dict(items)
    metadata = getattr(value, "_metadata", None)
    if isinstance(metadata, Mapping):
        # Version 1 is the default, and every module has one.
        versions = {key: dict(one) for key, one in metadata.items() if one.get("version", 1) not in (1, None)}
        if versions:
            into.kinds.append((path, _VERSIONS, versions))
    return collections.OrderedDict(items)


def unpack(tree: Any, kinds: list[tuple[Path, str, Any]]) -> Any:
    """Rebuild a packed value from its tree and the kinds of its objects."""
    at: dict[Path, list[tuple[str, Any]]] = {}
    for path, kind, detail in kinds:
        at.setdefault(tuple(path), []).append((kind, detail))

    def revive(path: Path, value: Any) -> Any:
        for kind, detail in reversed(at.get(path, ())):
            value = _revive(kind, detail, value)
        return value

    return rebuild(tree, lambda _, tensor: tensor, revive) if at else tree


def _revive(kind: str, detail: Any, value: Any) -> Any:
    if kind == _VERSIONS:
        value._metadata = collections.OrderedDict(detail)
        return value
    if kind == _STATE_DICT:
        state = StateDict(value) if isinstance(value, dict) else StateDict(state=value)
        if "_metadata" in getattr(value, "__dict__", ()):
            vars(state)["_metadata"] = vars(value)["_metadata"]
        return state
    if kind in _NAMESPACES:
        return _NAMESPACES[kind](**value)
    if kind not in KNOWN:
        raise Unsupported(
            f"Unknown kind of object {kind!r}. A newer Holdfast may have saved it: upgrade to load it."
        )
    module, _, name = kind.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return types.SimpleNamespace(**value)  # its library is not installed, but its attributes are saved
    made = found.__new__(found)
    vars(made).update(value)
    return made


def rebuild(
    tree: Any,
    leaf: Callable[[Path, torch.Tensor], Any],
    revive: Callable[[Path, Any], Any] = lambda _, value: value,
    path: Path = (),
) -> Any:
    """Rebuild a tree. `leaf` replaces each tensor, `revive` each node, inner ones first."""
    if isinstance(tree, torch.Tensor):
        return revive(path, leaf(path, tree))
    container = kind_of(tree)
    if container is None:
        return revive(path, tree)
    pairs = [(step, rebuild(item, leaf, revive, (*path, step))) for step, item in container.items(tree)]
    return revive(path, container.rebuild(tree, pairs))


@contextlib.contextmanager
def checked_metadata(name: str) -> Iterator[None]:
    """Raise Corrupt for errors of the block, which are caused by a partition's metadata."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"The metadata of the partition {name!r} is damaged, or a trainer's adapter did not write it: "
            f"{error!r}.",
            key=name,
        ) from error


def partition_key(name: Any, reserved: Collection[str]) -> str:
    """Return the key of a partition: its name, with characters escaped that keys cannot have."""
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"A partition's name must be a non-empty string, not {name!r}.")
    key = name.replace("%", "%25").replace("/", "%2F").replace("@", "%40")
    return f"%{ord(key[0]):02X}{key[1:]}" if key in reserved else key


def describe_partitions(partitions: Mapping[str, tuple[str, Packed]]) -> dict[str, Any]:
    """Return the metadata of partitions, by name; `partitions` are key and packed value of each."""
    return {
        name: {
            "key": key,
            "kinds": [[list(path), kind, detail] for path, kind, detail in packed.kinds],
            "devices": [[list(path), device] for path, device in packed.devices.items()],
        }
        for name, (key, packed) in partitions.items()
    }


def packed_of(name: str, metadata: Any, tree: Any) -> Packed:
    """Return a partition from its metadata and its tree."""
    with checked_metadata(name):
        kinds = [(tuple(path), kind, detail) for path, kind, detail in metadata["kinds"]]
        devices = {tuple(path): str(device) for path, device in metadata["devices"]}
    return Packed(tree, kinds, devices)


def read_partition(checkpoint: Checkpoint, rank: int, meta_key: str, name: str) -> Packed:
    """Return a partition of a rank, on the CPU and verified; `meta_key` has the metadata of all."""
    values = checkpoint.values(rank)
    with checked_metadata(name):
        metadata = values[meta_key]["partitions"][name]
        tree = values[metadata["key"]]
    packed = packed_of(name, metadata, tree)
    names = list(references(tree))
    found = checkpoint.tensors(rank, keys=names) if names else {}
    packed.tree = insert_tensors(tree, found.__getitem__)
    return packed
