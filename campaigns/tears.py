"""Torn copies: every way of writing to a state while it is copied, tried against the bytes of each step.

A case is an optimizer or a write, a size and a moment: before the copy, between its end and the look at
the memory, or a natural race. Each trains some steps and saves; every checkpoint is then compared, bit for
bit, with copies that were made in the moment of its save.

    python -m campaigns.tears [--only WORD] [--rounds N]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers  # pyright: ignore[reportAttributeAccessIssue]

import holdfast
from campaigns.counts import Count, write
from holdfast.checkpoint.stage import stager
from holdfast.checkpoint.stage.watch import WriteWatch
from holdfast.errors import HoldfastError, SaveWarning

STEPS, EVERY = 8, 2
MOMENTS = ("before the copy", "after the copy", "race")
WIDTHS = (128, 512)
_WAIT_S = 60.0
_HANGS_S = 120.0  # after which a case counts as hanging: it is printed where, and the campaign ends


@dataclass
class Training:
    """One training that is saved: what a case may look at and write to."""

    width: int
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    model: nn.Module = field(init=False)
    optimizer: Optimizer = field(init=False)
    state: dict[str, Any] = field(init=False)
    kept: dict[str, Any] = field(default_factory=dict)  # what a case keeps from step to step

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(self.width, self.width), nn.BatchNorm1d(self.width), nn.Linear(self.width, self.width)
        )
        self.optimizer = self.make_optimizer(list(self.model.parameters()))
        self.state = {"model": self.model, "optimizer": self.optimizer}

    @property
    def weight(self) -> nn.Parameter:
        """A parameter large enough to be copied in the background."""
        return self.model.get_parameter("2.weight")

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the model."""
        return list(self.model.parameters())

    def compute_gradients(self) -> torch.Tensor:
        """One forward and backward pass; the loss."""
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.model(torch.randn(8, self.width)).square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """One optimizer step on new gradients."""

        def closure() -> torch.Tensor:
            return self.compute_gradients()

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
            return
        closure()
        self.optimizer.step()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors of the state by their names in a checkpoint."""
        found: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}
        for key, value in self.state.items():
            if isinstance(value, nn.Module):
                names.update((id(p), f"{key}.{name}") for name, p in value.named_parameters())
                found.update((f"{key}.{name}", tensor) for name, tensor in value.state_dict().items())
            elif isinstance(value, torch.Tensor):
                found[key] = value
        for key, value in self.state.items():
            if isinstance(value, Optimizer):
                for parameter, slots in value.state.items():
                    for slot, tensor in slots.items():
                        if isinstance(tensor, torch.Tensor) and id(parameter) in names:
                            found[f"{key}.state.{names[id(parameter)]}.{slot}"] = tensor
        return {name: tensor.detach().clone() for name, tensor in found.items()}


Action = Callable[[Training], object]


@dataclass(frozen=True)
class Kind:
    """A way of training: its optimizer, and what is done right after each save."""

    name: str
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    after_save: Action | None = None
    setup: Action | None = None
    step: Action | None = None  # in the place of a plain step


@dataclass
class Outcome:
    """What became of the saves of one case."""

    right: int = 0
    dropped: int = 0
    wrong: list[str] = field(default_factory=list)
    newest: int | None = None
    error: str = ""

    @property
    def is_good(self) -> bool:
        """True if nothing wrong was saved, and the training ended with a recent checkpoint."""
        return not self.wrong and not self.error and self.newest is not None and self.newest >= STEPS - EVERY


def _adam(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def _sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


# -- writes --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _swap_average(training: Training) -> None:
    """An average of the weights is put into the model for an evaluation, and taken out again."""
    saved = [p.detach().clone() for p in training.parameters]
    for parameter in training.parameters:
        parameter.data.mul_(0.5)
    training.model(torch.randn(8, training.width))
    for parameter, value in zip(training.parameters, saved, strict=True):
        parameter.data.copy_(value)


def _step_copy_of_optimizer(training: Training) -> None:
    training.compute_gradients()
    copy.deepcopy(training.optimizer).step()  # of parameters that are deep copies: nothing of ours changes
    other = _sgd(training.parameters)
    other.step()


def _step_sharpness_aware(training: Training) -> None:
    """First step of SAM: up the gradient, past any optimizer's step()."""
    training.compute_gradients()
    for parameter in training.parameters:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=0.1)


def _write_from_thread(training: Training) -> None:
    thread = threading.Thread(target=lambda: training.weight.data.add_(1))
    thread.start()
    thread.join()


