"""Runner of a function on several gloo ranks, one process each, and the functions that tests run there."""

from __future__ import annotations

import logging
import random
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import holdfast
from forkserver import forkserver
from holdfast.checkpoint.policy import Every, Moment
from holdfast.checkpoint.run import attempt
from stage.training import make_checkpointer


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What `function(rank, *args, **options)` returns on each rank; an exception's text where it raises."""
    context = forkserver()
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(
                target=_become, args=(rank, world_size, folder, answers, partial(function, **options), args)
            )
            for rank in range(world_size)
        ]
        for child in children:
            child.start()
        found = dict(answers.get(timeout=600) for _ in children)
        for child in children:
            child.join(600)
    return [found[rank] for rank in range(world_size)]


def _become(
    rank: int, world_size: int, folder: str, answers: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    try:
        answers.put((rank, function(rank, *args)))
    except Exception:  # noqa: BLE001 - the test looks at it
        answers.put((rank, traceback.format_exc()))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))


def train_and_save(rank: int, home: Path) -> dict[str, Any]:
    """Three steps of DDP, a save, and one more step; the parameters as they were at the save."""
    net = DistributedDataParallel(make_net())
    optimizer = AdamW(net.parameters(), lr=0.1)
    torch.manual_seed(rank + 100)
    random.seed(rank)
    kept: dict[str, Any] = {}
    with make_checkpointer(home, {"model": net, "optimizer": optimizer}) as ckpt:
        for step in range(1, 5):
            optimizer.zero_grad()
            net(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            if step == 3:
                ckpt.save(3)
                kept = {name: tensor.clone().numpy() for name, tensor in net.module.state_dict().items()}
                kept["drawn"] = torch.rand(2).numpy()
                kept["python"] = random.random()
    return kept


def restore(rank: int, home: Path) -> dict[str, Any]:
    """The parameters after a restore into DDP, what the generators draw next, and the step."""
    net = DistributedDataParallel(make_net())
    optimizer = AdamW(net.parameters(), lr=0.1)
    with make_checkpointer(home, {"model": net, "optimizer": optimizer}) as ckpt:
        step = ckpt.restore()
    found: dict[str, Any] = {name: tensor.numpy() for name, tensor in net.module.state_dict().items()}
    found |= {"drawn": torch.rand(2).numpy(), "python": random.random(), "step": step}
    found["moments"] = [state["exp_avg"].sum().item() for state in optimizer.state.values()]
    return found


def drift_apart(rank: int, home: Path) -> str:
    """Rank 1 counts its steps otherwise."""
    ckpt = make_checkpointer(home, {"x": torch.ones(1)}, limits=holdfast.Limits(rank_timeout="10m"))
    try:
        ckpt.should_save(1)
        ckpt.should_save(2 + rank)
        ckpt.should_save(3 + rank)
    except ValueError as error:
        return str(error)
    return "nothing was said"


def save_on_rank_0_only(rank: int, home: Path, *, is_claimed: bool) -> list[str]:
    """Rank 0 saves, rank 1 does not until rank 0 has logged a line. Return the lines of this rank."""
    lines, logged = [], threading.Event()
    logger = logging.getLogger("holdfast")
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        if "every rank has to call" in lines[-1].lower():
            (home.parent / "logged").touch()

    handler.emit = emit
    logger.addHandler(handler)
    ckpt = make_checkpointer(home, {"x": torch.ones(1)}, limits=holdfast.Limits(rank_timeout="10m"))
    ckpt.restore()
    if is_claimed:
        ckpt.save(1).wait_durable()
    if rank == 0:
        ckpt.save(2)
    while not (home.parent / "logged").exists():
        logged.wait(0.01)
    if rank == 1:
        ckpt.save(2)
    ckpt.close()
    return lines


class FromStep(Every):
    """Due by a clock that only rank 0 asks, from a step on until it was saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def due(self, moment: Moment) -> bool:
        return moment.step >= self.step > moment.saved_step


def save_on_time(rank: int, home: Path) -> list[int]:
    """Steps at which a timed policy, due once, has this rank save."""
    with make_checkpointer(home, {"x": torch.ones(1)}, every=FromStep(4)) as ckpt:
        saved = []
        for step in range(1, 10):
            if ckpt.should_save(step):
                saved.append(step)
                ckpt.save(step)
    return saved


def skip_together(rank: int, home: Path) -> list[str]:
    """Only rank 1 has no free memory at the second save."""
    import warnings

    with make_checkpointer(
        home, {"x": torch.ones(1000)}, memory=holdfast.Memory("64kB", when_full="skip")
    ) as ckpt:
        ckpt.save(1).wait_durable()
        held = ckpt._components.pipeline.arenas.acquire(50_000) if rank == 1 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            states = [ckpt.save(2).state]
        if held is not None:
            ckpt._components.pipeline.arenas.release(held)
        save = ckpt.save(3)
        save.wait_durable()
        return [*states, save.state]


def pause_for_one(rank: int, folder: Path, *, is_local: bool, notified: int | None) -> list[str | int]:
    """Pause in save(3), as save 2 cannot be written. It can at the first line of rank 1, or after a notice.

    Args:
        is_local: the ranks have local folders of their own, and that of rank 1 is away; else their home is.
        notified: rank that receives a notice once rank 1 has paused.

    Returns:
        The state of save 2 after save(3), and the status of a preempted run.
    """
    local = folder / f"local-{rank}" if is_local else None
    place, paused = local or folder / "home", folder / "paused"
    notice = f"file:{paused}" if rank == notified else "none"
    options: dict[str, Any] = {
        "local": local,
        "limits": holdfast.Limits(failed_saves="pause", patience="1h"),
        "watches": [holdfast.Preemption(notice, signals=False)],
    }
    ckpt = make_checkpointer(folder / "home", {"x": torch.ones(1)}, **options)
    ckpt.save(1).wait_durable()

    def go_on(line: str) -> None:
        if line.startswith("training is paused") and not paused.exists():
            paused.touch()
            if notified is None:
                (folder / "away").rename(place)

    dist.barrier()
    if rank == 1:
        attempt._PAUSE_LINE_S = 0.0
        attempt._log.warning = go_on  # pyright: ignore[reportAttributeAccessIssue] - it is called with a line
        place.rename(folder / "away")
    dist.barrier()
    save = ckpt.save(2)
    ckpt.save(3)
    found: list[str | int] = [save.state]
    if notified is None:
        ckpt.close()
        return found
    if rank == 1:
        (folder / "away").rename(place)
    for step in range(4, 10):
        ckpt.should_save(step)
        if ckpt.preempted:
            try:
                ckpt.stop(step)
            except SystemExit as end:
                return [*found, int(str(end.code))]
    return found
