"""A sharded GPT saved by two ranks and loaded by one to four: seconds, and bytes read per byte needed."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
from memory import footprint
from pagecache import evict, sync
from resharded import HEADINGS, LOADED_ON, SAVED_ON, longest, ratio, rows
from rich.console import Console
from rich.table import Table
from source_path import environment
from states import Gpt2, Shape, Subject
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).resolve().parent
SHAPE = Shape(layers=8, width=512, heads=8)
LIMIT_S = 600.0


class Sharded(ABC):
    """A way of saving and loading a sharded model with its optimizer, on every rank."""

    title = ""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self.model, self.optimizer, self.directory = model, optimizer, directory

    def open(self) -> None:
        """Start what is needed; not timed."""
        return

    @abstractmethod
    def save(self, step: int) -> Callable[[], object]:
        """Save; answers what to call to wait until the peer calls it complete."""

    @abstractmethod
    def load(self, step: int) -> None:
        """Bring a step back into model and optimizer."""

    def close(self) -> None:
        """Stop what `open` started; not timed."""
        return

    def state(self) -> dict[str, Any]:
        """Both state dicts, as DCP's own helpers make them."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def put(self, state: dict[str, Any]) -> None:
        """Set both state dicts."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def path(self, step: int) -> Path:
        """Return the path of a peer's step."""
        return self.directory / f"step-{step}"


class Holdfast(Sharded):
    """`holdfast.Checkpointer`."""

    title = "holdfast"
    share_reads = False

    def open(self) -> None:
        """Start the checkpointer; a home with a checkpoint is loaded from later."""
        import holdfast

        home = self.directory / "home"
        state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self._checkpointer = holdfast.Checkpointer(
            home, state, every=10**9, keep=None, quiet=True, reads=holdfast.Reads(shared=self.share_reads)
        )
        if not home.exists():
            self._checkpointer.restore()
            self._checkpointer.prepare()

    def save(self, step: int) -> Callable[[], object]:
        """Save; it is durable when it has been waited for."""
        return self._checkpointer.save(step).wait_durable

    def load(self, step: int) -> None:
        """Restore the newest step, verified."""
        found = self._checkpointer.restore()
        if found != step:
            raise RuntimeError(f"restored step {found}, expected {step}")

    def close(self) -> None:
        """Stop the checkpointer."""
        self._checkpointer.close()


class HoldfastShared(Holdfast):
    """The same, with reads shared between the ranks."""

    title = "holdfast, shared reads"
    share_reads = True


class Dcp(Sharded):
    """`dcp.save` and `dcp.load`."""

    title = "DCP save"

    def save(self, step: int) -> Callable[[], object]:
        """Save synchronously."""
        dcp_save(self.state(), checkpoint_id=self.path(step))
        return lambda: None

    def load(self, step: int) -> None:
        """Load in place, then set."""
        state = self.state()
        dcp_load(state, checkpoint_id=self.path(step))
        self.put(state)


class DcpAsync(Dcp):
    """`dcp.async_save` with its default, a thread."""

    title = "DCP async_save"

    def save(self, step: int) -> Callable[[], object]:
        """Copy, then write in a thread."""
        answer: Any = dcp_async_save(self.state(), checkpoint_id=self.path(step))
        return answer.result if hasattr(answer, "result") else answer.upload_completion.result


class MetaCheckpointing(Sharded):
    """`torch_checkpointing`, asynchronous, with its resharder."""

    title = "torch_checkpointing, async"

    def open(self) -> None:
        """Make the manager; direct I/O off, see peers/metacheckpointing.py."""
        from torch_checkpointing import (  # pyright: ignore[reportMissingImports] - in the bench extra
            CheckpointManager,
            ItemSpec,
        )
        from torch_checkpointing.default_resharder import (  # pyright: ignore[reportMissingImports] - likewise
            DefaultResharder,
        )
        from torch_checkpointing.storage.filesystem import (  # pyright: ignore[reportMissingImports] - likewise
            LocalFileSystemStorageConfig,
        )

        config = CheckpointManager.Config.with_async_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        config.items = {key: ItemSpec(resharder=DefaultResharder()) for key in ("model", "optimizer")}
        self._manager = config.build()

    def save(self, step: int) -> Callable[[], object]:
        """Copy in a thread, write in the child."""
        future: Any = self._manager.save(str(self.path(step)), self.state())
        return future.result

    def load(self, step: int) -> None:
        """Load in place, then set."""
        found: Any = self._manager.load(str(self.path(step)), into=self.state(), strict=True)
        self.put(found)

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()


PEERS: dict[str, type[Sharded]] = {
    "holdfast": Holdfast,
    "holdfast-shared": HoldfastShared,
    "dcp": Dcp,
    "dcp-async": DcpAsync,
    "torch-checkpointing": MetaCheckpointing,
}
SAVERS = {"holdfast-shared": "holdfast"}
"""Whose checkpoints a peer loads, if not its own."""


