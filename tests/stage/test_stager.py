"""A save has the state at save(), even if training changes it right afterwards."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizers  # pyright: ignore[reportAttributeAccessIssue]

import holdfast
from holdfast.checkpoint.stage import stager
from holdfast.errors import RetryLater, SaveWarning
from stage.training import (
    WIDTH,
    CopyGate,
    check_saved,
    compute_gradients,
    make_checkpointer,
    make_model,
    snapshot,
    train,
)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=0.1),
    "fused AdamW": lambda parameters: AdamW(parameters, lr=0.1, fused=True),
    "foreach Adam": lambda parameters: Adam(parameters, lr=0.1, foreach=True),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
}


Trained = tuple[dict[str, Any], list[Optimizer], Callable[[], None]]
"""A state, its optimizers, and one training step."""


def trained_with(name: str) -> Trained:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    return {"model": model, "optimizer": optimizer}, [optimizer], lambda: train(model, optimizer)


def trained_by_two() -> Trained:
    """The optimizer that steps first is not the one that the state names first."""
    model, other = make_model(), make_model()
    first, second = (AdamW(one.parameters(), fused=True) for one in (model, other))

    def step() -> None:
        train(other, second)
        train(model, first)

    return {"model": model, "b": other, "for_a": first, "for_b": second}, [second, first], step


def trained_with_a_scaler() -> Trained:
    model, scaler = make_model(), torch.amp.GradScaler("cpu")
    optimizer = AdamW(model.parameters(), fused=True)

    def step() -> None:
        model.zero_grad()
        scaler.scale(model(torch.randn(4, WIDTH)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "scaler": scaler}, [optimizer], step


TRAININGS: dict[str, Callable[[], Trained]] = {
    **{name: partial(trained_with, name) for name in OPTIMIZERS},
    "two optimizers": trained_by_two,
    "gradient scaler": trained_with_a_scaler,
}


@pytest.mark.parametrize("name", TRAININGS)
def test_the_optimizer_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The copy does not begin before step() has been called, and still has the bytes from before it."""
    state, optimizers, step = TRAININGS[name]()
    step()
    gate = CopyGate(monkeypatch)
    gate.open_when_stepping(optimizers)
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        expected = snapshot(state)
        ckpt.save(1)
        step()
        assert gate.opened.is_set()
        assert not torch.equal(expected["model.0.weight"], snapshot(state)["model.0.weight"])
    check_saved(tmp_path / "home", 1, expected)


class _OwnSGD(SGD):
    """An optimizer that torch does not know: it may change parameters before the closure."""


