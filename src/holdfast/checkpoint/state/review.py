"""Review of a state before its first save: entries that would not resume exactly, each with its fix."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from msgspec import Struct

from holdfast.checkpoint.format.containers import kind_of
from holdfast.checkpoint.state.loader_watch import loader_doubts
from holdfast.checkpoint.state.tensors import described_read_only
from holdfast.checkpoint.state.tree import tensors_in
from holdfast.errors import InvalidInput, LoaderWarning, ResumeWarning, StrayParametersWarning

_MAX_DEPTH = 4  # of containers that are searched for snapshots
_RANDOM = frozenset(
    (
        *("random", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "uniform"),
        *("uniform_", "normal", "normal_", "bernoulli", "bernoulli_", "choice", "choices", "shuffle"),
        *("sample", "gauss", "permutation", "standard_normal", "multinomial", "random_", "integers"),
    )
)
"""Names of functions that draw random numbers, in the code of a data set."""
_RANDOM_TRANSFORMS = ("ColorJitter", "RandAugment", "AutoAugment")
_CALLED = ("__getitem__", "__iter__", "__call__", "forward")


def refuse_snapshots(objects: Mapping[str, Any]) -> None:
    """Raise if a state contains the result of state_dict() in place of the object itself.

    Such a dictionary is a copy of one moment, or shares memory with the training only until a tensor is
    replaced. That of an optimizer is empty before the first step, and stays so.
    """
    copies = (found for key, value in objects.items() for found in _copies(value, key))
    path, kind = next(((path, kind) for path, kind, _ in copies if kind is not None), ("", None))
    if kind is not None:
        raise InvalidInput(
            f"{path} is a dictionary that {kind}.state_dict() returned. It is a snapshot: checkpoints "
            f"would never change, and a restore would not reach the {kind}. Nothing was written. Pass "
            f"the {kind} itself in its place: {_as_state(path, kind)}. Or, if you make a new dictionary "
            "for each save and load it yourself: Checkpointer(home) without a state, save(step, state) "
            "and load().",
            key=path,
        )


def _copies(value: Any, path: str, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, str | None, set[str]]]:
    """Yield path, kind and names of each dict in a value that state_dict() returned or that copies one.

    Copies of a module's have names and no kind. Objects with a state of their own are left out.
    """
    container = kind_of(value)
    if container is None or depth == 0:
        return
    if isinstance(value, dict):
        if (kind := _kind_of_snapshot(value)) is not None:
            yield path, kind, set()
            return
        if {str}.issuperset(map(type, value)) and _has_tensors_of_a_module(value):
            yield path, None, set(value)
            return
    for step, item in container.items(value):
        yield from _copies(item, f"{path}.{step}", depth - 1)


def _has_tensors_of_a_module(value: dict[str, Any]) -> bool:
    are_tensors = all(type(item) is torch.Tensor and not item.requires_grad for item in value.values())
    return are_tensors and any(name.rpartition(".")[2] in ("weight", "bias") for name in value)


def _as_state(path: str, kind: str) -> str:
    """Return the source code of a `state=` argument with an object at a key path."""
    key, *steps = path.split(".")
    inner = kind
    for step in reversed(steps):
        inner = f"[..., {inner}]" if step.isdigit() else f"{{{step!r}: {inner}}}"
    return f"state={{{key!r}: {inner}}}"


def _kind_of_snapshot(value: dict[Any, Any]) -> str | None:
    groups = value.get("param_groups")
    if isinstance(value.get("state"), dict) and isinstance(groups, list):
        return "optimizer" if all(isinstance(one, dict) and "params" in one for one in groups) else None
    if isinstance(value, collections.OrderedDict) and hasattr(value, "_metadata"):
        return "model"
    if "last_epoch" in value and ("_step_count" in value or "_last_lr" in value):
        return "scheduler"
    if {"scale", "growth_factor", "_growth_tracker"} <= value.keys():
        return "scaler"
    return None


class ResumeRisk(Struct, frozen=True):
    """A part of a state that will not resume exactly."""

    text: str  # a sentence with the fix
    would_show: bool  # a resumed run's checkpoints show the difference, so comparing them decides
    category: type[ResumeWarning] = ResumeWarning


def find_resume_risks(
    values: Mapping[str, Any],
    read_only: Sequence[str] = (),
    forgotten: Sequence[torch.optim.Optimizer] = (),
    *,
    has_live_objects: bool = True,
) -> list[ResumeRisk]:
    """Return the parts of a state, of objects by key, that will not resume exactly.

    A restore could not write to the `read_only` tensors. Optimizers that have begun a step and are not saved
    are `forgotten`. A state without live objects may be made of snapshots.
    """
    hidden = list(_forgotten_doubts(values, forgotten))
    if read_only:
        fix = "Put a copy into the state: tensor.clone()."
        hidden.insert(0, f"{described_read_only(read_only)}, so a restore would be refused. {fix}")
    shown: list[str] = []
    strays: list[str] = []
    modules = [one for one in values.values() if isinstance(one, torch.nn.Module)]
    for key, value in values.items():
        bases = type(value).__mro__
        if isinstance(value, torch.nn.Module):
            hidden += _metric_doubts(key, value)
        elif any(one.__module__ == "accelerate.data_loader" for one in bases):
            shown += _prepared_doubts(key, value)
        elif any(one.__name__ == "StatefulDataLoader" for one in bases):
            shown += _loader_doubts(key, value, values)
        elif isinstance(value, torch.optim.Optimizer):
            strays += _stray_doubts(key, value, values)
            hidden += _schedule_doubts(key, value, values)
        elif callable(getattr(value, "state_dict", None)):
            hidden += _empty_doubts(key, value)
        elif has_live_objects:
            hidden += _snapshot_doubts(key, value, modules)
    loaders = loader_doubts(list(values.values()))
    kinds = (
        (hidden, False, ResumeWarning),
        (strays, False, StrayParametersWarning),
        (shown, True, ResumeWarning),
        (loaders, True, LoaderWarning),
    )
    return [ResumeRisk(text, would_show, kind) for texts, would_show, kind in kinds for text in texts]


def _snapshot_doubts(key: str, value: Any, modules: list[torch.nn.Module]) -> Iterator[str]:
    """Yield a sentence for each snapshot that was added later or copied to a dict."""
    for path, kind, names in _copies(value, key):
        if kind is not None:
            yield (
                f"{path} is a dictionary that {kind}.state_dict() returned, so a restore fills the "
                f"dictionary and not the {kind}. Pass the {kind} itself in its place: "
                f"{_as_state(path, kind)}."
            )
        elif not any(names <= _names_in(module) for module in modules):
            yield (
                f"{path} is a dictionary of tensors that are named as those of a module ({min(names)}), and "
                "no module of the state has these names. If it is a copy of a model's state_dict(), a "
                "restore fills the dictionary and not the model. Pass the model itself in its place: "
                f"{_as_state(path, 'model')}."
            )


def _names_in(module: torch.nn.Module) -> set[str]:
    tensors = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name for name, _ in chain.from_iterable(tensors)}


def _metric_doubts(key: str, module: torch.nn.Module) -> Iterator[str]:
    for name, child in module.named_modules():
        known, defaults = (getattr(child, name, None) for name in ("_persistent", "_defaults"))
        if not isinstance(known, dict) or not isinstance(defaults, dict):  # no metric of torchmetrics
            continue
        if lost := [state for state, is_kept in known.items() if not is_kept]:
            path = f"{key}.{name}" if name else key
            yield (
                f"{path} is a {type(child).__name__} whose state ({', '.join(lost)}) is not persistent, so "
                "it is not in its state_dict() and is reset when the run resumes. Call .persistent(True) on "
                "it before training."
            )


def _empty_doubts(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, torch.amp.GradScaler) and not value.is_enabled():
        return  # it has no state
    if getattr(value, "__dict__", None) and not value.state_dict():
        yield (
            f"{key} is a {type(value).__qualname__} whose state_dict() is empty, so it is not saved. "
            "If it changes during training, return its state from state_dict()."
        )


def _stray_doubts(key: str, optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> Iterator[str]:
    modules = [one for one in values.values() if isinstance(one, torch.nn.Module)]
    known = {id(one) for module in modules for one in module.parameters()}
    known |= {id(one) for value in values.values() for one in tensors_in(value)}
    groups = getattr(optimizer, "param_groups", [])
    num_lost = sum(id(one) not in known for group in groups for one in group["params"])
    if num_lost and not any("FullyShardedDataParallel" in type(one).__name__ for one in modules):
        yield (
            f"{key} trains {num_lost} parameters that are in no module of the state, so they are not saved. "
            "Add their module to the state."
        )


def _schedule_doubts(key: str, optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> Iterator[str]:
    step = getattr(optimizer, "step", None)
    is_scheduled = bool(getattr(step, "_wrapped_by_lr_sched", False) or getattr(step, "_with_counter", False))
    if is_scheduled and not any(_schedules(one, optimizer) for one in values.values()):
        yield (
            f"the learning rate of {key} is set by a scheduler that is not in the state, so the schedule "
            "restarts when the run resumes. Add it: state={..., 'scheduler': scheduler}."
        )


def _forgotten_doubts(values: Mapping[str, Any], forgotten: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    """Yield a sentence for each optimizer outside the state that trains parameters in it."""
    modules = {key: one for key, one in values.items() if isinstance(one, torch.nn.Module)}
    for optimizer in forgotten:
        if any(optimizer is value for value in values.values()):
            continue
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for key, module in modules.items():
            if trained.isdisjoint(map(id, module.parameters())):
                continue
            kind, holders = type(optimizer).__qualname__, _holders_of(optimizer, values)
            where = f" It is inside {holders[0]}, which does not save it." if holders else ""
            yield (
                f"parameters of {key} are trained by a {kind} whose state is not saved, and is empty when "
                f"the run resumes.{where} Add it: state={{..., 'another_optimizer': optimizer}}."
            )
            break


def _holders_of(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> list[str]:
    """Return the names of attributes that hold an optimizer."""
    attributes = [(key, getattr(value, "__dict__", {})) for key, value in values.items()]
    return [f"{key}.{name}" for key, own in attributes for name, one in own.items() if one is optimizer]


def _schedules(value: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an object is a scheduler of an optimizer, or may contain one."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return False
    may_be = callable(getattr(value, "load_state_dict", None)) and hasattr(value, "step")
    return may_be or getattr(value, "optimizer", None) is optimizer


def _prepared_doubts(key: str, loader: Any) -> Iterator[str]:
    """Yield a sentence if Accelerate's loader draws its order from random numbers."""
    inner = getattr(loader, "base_dataloader", None)
    order: Any = getattr(inner, "batch_sampler", None)
    while hasattr(order, "batch_sampler"):  # a shard of another one
        order = order.batch_sampler
    if isinstance(getattr(order, "sampler", None), torch.utils.data.RandomSampler):
        yield (
            f"{key} is a data loader that Accelerate has prepared. It does not save the order of a shuffled "
            "epoch, so a resumed run gets other batches. Use attach(accelerator) of "
            "holdfast.adapters.accelerate with save_state(), or read a loader that is not prepared, with "
            "batch_sampler=holdfast.train.data.GlobalBatches(len(data), batch_size), and add these batches "
            "to the state."
        )


