"""Processes of the recorded workloads: `python -m campaigns.crash_states.trainer ACT FOLDER [NUMBERS...]`.

Each act is one process; `play` starts those of a workload one after the other. What a save holds follows from
its branch (the start of the run that made it) and its step, so that any state can be checked by itself.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast

SHAPES = {"weight": (64, 64), "bias": (300,), "scale": ()}
WIDE = {"weight": (320, 1024), "bias": (300,)}  # 1.25 MiB: written past the page cache


def pattern(name: str, branch: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the integers that a tensor holds at a step of a branch."""
    return _pattern(name, branch, step, shape).clone()


@lru_cache(maxsize=256)
def _pattern(name: str, branch: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    seed = zlib.crc32(f"{name} {branch} {step}".encode())
    values = (torch.arange(math.prod(shape), dtype=torch.int64) * 2654435761 + seed) % 2147483647
    return values.to(torch.int32).reshape(shape)


def state_of(branch: int, step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    """Return a state; "stamp" says of which branch and step it is."""
    tensors = {name: pattern(name, branch, step, shape) for name, shape in shapes.items()}
    return {"stamp": torch.tensor([branch, step]), **tensors}


def set_state(state: dict[str, Any], branch: int, step: int) -> None:
    """Write the tensors of a step into a live state."""
    for name, value in state_of(
        branch, step, {k: tuple(v.shape) for k, v in state.items() if k in SHAPES}
    ).items():
        state[name].copy_(value)


_null = os.open("/dev/null", os.O_WRONLY)


def mark(*words: object) -> None:
    """Record that a promise was given; it is seen in the log of system calls."""
    os.write(_null, f"mark {' '.join(map(str, words))}\n".encode())


def make(
    folder: Path, state: dict[str, Any], *, home_every: int | None = None, **options: Any
) -> holdfast.Checkpointer:
    """Return a Checkpointer for a workload."""
    home = holdfast.Home(folder / "home", every=home_every)
    return holdfast.Checkpointer(
        home, state, quiet=True, watches=[holdfast.Preemption("none", signals=False)], **options
    )


def start(act: str, folder: Path, *numbers: object, status: int = 0, **env: str) -> None:
    """Run another act in a process of its own, and check how it ends."""
    command = [sys.executable, "-m", "campaigns.crash_states.trainer", act, str(folder), *map(str, numbers)]
    found = subprocess.run(command, env={**os.environ, **env}, check=False).returncode
    if found != status:
        raise RuntimeError(f"{act} ended with {found}, expected {status}")


# -- acts ----------------------------------------------------------------------------------------------------


def save(folder: Path, branch: int, first: int, last: int, keep: int, shapes: Any = SHAPES) -> None:
    """Save every step, waiting for every second one only, so that saves follow each other closely too."""
    state = state_of(branch, 0, shapes)
    with make(folder, state, keep=keep or None) as checkpointer:
        if branch > 1:
            mark("restored", branch, checkpointer.restore())
        for step in range(first, last + 1):
            set_state(state, branch, step)
            saved = checkpointer.save(step)
            if step % 2 or step == last:
                saved.wait_durable()
                mark("durable", branch, step)


def save_wide(folder: Path, branch: int, first: int, last: int, keep: int) -> None:
    """Save a state that is long enough for direct writes."""
    save(folder, branch, first, last, keep, WIDE)


def save_tiered(folder: Path, branch: int, first: int, last: int, keep: int) -> None:
    """Save into a local folder, and have every second step drained."""
    state = state_of(branch, 0)
    with make(folder, state, home_every=2, keep=keep, local=folder / "local") as checkpointer:
        if branch > 1:
            checkpointer.restore()
        for step in range(first, last + 1):
            set_state(state, branch, step)
            saved = checkpointer.save(step)
            saved.wait_durable()
            mark("durable", branch, step)
            if step % 4 == 0:
                saved.wait_home()
                mark("home", branch, step)
        checkpointer.wait()
        mark("home", branch, last)


def save_frozen(folder: Path, branch: int, first: int, last: int, keep: int) -> None:
    """Save a model most of whose parameters are frozen: their file is linked from save to save."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(torch.arange(6000, dtype=torch.float32), requires_grad=False)
            self.head = nn.Parameter(torch.zeros(300))

    model = Model()
    optimizer = torch.optim.SGD([model.head], lr=1.0)
    state = {"model": model, "optimizer": optimizer, **state_of(branch, 0)}
    with make(folder, state, keep=keep) as checkpointer:
        if branch > 1:
            checkpointer.restore()
        for step in range(first, last + 1):
            model.head.grad = torch.ones(300)
            optimizer.step()
            set_state(state, branch, step)
            saved = checkpointer.save(step)
            saved.wait_durable()
            mark("durable", branch, step)


def save_rank(folder: Path, branch: int, first: int, last: int, keep: int, is_tiered: int = 0) -> None:
    """Save as one of several gloo ranks."""
    torch.distributed.init_process_group("gloo")
    state = state_of(branch, 0)
    local = folder / "local" if is_tiered else None
    with make(folder, state, keep=keep, local=local) as checkpointer:
        if branch > 1:
            checkpointer.restore()
        for step in range(first, last + 1):
            set_state(state, branch, step)
            saved = checkpointer.save(step)
            saved.wait_durable()
            mark("durable", branch, step)
    holdfast.hard_exit(0)


def save_until_killed(folder: Path, branch: int, first: int, last: int, keep: int) -> None:
    """Save without waiting; the environment says where a process of this run is killed."""
    state = state_of(branch, 0)
    with make(folder, state, keep=keep) as checkpointer:
        if branch > 1:
            mark("restored", branch, checkpointer.restore())
        for step in range(first, last + 1):
            set_state(state, branch, step)
            checkpointer.save(step).wait_staged()
        checkpointer.wait()
        mark("durable", branch, last)


def save_again(folder: Path, branch: int, back_to: int, last: int, keep: int) -> None:
    """Go back to an older step, twice, and save the steps after it again."""
    state = state_of(branch, 0)
    with make(folder, state, keep=keep) as checkpointer:
        for one in (branch, branch + 1):
            checkpointer.restore(step=back_to)
            for step in range(back_to + 1, last + 1):
                set_state(state, one, step)
                checkpointer.save(step).wait_durable()
                mark("durable", one, step)


def loop(folder: Path, branch: int, first: int, last: int, keep: int) -> None:
    """Train in the loop of `steps` to the end, which writes the done marker."""
    state = state_of(branch, 0)
    with make(folder, state, keep=keep, every=2) as checkpointer:
        for step in checkpointer.steps(last):
            mark("training", branch, step + 1)  # a run that continues is no longer done
            set_state(state, branch, step + 1)
        mark("done", branch, last)
        mark("durable", branch, last)


def save_nebula(folder: Path, branch: int, first: int, last: int, keep: int) -> None:
    """Save through Nebula's interface, two files to a tag."""
    import holdfast.adapters.nebula as nebula

    nebula.init(str(folder / "home"), persistent_time_interval=1, num_of_version_in_retention=keep)
    for step in range(first, last + 1):
        checkpoint = nebula.Checkpoint(f"global_step{step}", num_of_files=2)
        checkpoint.save("model", state_of(branch, step))
        checkpoint.save("optimizer", {"moment": pattern("moment", branch, step, (300,))})
        if step % 2 == 0:
            nebula.flush_persistence(f"global_step{step}")
            mark("home", branch, step)


def save_dcp(folder: Path, branch: int, first: int, last: int, keep: int) -> None:
    """Save through torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict_saver import save as save_state

    from holdfast.adapters.dcp import HoldfastWriter

    for step in range(first, last + 1):
        writer = HoldfastWriter(str(folder / "home"), step=step, keep=keep)
        save_state(state_of(branch, step), storage_writer=writer, no_dist=True)
        mark("durable", branch, step)


def import_file(folder: Path, branch: int, first: int, last: int, keep: int) -> None:
    """Import a file of torch.save."""
    from holdfast.checkpoint.exchange.importer import import_checkpoint

    source = folder.parent / "source.pt"
    torch.save(state_of(branch, last), source)
    import_checkpoint(source, str(folder / "home"), step=last)
    mark("durable", branch, last)


def written(number: int) -> bytes:
    """Return the bytes of a file that the write-back workload writes."""
    return pattern("written", 1, number, (1000,)).numpy().tobytes()


def write_back(folder: Path, branch: int, first: int, last: int, keep: int) -> None:
    """Write files, each followed by a file that names it, into a write-back directory."""
    from holdfast.jobs.writeback import mount

    work = folder / "work"
    with mount(work, folder / "bucket") as held:
        for number in range(first, last + 1):
            (work / f"data-{number}").write_bytes(written(number))
            (work / "latest").write_text(str(number))
            if number % 3 == 0:
                held.drain()
                mark("home", branch, number)


ACTS: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (
        save,
        save_wide,
        save_tiered,
        save_frozen,
        save_rank,
        save_until_killed,
        save_again,
        loop,
        save_nebula,
        save_dcp,
        import_file,
        write_back,
    )
}


def play_ranks(folder: Path, world_size: int, *numbers: int, env: Mapping[str, str]) -> None:
    """Start the ranks of a gloo world in the environment `env`, and wait for all of them."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    world = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [
        sys.executable,
        "-m",
        "campaigns.crash_states.trainer",
        "save_rank",
        str(folder),
        *map(str, numbers),
    ]
    ranks = [subprocess.Popen(command, env={**env, **world, "RANK": str(rank)}) for rank in range(world_size)]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise RuntimeError(f"the ranks ended with {statuses}")


def main() -> None:
    """Run the act that the command line names."""
    torch.set_num_threads(1)
    act, folder, *numbers = sys.argv[1:]
    ACTS[act](Path(folder), *map(int, numbers))


if __name__ == "__main__":
    main()
