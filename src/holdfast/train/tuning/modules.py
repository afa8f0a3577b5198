"""The modules that a training step calls from outside of any other: what a compiler would be given."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.external_utils
import torch._dynamo.trace_rules
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from holdfast.train.tuning import places
from holdfast.train.tuning.facts import Place

Call = Callable[..., Any]
_COMPILER = "/torch/_dynamo/eval_frame.py"
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


@dataclasses.dataclass(frozen=True, slots=True)
class Outermost:
    """A module that a step calls."""

    module: nn.Module
    place: Place | None
    is_compiled_around: bool
    """It is called inside a function that the script compiles, so it can only be looked at from there."""


class Discovery:
    """Watches every module call of one step, and keeps the outermost ones that train."""

    def __init__(self) -> None:
        self._found: dict[int, Outermost] = {}
        self._depth = 0
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begin to watch. Compiled code runs eagerly meanwhile, for the watcher would be compiled with it."""
        torch.compiler.set_stance("force_eager")
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> list[Outermost]:
        """End it.

        Returns:
            The outermost modules, in the order of their first calls.
        """
        for handle in self._handles:
            handle.remove()
        torch.compiler.set_stance("default")
        inner = {
            id(child)
            for one in self._found.values()
            for child in one.module.modules()
            if child is not one.module
        }
        return [one for key, one in self._found.items() if key not in inner]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or id(module) in self._found or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            is_compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl
            around = not is_compiled and places.is_running(_COMPILER)
            self._found[id(module)] = Outermost(module, places.here(), around)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._depth -= 1


def inner(module: nn.Module) -> nn.Module:
    """The module itself, without what has been wrapped around it for several ranks or by torch.compile."""
    while True:
        if isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        elif isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        else:
            return module


def blocks(module: nn.Module) -> list[nn.Module]:
    """The layers that a model has several of: outermost members of lists whose class occurs there again.

    Source: the shape of the models in transformers and in PyTorch's own examples.
    """
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        kinds = [type(child) for child in module if any(True for _ in child.parameters())]
        repeated = {
            kind for kind in kinds if kinds.count(kind) > 1 and not kind.__module__.startswith("torch.")
        }
        found = [child for child in module if type(child) in repeated]
        if found:
            return found
    return [block for child in module.children() for block in blocks(child)]


def draws_random(module: nn.Module) -> bool:
    """True if the module draws random numbers as it trains, as far as its parts tell."""
    names = ("dropout", "attention_dropout", "dropout_p", "resid_pdrop")
    return any(
        (isinstance(part, _RANDOM) and getattr(part, "p", 0.1) > 0)
        or any(isinstance(rate := getattr(part, name, None), float) and rate > 0 for name in names)
        for part in module.modules()
    )


def compiles_in_place(module: nn.Module) -> bool:
    """False for a container of torch's own as the model: `compile()` of such a module compiles nothing.

    Its forward stands in a file that the compiler leaves out, and only `torch.compile(module)` sees to that.
    """
    return not torch._dynamo.trace_rules.check(module.forward)


def traceable(call: Call) -> Call:
    """The call of a module, so that the compiler takes it also where torch's own forward is left out."""
    owner = getattr(call, "__self__", None)
    if isinstance(owner, nn.Module) and not compiles_in_place(owner):
        return torch._dynamo.external_utils.wrap_inline(call)
    return call


def compilations() -> object:
    """What the compiler has done so far: another value after it has compiled something."""
    from torch._dynamo.utils import get_compilation_metrics  # not above: an eager training does without it

    done = get_compilation_metrics()  # torch keeps the newest few only, so their number does not tell
    return len(done), id(done[-1]) if done else None


@contextlib.contextmanager
def calls_through(module: nn.Module, through: Callable[[Call], Call]) -> Iterator[None]:
    """Have every call of a module go through a function that is given the call as it was."""
    before = module._compiled_call_impl
    module._compiled_call_impl = through(before or module._call_impl)
    try:
        yield
    finally:
        module._compiled_call_impl = before


def tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in arguments or in a batch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 6:
        if isinstance(value, Mapping):
            for one in value.values():
                yield from tensors(one, depth + 1)
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            for one in value:
                yield from tensors(one, depth + 1)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from tensors(getattr(value, field.name, None), depth + 1)
