"""Repeated captures: changes since the last one are detected, and the structure is reused otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from holdfast.checkpoint.state import CapturedState, State
from holdfast.errors import InvalidInput
from state.trip import Net, assign, same, train


class Story:
    """A training set-up whose state has been captured twice: the second time it was only compared."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        train(self.model, self.optimizer, 1)
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "epoch": 1}
        self.state = State(self.objects)
        self.first = self.state.capture()
        assert self.state.capture().structure is self.first.structure

    @property
    def state_of_bias(self) -> dict[str, Any]:
        """The optimizer's state of a parameter."""
        return self.optimizer.state[self.model.inner.bias]

    def capture(self) -> CapturedState:
        """Return the next capture, after comparing it with one by a new State."""
        captured, fresh = self.state.capture(), State(self.objects).capture()
        assert list(captured.tensors) == list(fresh.tensors)
        assert same(captured.tensors, fresh.tensors)
        for name, tensor in captured.tensors.items():
            if not name.startswith("rng"):
                assert tensor.data_ptr() == fresh.tensors[name].data_ptr(), name
            assert tensor.stride() == fresh.tensors[name].stride()
            assert not tensor.requires_grad
        assert captured.structure == fresh.structure
        assert captured.values == fresh.values
        again = self.state.capture()
        assert again.structure is captured.structure
        assert list(again.tensors) == list(captured.tensors)
        return captured


def _add_group(story: Story) -> None:
    story.objects["late"] = nn.Linear(2, 2)
    story.optimizer.add_param_group({"params": list(story.objects["late"].parameters())})


def _disown_parameter_without_state(story: Story) -> None:
    story.optimizer.state.clear()
    story.state.capture()
    story.optimizer.param_groups[0]["params"].pop()