# -- one rank ------------------------------------------------------------------------------------------------


def run_rank(options: argparse.Namespace) -> None:
    """Save twice or load once in this process; rank 0 prints the results of all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Gpt2(SHAPE)
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 1e-3
    optimizer.step()
    optimizer.zero_grad()
    subject = Subject("gpt", model, optimizer, None, torch.device("cpu"))
    peer = PEERS[options.peer](model, optimizer, options.dir)
    peer.open()
    found = _save(peer) if options.phase == "save" else _load(peer, subject)
    found["needed_bytes"] = float(sum(_local(tensor).nbytes for tensor in subject.tensors().values()))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    peer.close()
    if dist.get_rank() == 0:
        print(json.dumps(every), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's own threads may abort a finished process


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _save(peer: Sharded) -> dict[str, float]:
    peer.save(1)()
    dist.barrier()
    before = footprint()
    began = time.perf_counter()
    wait = peer.save(2)
    blocked_s = time.perf_counter() - began
    wait()
    complete_s = time.perf_counter() - began
    dist.barrier()
    sync(peer.directory)
    durable_s = time.perf_counter() - began
    return {
        "blocked_s": blocked_s,
        "complete_s": complete_s,
        "durable_s": durable_s,
        "kept_bytes": float(footprint().total - before.total),
    }


def _load(peer: Sharded, subject: Subject) -> dict[str, float]:
    with torch.no_grad():
        for tensor in subject.tensors().values():
            _local(tensor).fill_(-1)
    dist.barrier()
    if dist.get_rank() == 0:
        evict(peer.directory)
    dist.barrier()
    read_before = _bytes_read()
    began = time.perf_counter()
    peer.load(2)
    load_s = time.perf_counter() - began
    read_bytes = _bytes_read() - read_before
    if any(
        bool((_local(tensor) == -1).all()) for tensor in subject.tensors().values() if _local(tensor).numel()
    ):
        raise RuntimeError(f"{peer.title} left a tensor as it was.")
    return {"load_s": load_s, "read_bytes": float(read_bytes)}


def _bytes_read() -> int:
    """Bytes that this process's read calls have returned; what is mapped does not count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


# -- all of it -----------------------------------------------------------------------------------------------


def main() -> int:
    """Measure every peer, round by round, and show a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--phase", choices=["save", "load"], help=argparse.SUPPRESS)
    parser.add_argument("--peer", choices=list(PEERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        run_rank(options)
    options.dir.mkdir(exist_ok=True)
    runs = [run for number in range(options.rounds) for run in _round(number, options)]
    facts = machine.describe(options.dir)
    path = options.out or machine.results_path("resharding", facts)
    path.write_text(json.dumps({"machine": facts, "rounds": options.rounds, "runs": runs}, indent=1) + "\n")
    _show(runs)
    print(f"wrote {path}")
    return 0


def _round(number: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    runs = []
    shift = number % len(options.peers)
    order: list[str] = options.peers[shift:] + options.peers[:shift]
    for name in order:
        about = {"round": number, "peer": name, "title": PEERS[name].title}
        work = options.dir / f"resharding-{os.getpid()}"
        work.mkdir()
        try:
            saved = _ask(SAVERS.get(name) or name, "save", SAVED_ON, work)
            if name not in SAVERS:
                runs.append({**about, "phase": "save", "ranks": SAVED_ON, **saved})
            for ranks in LOADED_ON:
                runs.append({**about, "phase": "load", "ranks": ranks})
                runs[-1] |= _ask(name, "load", ranks, work) if "values" in saved else saved
                print(_in_short(runs[-1]), flush=True)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return runs


def _ask(peer: str, phase: str, ranks: int, work: Path) -> dict[str, Any]:
    """Run one phase on so many processes; the values of all ranks, or what went wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--phase", phase, "--peer", peer, "--dir", str(work)]
    shared = environment() | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = []
    for rank in range(ranks):
        with (work / f"log-{rank}").open("w") as log:
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = subprocess.PIPE if rank == 0 else log
            processes.append(subprocess.Popen(command, env=own, stdout=out, stderr=log, text=True))
    try:
        answer, _ = processes[0].communicate(timeout=LIMIT_S)
        return {"values": json.loads(answer.splitlines()[-1])}
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        said = [(work / f"log-{rank}").read_text().strip().splitlines()[-1:] for rank in range(ranks)]
        return {"error": f"no answer: {said}"}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _in_short(run: dict[str, Any]) -> str:
    head = f"round {run['round'] + 1}  {run['peer']:20} {SAVED_ON} -> {run['ranks']}"
    if "values" not in run:
        return f"{head}  {run['error'][:200]}"
    return f"{head}  {longest(run, 'load_s'):.2f} s  {ratio(run):.2f} bytes read per byte needed"


def _show(runs: list[dict[str, Any]]) -> None:
    table = Table("", *HEADINGS)
    for row in rows(runs):
        table.add_row(*row)
    Console(width=200, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
