"""An attached Accelerator in this process: its arguments, its folders, its hooks and its refusals."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="needs torch-holdfast[accelerate]")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration

import holdfast
from adapters.damage import flip
from holdfast.adapters.accelerate import attach, is_preempted
from holdfast.adapters.accelerate.folders import Folders
from holdfast.errors import InvalidInput, NotFound, ResumeWarning, Unsupported

MARKER = "holdfast_checkpoint.json"


class Parts:
    """A prepared training of one step per call."""

    def __init__(self, accelerator: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator
        self.model: Any = torch.nn.Linear(2, 1)
        optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model, self.optimizer = accelerator.prepare(self.model, optimizer)

    def step(self) -> None:
        self.accelerator.backward(self.model(torch.ones(1, 2)).square().sum())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path | None = None) -> Path:
        """Train a step, and save it."""
        self.step()
        return self.accelerator.save_state(None if folder is None else str(folder))

    @property
    def weights(self) -> list[float]:
        return self.model.weight.detach().flatten().tolist()


Make = Callable[..., Parts]
NAMED = {"automatic_checkpoint_naming": False}


def loaded(parts: Parts, path: Path | None = None) -> Parts:
    """Load a state, by default the newest, into a new training."""
    parts.accelerator.load_state(None if path is None else str(path))
    return parts


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A function that returns a new training, as a new start of the script makes it."""
    made: list[Any] = []

    def build(*, home: Any = None, is_stock: bool = False, limit: int = 100, **config: Any) -> Parts:
        for one in made:
            close(one)
        options = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, **config}
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(**options, total_limit=limit))
        made.append(accelerator)
        if not is_stock:
            accelerator = attach(accelerator, home, watches=[holdfast.Preemption("none")])
        return Parts(accelerator)

    yield build
    for one in made:
        close(one)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def close(accelerator: Any) -> None:
    session = getattr(accelerator, "holdfast_session", None)
    if session is not None and session.is_open:
        session.close()


def steps_of(home: Path) -> list[int]:
    with holdfast.Checkpointer(home, quiet=True) as checkpointer:
        return checkpointer.all_steps()


def mark(folder: Path, text: str) -> Path:
    """Make a folder with a marker of this content."""
    folder.mkdir(parents=True)
    (folder / MARKER).write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_state_is_loaded_by_a_new_start(make: Make, tmp_path: Path) -> None:
    first = make()
    folder = first.save()
    assert folder == tmp_path / "checkpoints" / "checkpoint_0"
    saved = first.weights
    first.step()
    again = loaded(make())
    assert again.weights == saved
    assert again.accelerator.save_iteration == 1
    again.step()
    assert again.weights == first.weights


def test_explicit_folders_are_named_by_the_script(make: Make, tmp_path: Path) -> None:
    first = make(**NAMED)
    found: dict[str, list[float]] = {}
    for name in ("step_100", "step_200", "last"):
        first.save(tmp_path / name)
        found[name] = first.weights
    close(first.accelerator)
    assert names(tmp_path) == ["holdfast", "last", "step_100", "step_200"]
    assert holdfast.open(tmp_path / "holdfast").step == 201
    again = make(**NAMED)
    for name in ("step_100", "last", "step_200"):
        assert loaded(again, tmp_path / name).weights == found[name]
    assert loaded(again, tmp_path / "holdfast").weights == found["last"]


def test_a_folder_that_is_saved_again_names_the_newer_state(make: Make, tmp_path: Path) -> None:
    first = make(**NAMED)
    for _ in range(3):
        first.save(tmp_path / "last")
    saved = first.weights
    assert loaded(make(**NAMED), tmp_path / "last").weights == saved
    assert holdfast.open(tmp_path / "holdfast").step == 2


def test_without_a_project_folder_the_home_is_beside_the_first_folder(make: Make, tmp_path: Path) -> None:
    first = make(project_dir=None, **NAMED)
    first.save(tmp_path / "deep" / "one")
    close(first.accelerator)
    assert names(tmp_path / "deep") == ["holdfast", "one"]
    again = loaded(make(project_dir=None, **NAMED), tmp_path / "deep" / "one")
    assert again.weights == first.weights


def test_the_newest_states_up_to_the_limit_are_kept(make: Make, tmp_path: Path) -> None:
    first = make(limit=2)
    for _ in range(5):
        first.save()
    close(first.accelerator)
    assert names(tmp_path / "checkpoints") == ["checkpoint_3", "checkpoint_4", "holdfast"]
    assert steps_of(tmp_path / "checkpoints" / "holdfast") == [3, 4]


def test_a_state_whose_folder_the_script_removes_is_deleted(make: Make, tmp_path: Path) -> None:
    first = make(**NAMED)
    for number in range(3):
        first.save(tmp_path / f"step_{number}")
        if number == 1:
            shutil.rmtree(tmp_path / "step_0")
    close(first.accelerator)
    assert steps_of(tmp_path / "holdfast") == [1, 2]