def _write_from_fork(training: Training) -> None:
    """A child changes its own copy of the memory, which is none of ours."""
    child = os.fork()
    if child == 0:
        training.weight.data.view(-1)[0] = 7
        os._exit(0)
    os.waitpid(child, 0)


def _write_by_other_process(training: Training) -> None:
    tensor = training.kept["shared"].view(-1)[::50]  # few elements: OpenMP does not work in a forked child
    child = multiprocessing.get_context("fork").Process(target=tensor.add_, args=(1,))
    child.start()
    child.join()


def _share(training: Training) -> None:
    training.model.share_memory()
    training.kept["shared"] = training.weight.data


def _use_file(training: Training) -> None:
    """A plain tensor over a file that is mapped shared."""
    path = Path(tempfile.gettempdir()) / f"holdfast-tears-{os.getpid()}"
    path.write_bytes(bytes(training.width * training.width * 4))
    tensor = torch.from_file(str(path), shared=True, size=training.width * training.width)
    path.unlink()
    training.state["mapped"] = training.kept["mapped"] = tensor


def _read_into(training: Training) -> None:
    """The kernel writes: a read from a file into the memory of a tensor."""
    with Path("/dev/zero").open("rb", buffering=0) as file:
        file.readinto(memoryview(training.weight.data.numpy())[3:5])  # pyright: ignore


def _write_memory(tensor: torch.Tensor) -> None:
    array: Any = tensor.numpy()  # a buffer, which the stubs of numpy do not show before Python 3.12
    memoryview(array).cast("B")[0:9] = b"123456789"


def _foreach_mul(tensors: Sequence[torch.Tensor]) -> None:
    torch._foreach_mul_(list(tensors), 2.0)  # pyright: ignore[reportPrivateImportUsage]


def _foreach_zero(tensors: Sequence[torch.Tensor]) -> None:
    torch._foreach_zero_(list(tensors))  # pyright: ignore[reportPrivateImportUsage]


def _call_fused_sgd(training: Training) -> None:
    training.compute_gradients()
    parameters = [p.data for p in training.parameters]
    torch._fused_sgd_(  # pyright: ignore
        parameters,
        [p.grad for p in training.parameters if p.grad is not None],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


def _collective(call: Callable[[torch.Tensor], object]) -> Action:
    def act(training: Training) -> None:
        training.weight.data.view(-1)[::7] += 1  # so that there is a change with one rank too
        call(training.weight.data)

    return act


def _join_group(_: Training) -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def _add_teacher(training: Training) -> None:
    teacher = copy.deepcopy(training.model)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    training.state["teacher"] = training.kept["teacher"] = teacher


def _average_past_counters(training: Training) -> None:
    for old, new in zip(training.kept["teacher"].parameters(), training.parameters, strict=True):
        old.data.mul_(0.9).add_(new.data, alpha=0.1)


@torch.no_grad()
def _average(training: Training) -> None:
    for old, new in zip(training.kept["teacher"].parameters(), training.parameters, strict=True):
        old.lerp_(new, 0.1)


def _step_then(action: Action) -> Action:
    def act(training: Training) -> None:
        training.step()
        action(training)

    return act


def _hook(register: Callable[[Training, Callable[..., None]], Any]) -> Action:
    """Have a hook change a parameter past its counter before each step."""

    def setup(training: Training) -> None:
        def hook(*_: object) -> None:
            training.weight.data.mul_(0.99)

        training.kept["hook"] = register(training, hook)

    return setup


class _Clipping(torch.optim.SGD):
    """An optimizer whose own step() writes to parameters before it calls that of its base class."""

    def step(self, closure: Any = None) -> Any:  # pyright: ignore
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-1, 1)
        return super().step(closure)


