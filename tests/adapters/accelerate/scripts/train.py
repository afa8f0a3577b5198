"""Training with a hand-written loop of Accelerate: `train.py FOLDER JSON`. Prints the end of the run as JSON.

Members of the JSON, all optional: `stock` (without Holdfast), `resume`, `naming` ("automatic" or "explicit"),
`loader` ("plain", "seedable", "stateful" or "global"), `accumulation`, `workers`, `scaler`, `every`, `steps`,
`limit`, `asks`, `live` (write the state at the end to a file of each rank, by the names of a checkpoint),
`slow_from` (a row that workers wait for), `hook` (that writes a file), `kill_before` (the number of a change
of files), and `kill_at` with `signal`, `rank`, `group` (all processes) and `is_saved` (after the save of that
step).
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


def make_accelerator(folder: Path, plan: dict[str, Any]) -> Any:
    loader = plan.get("loader", "plain")
    names = {"automatic_checkpoint_naming": plan.get("naming", "automatic") == "automatic"}
    kinds = {"use_seedable_sampler": loader == "seedable", "use_stateful_dataloader": loader == "stateful"}
    return Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(folder), **names, total_limit=plan.get("limit", 100)),
        dataloader_config=DataLoaderConfiguration(**kinds),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=plan.get("accumulation", 1)),
    )


def strike(plan: dict[str, Any], step: int) -> None:
    """Send this process its signal, if it is due."""
    if plan.get("kill_at") == step and plan.get("rank", 0) == int(os.environ.get("RANK", 0)):
        os.kill(0 if plan.get("group") else os.getpid(), plan.get("signal", signal.SIGKILL))
        if plan.get("slow_from"):  # the workers die too
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGKILL)


def loader_options(plan: dict[str, Any]) -> dict[str, Any]:
    workers = {"num_workers": plan.get("workers", 0)}
    if plan.get("loader") != "global":
        return {"batch_size": BATCH, "shuffle": not plan.get("slow_from"), **workers}
    parts = plan.get("accumulation", 1)
    return {"batch_sampler": GlobalBatches(NUM_ROWS, 2 * BATCH * parts, accumulation_steps=parts), **workers}


def add_note(models: list[Any], weights: list[Any], folder: str) -> None:
    """Write a file of the script's own into the folder of a state."""
    (Path(folder) / "note").write_text("whole")


class Training:
    """A prepared training."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder, self.plan, self.num_steps = folder, plan, plan.get("steps", 30)
        accelerator = self.accelerator = make_accelerator(folder, plan)
        set_seed(3, device_specific=True)
        if not plan.get("stock"):
            from holdfast.adapters.accelerate import attach

            attach(accelerator)
        torch.manual_seed(0)
        data = Rows(torch.randn(NUM_ROWS, 4), torch.randn(NUM_ROWS, 1), torch.arange(NUM_ROWS))
        data.slow_from = plan.get("slow_from", 0)
        net: Any = Net()
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
        loader: Any = torch.utils.data.DataLoader(data, **loader_options(plan))
        set_seed(5, device_specific=True)  # each rank draws its own numbers
        prepared = accelerator.prepare(net, optimizer, loader, scheduler)
        self.net, self.optimizer, self.loader, self.scheduler = prepared
        self.counter = Counter()
        accelerator.register_for_checkpointing(self.counter)
        if plan.get("scaler"):
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        if plan.get("hook"):
            accelerator.register_save_state_pre_hook(add_note)

    def resume(self) -> None:
        """Load the newest state: of explicit names as scripts find it."""
        if self.plan.get("naming", "automatic") == "automatic":
            self.accelerator.load_state()
            return
        found = [path for path in self.folder.glob("step_*") if re.fullmatch(r"step_[0-9]+", path.name)]
        if found:
            self.accelerator.load_state(str(max(found, key=lambda path: int(path.name[5:]))))

    def loop(self) -> None:
        counter, accelerator = self.counter, self.accelerator
        while counter.step < self.num_steps:
            if counter.num_batches >= len(self.loader):
                counter.epoch, counter.num_batches = counter.epoch + 1, 0
            active = self.loader
            if counter.num_batches and self.plan.get("loader") != "stateful":
                active = accelerator.skip_first_batches(self.loader, counter.num_batches)
            for x, y, rows in active:
                self.note_rows(rows)
                with accelerator.accumulate(self.net):
                    noise = 0.01 * (random.random() + np.random.rand())
                    loss = torch.nn.functional.mse_loss(self.net(x) + noise, y)
                    accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                counter.num_batches += 1
                counter.losses.append(loss.item())
                if accelerator.sync_gradients and self.end_step():
                    break

    def note_rows(self, rows: torch.Tensor) -> None:
        """Write the rows of a batch to a file of this rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"rows{os.environ.get('RANK', 0)}").open("a") as out:
            numbers = " ".join(map(str, rows.tolist()))
            out.write(f"{self.counter.epoch} {self.counter.num_batches} {numbers}\n")

    def end_step(self) -> bool:
        """Count and save a step; return True after the last one."""
        plan, counter = self.plan, self.counter
        counter.step += 1
        if not plan.get("is_saved"):
            strike(plan, counter.step)
        is_preempted = False
        if plan.get("asks", not plan.get("stock")):
            from holdfast.adapters import accelerate

            is_preempted = accelerate.is_preempted(self.accelerator)
        if counter.step % plan.get("every", 4) == 0 or is_preempted:
            self.accelerator.save_state(str(self.folder / f"step_{counter.step}"))
        if plan.get("is_saved"):
            strike(plan, counter.step)
        return counter.step >= self.num_steps

    def end(self) -> dict[str, Any]:
        """Return everything that an interrupted run has to have in common with an unbroken one."""
        counter = self.counter
        return {
            "model": digest(dict(self.accelerator.unwrap_model(self.net).state_dict())),
            "optimizer": digest(self.optimizer.optimizer.state_dict()["state"]),
            "scheduler": repr(self.scheduler.scheduler.state_dict()),
            "random": digest([torch.get_rng_state(), random.getstate(), repr(np.random.get_state())]),
            "counter": [counter.step, counter.epoch, counter.num_batches, digest(counter.losses)],
            "step": self.accelerator.step,
            "iteration": self.accelerator.save_iteration,
        }

    def keep_live(self) -> None:
        """Write the state to a file of this rank, by the names of a checkpoint."""
        from adapters.exports import by_name

        accelerator, model = self.accelerator, self.accelerator.unwrap_model(self.net)
        live = {
            "model": model.state_dict(),
            "optimizer": by_name(self.optimizer.optimizer, model),
            "scheduler": self.scheduler.scheduler.state_dict(),
            "custom_0": self.counter.state_dict(),
            "accelerator": {"step": accelerator.step, "iteration": accelerator.save_iteration},
        }
        torch.save(live, self.folder / f"live-{accelerator.process_index}.pt")


def main(folder: Path, plan: dict[str, Any]) -> None:
    training = Training(folder, plan)
    if "kill_before" in plan:
        kill_before_change(plan["kill_before"])
    if plan.get("resume"):
        training.resume()
    training.loop()
    end = training.end()
    if plan.get("live"):
        training.keep_live()
    if not plan.get("stock"):
        training.accelerator.holdfast_session.close()
    sys.stdout.write(json.dumps(end) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    if torch.distributed.is_initialized():
        from holdfast import hard_exit

        hard_exit()
