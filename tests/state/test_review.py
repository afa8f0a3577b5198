"""Review of states: entries that would not resume exactly are refused or warned about, and no others."""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import holdfast
from holdfast.checkpoint.state import State
from holdfast.checkpoint.state.loader_watch import plain_iterators
from holdfast.errors import InvalidInput, ResumeWarning
from stage.training import make_checkpointer, make_model
from state.trip import kept

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")


def doubts_of(home: Path, state: dict[str, Any], *steppers: Any) -> list[str]:
    """The ResumeWarnings of a first save; with steppers, after one step of training a model of width 4."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make_checkpointer(home, state) as ckpt:
            if steppers:
                state["model"](torch.ones(2, 4)).sum().backward()
            for one in steppers:
                one.step()
            ckpt.save(1)
    return [str(one.message) for one in caught if issubclass(one.category, ResumeWarning)]


@pytest.fixture
def no_other_loaders() -> None:
    """Free the loaders of earlier tests. The first import of torch's compiler keeps its callers in cycles."""
    gc.collect()


def snapshots() -> dict[str, Callable[[], Any]]:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    return {
        "optimizer": optimizer.state_dict,
        "model": model.state_dict,
        "scheduler": StepLR(optimizer, 2).state_dict,
        "scaler": torch.amp.GradScaler("cpu").state_dict,
    }


@pytest.mark.parametrize("kind", ["optimizer", "model", "scheduler", "scaler"])
@pytest.mark.parametrize("place", ["top", "dict", "list", "namespace"])
def test_the_result_of_state_dict_is_refused_with_a_fix(tmp_path: Path, kind: str, place: str) -> None:
    value = snapshots()[kind]()
    state, fix = {
        "top": ({"it": value}, f"{{'it': {kind}}}"),
        "dict": ({"all": {"epoch": 1, "it": value}}, f"{{'all': {{'it': {kind}}}}}"),
        "list": ({"all": [value]}, f"{{'all': [..., {kind}]}}"),
        "namespace": ({"all": argparse.Namespace(it=value)}, f"{{'all': {{'it': {kind}}}}}"),
    }[place]
    with pytest.raises(InvalidInput, match=rf"{kind}\.state_dict\(\) returned") as caught:
        make_checkpointer(tmp_path / "home", state)
    assert f"Pass the {kind} itself in its place: state={fix}." in str(caught.value)
    assert "Checkpointer(home) without a state, save(step, state) and load()" in str(caught.value)
    assert not (tmp_path / "home").exists()


def test_a_snapshot_that_is_added_later_warns_at_the_first_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"epoch": 0}
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        state["all"] = {"model": make_model().state_dict()}
        match = r"all\.model is a dictionary that model\.state_dict\(\) returned"
        with pytest.warns(ResumeWarning, match=match):
            ckpt.save(1)


def test_a_dictionary_that_is_refused_as_a_state_can_be_saved_as_the_error_says(tmp_path: Path) -> None:
    """The second fix of the error, for programs that refill the dictionary themselves."""
    model = make_model()
    with make_checkpointer(tmp_path / "home", None) as ckpt:
        ckpt.save(1, {"model": model.state_dict()})
    other = make_model()
    with make_checkpointer(tmp_path / "home", None) as ckpt:
        found = ckpt.load()
    assert found is not None
    other.load_state_dict(found["model"])
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.fixture
def prepared() -> Callable[..., Any]:
    """A function that prepares a data loader with Accelerate."""
    accelerate = pytest.importorskip("accelerate", reason="needs torch-holdfast[accelerate]")

    def prepare(*, is_stateful: bool = True, **options: Any) -> Any:
        settings = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=is_stateful)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
        return accelerator.prepare(DataLoader(Numbers(), batch_size=4, **options))

    return prepare


