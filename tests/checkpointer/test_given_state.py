"""Saves of a dictionary that the caller brings each time, and loads of it into new memory or into objects."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import gc
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
import nursery
from holdfast import Keep
from holdfast.checkpoint.format import names
from holdfast.errors import HoldfastError, InvalidInput, NotFound, ResumeWarning, SaveWarning
from stage.ranks import run_ranks
from stage.training import CopyGate, make_checkpointer, make_model, train, wait_until

make = functools.partial(make_checkpointer, state=None, keep=None, memory="64MiB")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, collections.deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_a_dictionary_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "trainer": {"step": 7, "log": [{"loss": 0.5}, (1, b"x")], "seen": collections.deque([1], maxlen=3)},
        "alone": torch.arange(5),
        "empty": {},
        "none": None,
    }
    with make(tmp_path) as ckpt:
        assert ckpt.load() is None
        ckpt.save(7, state)
    with make(tmp_path) as ckpt:
        loaded = ckpt.load()
        assert ckpt.restored_step == 7
    assert loaded is not None
    for key in state:
        assert equal(loaded[key], state[key]), key
    assert list(loaded) == list(state)


def test_changes_after_the_call_are_not_saved(tmp_path: Path) -> None:
    """Also where the memory is used again for another dictionary."""
    buffer = torch.ones(300_000)
    with make(tmp_path) as ckpt:
        for step in range(1, 6):
            state = {"w": buffer.fill_(step), "step": [step]}
            ckpt.save(step, state)
            buffer.fill_(-1)
            state["step"].append(-1)
            del state["w"]
        ckpt.wait()
        for step in range(1, 6):
            loaded = holdfast.open(tmp_path, step=step)
            assert torch.equal(loaded["w"], torch.full((300_000,), float(step)))
            assert loaded.values()["step"] == [step]


def test_the_dictionary_is_released(tmp_path: Path) -> None:
    """And the memory of its tensors, once they are copied."""
    with make(tmp_path) as ckpt:
        tensor = torch.ones(100_000)
        is_alive = weakref.ref(tensor.untyped_storage())
        ckpt.save(1, {"a": {"w": tensor}}).wait_staged()
        del tensor
        wait_until(lambda: gc.collect() is not None and is_alive() is None)


def test_a_dictionary_may_change_its_structure(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, {f"w{i}": torch.full((step,), float(i)) for i in range(step)})
        ckpt.wait()
        for step in range(1, 5):
            found = ckpt.load(step)
            assert found is not None
            assert {key: list(value) for key, value in found.items()} == {
                f"w{i}": [float(i)] * step for i in range(step)
            }


def test_live_objects_are_saved_under_their_names(tmp_path: Path) -> None:
    """And come back into live objects, or as state dicts."""
    model, optimizer = trained()
    with make(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer, "epoch": 3})
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with make(tmp_path) as ckpt:
        into: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
        assert ckpt.load(into=into) is into
        assert into["epoch"] == 3
        assert equal(dict(model.state_dict()), expected)
        loaded = ckpt.load()
        assert loaded is not None
        assert equal(loaded["model"], expected)
        assert set(loaded["optimizer"]["state"]) == {f"model.{name}" for name, _ in model.named_parameters()}


def test_a_load_into_tensors_fills_them_in_place(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        ckpt.save(1, {"sd": {"a": torch.arange(6.0), "n": 1}})
    target = torch.zeros(6)
    with make(tmp_path) as ckpt:
        into: dict[str, Any] = {"sd": {"a": target, "n": 0}}
        ckpt.load(into=into)
    assert torch.equal(target, torch.arange(6.0))
    assert into["sd"]["a"] is target
    assert into["sd"]["n"] == 1


def test_generators_are_restored_on_request_only(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        torch.manual_seed(5)
        ckpt.save(1, {"a": 1})
        expected = torch.rand(3)
    with make(tmp_path) as ckpt:
        torch.manual_seed(6)
        other = torch.rand(3)
        torch.manual_seed(6)
        ckpt.load(into={"a": 0})
        assert torch.equal(torch.rand(3), other)
        ckpt.load(rng=True)
        assert torch.equal(torch.rand(3), expected)


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.full((1000,), float(step))})
    data = tmp_path / names.data(2, 1, 0)
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    with make(tmp_path) as ckpt:
        loaded = ckpt.load()
        assert loaded is not None
        assert (ckpt.restored_step, loaded["w"][0]) == (1, 1)
        with pytest.raises(holdfast.Corrupt):
            ckpt.load(2)


class Phase(enum.Enum):
    WARM = 1
    TRAIN = 2


def test_a_load_warns_of_values_without_their_types(tmp_path: Path) -> None:
    """A comparison with an enum member would silently be False. `into=` shows the types."""
    with make(tmp_path / "home") as ckpt:
        ckpt.save(1, {"at": {"phase": Phase.TRAIN}, "seen": collections.defaultdict(int, a=2)})
    with make(tmp_path / "home") as ckpt:
        with pytest.warns(
            ResumeWarning, match=r"at\.phase was saved as a .*Phase, and 1 other value"
        ) as caught:
            ckpt.load()
        assert "load(into=...)" in str(caught[0].message)
        state = {"at": {"phase": Phase.WARM}, "seen": collections.defaultdict(int)}
        ckpt.load(into=state)
    assert state["at"]["phase"] is Phase.TRAIN
    assert state["seen"]["b"] == 0


def test_a_load_of_plain_values_does_not_warn(tmp_path: Path) -> None:
    with make(tmp_path / "home") as ckpt:
        ckpt.save(1, {"a": [1, ("x", {2: torch.ones(1)})], "sparse": torch.eye(2).to_sparse()})
        assert ckpt.load() is not None


def test_the_best_is_loaded(tmp_path: Path) -> None:
    with make(tmp_path, keep=Keep(last=1, best=1, metric="loss")) as ckpt:
        for step, loss in {1: 3.0, 2: 1.0, 3: 2.0}.items():
            ckpt.record(step, loss=loss)
            ckpt.save(step, {"n": step})
            ckpt.wait()
        assert ckpt.load(best=True) == {"n": 2}


def test_a_run_that_was_not_loaded_is_continued_or_refused(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        ckpt.save(1, {"n": 1})
    with make(tmp_path) as ckpt, pytest.raises(InvalidInput, match="holds checkpoints"):
        ckpt.save(2, {"n": 2})
    with make(tmp_path) as ckpt:
        assert ckpt.continue_from() == 1
        ckpt.save(2, {"n": 2})
        ckpt.wait()
        with pytest.raises(NotFound):
            ckpt.continue_from(5)


CALLS = {
    "save() without a dictionary": (lambda c: c.save(2), "needs it"),
    "save() of a list": (lambda c: c.save(2, [1]), "got list"),
    "restore()": (lambda c: c.restore(), r"Call load\(\)"),
    "steps()": (lambda c: next(c.steps(3)), "should_save"),
    "step_done()": (lambda c: c.step_done(), "should_save"),
    "prepare()": (lambda c: c.prepare(), "should_save"),
    "finish() of another step": (lambda c: c.finish(9), r"save\(9, state\)"),
    "load(rename=)": (lambda c: c.load(rename={"a": "b"}), "into="),
    "load(step, best)": (lambda c: c.load(1, best=True), "not both"),
    "a value that cannot be saved": (lambda c: c.save(2, {"a": {"b": object()}}), "a.b is a builtins.object"),
    "a key that cannot be saved": (lambda c: c.save(2, {"a/b": 1}), "keys are"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_and_loses_nothing(tmp_path: Path, name: str) -> None:
    call, message = CALLS[name]
    with make(tmp_path) as ckpt:
        ckpt.save(1, {"n": 1})
        with pytest.raises(InvalidInput, match=message):
            call(ckpt)
        ckpt.save(2, {"n": 2})
        ckpt.finish()
        assert ckpt.all_steps() == [1, 2]


def test_a_checkpointer_with_a_state_takes_no_other(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path, {"n": 1}) as ckpt:
        with pytest.raises(InvalidInput, match="made without a state"):
            ckpt.save(1, {"n": 2})
        with pytest.raises(InvalidInput, match=r"restore\(\)"):
            ckpt.load()
        ckpt.save(1)


def test_an_unknown_key_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        ckpt.save(1, {"a": 1, "b": torch.ones(3)})
    with make(tmp_path) as ckpt:
        with pytest.raises(HoldfastError, match="'c'"):
            ckpt.load(only=["c"])
        assert ckpt.load(only=["a"]) == {"a": 1}


def test_a_kill_loses_no_dictionary_that_was_staged(tmp_path: Path) -> None:
    script = f"""
