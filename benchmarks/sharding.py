"""`holdfast.shard` beside a hand-written `fully_shard` of the same layout: steps in turns, and memory."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine
import sharded
import torch
import torch.distributed as dist
from cputime import cpu_s
from memory import peak_tensor_bytes
from rich.console import Console
from rich.table import Table
from states import Gpt2, Shape, randomize
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

HERE = Path(__file__).resolve().parent
SHAPE = Shape(layers=8, width=256, heads=8, vocabulary=2048, positions=128)
BATCH, LENGTH = 4, 128
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)

LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"shards": 1},
    "ZeRO-3": {},
    "ZeRO-2": {"reshard_after_forward": False},
    "ZeRO-3, bf16": {"dtype": "bf16"},
    "ZeRO-3, recomputed": {"activation_checkpointing": True},
}


def main() -> int:
    """Measure every layout; exit status 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="training steps in each turn")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="default results/sharding_<hardware>_<date>.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options)
    facts = machine.describe(HERE)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(options.ranks), str(Path(__file__).resolve()), "--child", str(answer)]
        command += [
            "--rounds",
            str(options.rounds),
            "--steps",
            str(options.steps),
            "--device",
            options.device,
        ]
        subprocess.run(command, check=True)
        runs = json.loads(answer.read_text())
    return _report(options, facts, runs)


def _report(options: argparse.Namespace, facts: dict[str, Any], runs: list[sharded.Run]) -> int:
    title = f"{options.ranks} ranks, medians of {options.rounds} rounds [least..greatest]"
    table = Table("", *sharded.HEADINGS, title=title)
    for row in sharded.rows(runs):
        table.add_row(*row)
    console.print(table)
    path = options.out or machine.results_path("sharding", facts)
    document = {
        "machine": facts,
        "ranks": options.ranks,
        "rounds": options.rounds,
        "goals": sharded.GOALS,
        "runs": runs,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(map(sharded.misses, runs)))


def _child(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(HERE.parent / "src"))
    import holdfast

    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    runs = [_measure(layout, options.rounds, options.steps, device) for layout in LAYOUTS]
    if dist.get_rank() == 0:
        options.child.write_text(json.dumps(runs))
    holdfast.hard_exit(0)


def _measure(layout: str, rounds: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Both in one process, in turns that begin with either: first memory, each by itself, then time."""
    makers: dict[str, Callable[[], Any]] = {
        "ours": lambda: _ours(layout, device),
        "hand": lambda: _by_hand(layout, device),
    }
    run: dict[str, Any] = {
        "layout": layout,
        **{who: {"peak_bytes": [], "s": [], "cpu_s": []} for who in makers},
    }
    for who in _turns(list(makers), rounds):
        run[who]["peak_bytes"].append(
            peak_tensor_bytes(lambda make=makers[who]: _Loop(make(), device).run(2), device)
        )
    loops = {who: _Loop(make(), device) for who, make in makers.items()}
    for loop in loops.values():
        loop.run(2)
    for who in _turns(list(loops), rounds):
        took_s, used_s = loops[who].run(steps)
        run[who]["s"].append(took_s)
        run[who]["cpu_s"].append(used_s)
    if dist.get_rank() == 0:
        ratio = statistics.median(run["ours"]["s"]) / statistics.median(run["hand"]["s"])
        console.print(f"{layout}: {ratio:.3f} of the time by hand")
    return run


def _turns(names: list[str], rounds: int) -> Iterator[str]:
    for number in range(rounds):
        yield from names if number % 2 == 0 else reversed(names)


class _Loop:
    """Training steps of a sharded model."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._device = device
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._tokens = torch.randint(SHAPE.vocabulary, (BATCH, LENGTH), generator=generator).to(device)

    def run(self, steps: int) -> tuple[float, float]:
        """(seconds, seconds of this rank's processor time) of one step."""
        self._meet()
        started_s, used_s = time.perf_counter(), cpu_s()
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._model(self._tokens).backward()
            self._optimizer.step()
        self._meet()
        return (time.perf_counter() - started_s) / steps, (cpu_s() - used_s) / steps

    def _meet(self) -> None:
        """Wait for the device and for all ranks."""
        if self._device.type == "cuda":  # a barrier alone may return before the kernels of the steps have run
            torch.cuda.synchronize()
        dist.barrier()


def _fresh() -> Any:
    torch.manual_seed(0)
    model = Gpt2(SHAPE)
    randomize(model)
    return model


def _ours(layout: str, device: torch.device) -> Any:
    import holdfast

    return holdfast.shard(_fresh(), **LAYOUTS[layout], device=device.type, quiet=True)


def _by_hand(layout: str, device: torch.device) -> Any:
    """Shard the model as PyTorch's tutorial and torchtitan do."""
    model, chosen, ranks = _fresh().to(device), LAYOUTS[layout], dist.get_world_size()
    is_ddp = chosen.get("shards") == 1
    shape, names = ((ranks, 1), ("replicate", "shard")) if is_ddp else ((ranks,), ("shard",))
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "dtype" in chosen else MixedPrecisionPolicy()
    )
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, shape, mesh_dim_names=names),
        "mp_policy": policy,
    }
    if "activation_checkpointing" in chosen:
        kind = type(model.h[0])
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    for block in model.h:
        fully_shard(block, reshard_after_forward=chosen.get("reshard_after_forward", True), **options)
    return fully_shard(model, **options)


if __name__ == "__main__":
    sys.exit(main())
