"""Training with a hand-written loop of Accelerate: `train.py FOLDER JSON`. Prints the end of the run as JSON.

Members of the JSON, all optional: `stock` (without Holdfast), `attach` (its options), `resume`, `naming`
("automatic" or "explicit"), `loader` ("plain", "seedable", "stateful" or "global"), `accumulation`,
`workers`, `scaler`, `every`, `steps`, `limit`, `asks`, `live` (write the state at the end to a file of each
rank, by the names of a checkpoint), `slow_from` (a row that workers wait for),
`hook` (that writes a file), `kill_before` (the number of a change of files), and `kill_at` with `signal`,
`rank`, `group` (all processes) and `is_saved` (after the save of that step).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    set_seed,
)

from adapters.digest import digest
from holdfast.train.data import GlobalBatches
from kills import kill_before_change

warnings.simplefilter("ignore", FutureWarning)
NUM_ROWS, BATCH = 48, 4


class Counter:
    """Steps and epochs of the script, which it registers."""

    def __init__(self) -> None:
        self.step = self.epoch = self.num_batches = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Net(torch.nn.Module):
    """A small network that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3, self.training))


class Rows(torch.utils.data.TensorDataset):
    """Rows of a table. From one on, workers wait for ever."""

    slow_from = 0

    def __getitem__(self, index: Any) -> Any:
        if 0 < self.slow_from <= index:
            time.sleep(10**6)
        return super().__getitem__(index)


def make_accelerator(folder: Path, plan: dict[str, Any]) -> Accelerator:
    loader = plan.get("loader", "plain")
    is_automatic = plan.get("naming", "automatic") == "automatic"
    return Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=str(folder),
            automatic_checkpoint_naming=is_automatic,
            total_limit=plan.get("limit", 100),
        ),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=loader == "seedable",
            use_stateful_dataloader=loader == "stateful",
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=plan.get("accumulation", 1)),
    )


def newest(folder: Path) -> str | None:
    """Return the newest folder of explicit names, as scripts find it."""
    found = [path for path in folder.glob("step_*") if re.fullmatch(r"step_[0-9]+", path.name)]
    return str(max(found, key=lambda path: int(path.name[5:]))) if found else None


def strike(plan: dict[str, Any], step: int) -> None:
    """Send this process its signal, if it is due."""
    if plan.get("kill_at") == step and plan.get("rank", 0) == int(os.environ.get("RANK", 0)):
        os.kill(0 if plan.get("group") else os.getpid(), plan.get("signal", signal.SIGKILL))
        if plan.get("slow_from"):  # the workers die too
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGKILL)