def test_folders_agree_with_the_home_at_the_start(make: Make, tmp_path: Path) -> None:
    """The folder of a save that was interrupted is removed, and a missing one is made again."""
    first = make(**NAMED)
    for number in (1, 2):
        first.save(tmp_path / f"step_{number}")
    close(first.accelerator)
    shutil.rmtree(tmp_path / "step_2")
    for step in (3, 4):
        mark(tmp_path / f"step_{step}", f'{{"home": "../holdfast", "steps": [{step}], "is_new": true}}')
    (tmp_path / "step_4" / "of a hook").write_text("")
    make(**NAMED)
    assert names(tmp_path) == ["holdfast", "interrupted-step_4", "step_1", "step_2"]


def test_the_folder_of_a_deleted_state_is_removed_with_the_files_of_hooks(tmp_path: Path) -> None:
    """Those of a save that was interrupted are moved aside."""
    folders = Folders(tmp_path, str(tmp_path / "holdfast"), writes=True)
    for step in range(3):
        folders.make(f"checkpoint_{step}", step, complete=[])
        (tmp_path / f"checkpoint_{step}" / "note").touch()
    folders.tidy({1: "checkpoint_1"}, [1])
    assert folders.list() == ["checkpoint_1", "interrupted-checkpoint_2"]


def test_an_interrupted_state_is_refused_by_its_path(make: Make, tmp_path: Path) -> None:
    first = make(**NAMED)
    first.accelerator.save_state(str(tmp_path / "step_1"))
    mark(tmp_path / "step_2", '{"home": "../holdfast", "steps": [2], "is_new": true}')
    with pytest.raises(InvalidInput, match=r"interrupted .* The newest that is: .*step_1"):
        first.accelerator.load_state(str(tmp_path / "step_2"))


def test_a_damaged_state_is_skipped_for_an_older_one(make: Make, tmp_path: Path) -> None:
    first = make()
    kept: list[list[float]] = []
    for _ in range(2):
        first.save()
        kept.append(first.weights)
    close(first.accelerator)
    data = sorted((tmp_path / "checkpoints" / "holdfast").rglob("*.safetensors"))
    newest = [path for path in data if "00000001" in str(path) and path.stat().st_size]
    assert newest
    for path in newest:
        flip(path)
    again = loaded(make())
    assert again.weights == kept[0]
    assert again.accelerator.save_iteration == 2


def test_folders_that_accelerate_has_written_are_loaded_if_they_are_newer(make: Make, tmp_path: Path) -> None:
    stock = make(is_stock=True)
    stock.save()
    again = loaded(make())
    assert again.weights == stock.weights
    again.step()
    assert again.accelerator.save_state() == tmp_path / "checkpoints" / "checkpoint_1"
    last = loaded(make())
    assert last.weights == again.weights
    assert loaded(last, tmp_path / "checkpoints" / "checkpoint_0").weights == stock.weights


def test_a_stock_folder_that_was_cut_off_is_skipped(make: Make, tmp_path: Path) -> None:
    stock = make(is_stock=True)
    for _ in range(2):
        stock.save()
    path = tmp_path / "checkpoints" / "checkpoint_1" / "optimizer.bin"
    path.write_bytes(path.read_bytes()[:-9])
    again = loaded(make())
    assert again.accelerator.save_iteration == 2
    with pytest.raises(InvalidInput, match=r"optimizer\.bin is damaged"):
        again.accelerator.load_state(str(path.parent))


def test_a_state_of_another_run_starts_a_new_run(make: Make, tmp_path: Path) -> None:
    first = make(project_dir=str(tmp_path / "first"))
    folder = first.save()
    second = loaded(make(project_dir=str(tmp_path / "second")), folder)
    assert second.weights == first.weights
    second.save()
    close(second.accelerator)
    assert "checkpoint_1" in names(tmp_path / "second" / "checkpoints")


@pytest.mark.parametrize(
    "marker",
    [
        "[" * 100_000,
        '{"home": 5, "steps": [1]}',
        '{"home": "holdfast", "steps": []}',
        '{"home": "holdfast", "steps": [true]}',
        '{"home": "\\u0000", "steps": [1]}',
        '{"home": "\\udcff", "steps": [1]}',
    ],
)
def test_a_folder_with_a_strange_marker_is_refused(make: Make, tmp_path: Path, marker: str) -> None:
    folder = mark(tmp_path / "other" / "checkpoint_0", marker)
    with pytest.raises(InvalidInput, match="Nothing was loaded"):
        make().accelerator.load_state(str(folder))


@pytest.mark.usefixtures("no_endpoints")
def test_keys_are_not_sent_to_an_endpoint_that_only_a_folder_names(make: Make, tmp_path: Path) -> None:
    home = "s3://bucket/run?endpoint_url=http://127.0.0.1:9"
    folder = mark(tmp_path / "other" / "checkpoint_0", json.dumps({"home": home, "steps": [1]}))
    with pytest.raises(InvalidInput, match="would send your keys to the endpoint http://127"):
        make().accelerator.load_state(str(folder))