def _loader_doubts(key: str, loader: Any, values: Mapping[str, Any]) -> Iterator[str]:
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    own = [getattr(one, "generator", None) for one in (loader, sampler, inner)]
    for name, value in values.items():
        if isinstance(value, torch.Generator) and any(value is one for one in own):
            yield (
                f"{name} is a generator of {key}, which restores it itself, to the epoch's start. With "
                f"both in the state, the resumed run gets different batches. Leave {name} out of the state."
            )
    if getattr(loader, "generator", None) is None:
        yield (
            f"{key} does not have its own generator, so starting it draws from the process-wide one: once "
            "more in a resumed run than in an uninterrupted one. Pass one: "
            "StatefulDataLoader(..., generator=torch.Generator())."
        )
    yield from _sampler_doubts(key, loader, inner or sampler)
    drawing = _draws_random_numbers(getattr(loader, "dataset", None))
    if getattr(loader, "num_workers", 0) and drawing:
        yield (
            f"{key} has workers, and {drawing} draws random numbers in them. Their generators are reset "
            "when the run resumes. Draw from a generator seeded by the sample's index, or use num_workers=0."
        )


def _sampler_doubts(key: str, loader: Any, sampler: Any) -> Iterator[str]:
    """Yield a sentence if a loader resumes its epoch, but shuffles later ones differently."""
    fix = (
        "Pass sampler=torchdata.stateful_dataloader.sampler.RandomSampler(dataset, "
        "generator=torch.Generator()), with a generator of its own."
    )
    generator = getattr(sampler, "generator", None)
    if generator is not None and type(sampler).__module__.partition(".")[0] == "torch":
        kind = type(sampler).__name__  # torchdata's own saves its position through its iterator
        yield f"the {kind} of {key} does not save its position, so later epochs are in another order. {fix}"
    elif generator is not None and not loader.num_workers and generator is loader.generator:
        yield (
            f"{key} and its sampler share a generator, and without workers the loader draws from it too: "
            f"once more in a resumed run, so later epochs are in another order. {fix}"
        )


def _draws_random_numbers(dataset: Any) -> str | None:
    """Return the name of a data set's code that draws random numbers; None if a search finds nothing."""
    waiting, seen = [dataset], set[int]()
    while waiting and len(seen) < 100:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        kind = type(part)
        if kind.__name__.startswith("Random") or kind.__name__ in _RANDOM_TRANSFORMS:
            return kind.__name__
        functions = [part] if isinstance(part, FunctionType) else []
        functions += [getattr(kind, name, None) for name in _CALLED]
        for function in functions:
            names = getattr(getattr(function, "__code__", None), "co_names", ())
            if function is not None and not _RANDOM.isdisjoint(names) and _is_of_users(function):
                return f"{function.__qualname__}()"
        if _is_of_users(kind) or kind.__name__ in ("Compose", "Subset", "ConcatDataset", "Sequential"):
            held = list(getattr(part, "__dict__", {}).values())
            held += [item for value in held if isinstance(value, (list, tuple)) for item in value[:20]]
            waiting += [value for value in held if callable(value) or hasattr(value, "__getitem__")]
    return None


def _is_of_users(thing: Any) -> bool:
    module = getattr(thing, "__module__", None) or ""
    return module.split(".")[0] not in ("torch", "torchdata", "numpy", "builtins")