def _read_as_integers(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(torch.int32)


CHANGES: dict[str, Callable[[Story], object]] = {
    "replace parameters": lambda story: assign(
        story.model.inner, weight=nn.Parameter(torch.randn(4, 8)), bias=nn.Parameter(torch.randn(4))
    ),
    "resize buffer": lambda story: story.model.norm.running_mean.resize_(3),
    "halve": lambda story: story.model.half(),
    "reread as integers": lambda story: _read_as_integers(story.model.norm.running_mean),
    "add buffer": lambda story: story.model.inner.register_buffer("extra", torch.ones(2)),
    "remove buffer": lambda story: story.model.norm.__delattr__("running_mean"),
    "forget buffer": lambda story: story.model.norm._non_persistent_buffers_set.add("running_mean"),
    "add module": lambda story: assign(story.model, more=nn.Linear(1, 1)),
    "reorder": lambda s: s.model._modules.update(embed=s.model._modules.pop("embed")),
    "add group": _add_group,
    "drop parameter from group": lambda story: story.optimizer.state.pop(
        story.optimizer.param_groups[0]["params"].pop()
    ),
    "disown parameter without state": _disown_parameter_without_state,
    "clear optimizer": lambda story: story.optimizer.state.clear(),
    "add state tensor": lambda story: story.state_of_bias.update(more=torch.ones(3)),
    "turn step into number": lambda story: story.state_of_bias.update(step=3),
    "untie": lambda s: assign(s.model.out, weight=nn.Parameter(s.model.out.weight.detach().clone())),
    "tie by memory": lambda s: assign(s.model.norm.weight, data=s.model.norm.bias.data),
    "add alias": lambda story: story.objects.update(also=story.model.embed.weight),
    "tie a state tensor": lambda s: s.state_of_bias.update(exp_avg=s.state_of_bias["exp_avg_sq"]),
    "replace object": lambda story: story.objects.update(model=nn.Linear(1, 1)),
    "remove object": lambda story: story.objects.pop("optimizer"),
    "add tensor in value": lambda story: story.objects.update(epoch={"table": torch.ones(3)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_structure_is_detected(change: str) -> None:
    """The next capture has it, and has a new structure object, so that new plans are made."""
    story = Story()
    CHANGES[change](story)
    assert story.capture().structure is not story.first.structure


def _swap_parameter_of_same_shape(story: Story) -> None:
    story.model.inner.bias = nn.Parameter(torch.randn(8))
    story.optimizer.param_groups[0]["params"] = list(story.model.parameters())
    old = list(story.optimizer.state)
    for parameter in [p for p in old if all(p is not q for q in story.model.parameters())]:
        story.optimizer.state[story.model.inner.bias] = story.optimizer.state.pop(parameter)


def _swap_objects(story: Story) -> None:
    other = nn.Parameter(torch.randn(8, 8))
    story.model.inner.weight.grad = None
    torch.utils.swap_tensors(story.model.inner.weight, other)


def _fill_state_in_another_order(story: Story) -> None:
    state = story.optimizer.state
    first = next(iter(state))
    state[first] = state.pop(first)


def _change_values(story: Story) -> None:
    story.optimizer.param_groups[0]["lr"] = 0.5
    story.objects["epoch"] = 2


def _wrap(story: Story) -> None:
    compiled: Any = torch.compile(story.model.inner, backend="eager")
    story.model.inner = checkpoint_wrapper(compiled)


SWAPS: dict[str, Callable[[Story], object]] = {
    "swap data": lambda story: assign(story.model.inner.weight, data=torch.randn(8, 8)),
    "swap data of buffer": lambda story: assign(story.model.norm.running_mean, data=torch.randn(8)),
    "transpose in place": lambda s: assign(s.model.inner.weight, data=s.model.inner.weight.data.t()),
    "swap parameter of same shape": _swap_parameter_of_same_shape,
    "swap objects": _swap_objects,
    "replace buffer": lambda story: assign(story.model.norm, running_mean=torch.randn(8)),
    "load optimizer": lambda s: s.optimizer.load_state_dict(Story().optimizer.state_dict()),
    "replace one state tensor": lambda story: story.state_of_bias.update(exp_avg=torch.randn(8)),
    "fill state in another order": _fill_state_in_another_order,
    "freeze": lambda story: story.model.inner.weight.requires_grad_(False),
    "change values": _change_values,
    "wrap in place": _wrap,
}


@pytest.mark.parametrize("change", SWAPS)
def test_a_tensor_replaced_by_a_similar_one_is_detected(change: str) -> None:
    """The new bytes are captured, and the plan of the save may stay as it is."""
    story = Story()
    SWAPS[change](story)
    assert story.capture().structure is story.first.structure


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adagrad]
)
def test_training_does_not_change_the_structure(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Over 100 captures with steps between them; each capture shows the values of its moment."""
    story = Story(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(story.optimizer, 10)
    story.objects["schedule"] = schedule
    structure = story.state.capture().structure
    if optimizer is torch.optim.LBFGS:
        structure = None  # it keeps a growing history
    for epoch in range(100):
        train(story.model, story.optimizer, 1, schedule.step)
        story.objects["epoch"] = epoch
        captured = story.state.capture()
        assert structure is None or captured.structure is structure
        assert captured.values["epoch"] == epoch
        assert captured.values["optimizer"]["param_groups"][0]["lr"] == story.optimizer.param_groups[0]["lr"]
        assert torch.equal(captured.tensors["rng.torch"], torch.get_rng_state())
        assert captured.tensors["model.inner.weight"].data_ptr() == story.model.inner.weight.data_ptr()
        assert captured.tensors["model.inner.weight"]._version == story.model.inner.weight._version
    story.capture()


class Counting(torch.optim.SGD):
    """Counts its steps in plain numbers, as many optimizers do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0) + 1
                state["mean"] = parameter.detach().clone()  # a new tensor at each step
        return loss


def test_a_capture_has_the_current_numbers_and_tensors_of_optimizer_state() -> None:
    """Numbers are encoded anew; tensors that are replaced at each step leave the structure as it is."""
    story = Story(Counting)
    for seen in range(2, 6):
        train(story.model, story.optimizer, 1)
        captured = story.capture()
        assert captured.values["optimizer"]["state"]["model.inner.bias"] == {"seen": seen}
        mean = captured.tensors["optimizer.state.model.inner.bias.mean"]
        assert same(mean, story.model.inner.bias.detach())
        assert captured.structure is story.first.structure


class Loose:
    """Object whose state_dict() returns the tensors that a test chooses."""

    def __init__(self) -> None:
        self.give: Callable[[], dict[str, Any]] = dict

    def state_dict(self) -> dict[str, Any]:
        return self.give()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_capture_has_the_current_tensors_of_other_objects() -> None:
    """Fresh ones each time, of another shape, tied to each other, or tied to a parameter."""
    story, loose = Story(), Loose()
    story.objects["loose"] = loose
    weight, shared = story.model.inner.weight, torch.ones(4)
    structures = []
    gifts: list[Callable[[], dict[str, Any]]] = [
        lambda: {"a": torch.randn(3), "b": torch.randn(3)},
        lambda: {"a": torch.randn(4), "b": torch.randn(3)},
        lambda: {"a": shared, "b": shared},
        lambda: {"a": shared, "b": shared.clone()},
        lambda: {"a": weight.detach(), "b": torch.randn(3)},
        lambda: {"a": weight.detach()[1], "b": weight.detach()[2]},
        lambda: {"b": torch.empty(0), "a": torch.empty(0)},
    ]
    for gift in gifts:
        loose.give = gift
        captured = story.state.capture()
        structures.append(captured.structure)
        assert story.state.capture().structure is captured.structure
        fresh = State(story.objects).capture()
        assert captured.structure.tied == fresh.structure.tied
        assert list(captured.tensors) == list(fresh.tensors)
        shapes = {name: tensor.shape for name, tensor in fresh.tensors.items()}
        assert {name: tensor.shape for name, tensor in captured.tensors.items()} == shapes
    assert len({id(structure) for structure in structures}) == len(gifts)


def test_a_conjugate_view_of_the_same_memory_is_detected() -> None:
    """Address, shape and dtype are the same; the numbers are not."""
    numbers = torch.randn(3, dtype=torch.complex64)
    model: Any = nn.Module()
    model.register_buffer("numbers", numbers.view(3))
    model.register_buffer("imaginary", numbers.imag)
    state = State({"m": model})
    state.capture()
    model.numbers.data = numbers.conj()
    model.imaginary.data = numbers.conj().imag
    captured = state.capture()
    assert same(captured.tensors["m.numbers"], numbers.conj())
    assert same(captured.tensors["m.imaginary"], -numbers.imag)


def test_user_code_runs_once_per_capture() -> None:
    """A state_dict() may be collective: a change elsewhere must not make one rank call it twice."""
    story, loose = Story(), Loose()
    calls: list[int] = []
    story.objects["loose"] = loose
    loose.give = lambda: {"number": calls.append(1), "tensor": torch.randn(2)}
    story.objects["last"] = {"t": torch.ones(1)}
    for change in (None, 0, 1):
        if change is not None:
            story.objects["last"] = {"t": torch.ones(2 + change)}
        calls.clear()
        story.state.capture()
        assert len(calls) == 1


def test_earlier_captures_keep_their_tensors() -> None:
    """What a later capture finds in a place does not show in an earlier one, which may still be copied."""
    story = Story()
    rng = story.first.tensors["rng.torch"].clone()
    mean = story.first.tensors["model.norm.running_mean"]
    torch.rand(7)
    story.model.norm.running_mean = torch.randn(8)
    later = story.state.capture()
    assert later.tensors["model.norm.running_mean"] is not mean
    assert story.first.tensors["model.norm.running_mean"] is mean
    assert torch.equal(story.first.tensors["rng.torch"], rng)
    assert not torch.equal(later.tensors["rng.torch"], rng)


def test_a_failed_capture_does_not_affect_the_next_one() -> None:
    story = Story()
    story.model.norm.running_mean = torch.randn(8)
    story.objects["bad"] = object()
    with pytest.raises(InvalidInput, match="bad"):
        story.state.capture()
    del story.objects["bad"]
    assert story.capture().structure is story.first.structure


def test_memory_freed_by_training_is_released_at_the_next_capture() -> None:
    """It is held until then, so that no new tensor can be mistaken for the old one."""
    story = Story()
    old = weakref.ref(story.model.norm.running_mean)
    story.model.norm.running_mean = torch.randn(8)
    assert old() is not None
    story.first = story.state.capture()
    assert old() is None