def train(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    accelerator: Any = make_accelerator(folder, plan)
    set_seed(3, device_specific=True)
    if not plan.get("stock"):
        from holdfast.adapters.accelerate import attach

        attach(accelerator, **plan.get("attach", {}))
    torch.manual_seed(0)
    columns = torch.randn(NUM_ROWS, 4), torch.randn(NUM_ROWS, 1), torch.arange(NUM_ROWS)
    data = Rows(*columns)
    data.slow_from = plan.get("slow_from", 0)
    net: Any = Net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
    loader: Any = torch.utils.data.DataLoader(data, **loader_options(plan))
    set_seed(5, device_specific=True)  # each rank draws its own numbers
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if plan.get("scaler"):
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    if plan.get("hook"):
        accelerator.register_save_state_pre_hook(add_note)
    if "kill_before" in plan:
        kill_before_change(plan["kill_before"])
    if plan.get("resume"):
        resume(accelerator, folder, plan)
    loop(accelerator, net, optimizer, scheduler, loader, counter, folder, plan)
    end = end_of(accelerator, net, optimizer, scheduler, counter)
    if plan.get("live"):
        from adapters.exports import by_name

        model = accelerator.unwrap_model(net)
        live = {
            "model": model.state_dict(),
            "optimizer": by_name(optimizer.optimizer, model),
            "scheduler": scheduler.scheduler.state_dict(),
            "custom_0": counter.state_dict(),
            "accelerator": {"step": accelerator.step, "iteration": accelerator.save_iteration},
        }
        torch.save(live, folder / f"live-{accelerator.process_index}.pt")
    if not plan.get("stock"):
        accelerator.holdfast_session.close()
    return end


def loader_options(plan: dict[str, Any]) -> dict[str, Any]:
    if plan.get("loader") != "global":
        return {
            "batch_size": BATCH,
            "shuffle": not plan.get("slow_from"),
            "num_workers": plan.get("workers", 0),
        }
    parts = plan.get("accumulation", 1)
    batches = GlobalBatches(NUM_ROWS, 2 * BATCH * parts, accumulation_steps=parts)
    return {"batch_sampler": batches, "num_workers": plan.get("workers", 0)}


def loop(
    accelerator: Any,
    net: Any,
    optimizer: Any,
    scheduler: Any,
    loader: Any,
    counter: Counter,
    folder: Path,
    plan: dict[str, Any],
) -> None:
    while counter.step < plan.get("steps", 30):
        if counter.num_batches >= len(loader):
            counter.epoch, counter.num_batches = counter.epoch + 1, 0
        active = loader
        if counter.num_batches and plan.get("loader") != "stateful":
            active = accelerator.skip_first_batches(loader, counter.num_batches)
        for x, y, rows in active:
            note_rows(folder, counter, rows)
            with accelerator.accumulate(net):
                noise = 0.01 * (random.random() + np.random.rand())
                loss = torch.nn.functional.mse_loss(net(x) + noise, y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.num_batches += 1
            counter.losses.append(loss.item())
            if accelerator.sync_gradients and end_step(accelerator, counter, folder, plan):
                break


def add_note(models: list[Any], weights: list[Any], folder: str) -> None:
    """Write a file of the script's own into the folder of a state."""
    (Path(folder) / "note").write_text("whole")


def note_rows(folder: Path, counter: Counter, rows: torch.Tensor) -> None:
    """Write the rows of a batch to a file of this rank."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rows{os.environ.get('RANK', 0)}").open("a") as out:
        out.write(f"{counter.epoch} {counter.num_batches} {' '.join(map(str, rows.tolist()))}\n")


def end_step(accelerator: Any, counter: Counter, folder: Path, plan: dict[str, Any]) -> bool:
    """Count and save a step; return True after the last one."""
    counter.step += 1
    if not plan.get("is_saved"):
        strike(plan, counter.step)
    is_preempted = False
    if plan.get("asks", not plan.get("stock")):
        from holdfast.adapters import accelerate

        is_preempted = accelerate.is_preempted(accelerator)
    if counter.step % plan.get("every", 4) == 0 or is_preempted:
        accelerator.save_state(str(folder / f"step_{counter.step}"))
    if plan.get("is_saved"):
        strike(plan, counter.step)
    return counter.step >= plan.get("steps", 30)


def resume(accelerator: Accelerator, folder: Path, plan: dict[str, Any]) -> None:
    if plan.get("naming", "automatic") == "automatic":
        accelerator.load_state()
        return
    path = newest(folder)
    if path is not None:
        accelerator.load_state(path)


def end_of(accelerator: Any, net: Any, optimizer: Any, scheduler: Any, counter: Counter) -> dict[str, Any]:
    """Return everything that an interrupted run has to have in common with an unbroken one."""
    return {
        "model": digest(dict(accelerator.unwrap_model(net).state_dict())),
        "optimizer": digest(optimizer.optimizer.state_dict()["state"]),
        "scheduler": repr(scheduler.scheduler.state_dict()),
        "random": digest([torch.get_rng_state(), random.getstate(), repr(np.random.get_state())]),
        "counter": [counter.step, counter.epoch, counter.num_batches, digest(counter.losses)],
        "step": accelerator.step,
        "iteration": accelerator.save_iteration,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(train(Path(sys.argv[1]), json.loads(sys.argv[2]))) + "\n")
    if torch.distributed.is_initialized():
        from holdfast import hard_exit

        hard_exit()