class _Scheduleless(torch.optim.SGD):
    """Swaps the parameters for their averages and back, as optimizers without schedules do."""

    def swap(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.lerp_(torch.ones_like(parameter), 0.1)


class _Embedding(nn.Module):
    """Embeddings with a largest norm, which forward() renormalises in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, width, max_norm=0.5)
        self.head = nn.Linear(width, width)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(torch.randint(500, (64,))))


def _embed(training: Training) -> None:
    training.model = _Embedding(training.width)
    training.optimizer = _adam(training.parameters)
    training.state.update(model=training.model, optimizer=training.optimizer)


def _step_in_backward(training: Training) -> None:
    """Each parameter has an optimizer of its own, stepped when its gradient is there."""
    own = {p: _sgd([p]) for p in training.parameters}
    training.kept["own"] = own

    def step(parameter: torch.Tensor) -> None:
        own[parameter].step()  # pyright: ignore[reportArgumentType]

    for parameter in training.parameters:
        parameter.register_post_accumulate_grad_hook(step)


def _fuzz_state(training: Training) -> None:
    for slots in training.optimizer.state.values():
        for tensor in slots.values():
            if isinstance(tensor, torch.Tensor):
                tensor.data.mul_(0.5)


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _set_bytes(training: Training) -> None:
    ctypes.memset(_address(training.weight) + 4096, 1, 5000)


def _set_all(action: Callable[[torch.Tensor], object]) -> Action:
    def act(training: Training) -> None:
        for parameter in training.parameters:
            action(parameter.data)

    return act


def _with_no_grad(action: Action) -> Action:
    def act(training: Training) -> None:
        with torch.no_grad():
            action(training)

    return act


def _inference(training: Training) -> None:
    with torch.inference_mode():
        training.weight.data.add_(1)


def _load_other(training: Training) -> None:
    values = {name: tensor + 1 for name, tensor in training.model.state_dict().items()}
    training.model.load_state_dict(values)


def _numpy_out(training: Training) -> None:
    import numpy as np

    array = training.weight.data.numpy()
    np.multiply(array, 2, out=array)


def _weights(action: Callable[[torch.Tensor], object]) -> Action:
    return lambda training: action(training.weight.data)


WRITES: dict[str, Action] = {
    "data.clamp_ of all": _set_all(lambda t: t.clamp_(-0.01, 0.01)),
    "data.clamp_ of one": _weights(lambda t: t.clamp_(-0.01, 0.01)),
    "data.add_": _weights(lambda t: t.add_(1)),
    "data.copy_": _weights(lambda t: t.copy_(torch.rand_like(t))),
    "data.zero_": _weights(lambda t: t.zero_()),
    "data[...] of one element": _weights(lambda t: t.view(-1)[-5000:-4999].fill_(3)),
    "data of the first element": _weights(lambda t: t.view(-1)[:1].fill_(3)),
    "data of the last element": _weights(lambda t: t.view(-1)[-1:].fill_(3)),
    "data.index_add_": _weights(lambda t: t.index_add_(0, torch.tensor([1]), torch.ones(1, t.shape[1]))),
    "data.masked_fill_": _weights(lambda t: t.masked_fill_(t > 0, 0)),
    "data.bernoulli_": _weights(lambda t: t.bernoulli_()),
    "data.t().add_": _weights(lambda t: t.t().add_(1)),
    "data as bytes": _weights(lambda t: t.view(torch.uint8).bitwise_not_()),
    "detach().add_": lambda training: training.weight.detach().add_(1),
    "mul_ in no_grad": _with_no_grad(lambda training: training.weight.mul_(2)),
    "lerp_ in no_grad": _with_no_grad(lambda training: training.weight.lerp_(torch.ones(()), 0.5)),
    "nn.init": lambda training: nn.init.xavier_uniform_(training.weight),
    "_foreach_mul_": _with_no_grad(lambda t: _foreach_mul(t.parameters)),
    "_foreach_mul_ of data": lambda t: _foreach_mul([p.data for p in t.parameters]),
    "_foreach_zero_": _with_no_grad(lambda t: _foreach_zero(t.parameters)),
    "_fused_sgd_": _call_fused_sgd,
    "out=": _with_no_grad(lambda t: torch.add(t.weight.data, 1, out=t.weight.data)),
    "as_strided": _weights(lambda t: t.as_strided((4096,), (2,)).fill_(5)),
    "vector_to_parameters": lambda t: vector_to_parameters(
        parameters_to_vector(t.parameters) * 2, t.parameters
    ),
    "vector_to_parameters, then in place": lambda t: [
        vector_to_parameters(parameters_to_vector(t.parameters), t.parameters),
        t.weight.data.add_(1),
    ],
    "data = another tensor": lambda training: setattr(training.weight, "data", training.weight.data + 1),
    "numpy alias": _weights(lambda t: t.numpy().fill(2)),
    "numpy out=": _numpy_out,
    "memoryview": _weights(_write_memory),
    "dlpack": _weights(lambda t: torch.from_dlpack(t).add_(1)),
    "storage copy_": _weights(
        lambda t: t.untyped_storage().copy_(torch.ones_like(t).untyped_storage(), False)
    ),
    "storage fill_": _weights(
        lambda t: t.untyped_storage().fill_(1)  # pyright: ignore[reportAttributeAccessIssue]
    ),
    "ctypes.memset": _set_bytes,
    "read() by the kernel": _read_into,
    "inference mode": _inference,
    "thread": _write_from_thread,
    "forked child": _write_from_fork,
    "second optimizer": lambda t: [t.compute_gradients(), _sgd(t.parameters).step()],
    "fresh and copied optimizers": _step_copy_of_optimizer,
    "second optimizer, fused": lambda t: [
        t.compute_gradients(), torch.optim.AdamW(t.parameters, fused=True).step()
    ],
    "SAM": _step_sharpness_aware,
    "swap of an average": _swap_average,
    "load_state_dict": _load_other,
    "state of the optimizer": _fuzz_state,
    "same values": _weights(lambda t: t.copy_(t.clone())),
    "prune": _weights(lambda t: t.mul_((torch.rand_like(t) > 0.5).float())),
    "orthogonal_": lambda training: nn.init.orthogonal_(training.weight),
    "parametrized weight_norm": _with_no_grad(lambda t: t.weight.data.div_(t.weight.data.norm())),
    "several threads": lambda t: [_write_from_thread(t) for _ in range(3)],
    "gradients only": lambda training: training.compute_gradients(),
    "nothing": lambda _: None,
}  # fmt: skip

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": _sgd,
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD nesterov foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "Adam": _adam,
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, maximize=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
}

SPECIAL = (
    Kind("own pre-hook that writes", _adam, setup=_hook(lambda t, h: t.optimizer.register_step_pre_hook(h))),
    Kind(
        "global pre-hook that writes",
        _adam,
        setup=_hook(lambda _, h: optimizers.register_optimizer_step_pre_hook(h)),
    ),
    Kind("post-hook that writes", _adam, setup=_hook(lambda t, h: t.optimizer.register_step_post_hook(h))),
    Kind("step() that writes first", lambda p: _Clipping(p, lr=0.1)),
    Kind("forward hook that writes", _adam, setup=_hook(lambda t, h: t.model.register_forward_pre_hook(h))),
    Kind(
        "average, past the counters, after steps",
        _adam,
        setup=_add_teacher,
        step=_step_then(_average_past_counters),
    ),
    Kind(
        "average, past the counters, after saves",
        _adam,
        after_save=_average_past_counters,
        setup=_add_teacher,
    ),
    Kind("average after steps", _adam, setup=_add_teacher, step=_step_then(_average)),
    Kind("average after saves", _adam, after_save=_average, setup=_add_teacher),
    Kind(
        "optimizer that swaps",
        lambda p: _Scheduleless(p, lr=0.1),
        after_save=lambda t: t.optimizer.swap(),  # pyright: ignore
    ),
    Kind("embeddings with a largest norm", _adam, setup=_embed, after_save=lambda t: t.model(torch.ones(1))),
    Kind("optimizers in backward", _sgd, setup=_step_in_backward, step=lambda t: t.compute_gradients()),
    Kind("shared memory", _sgd, setup=_share, after_save=_write_by_other_process),
    Kind("shared memory, own write", _sgd, setup=_share, after_save=WRITES["data.add_"]),
    Kind("file mapped shared", _adam, setup=_use_file, after_save=lambda t: t.kept["mapped"].add_(1)),
    Kind("all_reduce", _adam, setup=_join_group, after_save=_collective(lambda t: dist.all_reduce(t))),
    Kind("broadcast", _adam, setup=_join_group, after_save=_collective(lambda t: dist.broadcast(t, 0))),
)

KINDS: tuple[Kind, ...] = (
    *(Kind(f"optimizer {name}", make) for name, make in OPTIMIZERS.items()),
    *(Kind(f"write {name}", _adam, after_save=act) for name, act in WRITES.items()),
    *SPECIAL,
)


# -- moments -------------------------------------------------------------------------------------------------


class Gate:
    """Holds the background copy, before it begins or before it is looked at, until training lets it pass."""

    def __init__(self, moment: str) -> None:
        self._moment = moment
        self._opened = threading.Event()
        self._opened.set()

    def close(self) -> None:
        """Hold the next copy."""
        if self._moment != "race":
            self._opened.clear()

    def open(self) -> None:
        """Let the copy pass."""
        self._opened.set()

    def _pass(self, moment: str) -> None:
        is_beside = threading.current_thread().name == "holdfast-stage"
        if is_beside and self._moment == moment and not self._opened.wait(_WAIT_S):
            message = "the gate was never opened"
            raise TimeoutError(message)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install the gate in the copy, and have every step that waits for a copy open it."""
        copy_, end, before_step = stager.copy_all, WriteWatch.end, stager.Stager._before_step

        def copying(*args: Any, **options: Any) -> None:
            self._pass("before the copy")
            copy_(*args, **options)

        def ending(*args: Any, **options: Any) -> list[int]:
            self._pass("after the copy")
            return end(*args, **options)

        def stepping(owner: stager.Stager, optimizer: Optimizer) -> None:
            self.open()
            before_step(owner, optimizer)

        stager.copy_all, WriteWatch.end, stager.Stager._before_step = copying, ending, stepping  # pyright: ignore
        try:
            yield
        finally:
            stager.copy_all, WriteWatch.end, stager.Stager._before_step = copy_, end, before_step  # pyright: ignore


def run_case(kind: Kind, width: int, moment: str, home: Path) -> Outcome:
    """Train, save and write as `kind` does; compare every checkpoint with the bytes of its step."""
    gate, outcome = Gate(moment), Outcome()
    training = Training(width, kind.optimizer)
    expected: dict[int, dict[str, torch.Tensor]] = {}
    with gate.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SaveWarning)
        try:
            _train(kind, training, gate, home, expected, outcome)
        except HoldfastError as error:
            outcome.error = repr(error)
        finally:
            gate.open()
            for kept in training.kept.values():
                if hasattr(kept, "remove"):
                    kept.remove()
    _compare(home, expected, outcome)
    return outcome


