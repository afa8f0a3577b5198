"""Lightning's trainer saves with the plugin and the callback, and resumes from these checkpoints."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import holdfast.adapters.nebula as nm
from holdfast.adapters.nebula import interface

pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Lightning's own there are many
]


def make_trainer(folder: Path, epochs: int, **options: Any) -> Any:
    from lightning.pytorch import Trainer  # pyright: ignore[reportMissingImports]

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return Trainer(default_root_dir=folder, max_epochs=epochs, devices=1, **quiet, **options)


def make_model() -> Any:
    boring = importlib.import_module("lightning.pytorch.demos.boring_classes")

    class Model(boring.BoringModel):
        def __init__(self, width: int = 32) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            data = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
            return torch.utils.data.DataLoader(data)  # type: ignore[arg-type]

    torch.manual_seed(0)
    return Model()


def test_the_callback_saves_and_a_run_resumes_from_its_path(home: str, tmp_path: Path) -> None:
    config = {"persistent_storage_path": home, "persistent_time_interval": 3600}
    callback = nm.NebulaCallback(dirpath=tmp_path / "ckpt", save_last=True, config_params=config)
    model = make_model()
    make_trainer(tmp_path, 2, callbacks=[callback]).fit(model)
    interface.end()
    checkpoint = holdfast.open(home)
    assert checkpoint.verify().is_good
    assert torch.equal(checkpoint["checkpoint.state_dict.layer.weight"], model.layer.weight)

    whole = make_model()
    make_trainer(tmp_path / "other", 3, enable_checkpointing=False).fit(whole)
    for path in (callback.best_model_path, str(tmp_path / "ckpt" / "last.ckpt"), "last"):
        callback = nm.NebulaCallback(
            dirpath=tmp_path / "ckpt", save_last=True, save_top_k=0, config_params=config
        )
        again, trainer = make_model(), make_trainer(tmp_path, 3, callbacks=[callback])
        if path == "last":  # what has been trained to the end meanwhile
            trainer = make_trainer(tmp_path, 4, callbacks=[callback])
            trainer.fit(again, ckpt_path=path)
            assert trainer.global_step == 32
        else:
            trainer.fit(again, ckpt_path=path)
            assert trainer.global_step == 24
            assert torch.equal(again.layer.weight, whole.layer.weight)
        interface.end()


def test_the_plugin_alone_saves_to_its_path(home: str, tmp_path: Path) -> None:
    nm.init(home)
    trainer = make_trainer(tmp_path, 1, plugins=[nm.NebulaCheckpointIO()], enable_checkpointing=False)
    model = make_model()
    trainer.fit(model)
    best = {"is_best": True, "persist_path": tmp_path / "best.ckpt"}
    trainer.save_checkpoint(tmp_path / "one.ckpt", storage_options=best)
    assert nm.get_latest_checkpoint(home).tag == "global_step8"
    for path in (tmp_path / "best.ckpt", nm.get_latest_checkpoint_path("checkpoint", home)):
        again = type(model).load_from_checkpoint(path, weights_only=True)
        assert torch.equal(again.layer.weight, model.layer.weight)
    again = make_model()
    resumed = make_trainer(tmp_path, 2, plugins=[nm.NebulaCheckpointIO()], enable_checkpointing=False)
    resumed.fit(again, ckpt_path=tmp_path / "one.ckpt")
    assert resumed.global_step == 16


def test_ordinary_files_are_loaded(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "plain.ckpt")
    assert nm.NebulaCheckpointIO().load_checkpoint(tmp_path / "plain.ckpt")["epoch"] == 3
