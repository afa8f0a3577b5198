"""Load: the plan to restore saved tensors and values into the live state, and its final steps."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.checkpoint.format.composites import SavedTensor, shown_type
from holdfast.checkpoint.format.layout import FillTarget, Region
from holdfast.checkpoint.format.manifest import Tensor
from holdfast.checkpoint.format.nesting import is_under
from holdfast.checkpoint.format.values import decode
from holdfast.checkpoint.state import sharding
from holdfast.checkpoint.state.composites import set_content, take_apart
from holdfast.checkpoint.state.fitting import GONE, Fitting, Misfit, Updates, misfit, needs_live
from holdfast.checkpoint.state.tensors import (
    PLAIN,
    RAW,
    FilledMemory,
    Range,
    copy,
    described_read_only,
    find_read_only,
    holds,
    is_composite,
    is_dtensor,
    is_local_shard,
    is_plain_memory,
    is_same_view,
    is_sharded_tensor,
    range_of,
    torch_dtype,
    unfillable,
)
from holdfast.checkpoint.state.tree import insert_tensors, references
from holdfast.errors import Corrupt, InvalidInput, Unsupported

Rename = Callable[[str], str]
Maker = Callable[[], torch.Tensor]  # function that returns a tensor after all targets are filled
_MAX_LISTED = 10
PARAMETER_MARK = ".param_groups: "
"""Separator between an optimizer's key and its parameter in names of unexpected parameters."""
_UNTIED = "tied in the live state but saved as two tensors; the later name wins."
_SHARED = "it shares memory with another live tensor, but was saved with other values; the later name wins."


class LoadPhase(enum.IntEnum):
    """Phase of a step of `Load.finish`. Each phase may rely on the ones before it."""

    CARVE = 0  # parts are copied out of tensors that were read whole
    SWAP = 1  # meta tensors become real
    COPY = 2  # targets that were not live go into live tensors
    OPTIMIZER = 3
    MODULE = 4
    OBJECT = 5
    VALUE = 6
    RNG = 7  # last, because any step before may draw random numbers