import os, signal, torch, holdfast
ckpt = holdfast.Checkpointer({str(tmp_path)!r}, keep=None, watches=[holdfast.Preemption(signals=False)])
for step in (1, 2, 3):
    ckpt.save(step, {{"w": torch.full((200_000,), float(step))}}).wait_staged()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert nursery.shared().run(["-c", script]).returncode == -signal.SIGKILL
    with make(tmp_path) as ckpt:
        loaded = ckpt.load()
        assert loaded is not None
        assert (ckpt.restored_step, loaded["w"][-1]) == (3, 3)
        assert ckpt.all_steps() == [1, 2, 3]


# -- several ranks -------------------------------------------------------------------------------------------


def save_on_ranks(rank: int, home: Path) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0)])
    with make(home) as ckpt:
        ckpt.save(
            3,
            {
                "sharded": {"w": sharded},
                "own": torch.full((rank + 1,), float(rank)),
                "same": holdfast.replicated({"w": torch.arange(5.0)}),
                "rank": rank,
            },
        )
    with make(home) as ckpt:
        into = {"sharded": {"w": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)])}}
        ckpt.load(into=into, strict=False)
        filled = into["sharded"]["w"].full_tensor().flatten().tolist()
        new = ckpt.load() or {}
        return [filled, new["sharded"]["w"].flatten().tolist(), new["own"].tolist(), new["rank"]]