def test_a_shuffled_loader_prepared_by_accelerate_warns(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    (doubt,) = doubts_of(tmp_path / "home", {"data": [prepared(shuffle=True)]})
    assert "data.0 is a data loader that Accelerate has prepared" in doubt
    assert "attach(accelerator)" in doubt


def test_a_loader_in_order_of_accelerate_resumes(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    """Without a warning, neither at the save nor at the restore: the batches are those that follow."""
    loader = prepared(num_workers=0)
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(3)]
    assert doubts_of(tmp_path / "home", {"data": loader}) == []
    loader = prepared(num_workers=0)
    with make_checkpointer(tmp_path / "home", {"data": loader}) as ckpt:
        ckpt.restore()
    assert next(iter(loader)).tolist() == [last + 4 for last in first[-1]]


def test_a_loader_without_a_state_is_refused(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    """Accelerate's has state_dict() in any case, and fails in it."""
    with make_checkpointer(tmp_path / "home", {"data": prepared(is_stateful=False)}) as ckpt:
        with pytest.raises(InvalidInput, match=r"data: DataLoaderShard\.state_dict\(\) failed") as caught:
            ckpt.save(1)
        assert "leave the object out of the state" in str(caught.value)


def test_a_copy_of_a_state_dict_warns_with_a_fix(tmp_path: Path) -> None:
    """A plain dict, as `get_model_state_dict` of torch returns it, or a copy on the CPU."""
    copy = {name: tensor.clone() for name, tensor in make_model().state_dict().items()}
    (doubt,) = doubts_of(tmp_path / "home", {"all": {"weights": copy}})
    assert "all.weights is a dictionary of tensors that are named as those of a module" in doubt
    assert "state={'all': {'weights': model}}" in doubt


def test_objects_in_containers_are_reviewed(tmp_path: Path) -> None:
    state = {"all": [{"meter": Meter({})}, {"opt": SGD(make_model().parameters(), lr=0.1)}]}
    doubts = doubts_of(tmp_path / "home", state)
    assert any("all.0.meter is a Meter whose state_dict() is empty" in doubt for doubt in doubts)
    assert any("all.1.opt trains 6 parameters that are in no module" in doubt for doubt in doubts)


class Meter:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index) + torch.rand(1)


class Mean(torch.nn.Module):
    """A metric as torchmetrics makes it: its state is no buffer, and not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults, self._persistent = {"total": 0}, {"total": False}


def faults() -> dict[str, tuple[dict[str, Any], str]]:
    model, other = make_model(), make_model()
    scheduled = SGD(model.parameters(), lr=0.1)
    StepLR(scheduled, 2)
    shared = torch.Generator()
    lost = torch.utils.data.RandomSampler(Numbers(), generator=torch.Generator())
    augmented = StatefulDataLoader(Augmented(), num_workers=1, generator=torch.Generator())

    def loader(**options: Any) -> Any:
        return StatefulDataLoader(Numbers(), **{"generator": torch.Generator(), **options})

    return {
        "empty": ({"meter": Meter({})}, "meter is a Meter whose state_dict() is empty"),
        "metric": ({"all": nn.Sequential(Mean())}, "all.0 is a Mean whose state (total) is not persist"),
        "scheduler": ({"model": model, "opt": scheduled}, "set by a scheduler that is not in the state"),
        "model": ({"opt": SGD(other.parameters(), lr=0.1)}, "opt trains 6 parameters that are in no module"),
        "loader": ({"data": StatefulDataLoader(Numbers())}, "data does not have its own generator"),
        "generator": ({"data": loader(generator=shared), "g": shared}, "Leave g out of the state"),
        "shared": ({"data": loader(shuffle=True)}, "data and its sampler share a generator"),
        "sampler": ({"data": loader(sampler=lost)}, "the RandomSampler of data does not save its position"),
        "workers": ({"data": augmented}, "Augmented.__getitem__() draws random numbers"),
    }


FAULTS = ["empty", "metric", "scheduler", "model", "loader", "generator", "shared", "sampler", "workers"]


@pytest.mark.parametrize("name", FAULTS)
def test_entries_that_do_not_resume_exactly_warn_with_a_fix(tmp_path: Path, name: str) -> None:
    state, text = faults()[name]
    assert any(text in doubt for doubt in doubts_of(tmp_path / "home", state))


def begun_loader() -> Any:
    """The iterator of a shuffled loader that has given its first batch."""
    reading = iter(DataLoader(Numbers(), shuffle=True))
    next(reading)
    return reading


@pytest.mark.usefixtures("no_other_loaders")
def test_the_first_save_does_not_scan_all_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns of a data loader in use. The scan stops all threads, runs before training, and only once."""
    made = make_checkpointer(tmp_path / "home", {"x": torch.ones(1)})
    _reading = begun_loader()

    def scan(*_: object) -> list[object]:
        raise AssertionError("a scan of all objects")

    for name in ("get_referrers", "get_objects"):
        monkeypatch.setattr(gc, name, scan)
    with made as ckpt, pytest.warns(ResumeWarning, match="a shuffled DataLoader over Numbers is being read"):
        ckpt.save(1)


@pytest.mark.usefixtures("no_other_loaders")
def test_a_data_loader_no_longer_in_use_does_not_warn(tmp_path: Path) -> None:
    reading = begun_loader()
    assert any(one is reading for one in plain_iterators())
    del reading
    assert doubts_of(tmp_path / "home", {"x": torch.ones(1)}) == []


def sound() -> dict[str, dict[str, Any]]:
    """States that resume exactly."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    seeded, sampler = torch.Generator, RandomSampler(Numbers(), generator=torch.Generator())
    return {
        "everything": {
            "model": model,
            "optimizer": optimizer,
            "steps": LambdaLR(optimizer, lambda _: 1.0),
            "plateau": ReduceLROnPlateau(optimizer),
            "scaler": torch.amp.GradScaler("cpu"),
            "off": torch.amp.GradScaler("cpu", enabled=False),
            "average": AveragedModel(model),
            "generator": seeded(),
            "meter": Meter({"seen": 1}),
            "data": StatefulDataLoader(Numbers(), num_workers=0, generator=seeded()),
            "shuffled": StatefulDataLoader(Numbers(), sampler=sampler, generator=seeded()),
            "epoch": 0,
            "config": {"state": "Ohio", "param_groups": 3},
        },
        "parameters in a container": {"all": parameters, "optimizer": SGD(parameters, lr=0.1)},
        "no copies of a model": {
            "model": model,
            "average": {name: tensor.clone() for name, tensor in model.state_dict().items()},
            "parameters": {"layer.weight": torch.nn.Parameter(torch.ones(2))},
            "statistics": {"layer.mean": torch.ones(2)},
        },
    }


@pytest.mark.usefixtures("no_other_loaders")
@pytest.mark.parametrize("name", ["everything", "parameters in a container", "no copies of a model"])
def test_states_that_resume_exactly_do_not_warn(tmp_path: Path, name: str) -> None:
    assert doubts_of(tmp_path / "home", sound()[name]) == []


def test_a_load_state_dict_that_ignores_its_argument_warns_at_the_restore() -> None:
    saved = kept({"meter": Meter({"seen": 5})})
    with pytest.warns(ResumeWarning, match="meter: after load_state_dict.* of this Meter differs from"):
        saved.restore(State({"meter": Meter({"seen": 0})}))


class Structured:
    """As a TensorDict: its state_dict() has its structure as an attribute, and loading checks it."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((3,), value)

    def state_dict(self) -> dict[str, Any]:
        found = torch.nn.Module().state_dict()
        found["value"] = self.value
        found._metadata = {"": {"batch_size": torch.Size([3])}}  # type: ignore[attr-defined]
        return found

    def load_state_dict(self, state: Any) -> None:
        assert state._metadata[""]["batch_size"] == self.value.shape
        self.value.copy_(state["value"])


def test_the_metadata_of_a_state_dict_is_restored() -> None:
    it = Structured(0.0)
    kept({"it": Structured(7.0)}).restore(State({"it": it}))
    assert it.value.tolist() == [7.0] * 3


def test_a_new_run_suggests_holdfast_check_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with make_checkpointer(tmp_path / "home", {"x": torch.ones(1)}, quiet=False) as ckpt:
            step = (ckpt.restore() or 0) + 1
            ckpt.save(step).wait_durable()
            ckpt.save(step + 1)
    assert capfd.readouterr().err.count("holdfast check") == 1
    assert holdfast.open(tmp_path / "home").step == 4


class Inside(torch.optim.Optimizer):
    """An optimizer that steps another one, as SAM does, and saves only itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.base_optimizer.step()


class Delegate:
    """A wrapper that saves the optimizer which it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def test_an_optimizer_that_is_not_saved_is_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    inside, forgotten = Inside(model.parameters()), torch.optim.AdamW(model.parameters())
    (doubt,) = doubts_of(tmp_path / "a", {"model": model, "sam": inside}, inside)
    assert "trained by a SGD whose state is not saved" in doubt
    assert "It is inside sam.base_optimizer" in doubt
    (doubt,) = doubts_of(tmp_path / "b", {"model": model}, forgotten)
    assert "trained by a AdamW whose state is not saved" in doubt


def test_optimizers_that_are_saved_or_have_no_state_are_not_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    ema, teacher, other = AveragedModel(model), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    adam, plain = torch.optim.AdamW(model.parameters()), SGD(model.parameters(), 0.1)
    elsewhere = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 4)).sum().backward()
    state = {"model": model, "optimizer": adam, "ema": ema, "teacher": teacher}
    assert doubts_of(tmp_path / "a", state, adam, elsewhere) == []
    assert doubts_of(tmp_path / "b", {"model": model}, plain) == []
    assert doubts_of(tmp_path / "c", {"model": model, "wrapped": Delegate(adam)}, adam) == []
    inside = Inside(model.parameters())
    both = {"model": model, "sam": inside, "base": inside.base_optimizer}
    assert doubts_of(tmp_path / "d", both, inside) == []


def test_sparse_state_of_an_optimizer_is_no_error(tmp_path: Path) -> None:
    class Sparse(SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for one in group["params"]:
                    self.state[one]["rows"] = torch.eye(2).to_sparse()

    model = torch.nn.Linear(2, 2)
    optimizer = Sparse(model.parameters(), lr=0.1)
    optimizer.step()
    assert doubts_of(tmp_path, {"model": model, "optimizer": optimizer}) == []
