"""An attached Trainer in this process: its arguments, its refusals, and its methods' order."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs torch-holdfast[transformers]")
pytest.importorskip("accelerate", reason="needs torch-holdfast[transformers]")

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import holdfast
from adapters.damage import flip
from holdfast.adapters.transformers import attach
from holdfast.adapters.transformers.trainer import HoldfastTrainer
from holdfast.errors import ResumeWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning", "ignore::FutureWarning")


class Line(torch.nn.Module):
    """A line through points."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = self.layer(x)
        return {"logits": found} if labels is None else {"loss": (found - labels).square().mean()}


POINTS = [{"x": torch.tensor([i / 8, 1.0]), "labels": torch.tensor([i / 4])} for i in range(16)]


def make(
    folder: Path,
    kind: type[Trainer] = Trainer,
    callbacks: list[TrainerCallback] | None = None,
    **changes: Any,
) -> Trainer:
    """Return a Trainer of eight steps, four per epoch."""
    arguments: dict[str, Any] = {
        **{"output_dir": str(folder), "max_steps": 8, "save_steps": 2, "per_device_train_batch_size": 4},
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 100, "seed": 0},
        "dataloader_pin_memory": False,
        **changes,
    }
    return kind(Line(), TrainingArguments(**arguments), train_dataset=POINTS, callbacks=callbacks)  # pyright: ignore[reportArgumentType]