def test_ranks_save_parts_and_load_them_in_another_layout(tmp_path: Path) -> None:
    whole = [float(i) for i in range(24)]
    assert run_ranks(2, save_on_ranks, tmp_path) == [[whole, whole, [0.0], 0], [whole, whole, [1.0, 1.0], 1]]
    data = [holdfast.open(tmp_path).info(name).owner for name in ("sharded.w", "own", "same.w")]
    assert data[:2] == ["split", "each"]
    assert isinstance(data[2], int), "a replicated tensor is written once"


def restore_of_different_sizes(rank: int, home: Path) -> list[Any]:
    state = {"own": torch.full((rank + 1,), float(rank))}
    with make_checkpointer(home, state) as ckpt:
        ckpt.save(1)
    state["own"].fill_(-1)
    with make_checkpointer(home, state) as ckpt:
        ckpt.restore()
    target = torch.zeros(rank + 1)
    holdfast.open(home).load_into({"own": target})
    return [state["own"].tolist(), target.tolist()]


def test_ranks_restore_their_own_tensors_of_different_sizes(tmp_path: Path) -> None:
    found = run_ranks(2, restore_of_different_sizes, tmp_path)
    assert found == [[[0.0], [0.0]], [[1.0, 1.0], [1.0, 1.0]]]


def test_parameters_of_given_optimizers_are_copied_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, moments and views of them; the step waits for the copy."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    gate = CopyGate(monkeypatch)
    gate.open_when_stepping([optimizer])
    with make(tmp_path / "home") as ckpt:
        expected = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        ckpt.save(1, state, optimizers=[optimizer])
        del state
        train(model, optimizer)
        assert gate.opened.is_set()
        ckpt.wait()
        found = ckpt.load(1)
        assert found is not None
        assert equal(found["model"], expected[0])
        assert equal(found["optimizer"], expected[1])
        assert not equal(found["model"], model.state_dict())


@pytest.mark.parametrize("is_given", [False, True])
def test_a_write_during_the_copy_fails_only_a_save_with_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gate = CopyGate(monkeypatch)
    weight = next(model.parameters())
    with make(tmp_path / "home") as ckpt:
        expected = weight.detach().clone()
        save = ckpt.save(1, {"model": model.state_dict()}, optimizers=[optimizer] if is_given else [])
        with torch.no_grad():
            weight.add_(1)
        gate.opened.set()
        if is_given:
            with pytest.raises(InvalidInput, match=r"model\.0\.weight"):
                save.wait_durable()
            with pytest.warns(SaveWarning, match=r"model\.0\.weight"):
                ckpt.save(2, {"model": model.state_dict()}, optimizers=[optimizer]).wait_durable()
            expected = weight.detach().clone()
        else:
            save.wait_durable()
        found = ckpt.load()
        assert found is not None
        assert torch.equal(found["model"]["0.weight"], expected)
