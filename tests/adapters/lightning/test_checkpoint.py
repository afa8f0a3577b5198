"""HoldfastCheckpoint in real trainings: its files, its paths, and the refusals."""

from __future__ import annotations

import gc
import importlib
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'torch-holdfast[lightning]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Lightning's own there are many
]

from adapters.damage import flip, middle  # noqa: E402
from holdfast.adapters.lightning import HoldfastCheckpoint, HoldfastCheckpointIO  # noqa: E402
from holdfast.adapters.lightning.ckpt_file import HomeContent, HomePlace  # noqa: E402
from holdfast.adapters.lightning.plugin import BackgroundSaver  # noqa: E402
from holdfast.errors import Corrupt  # noqa: E402


def trainer(folder: Path, epochs: int, *callbacks: Any, **options: Any) -> Any:
    from lightning.pytorch import Trainer  # pyright: ignore[reportMissingImports]

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        devices=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        limit_train_batches=3,
        limit_val_batches=1,
        **{**quiet, **options},
    )


def model(**hparams: Any) -> Any:
    boring = importlib.import_module("lightning.pytorch.demos.boring_classes")

    class Model(boring.BoringModel):
        def __init__(self, **hparams: Any) -> None:
            super().__init__()
            self.save_hyperparameters(hparams)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = super().training_step(batch, batch_idx)
            self.log("loss", out["loss"])
            return out

    torch.manual_seed(0)
    return Model(**hparams)


def save(home: Path, path: Path | str, content: dict[str, Any]) -> HoldfastCheckpointIO:
    """Save a dictionary as the file of a path."""
    io = HoldfastCheckpointIO(home)
    io.save_checkpoint(content, path)
    io.teardown()
    return io


def newest(home: Path, folder: str) -> str | None:
    """Return the newest file of a folder, with the checkpoints of a home."""
    return BackgroundSaver(HomePlace(str(home)), "8GiB").newest(folder)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_reported_paths_are_files_of_torch(tmp_path: Path) -> None:
    callback = HoldfastCheckpoint(dirpath=tmp_path / "ckpt", monitor="loss", save_top_k=2, save_last=True)
    one = model(width=3)
    trainer(tmp_path, 4, callback).fit(one)
    assert files(tmp_path / "ckpt") == {Path(path).name for path in callback.best_k_models} | {"last.ckpt"}
    best = torch.load(callback.best_model_path)
    assert best["hyper_parameters"] == {"width": 3}
    again = type(one).load_from_checkpoint(callback.last_model_path)
    assert torch.equal(again.layer.weight, one.layer.weight)