def test_hooks_see_the_folder_and_may_save_and_load_models_themselves(make: Make, tmp_path: Path) -> None:
    def write(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(weights.pop(), Path(folder) / "own.pt")

    def read(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "own.pt"))

    first = make()
    first.accelerator.register_save_state_pre_hook(write)
    folder = first.save()
    close(first.accelerator)
    with pytest.raises(NotFound, match="'model'"):
        holdfast.open(folder.parent / "holdfast").state_dict("model")
    again = make()
    again.accelerator.register_load_state_pre_hook(read)
    again.accelerator.load_state()
    assert again.weights == first.weights


def test_weights_that_a_hook_changes_are_refused(make: Make) -> None:
    def change(models: list[Any], weights: list[Any], folder: str) -> None:
        weights[0].pop("bias")

    first = make()
    first.accelerator.register_save_state_pre_hook(change)
    with pytest.raises(InvalidInput, match="remove the weights from the list"):
        first.accelerator.save_state()


def test_a_home_with_a_run_is_not_overwritten(make: Make, tmp_path: Path) -> None:
    first = make(**NAMED)
    first.accelerator.save_state(str(tmp_path / "one"))
    again = make(**NAMED)
    with pytest.raises(InvalidInput, match=r"without load_state\(\)"):
        again.accelerator.save_state(str(tmp_path / "two"))
    assert not (tmp_path / "two").exists()


def test_a_save_amid_accumulated_gradients_warns(make: Make) -> None:
    first = make()
    first.accelerator.gradient_accumulation_steps = 2
    with first.accelerator.accumulate(first.model):
        first.accelerator.backward(first.model(torch.ones(1, 2)).sum())
    with pytest.warns(ResumeWarning, match="accumulated gradients"):
        first.accelerator.save_state()


def test_a_registered_object_that_is_missing_is_refused(make: Make) -> None:
    first = make()
    scheduler = torch.optim.lr_scheduler.StepLR(first.optimizer.optimizer, 1)
    first.accelerator.register_for_checkpointing(scheduler)
    first.accelerator.save_state()
    again = make()
    with pytest.raises(InvalidInput, match="custom_0"):
        again.accelerator.load_state()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (DistributedType.DEEPSPEED, "uses DeepSpeed.*FSDP2"),
        (DistributedType.MEGATRON_LM, "uses Megatron-LM.*FSDP2"),
        (DistributedType.FSDP, "uses FSDP 1.*fsdp_version: 2"),
        (DistributedType.XLA, "TPUs"),
    ],
)
def test_other_engines_are_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, kind: DistributedType, message: str
) -> None:
    accelerator = make(is_stock=True).accelerator
    monkeypatch.setattr(type(accelerator), "distributed_type", kind)
    with pytest.raises(Unsupported, match=message):
        attach(accelerator)
    assert type(accelerator) is Accelerator


def test_arguments_that_cannot_be_used_are_refused(make: Make, tmp_path: Path) -> None:
    accelerator = make(is_stock=True).accelerator
    with pytest.raises(InvalidInput, match="total_limit"):
        attach(accelerator, keep=3)
    with pytest.raises(InvalidInput, match="not attached"):
        is_preempted(accelerator)
    attached = make().accelerator
    with pytest.raises(InvalidInput, match="already attached"):
        attach(attached)
    with pytest.raises(InvalidInput, match="There is no state to load"):
        attached.load_state()
    with pytest.raises(InvalidInput, match="folder does not exist"):
        attached.load_state(str(tmp_path / "missing"))
    attached.save_state()
    with pytest.raises(TypeError, match="Unsupported optimizer map location"):
        attached.load_state(map_location="invalid")
    with pytest.raises(InvalidInput, match="tag"):
        attached.load_state(tag="x")
    assert not is_preempted(attached)
    assert (tmp_path / "checkpoints" / "checkpoint_0").is_dir()


def test_the_notice_of_a_known_end_leaves_time_for_a_save(make: Make) -> None:
    accelerator = attach(make(is_stock=True).accelerator, watches=[holdfast.Preemption("deadline=1h")])
    session = accelerator.holdfast_session
    (deadline,) = session.notices._sources.clouds
    accelerator.save_state()
    (save,) = session.pending
    save.wait_durable()
    is_preempted(accelerator)
    assert deadline.save_s >= save.durable_s > 0


@pytest.mark.parametrize("has_generator", [False, True])
def test_persistent_workers_that_share_the_generator_of_dropout_are_warned_of(
    make: Make, has_generator: bool
) -> None:
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(8)),
        num_workers=1,
        persistent_workers=True,
        generator=torch.Generator() if has_generator else None,
    )
    parts = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts.accelerator.prepare(loader)
    assert any("persistent_workers=True" in str(one.message) for one in caught) is not has_generator