def _train(
    kind: Kind, training: Training, gate: Gate, home: Path, expected: dict[int, Any], outcome: Outcome
) -> None:
    if kind.setup is not None:
        kind.setup(training)
    saves = []
    options: dict[str, Any] = {"keep": None, "memory": "256MiB", "quiet": True}
    checkpointer = holdfast.Checkpointer(
        home,
        training.state,
        every=EVERY,
        watches=[holdfast.Preemption("none", signals=False), holdfast.CompileCache("off")],
        **options,
    )
    with checkpointer:
        for step in range(1, STEPS + 1):
            (kind.step or Training.step)(training)
            if checkpointer.should_save(step):
                expected[step] = training.snapshot()
                gate.close()
                saves.append(checkpointer.save(step))
                if kind.after_save is not None and step < STEPS:  # the last save is the end of the training
                    kind.after_save(training)
                gate.open()
        with contextlib.suppress(HoldfastError):
            saves[-1].wait_durable(_WAIT_S)
        outcome.dropped = sum(save.failed is not None for save in saves)


def _compare(home: Path, expected: dict[int, dict[str, torch.Tensor]], outcome: Outcome) -> None:
    for step, tensors in expected.items():
        try:
            saved = holdfast.open(home, step=step)
        except HoldfastError:
            continue  # it was dropped
        outcome.newest = step
        bad = [name for name, tensor in tensors.items() if not _is_same(saved[name], tensor)]
        if bad:
            outcome.wrong.append(f"step {step}: {', '.join(bad[:3])}")
        else:
            outcome.right += 1


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8))