def resume(folder: Path, path: Any = True, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    """Return an attached Trainer that has resumed, by default from the newest checkpoint."""
    trainer = attach(make(folder, kind, **changes))
    trainer.train(resume_from_checkpoint=str(path) if isinstance(path, Path) else path)
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    return trainer.model.layer.weight.detach().clone()  # pyright: ignore


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Return the weights at the end of a training without Holdfast."""
    trainer = make(tmp_path_factory.mktemp("unbroken"))
    trainer.train()
    return weights(trainer)


class StopAt(TrainerCallback):
    """Callback that ends a training early."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def test_a_training_resumes_like_an_unbroken_one(tmp_path: Path, unbroken: torch.Tensor) -> None:
    attach(make(tmp_path / "out", callbacks=[StopAt(5)])).train()
    resumed = resume(tmp_path / "out")
    assert torch.equal(weights(resumed), unbroken)
    assert resumed.state.global_step == 8
    assert holdfast.open(tmp_path / "out" / "holdfast").step == 8


def test_a_training_that_resumes_from_its_last_step_trains_no_further_one(tmp_path: Path) -> None:
    ended = attach(make(tmp_path, max_steps=6))
    ended.train()
    resumed = resume(tmp_path, max_steps=6)
    assert resumed.state.global_step == 6
    assert torch.equal(weights(resumed), weights(ended))
    assert resume(tmp_path, max_steps=7).state.global_step == 7


def test_early_stopping_that_begins_anew_at_a_resume_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(ResumeWarning, match="EarlyStoppingCallback begins anew.*restore_callback_states"):
        attach(make(tmp_path, callbacks=[EarlyStoppingCallback()]))
    attach(make(tmp_path, callbacks=[EarlyStoppingCallback()], restore_callback_states_from_checkpoint=True))


@pytest.mark.slow
def test_folders_and_checkpoints_follow_the_trainers_limit(tmp_path: Path) -> None:
    attach(make(tmp_path, save_total_limit=2)).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
    with holdfast.Checkpointer(tmp_path / "holdfast") as checkpointer:
        assert checkpointer.all_steps() == [6, 8]


@pytest.mark.slow
def test_folders_of_all_kept_checkpoints_are_written_on_request(
    tmp_path: Path, unbroken: torch.Tensor
) -> None:
    attach(make(tmp_path, save_total_limit=3), tmp_path / "home", folders="all").train()
    files = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= files
    stock = make(tmp_path)
    stock.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(weights(stock), unbroken)


def test_a_path_resumes_from_its_step(tmp_path: Path) -> None:
    attach(make(tmp_path)).train()
    again = resume(tmp_path, tmp_path / "checkpoint-4", callbacks=[StopAt(5)])
    assert again.state.global_step == 5
    assert holdfast.open(tmp_path / "holdfast").attempt == 2


@pytest.mark.slow
def test_a_path_of_another_run_begins_a_new_home_from_it(tmp_path: Path) -> None:
    attach(make(tmp_path / "first", max_steps=4)).train()
    second = resume(tmp_path / "second", tmp_path / "first" / "checkpoint-4")
    assert second.state.global_step == 8
    assert holdfast.open(tmp_path / "second" / "holdfast").step == 8


@pytest.mark.usefixtures("no_endpoints")
def test_keys_are_not_sent_to_an_endpoint_that_only_a_folder_names(tmp_path: Path) -> None:
    folder = tmp_path / "first" / "checkpoint-4"
    folder.mkdir(parents=True)
    home = "s3://bucket/run?endpoint_url=http://127.0.0.1:9"
    (folder / "holdfast.json").write_text(json.dumps({"home": home}))
    with pytest.raises(holdfast.InvalidInput, match="would send your keys to the endpoint http://127"):
        resume(tmp_path / "second", folder)


@pytest.mark.slow
def test_a_folder_of_an_interrupted_save_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attach(make(tmp_path, callbacks=[StopAt(4)])).train()
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text("{}")
    trainer = resume(tmp_path, tmp_path / "checkpoint-6")  # as get_last_checkpoint returns it
    assert trainer.state.global_step == 8


def test_a_new_training_does_not_begin_in_the_home_of_another(tmp_path: Path) -> None:
    attach(make(tmp_path, callbacks=[StopAt(3)])).train()
    with pytest.raises(holdfast.InvalidInput, match=r"holds a run up to step 2.*resume_from_checkpoint=True"):
        attach(make(tmp_path)).train()
    assert resume(tmp_path, "auto").state.global_step == 8


@pytest.mark.slow
def test_auto_begins_a_new_training_and_true_does_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        resume(tmp_path)
    assert resume(tmp_path, "auto").state.global_step == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint-99", "elsewhere"])
def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    attach(make(tmp_path)).train()
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
        resume(tmp_path, tmp_path / name)


def test_folders_of_the_trainer_itself_are_resumed_and_continued(
    tmp_path: Path, unbroken: torch.Tensor
) -> None:
    make(tmp_path / "out", callbacks=[StopAt(4)]).train()
    resume(tmp_path / "out", callbacks=[StopAt(6)])
    back = make(tmp_path / "out")
    back.train(resume_from_checkpoint=True)  # from the folder that was written at the end
    assert back.state.global_step == 8
    assert torch.equal(weights(back), unbroken)


@pytest.mark.slow
def test_a_damaged_folder_of_the_trainer_is_skipped(tmp_path: Path, unbroken: torch.Tensor) -> None:
    make(tmp_path / "out", callbacks=[StopAt(6)]).train()
    optimizer = tmp_path / "out" / "checkpoint-6" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-100])
    assert torch.equal(weights(resume(tmp_path / "out")), unbroken)


def damage(home: Path, step: int, part: str) -> None:
    """Flip a bit in the first tensor of a part of a checkpoint."""
    checkpoint = holdfast.open(home, step)
    name = next(name for name in checkpoint.keys() if name.startswith(f"{part}."))  # noqa: SIM118 - no mapping
    content = bytes(checkpoint.tensor(name).contiguous().view(-1).view(torch.uint8).numpy())
    (data,) = (home / f"step-{step:08d}").glob("*.safetensors")
    flip(data, data.read_bytes().index(content))