def _with_hook(parameters: Any) -> Optimizer:
    optimizer = SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "is_beside"),
    [
        (OPTIMIZERS["AdamW"], True),
        (OPTIMIZERS["SGD with momentum"], True),
        (lambda parameters: torch.optim.LBFGS(parameters, max_iter=3), True),
        (lambda parameters: _OwnSGD(parameters, lr=0.1), False),
        (_with_hook, False),
    ],
    ids=["AdamW", "SGD", "LBFGS", "other class", "other hook"],
)
def test_a_closure_runs_during_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Optimizer], is_beside: bool
) -> None:
    """Unless parameters may change before the closure."""
    model = make_model()
    optimizer = make(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    was_opened: list[bool] = []

    def closure() -> Any:
        was_opened.append(gate.opened.is_set())
        model.zero_grad()
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        return loss

    gate = CopyGate(monkeypatch)
    gate.open_when_stepping([optimizer])
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        optimizer.step(closure)
        was_opened.clear()
        gate.opened.clear()
        expected = snapshot({"model": model})
        ckpt.save(1)
        loss = optimizer.step(closure=closure)
        assert isinstance(loss, torch.Tensor)
        assert was_opened[0] is not is_beside
        assert not torch.equal(expected["model.0.weight"], snapshot({"model": model})["model.0.weight"])
    check_saved(tmp_path / "home", 1, expected)


@pytest.mark.filterwarnings("ignore", "error:Dynamo does not know how to trace")
@pytest.mark.parametrize("when", ["before the first save", "after it"])
def test_a_compiled_step_waits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A whole training step under torch.compile, traced before or after the hook is there."""
    torch.compiler.reset()
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    train(model, optimizer)

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    if when == "before the first save":
        compute_gradients(model)
        step()
    gate = CopyGate(monkeypatch)
    with make_checkpointer(tmp_path / "home", state, keep=None) as ckpt:
        expected = {}
        for number in range(1, 4):
            gate.opened.clear()
            gate.reached.clear()
            compute_gradients(model)
            expected[number] = snapshot(state)
            ckpt.save(number)
            assert gate.reached.wait(600)
            helper = threading.Timer(0.05, gate.opened.set)  # nothing depends on its length
            helper.start()
            step()
            assert gate.opened.is_set()
            helper.join()
            assert not torch.equal(expected[number]["model.0.weight"], snapshot(state)["model.0.weight"])
    for number, tensors in expected.items():
        check_saved(tmp_path / "home", number, tensors)


def test_close_removes_hooks_from_optimizers(tmp_path: Path) -> None:
    """One hook for all of them, before all others while the Checkpointer is there."""
    first, hooks = lambda *_: None, optimizers._global_optimizer_pre_hooks
    gc.collect()  # Checkpointers that other tests have let go
    user = optimizers.register_optimizer_step_pre_hook(first)
    try:
        with make_checkpointer(tmp_path / "home", {"model": make_model()}):
            assert len(hooks) == 2
            assert next(reversed(hooks.values())) is first
        assert list(hooks.values()) == [first]
        make_checkpointer(tmp_path / "other", {"model": make_model()})  # let go without close()
        gc.collect()
        assert list(hooks.values()) == [first]
    finally:
        user.remove()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failed_copy_warns_and_the_next_save_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Before or after save() returns, nothing blocks and no memory leaks."""
    model = make_model()
    state = {"model": model, "optimizer": AdamW(model.parameters())}
    train(model, state["optimizer"])
    copy, left = stager.copy_all, [1]

    def failing(*args: Any, **options: Any) -> None:
        if (threading.current_thread().name != "holdfast-stage") == at_once and left:
            left.pop()
            raise RuntimeError("no such luck")
        copy(*args, **options)

    monkeypatch.setattr(stager, "copy_all", failing)
    with make_checkpointer(tmp_path / "home", state, memory="1MiB") as ckpt:
        if at_once:
            with pytest.raises(RuntimeError, match="no such luck"):
                ckpt.save(1)
            ckpt.save(2)
        else:
            save = ckpt.save(1)
            with pytest.raises(RetryLater, match="no such luck"):
                save.wait_staged()
            with pytest.warns(SaveWarning, match="no such luck"):
                ckpt.save(2)
        train(model, state["optimizer"])
        ckpt.wait()
        assert ckpt.latest_step() == 2
        assert len(ckpt._components.pipeline.arenas.numbers()) == 1


DTYPES = [
    torch.float64, torch.int64, torch.uint64, torch.complex64, torch.float32, torch.int32, torch.uint32,
    torch.float16, torch.bfloat16, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def test_every_dtype_shape_and_stride_is_saved(tmp_path: Path) -> None:
    """Also empty and 0-dimensional tensors, transposed, strided, expanded, conjugate and negative views."""
    torch.manual_seed(0)
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        bits = torch.randint(0, 2 if dtype is torch.bool else 100, (6, 10), dtype=torch.uint8)
        tensor = bits.view(dtype) if dtype.itemsize == 1 else bits.to(dtype)
        name = str(dtype).removeprefix("torch.")
        state |= {name: tensor, f"{name}_scalar": tensor[0, 0].clone(), f"{name}_empty": tensor[:0]}
        state |= {f"{name}_transposed": tensor.t(), f"{name}_strided": tensor[::2, 1::3]}
        state[f"{name}_expanded"] = tensor[:, :1].expand(6, 4)
    both = torch.randn(5, 2, dtype=torch.complex64)
    state |= {"conjugate": both.conj(), "negative": both.conj().imag, "one": torch.tensor(3.5)}
    state["parameter"] = nn.Parameter(torch.randn(4, 6).t())
    state["optimizer"] = AdamW([state["parameter"]])
    state["parameter"].sum().backward()
    state["optimizer"].step()
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.save(1)
    saved = holdfast.open(tmp_path / "home")
    names = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
    assert len(names) == 6 * len(DTYPES) + 4
    for name in names:
        found, live = saved[name], state[name].detach()
        assert (found.dtype, found.shape) == (live.dtype, live.shape), name
        as_bytes = live.resolve_conj().resolve_neg().contiguous()
        assert found.reshape(-1).view(torch.uint8).equal(as_bytes.reshape(-1).view(torch.uint8)), name


def test_steps_do_not_wait_without_a_save_in_progress(tmp_path: Path) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    with make_checkpointer(tmp_path / "home", {"model": model, "optimizer": optimizer}) as ckpt:
        train(model, optimizer)
        ckpt.save(1).wait_durable()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                train(model, optimizer)
        assert ckpt._components.pipeline.stager.waited_s == 0.0