def test_the_notice_of_a_known_end_leaves_time_for_a_save(tmp_path: Path) -> None:
    callback = HoldfastCheckpoint(tmp_path / "ckpt", every_n_train_steps=1, preemption="deadline=1h")
    found = []

    class Look(importlib.import_module("lightning.pytorch").Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            callback._saver.wait()
            saved_s, watcher = callback._saver.save_s, callback._notices
            assert watcher is not None
            watcher.expect_save = lambda save_s: found.append((save_s, saved_s))

    trainer(tmp_path, 1, Look(), callback).fit(model())
    assert len(found) == 3
    assert all(expected_s >= saved_s for expected_s, saved_s in found)
    assert found[-1][1] > 0


def test_a_checkpoint_of_model_checkpoint_can_be_resumed_and_the_other_way_round(tmp_path: Path) -> None:
    stock = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint
    kinds = [stock, HoldfastCheckpoint, stock]
    path: Any = None
    for epochs, kind in enumerate(kinds, 1):
        callback = kind(dirpath=tmp_path / "ckpt", filename="one", enable_version_counter=False)
        run = trainer(tmp_path, epochs, callback)
        run.fit(model(), ckpt_path=path)
        assert run.global_step == 3 * epochs
        path = callback.best_model_path
    assert torch.load(path)["callbacks"].keys() == {stock(dirpath=tmp_path / "ckpt").state_key}


def test_last_is_the_newest_checkpoint_also_without_save_last(tmp_path: Path) -> None:
    trainer(tmp_path, 2, HoldfastCheckpoint(dirpath=tmp_path / "ckpt")).fit(model())
    assert holdfast.open(tmp_path / "ckpt.holdfast").verify().is_good, "the home is beside the files"
    assert not [one.name for one in threading.enumerate() if one.name.startswith("holdfast")]
    run = trainer(tmp_path, 3, HoldfastCheckpoint(dirpath=tmp_path / "ckpt"))
    run.fit(model(), ckpt_path="last")
    assert run.ckpt_path == str(tmp_path / "ckpt" / "epoch=1-step=6.ckpt")
    assert run.global_step == 9


def test_a_damaged_file_is_written_again_from_the_home(tmp_path: Path) -> None:
    callback = HoldfastCheckpoint(dirpath=tmp_path / "ckpt")
    trainer(tmp_path, 2, callback).fit(model())
    path = Path(callback.best_model_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    trainer(tmp_path, 3, HoldfastCheckpoint(dirpath=tmp_path / "ckpt")).fit(model(), ckpt_path=str(path))
    assert torch.load(path)["global_step"] == 6


def test_last_skips_a_checkpoint_that_is_damaged_everywhere(tmp_path: Path) -> None:
    trainer(tmp_path, 2, HoldfastCheckpoint(dirpath=tmp_path / "ckpt", save_top_k=-1)).fit(model())
    home = tmp_path / "ckpt.holdfast"
    for data in [*home.rglob("*.safetensors"), tmp_path / "ckpt" / "epoch=1-step=6.ckpt"]:
        flip(data, middle(data))
    run = trainer(tmp_path, 2, HoldfastCheckpoint(dirpath=tmp_path / "ckpt", save_top_k=-1))
    run.fit(model(), ckpt_path="last")
    assert run.ckpt_path == str(tmp_path / "ckpt" / "epoch=0-step=3.ckpt")


def test_a_path_that_is_damaged_everywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    io = save(tmp_path / "home", path, {"state_dict": {"w": torch.ones(1000)}})
    for data in [*(tmp_path / "home").rglob("*.safetensors"), path]:
        data.write_bytes(data.read_bytes()[:-900])
    with pytest.raises(holdfast.Corrupt, match=r"no longer in the home"):
        io.load_checkpoint(path)


def test_an_interrupted_file_is_completed_at_the_next_save(tmp_path: Path) -> None:
    io = save(tmp_path / "home", tmp_path / "a.ckpt", {"w": torch.ones(10)})
    (tmp_path / "a.ckpt").unlink()  # as if the process had died before it was written
    io.save_checkpoint({"w": torch.zeros(10)}, tmp_path / "b.ckpt")
    io.teardown()
    assert torch.load(tmp_path / "a.ckpt")["w"].eq(1).all()


def test_what_a_killed_process_has_left_of_a_file_is_removed(tmp_path: Path) -> None:
    save(tmp_path / "home", tmp_path / "a.ckpt", {"w": torch.ones(10)})
    left = tmp_path / ".a.ckpt.0123456789abcdef.partial"
    left.write_bytes(b"half")
    save(tmp_path / "home", tmp_path / "a.ckpt", {"w": torch.zeros(10)})
    assert not left.exists()


def test_trainer_save_checkpoint_outside_of_training_writes_the_file(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1, HoldfastCheckpoint(dirpath=tmp_path / "ckpt"))
    run.fit(model())
    run.save_checkpoint(tmp_path / "own.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "own.ckpt")


def test_weights_only_files_are_not_resumed_from(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1, HoldfastCheckpoint(dirpath=tmp_path / "ckpt", save_weights_only=True))
    run.fit(model())
    assert newest(tmp_path / "ckpt.holdfast", str(tmp_path / "ckpt")) is None


def test_a_trainer_with_another_checkpoint_io_is_refused(tmp_path: Path) -> None:
    plugins = importlib.import_module("lightning.pytorch.plugins.io")
    run = trainer(
        tmp_path, 1, HoldfastCheckpoint(dirpath=tmp_path / "ckpt"), plugins=[plugins.AsyncCheckpointIO()]
    )
    with pytest.raises(holdfast.InvalidInput, match=r"Remove that one from Trainer\(plugins"):
        run.fit(model())


def test_two_homes_in_one_trainer_are_refused(tmp_path: Path) -> None:
    callbacks = [
        HoldfastCheckpoint(dirpath=tmp_path / "ckpt", home=tmp_path / name, every_n_epochs=i)
        for i, name in enumerate("ab", 1)
    ]
    with pytest.raises(holdfast.InvalidInput, match=r"Use one home for all"):
        trainer(tmp_path, 1, *callbacks).fit(model())


def test_two_callbacks_share_a_home(tmp_path: Path) -> None:
    callbacks = [
        HoldfastCheckpoint(dirpath=tmp_path / "steps", every_n_train_steps=2, save_top_k=-1),
        HoldfastCheckpoint(dirpath=tmp_path / "epochs", every_n_epochs=1, save_top_k=-1),
    ]
    trainer(tmp_path, 2, *callbacks).fit(model())
    assert files(tmp_path / "steps") == {f"epoch={(n - 1) // 3}-step={n}.ckpt" for n in (2, 4, 6)}
    assert files(tmp_path / "epochs") == {"epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"}


def test_a_missing_file_of_the_second_callback_is_written_without_another_save(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [
            HoldfastCheckpoint(dirpath=tmp_path / "steps", every_n_train_steps=2, save_top_k=-1),
            HoldfastCheckpoint(dirpath=tmp_path / "epochs", every_n_epochs=1, save_top_k=-1),
        ]

    trainer(tmp_path, 1, *callbacks()).fit(model())
    (tmp_path / "epochs" / "epoch=0-step=3.ckpt").unlink()  # as if the process had died before it was written
    again = trainer(tmp_path, 1, *callbacks())
    again.fit(model(), ckpt_path="last")
    assert files(tmp_path / "epochs") == {"epoch=0-step=3.ckpt"}
    assert files(tmp_path / "steps") == {"epoch=0-step=2.ckpt"}
    assert again.ckpt_path == str(tmp_path / "epochs" / "epoch=0-step=3.ckpt")


def test_a_link_to_the_last_file_is_made_before_the_file(tmp_path: Path) -> None:
    callback = HoldfastCheckpoint(dirpath=tmp_path / "new" / "ckpt", save_last="link")
    trainer(tmp_path, 1, callback).fit(model())
    link = tmp_path / "new" / "ckpt" / "last.ckpt"
    assert link.is_symlink()
    assert torch.load(link, weights_only=False)["global_step"] == 3


def test_the_last_file_is_renewed_from_the_checkpoint_that_training_resumes_from(tmp_path: Path) -> None:
    """Even if no save follows: a process may be killed between the files of one save."""

    def fit() -> None:
        callback = HoldfastCheckpoint(dirpath=tmp_path / "ckpt", save_last=True)
        trainer(tmp_path, 1, callback).fit(model(), ckpt_path="last")

    fit()
    (tmp_path / "ckpt" / "last.ckpt").unlink()
    left = tmp_path / "ckpt" / ".last.ckpt.0123456789abcdef.partial"
    left.write_bytes(b"half")
    fit()
    assert files(tmp_path / "ckpt") == {"epoch=0-step=3.ckpt", "last.ckpt"}


def test_the_plugin_alone_saves_for_model_checkpoint(tmp_path: Path) -> None:
    stock = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint
    callback = stock(dirpath=tmp_path / "ckpt", save_last=True)
    run = trainer(tmp_path, 2, callback, plugins=[HoldfastCheckpointIO()])
    run.fit(model())
    assert files(tmp_path / "ckpt") == {"epoch=1-step=6.ckpt", "last.ckpt"}
    run.test(model(), ckpt_path="best")


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    fabric_type = importlib.import_module("lightning.fabric").Fabric
    fabric = fabric_type(accelerator="cpu", devices=1, plugins=[HoldfastCheckpointIO(tmp_path / "home")])
    module = torch.nn.Linear(3, 2)
    state = {"model": fabric.setup(module), "step": 7}
    fabric.save(tmp_path / "a.ckpt", state)
    weight = module.weight.detach().clone()
    torch.nn.init.zeros_(module.weight)
    state["step"] = 0
    fabric.load(tmp_path / "a.ckpt", state)
    fabric.strategy.checkpoint_io.teardown()
    assert state["step"] == 7
    assert torch.equal(module.weight, weight)


def test_remote_files_have_their_home_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    callback = HoldfastCheckpoint(dirpath="memory://run/ckpt", save_last=True)
    run = trainer(tmp_path, 1, callback)
    run.fit(model())
    assert fsspec.filesystem("memory").exists("/run/ckpt/last.ckpt")
    run.test(model(), ckpt_path=callback.last_model_path)


FULL = {"state_dict": {}, "optimizer_states": [], "loops": {}}


def make_home(home: Path, *paths: Path | str) -> None:
    """Make the home of a stranger, which names these paths."""
    for path in paths:
        save(home, path, FULL)


def test_a_home_cannot_have_a_file_of_the_user_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_home(tmp_path / "home", run / "notes.txt")
    (run / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match="damaged, so an older one is used"):
        assert newest(tmp_path / "home", str(run)) is None
    make_home(tmp_path / "home", run / "new.ckpt")
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "path", ["{0}/profile", "{0}/own.ckpt", "{0}/run/../own.ckpt", "{0}/run/link/own.ckpt"]
)
def test_a_home_cannot_choose_a_path_outside_of_the_folder(tmp_path: Path, path: str) -> None:
    """The checkpoint gets the same name in the folder, so that the newest one is not lost."""
    run, other = tmp_path / "run", Path(path.format(tmp_path))
    run.mkdir()
    (run / "link").symlink_to(tmp_path)
    make_home(tmp_path / "home", other)
    other.unlink()
    assert newest(tmp_path / "home", str(run)) == str(run / other.name)
    make_home(tmp_path / "home", run / "new.ckpt")
    assert not other.exists()
    assert (run / "new.ckpt").exists()


def test_a_home_cannot_send_a_checkpoint_to_a_server(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    make_home(tmp_path / "home", "memory://else/last.ckpt")
    fsspec.filesystem("memory").rm("/else/last.ckpt")
    make_home(tmp_path / "home", tmp_path / "new.ckpt")
    assert not fsspec.filesystem("memory").exists("/else/last.ckpt")


def test_fifos_in_place_of_files_do_not_block(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_home(tmp_path / "home", run / "old.ckpt", run / "new.ckpt")
    (run / "new.ckpt").unlink()
    for name in ("new.ckpt", "z.ckpt"):
        os.mkfifo(run / name)
    with pytest.warns(UserWarning, match="damaged, so an older one is used"):
        assert newest(tmp_path / "home", str(run)) == str(run / "old.ckpt")


@pytest.mark.parametrize(
    "change",
    [
        {"path": 5},
        {"path": "a\0b"},
        {"names": [5]},
        {"names": ["lost"]},
        {"global_step": "x"},
        {"epoch": -1},
        {"is_full": None},
    ],
)
def test_facts_of_other_types_are_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    facts = {"format": 1, "names": [], "pickle": torch.zeros(3, dtype=torch.uint8), "path": "run/a.ckpt"}
    facts |= {"global_step": 1, "epoch": None, "is_full": True}
    with holdfast.Checkpointer(
        tmp_path / "home", quiet=True, watches=[holdfast.Preemption("none", signals=False)]
    ) as ckpt:
        ckpt.save(1, {"checkpoint": {}, "lightning": {**facts, **change}})
    assert newest(tmp_path / "home", str(tmp_path / "run")) is None
    with pytest.raises(Corrupt, match="Lightning's part of"):
        HomeContent(str(tmp_path / "home"), 1)


def test_a_trainer_is_freed_after_its_training(tmp_path: Path) -> None:
    def train() -> list[weakref.ref[Any]]:
        run, module = trainer(tmp_path, 1, HoldfastCheckpoint(dirpath=tmp_path / "ckpt")), model()
        run.fit(module)
        return [weakref.ref(run), weakref.ref(module)]

    found = train()
    gc.collect()
    assert [one() for one in found] == [None, None]


def test_storage_options_of_a_save_are_used_beside_the_callback(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1, HoldfastCheckpoint(dirpath=tmp_path / "ckpt"))
    run.fit(model())
    io = run.strategy.checkpoint_io
    assert isinstance(io, HoldfastCheckpointIO)
    run.save_checkpoint("memory://elsewhere/x.ckpt", storage_options={"skip_instance_cache": True})
    assert io.saver_for("memory://elsewhere/x.ckpt").place.storage_options == {"skip_instance_cache": True}