@pytest.mark.parametrize("part", ["model", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_skipped_wherever_the_damage_is(
    tmp_path: Path, unbroken: torch.Tensor, part: str
) -> None:
    attach(make(tmp_path / "out", callbacks=[StopAt(6)]), folders=False).train()
    damage(tmp_path / "out" / "holdfast", 6, part)
    with pytest.raises(holdfast.Corrupt):  # a path means this checkpoint and no other
        resume(tmp_path / "out", tmp_path / "out" / "checkpoint-6")
    resume(tmp_path / "out", callbacks=[StopAt(7)])
    assert holdfast.open(tmp_path / "out" / "holdfast").manifest.ancestors[-1][1] == 4
    assert torch.equal(weights(resume(tmp_path / "out")), unbroken)


def test_the_methods_of_a_subclass_run_first_and_reach_holdfast_by_super(tmp_path: Path) -> None:
    calls: list[str] = []

    class Mine(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            calls.append("mine")
            super()._save_checkpoint(model, trial)

    trainer = attach(make(tmp_path, Mine, max_steps=2))
    assert isinstance(trainer, Mine)
    names = [kind.__name__ for kind in type(trainer).__mro__]
    assert names.index("Mine") < names.index("HoldfastTrainer") < names.index("Trainer")
    trainer.train()
    assert calls == ["mine"]
    assert holdfast.open(tmp_path / "holdfast").step == 2


def test_a_subclass_with_its_own_save_is_refused_at_its_first_save(tmp_path: Path) -> None:
    class Alone(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            pass

    with pytest.raises(holdfast.InvalidInput, match=r"Alone does not call super\(\)._save_checkpoint"):
        attach(make(tmp_path, Alone)).train()


@pytest.mark.slow
def test_weights_alone_continue_only_on_request(tmp_path: Path) -> None:
    attach(make(tmp_path, save_only_model=True, callbacks=[StopAt(4)]), folders=False).train()
    with pytest.raises(holdfast.InvalidInput, match="save_only_model=True"):
        resume(tmp_path)
    again = attach(make(tmp_path, save_only_model=True), folders=False)
    with pytest.warns(holdfast.ResumeWarning, match="has no optimizer"):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Remove the handler of SIGTERM that a Trainer with `enable_jit_checkpoint` installs."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_what_cannot_work_is_refused_with_the_fix(tmp_path: Path) -> None:
    refused: dict[str, Callable[[], object]] = {
        r'save_strategy="no".*Set save_strategy="steps"': lambda: attach(make(tmp_path, save_strategy="no")),
        "enable_jit_checkpoint": lambda: attach(make(tmp_path, enable_jit_checkpoint=True)),
        'True, False or "all"': lambda: attach(make(tmp_path), folders="every"),  # pyright: ignore
        "keep=: set save_total_limit": lambda: attach(make(tmp_path), keep=3),
        "already attached": lambda: attach(attach(make(tmp_path))),
    }
    for words, call in refused.items():
        with pytest.raises(holdfast.InvalidInput, match=words):
            call()
    deepspeed = make(tmp_path)
    deepspeed.is_deepspeed_enabled = True
    with pytest.raises(holdfast.Unsupported, match="DeepSpeed"):
        attach(deepspeed)
    assert not isinstance(deepspeed, HoldfastTrainer)
    with pytest.raises(holdfast.Unsupported, match="hyperparameter_search"):
        attach(make(tmp_path)).train(trial=object())


def test_persistent_workers_are_warned_of(tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    with pytest.warns(holdfast.ResumeWarning, match="dataloader_persistent_workers=True"):
        attach(make(tmp_path, **options), watches=[holdfast.Preemption("none")])


def test_the_home_records_how_the_trainer_compares_models(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True}
    kind: Any = functools.partial(Trainer, eval_dataset=POINTS)
    attach(make(tmp_path / "out", kind, metric_for_best_model="loss", **changes)).train()
    home = tmp_path / "out" / "holdfast"
    worst = max(range(2, 9, 2), key=lambda step: holdfast.open(home, step).metrics()["eval_loss"])
    assert holdfast.open(home, best="eval_loss").step == worst