# -- the campaign --------------------------------------------------------------------------------------------


def main() -> int:
    """Run all cases, print the bad ones, write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kinds with this word in their name")
    parser.add_argument("--rounds", type=int, default=1, help="how often each case is run")
    options = parser.parse_args()
    torch.set_num_threads(2)
    began, counts, totals = time.monotonic(), [], collections.Counter[str]()
    kinds = [kind for kind in KINDS if options.only in kind.name]
    cases = list(itertools.product(kinds, WIDTHS, MOMENTS, range(options.rounds)))
    random.Random(0).shuffle(cases)
    per_moment: dict[str, list[Outcome]] = {moment: [] for moment in MOMENTS}
    for number, (kind, width, moment, _) in enumerate(cases):
        if number % 50 == 0:
            print(f"{number} of {len(cases)}", flush=True)
        faulthandler.dump_traceback_later(_HANGS_S, exit=True)
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_case(kind, width, moment, Path(folder) / "home")
        per_moment[moment].append(outcome)
        totals.update(right=outcome.right, dropped=outcome.dropped, wrong=len(outcome.wrong))
        if not outcome.is_good:
            print(f"BAD {kind.name}, width {width}, {moment}: {outcome}", flush=True)
    for moment, outcomes in per_moment.items():
        bad = sum(not outcome.is_good for outcome in outcomes)
        right = sum(outcome.right for outcome in outcomes)
        dropped = sum(outcome.dropped for outcome in outcomes)
        detail = f"{len(kinds)} kinds; {right} checkpoints equal to their step, {dropped} torn saves dropped"
        counts.append(Count(f"torn copies, {moment}", len(outcomes), bad, detail))
    print(f"{len(cases)} cases of {len(kinds)} kinds: {dict(totals)}", flush=True)
    if not options.only:
        write("tears", counts, seconds=time.monotonic() - began)
    return int(any(count.failures for count in counts))


if __name__ == "__main__":
    sys.exit(main())