class Load:
    """A plan to fill the live state, made by one entry after the other. Making it changes nothing live.

    Most of `targets` are the live tensors themselves, so filling them already changes the live state. Once
    filling has begun, only a completed load, of this or another checkpoint, leaves a consistent state. The
    arguments are those of `State.load`, by saved names and keys, with a function to rename; `rank` is this
    rank, whose parts of sharded tensors are filled.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        tied: Mapping[str, str],
        values: Mapping[str, Any],
        rename: Rename,
        *,
        others: Sequence[Mapping[str, Any]] = (),
        rank: int = 0,
    ) -> None:
        self.tensors = tensors
        self.tied = tied
        self.rename = rename
        self.missing: list[str] = []  # names in the live state but not in the checkpoint; they stay unchanged
        self.unexpected: list[str] = []  # in the checkpoint but not in the live state; they are not read
        self.notes: list[str] = []  # on values that differ from the saved ones, such as casts
        self.generator_notes: list[str] = []  # on those of the process that are not set as saved; of `finish`
        self.misfits: list[Misfit] = []  # errors of values that stay unchanged unless the load is strict
        self.written: dict[str, torch.Tensor] = {}  # live tensors that are written to, by live name
        self.replaced: dict[str, Any] = {}  # objects that `finish` puts into the state, by top-level key
        self.used: set[str] = set()  # saved names, aliases included, that fill something live
        self._steps: list[tuple[LoadPhase, Callable[[], None]]] = []
        self.saved_names = _renamed([*tensors, *tied], rename)
        self._sources = [(_renamed(part, rename), part) for part in (values, *others)]
        self.keys: dict[str, str] = {}  # saved top-level keys by live key; of several, the first part's
        for keys, _ in self._sources:
            self.keys = {**self.keys, **keys, **self.keys}
        self._rank = rank
        self._parts: dict[str, list[FillTarget]] = {}  # by saved name, also those without elements
        self._claimed: set[str] = set()  # saved names that are in a live tensor or become one
        self.updates = Updates()
        self._memory = FilledMemory()  # of all live tensors
        self._swapped: set[int] = set()  # ids of meta tensors that become real
        self.real_devices: dict[int, torch.device] = {}  # of meta tensors once they are real, by id

    def complete(self, unexpected: list[str], *, strict: bool) -> Load:
        """Return the load if live tensors can be written and, if `strict`, all names have been found."""
        if strict and self.misfits:
            raise self.misfits[0]
        if strict and (self.missing or unexpected):
            raise mismatch(self.missing, unexpected)
        if found := find_read_only(self.written):
            raise InvalidInput(
                f"{described_read_only(found)}, so a restore cannot write to it. Nothing was changed. Put a "
                "copy into the state: tensor.clone(). Or leave it out with only=.",
                key=found[0],
            )
        for error in self.misfits:
            kept = str(error).partition(" Nothing was changed.")[0]
            self.notes.append(f"{kept} The live value stays (strict=False).")
        self.unexpected = unexpected
        return self

    def finish(self) -> None:
        """Restore all that is not a live target: casts, optimizers, objects, values, RNG last.

        Call it once, after all targets are filled. A user's load_state_dict() may be collective.
        """
        steps, self._steps = self._steps, []
        for _, step in sorted(steps, key=operator.itemgetter(0)):
            step()

    def values(self, key: str) -> Any:
        """Return new decoded values of a live top-level key, or None without saved ones."""
        return next(self.all_values(key), None)

    def all_values(self, key: str) -> Iterator[Any]:
        """Yield decoded values of a live top-level key from every part, this rank's first."""
        return (decode(values[keys[key]]) for keys, values in self._sources if key in keys)

    def lacks(self, key: str) -> bool:
        """Return True, and record the key as missing, if the checkpoint does not have it."""
        if key not in self.keys:
            self.missing.append(key)
        return key not in self.keys

    def leave(self, key: str) -> None:
        """Leave out a saved top-level key with its tensors, which then are not unexpected."""
        self.used.update(name for live, name in self.saved_names.items() if _is_under(live, [key]))

    def fit(self, saved: Any, live: Any, path: str) -> Fitting | None:
        """Fit a saved tree to the live value at a key path, or return None, and record all differences."""
        found = Fitting()
        try:
            fitted = found.fit(saved, live, path, is_here=True)
        except Misfit as error:
            self.misfits.append(error)
            self.used.update(references(saved))
            return None
        found.tree = live if fitted is GONE else fitted
        self.missing += found.missing
        self.unexpected += found.unexpected
        return found

    def add_step(self, phase: LoadPhase, step: Callable[[], None]) -> None:
        """Add a step for `Load.finish`. Within a phase, steps run in the order they were added."""
        self._steps.append((phase, step))

    def read(
        self, name: str, device: torch.device | str = "cpu", regions: Sequence[Region | None] = (None,)
    ) -> list[Maker]:
        """Plan to read regions of a saved tensor into new memory, unless they are read already.

        None is the whole tensor. Return a function for each region that returns it after filling.
        """
        self.used.add(name)
        saved = self.tied.get(name, name)
        if saved not in self._parts:
            self._parts[saved] = [self._new_target(saved, device, region) for region in regions]
        return [self._source(saved, region) for region in regions]

    def read_tree(
        self, tree: Any, device: torch.device | None = None, made: Mapping[str, Maker] | None = None
    ) -> Callable[[], Any]:
        """Plan to read the tensors of a tree into new memory; return a function that returns it filled.

        The functions in `made` return some of the tensors, by saved name.
        """
        makers = made or {}
        for name in references(tree):
            if name not in makers:
                self.read(name, device or "cpu")
        return lambda: insert_tensors(
            tree, lambda name: makers[name]() if name in makers else self.tensor(name, device)
        )

    def tensor(self, name: str, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the filled tensor of a saved name. Names that were tied when saved share one object."""
        (target,) = self._parts[self.tied.get(name, name)]
        assert target.region is None, name
        return target.tensor if device is None else target.tensor.to(device)

    def read_like(self, name: str, model: torch.Tensor, label: str) -> Maker:
        """Plan to read this rank's part of a saved tensor, which is split as `model`, into new memory."""
        device = self.device_of(model)
        sources = self.read(name, device, [region for _, region in self._parts_of(model, label)])
        return lambda: sharding.parts_like(
            [source().to(device) for source in sources], model, self.dtype(name), device
        )

    def read_as(self, name: str, model: torch.Tensor, label: str) -> Maker:
        """Plan to read a saved tensor into new memory: split as a model of its shape, or whole."""
        if (sharding.is_divided(model) or is_sharded_tensor(model)) and sharding.shape_of(
            model
        ) == self.shape(name):
            return self.read_like(name, model, label)
        self.read(name)
        return partial(self.tensor, name)

    @property
    def targets(self) -> dict[str, list[FillTarget]]:
        """This rank's targets by saved name; parts of sharded tensors only if they have an element."""
        return {
            name: found
            for name, parts in self._parts.items()
            if (found := [one for one in parts if one.region is None or one.region.num_items])
        }

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a saved tensor."""
        return torch_dtype(self._spec(name).dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a saved tensor."""
        return tuple(self._spec(name).shape)

    def fill(self, name: str, live: torch.Tensor, label: str) -> None:
        """Plan to fill a live tensor from a saved one, in place if possible. `label` is its live name."""
        self._check(name, live, label)
        is_own = is_local_shard(live) and self._is_own(name, live)
        parts = self._parts_of(live, label, is_own=is_own)
        self.used.add(name)
        self.written[label] = sharding.local_of(live)
        saved = self.tied.get(name, name)
        if live.device.type == "meta":
            self._make_real(name, live, [region for _, region in parts], label)
        elif saved not in self._parts:
            self._parts[saved] = [self._fill_first(saved, part, region, label) for part, region in parts]
        else:
            filled = [target.tensor for target in self._parts[saved]]
            for part, region in parts:
                source = self._source(saved, region)
                if not any(part.data_ptr() == one.data_ptr() and is_same_view(part, one) for one in filled):
                    self._add_memory(part)
                    self.add_step(LoadPhase.COPY, lambda source=source, part=part: copy(source(), part))
        self._claimed.add(saved)

    def device_of(self, live: torch.Tensor) -> torch.device:
        """Return the device of a live tensor, or the device chosen for a meta tensor."""
        chosen = self.real_devices.get(id(live), torch.device("cpu"))
        return chosen if live.device.type == "meta" else live.device

    def _check(self, name: str, live: torch.Tensor, label: str) -> None:
        if is_composite(live) and live.dtype not in RAW:
            composite = take_apart(live)
            found = f"it was saved as a plain tensor, but is {shown_type(composite.type, composite.facts)}. "
            advice = "Build it as it was when it was saved, or leave it out with only= or rename=."
            raise unfillable(live, label, found + advice)
        is_known = type(live) in PLAIN or is_dtensor(live) or is_sharded_tensor(live)
        if not is_known or live.layout is not torch.strided:
            raise unfillable(live, label)
        expected, found = sharding.shape_of(live), self.shape(name)
        if expected != found and not self._is_own(name, live):
            raise InvalidInput(
                f"{label} has shape {list(expected)} in the live state but {list(found)} in the checkpoint. "
                "Nothing was changed. Build the same model, or leave it out with only= or rename=.",
                key=label,
            )
        if live.dtype is not self.dtype(name):
            self.notes.append(f"{label}: saved as {self.dtype(name)}, cast to {live.dtype}.")

    def _is_own(self, name: str, live: torch.Tensor) -> bool:
        """Return True if each rank has saved its own, in the live shape."""
        is_whole = type(live) in PLAIN and self._spec(name).partitioning is None
        return is_whole and tuple(live.shape) == self.shape(name)

    def _parts_of(
        self, live: torch.Tensor, label: str, *, is_own: bool = False
    ) -> list[tuple[torch.Tensor, Region | None]]:
        """Return this rank's parts of a live tensor and their regions. None is the whole tensor."""
        if type(live) in PLAIN and (is_own or not is_local_shard(live)):
            return [(live, None)]
        try:
            local, shards = sharding.local_of(live), sharding.shards_of(live, self._rank)
        except Unsupported as error:
            raise unfillable(live, label, str(error)) from error
        if type(local) not in PLAIN or local.layout is not torch.strided:
            raise unfillable(local, label)
        whole = Region.whole(sharding.shape_of(live))
        if not shards and not is_local_shard(live):  # its sharding has other ranks only
            return [(local, Region(whole.offsets, whole.offsets))]
        return [(shard, None if region == whole else region) for shard, region in shards]

    def _new_target(self, saved: str, device: torch.device | str, region: Region | None) -> FillTarget:
        """Return new memory for a saved tensor, or for a region of it."""
        spec = self._spec(saved)
        sizes = tuple(spec.shape) if region is None else region.sizes
        return FillTarget(torch.empty(sizes, dtype=torch_dtype(spec.dtype), device=device), region)

    def _source(self, saved: str, region: Region | None) -> Maker:
        """Return a function that returns a region of a saved tensor after filling."""
        parts = self._parts[saved]
        for target in parts:
            if target.region == region:
                return lambda: target.tensor
        if not any(part.region is None for part in parts):  # read all of the tensor instead of parts
            new = self._new_target(saved, "cpu", None)
            self._parts[saved] = [new]
            for part in parts:
                assert part.region is not None
                self.add_step(LoadPhase.CARVE, partial(copy, new.tensor[part.region.slices], part.tensor))
        (target,) = self._parts[saved]
        whole = target.tensor
        return lambda: whole if region is None else whole[region.slices].contiguous()

    def read_apart(self, name: str, live: torch.Tensor) -> Maker | None:
        """Plan to read a tensor of a container into new memory if its live one shares memory.

        Return a function that returns `live` with the saved values after filling, or a new tensor if they
        differ from those that the others have there; None if `live` shares no memory or is not plain.
        """
        is_plain = type(live) is torch.Tensor and not live.requires_grad and not sharding.is_divided(live)
        if not is_plain or self.tied.get(name, name) in self._parts:
            return None
        if tuple(live.shape) != self.shape(name) or live.dtype is not self.dtype(name):
            return None
        place = range_of(live)
        shared = [] if place is None else self._memory.overlap(*place)
        if not shared:
            return None
        self.read(name)

        def choose() -> torch.Tensor:
            new = self.tensor(name, live.device)
            if not holds(live, new, shared):
                return new
            copy(new, live)
            return live

        return choose

    def _add_memory(self, live: torch.Tensor) -> list[Range]:
        """Record that a live tensor is filled; return its addresses that other tensors fill too."""
        if (place := range_of(live)) is None:
            return []
        shared = self._memory.overlap(*place)
        self._memory.add(*place)
        return shared

    def _fill_first(self, saved: str, live: torch.Tensor, region: Region | None, label: str) -> FillTarget:
        shared = self._add_memory(live)
        if not shared and is_plain_memory(live) and live.dtype is self.dtype(saved):
            return FillTarget(live.detach(), region)
        target = self._new_target(saved, "cpu", region)

        def copy_over() -> None:
            if shared and not holds(live, target.tensor, shared):
                self.notes.append(f"{label}: {_SHARED}")
            copy(target.tensor, live)

        self.add_step(LoadPhase.COPY, copy_over)
        return target

    def _make_real(self, name: str, live: torch.Tensor, regions: list[Region | None], label: str) -> None:
        device = self.real_devices.setdefault(id(live), torch.device("cpu"))
        is_second = id(live) in self._swapped
        self._swapped.add(id(live))
        is_shared = self.tied.get(name, name) in self._claimed
        sources = self.read(name, device, regions)
        if not is_second:
            self.add_step(
                LoadPhase.SWAP, lambda: sharding.make_real(live, sources, device, label, copy=is_shared)
            )
        elif not is_shared:
            self.notes.append(f"{label}: {_UNTIED}")

            def copy_again() -> None:
                for source, (part, _) in zip(sources, self._parts_of(live, label), strict=True):
                    copy(source(), part)

            self.add_step(LoadPhase.COPY, copy_again)

    def _spec(self, name: str) -> Tensor:
        saved = self.tied.get(name, name)
        if saved not in self.tensors:
            raise Corrupt(f"The checkpoint refers to a tensor {saved!r} that it does not contain.", key=saved)
        return self.tensors[saved]


def _renamed(names: Iterable[str], rename: Rename) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for name in names:
        live = rename(name)
        if live in renamed:
            raise InvalidInput(
                f"rename= maps both {renamed[live]!r} and {name!r} to {live!r}. Nothing was changed.",
                key=live,
            )
        renamed[live] = name
    return renamed


def renamer(rename: Mapping[str, str] | Rename | None) -> Rename:
    """Return the function that maps saved names to live ones. In a mapping, the longest prefix wins."""
    if callable(rename):
        return rename
    prefixes = sorted((rename or {}).items(), key=lambda pair: -len(pair[0]))

    def renamed(name: str) -> str:
        for old, new in prefixes:
            if old and is_under(name, old):
                return new + name[len(old) :]
        return name

    return renamed


def leftover(
    plan: Load,
    live_keys: Collection[str],
    wanted: Collection[str] | None,
    held: tuple[Collection[str], Collection[str]] | None,
) -> list[str]:
    """Return the saved names that fill nothing live. A completely unused key is listed as one name.

    `wanted` are the top-level keys (live names) to restore, or None for all. If ranks differ, `held` has the
    live names and top-level keys that any rank has: these do not count.
    """
    names = [
        name
        for live, name in plan.saved_names.items()
        if name not in plan.used and (wanted is None or _is_under(live, wanted))
    ]
    found = list(plan.unexpected)
    if held is not None:
        live_names, keys = held
        elsewhere = [key for key in keys if key not in live_keys]
        renamed = {name: plan.rename(name) for name in names}
        names = [
            k for k, live in renamed.items() if live not in live_names and not _is_under(live, elsewhere)
        ]
        found = [name for name in found if plan.rename(name.rpartition(PARAMETER_MARK)[2]) not in live_names]
        live_keys = {*live_keys, *keys}
    for live, key in plan.keys.items():
        if live in live_keys or (wanted is not None and not _is_under(live, wanted)):
            continue
        if not any(_is_under(name, [key]) for name in plan.used):
            names = [name for name in names if not _is_under(name, [key])]
            found.append(key)
    return found + names


def _is_under(name: str, keys: Collection[str]) -> bool:
    return any(is_under(name, key) for key in keys)


def mismatch(missing: list[str], unexpected: list[str]) -> InvalidInput:
    """Return the error of a strict load whose names differ."""
    found = {"in the live state but not in the checkpoint": missing}
    found["in the checkpoint but not in the live state"] = unexpected
    parts = [
        f"{len(names)} {what}: {', '.join(names[:_MAX_LISTED])}{', ...' if len(names) > _MAX_LISTED else ''}"
        for what, names in found.items()
        if names
    ]
    advice = (
        "Nothing was changed. Use strict=False to restore the names that match, only= to choose keys, or "
        "rename= to map saved names to live ones."
    )
    return InvalidInput(f"The checkpoint does not fit the live state. {'. '.join(parts)}. {advice}")


def fill_composite(plan: Load, saved: SavedTensor, live: torch.Tensor, label: str) -> None:
    """Plan to fill a live composite tensor from a saved one. It stays the same object."""
    why = misfit(saved, live, plan)
    if why is not None:
        raise InvalidInput(
            f"{label} cannot be restored: {why}. A composite tensor is only restored into a live one of the "
            "same class with the same description. Nothing was changed. Build it as it was, or leave it out "
            "with only= or rename=.",
            key=label,
        )
    if live.is_meta:
        why = "it is on the meta device. Call to_empty(device=...) on the module first."
        raise unfillable(live, label, why)
    found = Fitting()
    found.pair(saved, live, label)
    for name, part, path in found.places:
        plan.fill(name, part, path)
    for tree, part in found.sparse:
        make = plan.read_tree(tree, part.device)
        # A copy: names that were tied when they were saved share one object.
        plan.add_step(
            LoadPhase.COPY,
            lambda part=part, make=make: set_content(part, make().to(device=part.device, copy=True)),
        )


def plan_state(
    plan: Load, optimizer: Optimizer, parameter: torch.Tensor, saved: SavedTensor, live: Any, label: str
) -> Maker:
    """Plan to fill one composite tensor of a parameter's state; return a function that returns it filled.

    It is the live one, if there is one that fits, or one that the optimizer makes as at its first step.
    """
    known = [live] if isinstance(live, torch.Tensor) else []
    if not known or misfit(saved, live, plan) is not None:
        if not needs_live(saved):  # its class is not the program's
            device = plan.device_of(parameter)
            return plan.read_tree(saved, device)
        make: Callable[..., torch.Tensor] | None = getattr(optimizer, "_new_buffer", None)
        if make is not None and not parameter.is_meta:  # torchao's low-bit optimizers call it at a first step
            known += [make(parameter, is_signed) for is_signed in (True, False)]
    if not known:
        raise InvalidInput(
            f"{label} was saved as {shown_type(saved.type, saved.facts)}, but the live "
            f"{type(optimizer).__qualname__} has no state yet that shows this class. A checkpoint only names "
            "classes, and never imports them. Nothing was changed. Restore into the same kind of optimizer, "
            "or take one step with it first: the restore replaces all that the step changes.",
            key=label,
        )
    target = next((one for one in known if misfit(saved, one, plan) is None), known[0])
    fill_composite(plan, saved, target, label)
    return lambda: target
