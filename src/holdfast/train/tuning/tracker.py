"""Tracker of a training's optimizer steps and the modules that they call, which drives a watcher."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.external_utils
import torch._dynamo.trace_rules
from msgspec import Struct
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast.train.tuning import source_lines
from holdfast.train.tuning.loaders import LoaderMonitor
from holdfast.train.tuning.measurements import SourceLine

Call = Callable[..., Any]
_MAX_DEPTH = 6  # of containers in the arguments of a call
_COMPILER = "/torch/_dynamo/eval_frame.py"
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)
_RATES = ("dropout", "attention_dropout", "dropout_p", "resid_pdrop")


class StopRun(BaseException):
    """Request to end a run between two steps. Not an Exception, so the script's handlers do not catch it."""


class OutermostModule(Struct, frozen=True):
    """A module that a step calls directly."""

    module: nn.Module
    place: SourceLine | None
    is_compiled_around: bool  # called inside a function that the script compiles: calls cannot be intercepted


class TrainingInfo(Struct, frozen=True):
    """Facts about the training from its first step."""

    modules: tuple[OutermostModule, ...]
    device: torch.device

    @property
    def interceptable(self) -> tuple[OutermostModule, ...]:
        """The modules whose calls can be intercepted: those called outside of compiled code."""
        return tuple(one for one in self.modules if not one.is_compiled_around)


Watching = Generator[None, object, Any]
"""Watcher of some steps at work, for one question: yields before each step, and returns its measurements.

It is sent the optimizer after a step, and None if no further one follows. The measurements are a dataclass of
`measurements`.
"""
Watcher = Callable[[TrainingInfo], Watching]


class StepTracker:
    """Tracker that drives a watcher over the optimizer steps of this process, from the second one on."""

    def __init__(
        self, watcher: Watcher, loaders: LoaderMonitor, *, on_result: Callable[[Any], object]
    ) -> None:
        self._loaders, self._on_result = loaders, on_result
        self._watching = _from_first_step(watcher)
        self._pacer: Optimizer | None = None  # marks the steps, the first of several optimizers
        self._undo = contextlib.ExitStack()
        self.is_done = False

    def start(self) -> None:
        """Start tracking. The training need not exist yet."""
        self._undo.enter_context(self._loaders.running())
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        next(self._watching)

    def stop(self) -> None:
        """Stop tracking, and pass on the measurements if that has not happened."""
        with self._undo:
            if not self.is_done:
                self._resume(None)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.is_done or self._pacer not in (None, optimizer):
            return
        self._pacer = optimizer
        self._resume(optimizer)
        if self.is_done:
            self._undo.close()
            raise StopRun

    def _resume(self, optimizer: Optimizer | None) -> None:
        """Let the watcher continue, and pass on its measurements at its end."""
        try:
            self._watching.send(optimizer)
        except StopIteration as end:
            self.is_done = True
            if self._pacer is not None:
                self._on_result(end.value)


def _from_first_step(watcher: Watcher) -> Watching:
    """Collect the modules that the first step calls, then have the watcher watch the next steps."""
    with _called_modules() as found:
        optimizer: Any = yield
    if optimizer is None:
        return None
    inner = {id(child) for one in found.values() for child in one.module.modules() if child is not one.module}
    outermost = tuple(one for key, one in found.items() if key not in inner)
    device = next(one for group in optimizer.param_groups for one in group["params"]).device
    return (yield from watcher(TrainingInfo(outermost, device)))


@contextlib.contextmanager
def _called_modules() -> Iterator[dict[int, OutermostModule]]:
    """Collect the trained modules that are called during the block, not by other modules, in their order.

    Compiled code runs eagerly meanwhile, to keep the hooks out of it.
    """
    found: dict[int, OutermostModule] = {}
    depth = 0

    def enter(module: nn.Module, _args: Any) -> None:
        nonlocal depth
        depth += 1
        if depth > 1 or id(module) in found or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            is_compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl
            around = not is_compiled and source_lines.is_running(_COMPILER)
            found[id(module)] = OutermostModule(module, source_lines.current_line(), around)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal depth
        depth -= 1

    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.callback(register_module_forward_pre_hook(enter).remove)
        undo.callback(register_module_forward_hook(leave, always_call=True).remove)
        yield found


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module without DistributedDataParallel and torch.compile wrappers."""
    while True:
        if isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        elif isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        else:
            return module


def find_layers(module: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model: outermost members of lists whose class occurs again.

    Source: the structure of the models in transformers and in PyTorch's own examples.
    """
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        kinds = Counter(type(child) for child in module if any(True for _ in child.parameters()))
        repeated = {one for one, num in kinds.items() if num > 1 and not one.__module__.startswith("torch.")}
        if found := [child for child in module if type(child) in repeated]:
            return found
    return [block for child in module.children() for block in find_layers(child)]


def uses_randomness(module: nn.Module) -> bool:
    """Return True if the module draws random numbers in training, judging by its submodules."""
    return any(
        (isinstance(part, _RANDOM) and getattr(part, "p", 0.1) > 0)
        or any(isinstance(rate := getattr(part, name, None), float) and rate > 0 for name in _RATES)
        for part in module.modules()
    )


def compiles_in_place(module: nn.Module) -> bool:
    """Return False for torch's own containers: their `compile()` compiles nothing.

    Their forward is in a file that the compiler skips. Only `torch.compile(module)` handles that.
    """
    return not torch._dynamo.trace_rules.check(module.forward)


def traceable(call: Call) -> Call:
    """Return a module's call so that the compiler traces it, even for torch's own containers."""
    owner = getattr(call, "__self__", None)
    if isinstance(owner, nn.Module) and not compiles_in_place(owner):
        return torch._dynamo.external_utils.wrap_inline(call)
    return call


def compilation_state() -> object:
    """Return a value that changes with every compilation."""
    from torch._dynamo.utils import get_compilation_metrics  # slow import, not needed for eager training

    done = get_compilation_metrics()  # torch keeps only the newest few
    return len(done), id(done[-1]) if done else None


@contextlib.contextmanager
def intercept_calls(module: nn.Module, through: Callable[[Call], Call]) -> Iterator[None]:
    """Route every call of a module through a function during the block."""
    before = module._compiled_call_impl
    module._compiled_call_impl = through(before or module._call_impl)
    try:
        yield
    finally:
        module._compiled_call_impl = before


@contextlib.contextmanager
def intercepted(training: TrainingInfo, through: Callable[[Call], Call]) -> Iterator[None]:
    """Route every call of the modules that a step calls through a function during the block."""
    with contextlib.ExitStack() as undo:
        for called in training.interceptable:
            is_compiled = isinstance(called.module, torch._dynamo.OptimizedModule)
            target = called.module if is_compiled else unwrap(called.module)
            undo.enter_context(intercept_calls(target, through))
        yield


def find_tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or in a batch."""
    members: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        members = value.values()
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        members = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = (getattr(value, field.name, None) for field in dataclasses.fields(value))
    for member in members if depth < _MAX_DEPTH else ():
        yield from find_tensors(member, depth + 1)
