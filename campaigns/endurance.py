"""Endurance: 10,000 saves of one training, signals at random moments of saves, and clocks hours apart.

    make endurance

- Saves: memory, descriptors and the files of the home stay as they were after the first thousand.
- Signals: SIGTERM, SIGUSR1, SIGINT or SIGHUP reach all processes of a training with data loader workers, at
  a random moment between or in its saves. It ends with status 75, and no complete step is lost.
- Clocks: each of two ranks has a clock of its own, hours wrong, another one at each start; the ranks are
  killed and started again. Each start restores the newest step that was durable, or a newer one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from campaigns import counts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from nursery import Child, Nursery  # noqa: E402  # pyright: ignore[reportMissingImports]
from servers import reserve_port  # noqa: E402  # pyright: ignore[reportMissingImports]

CLOCK = ROOT / "tests" / "faults" / "clock" / "sitecustomize.py"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_LIMIT_S = 3600
_END_LIMIT_S = 120
"""Limit of the end of a training that got a signal, on a busy machine too."""
_WRITE_S = 2  # time that processes get to write their stacks

_SAVES = """
import os, sys, time, torch, holdfast
home, total = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())

def resources():
    end_s = time.monotonic() + 60  # old checkpoints are deleted in the background
    while sum(name.startswith("step-") for name in os.listdir(home)) > 4 and time.monotonic() < end_s:
        time.sleep(0.05)
    status = open("/proc/self/status").read()
    resident = int(status.split("VmRSS:")[1].split()[0])
    return resident, len(os.listdir("/proc/self/fd")), sum(len(files) for _, _, files in os.walk(home))

state = {"model": model, "optimizer": optimizer}
with holdfast.Checkpointer(home, state, every=1, keep=3, quiet=True) as ckpt:
    for step in ckpt.steps(total):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            ckpt.wait()  # a queue takes descriptors up to its limit; here only what stays counts
        if step % (total // 10) == total // 10 - 1:
            print("AT", step + 1, *resources(), flush=True)
print("END", holdfast.open(home).step, flush=True)
"""

_SIGNALLED = """
import faulthandler, sys, time, torch, holdfast
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, index): return torch.ones(64) * index
if __name__ == "__main__":
    faulthandler.enable()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    loader = iter(torch.utils.data.DataLoader(Data(), 4, num_workers=2))
    with holdfast.Checkpointer(
        sys.argv[1], {"model": model, "optimizer": optimizer}, every=3, quiet=True
    ) as ckpt:
        for step in ckpt.steps(20_000):
            model(next(loader)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print("STEP", step + 1, flush=True)
"""

_CLOCKED = """
import os, runpy, sys, warnings, torch, holdfast
runpy.run_path(sys.argv[2])
warnings.simplefilter("ignore")
torch.distributed.init_process_group("gloo")
state = {"x": torch.zeros(50_000)}
with holdfast.Checkpointer(sys.argv[1], state, keep=2, quiet=True) as ckpt:
    start = ckpt.restore() or 0
    assert torch.equal(state["x"], torch.full((50_000,), float(start))), "other bytes"
    print("RESTORED", start, flush=True)
    for step in range(start + 1, start + 200):
        state["x"].fill_(float(step))
        ckpt.save(step).wait_durable(60)
        print("DURABLE", step, flush=True)
"""


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-endurance-", ignore_cleanup_errors=True) as name:
        os.environ["HOLDFAST_RUNTIME_DIR"] = f"{name}/runtime"
        yield Path(name)


def save_often(nursery: Nursery, total: int) -> list[str]:
    """Save `total` times, and return what grew after the first tenth."""
    with _folder() as folder:
        done = nursery.run(["-c", _SAVES, str(folder / "home"), str(total)], timeout_s=_LIMIT_S)
    rows = [list(map(int, one)) for one in re.findall(r"AT (\d+) (\d+) (\d+) (\d+)", done.stdout)]
    if done.returncode or f"END {total}" not in done.stdout or len(rows) < 10:
        return [f"ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"]
    (_, memory, fds, files), (_, last_memory, last_fds, last_files) = rows[0], rows[-1]
    print(f"resident {memory} -> {last_memory} kB, fds {fds} -> {last_fds}, files {files} -> {last_files}")
    grown = [
        (last_memory > memory * 1.1 + 20_000, "memory"),
        (last_fds > fds + 8, "descriptors"),
        (last_files > files + 20, "files of the home"),
    ]
    return [f"{what} grew: {rows}" for is_grown, what in grown if is_grown]


def _wait_for(child: Child, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in child.said():
        if time.monotonic() > deadline or not child.ended.empty():
            raise RuntimeError(f"the training did not print {text!r}: {child.said()[-1500:]}")
        time.sleep(0.005)


def send_signal(nursery: Nursery, seed: int) -> list[str]:
    """Send a signal to all processes of a training at a random moment, and return what was lost."""
    dice = random.Random(seed)
    number, at, pause_s = SIGNALS[seed % len(SIGNALS)], dice.randrange(5, 60), dice.uniform(0, 0.02)
    with _folder() as folder:
        script = folder / "train.py"
        script.write_text(_SIGNALLED)
        child = nursery.start([str(script), str(folder / "home")], folder / "output.txt")
        _wait_for(child, f"STEP {at}\n")
        time.sleep(pause_s)
        os.killpg(child.pid, number)
        try:
            status: int | str = child.wait(_END_LIMIT_S)
        except queue.Empty:
            status = f"still running after {_END_LIMIT_S} s"
            _end_with_stacks(child.pid)
        said = child.said()
        steps = [int(one) for one in re.findall(r"STEP (\d+)", said)]
        saved = [int(one.name[5:]) for one in (folder / "home").glob("step-*") if list(one.glob("manifest*"))]
    if status != 75 or max(saved, default=0) < max(steps):
        return [f"{number.name} after step {at}: status {status}, saved {saved[-3:]}: {said[-20_000:]}"]
    return []


def _end_with_stacks(group: int) -> None:
    """End the processes of a group; faulthandler writes their stacks into their output."""
    os.killpg(group, signal.SIGABRT)
    time.sleep(_WRITE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_clocks(nursery: Nursery, seed: int, *, num_kills: int = 4) -> list[str]:
    """Kill two ranks with wrong clocks again and again, and return what was wrong."""
    dice, newest, problems = random.Random(seed), 0, []
    with _folder() as folder:
        for life in range(num_kills):
            port, children = str(reserve_port()), []
            for rank in range(2):
                env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
                env |= {"RANK": str(rank), "CLOCK_OFFSET_S": str(dice.uniform(-20_000, 20_000))}
                arguments = ["-c", _CLOCKED, str(folder / "home"), str(CLOCK)]
                children.append(nursery.start(arguments, folder / f"output-{life}-{rank}.txt", env=env))
            _wait_for(children[0], f"DURABLE {newest + dice.randrange(3, 20)}\n")
            for child in children:
                child.kill()
            said = [(child.wait(), child.said())[1] for child in children]
            restored = int(re.findall(r"RESTORED (\d+)", said[0])[0])
            if restored < newest:
                problems.append(f"restored {restored}, but {newest} was durable: {said}")
            newest = max(map(int, re.findall(r"DURABLE (\d+)", said[0])))
    return problems


def main() -> int:
    """Run the campaign; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.endurance", description=__doc__)
    parser.add_argument("--saves", type=int, default=10_000)
    parser.add_argument("--signals", type=int, default=60)
    parser.add_argument("--clocks", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # A shell starts its background jobs with SIGINT ignored, and nohup with SIGHUP: a training inherits and
    # respects both.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    began, nursery = time.monotonic(), Nursery()
    try:
        problems = save_often(nursery, options.saves) if options.saves else []
        if problems:
            print(*problems, sep="\n", flush=True)
        found = [_count("saves of one training", options.saves, problems)]
        for name, number, run in (
            ("signals to a training with workers", options.signals, send_signal),
            ("starts of ranks with wrong clocks", options.clocks, run_clocks),
        ):
            found.append(_count(name, number, _repeat(nursery, run, number, options.seed)))
    finally:
        nursery.close()
    counts.write("endurance", found, seconds=time.monotonic() - began)
    return int(any(one.failures for one in found))


def _repeat(nursery: Nursery, run: Callable[[Nursery, int], list[str]], number: int, seed: int) -> list[str]:
    problems = []
    for one in range(seed, seed + number):
        for problem in run(nursery, one):
            problems.append(f"seed {one}: {problem}")
            print(problems[-1], flush=True)
    return problems


def _count(kind: str, cases: int, problems: list[str]) -> counts.Count:
    print(f"{kind}: {cases:,} cases, {len(problems)} failed", flush=True)
    return counts.Count(kind, cases, len(problems))


if __name__ == "__main__":
    os.environ |= {"HOLDFAST_KEEP_IN_MEMORY": "0", "OMP_NUM_THREADS": "1"}
    sys.exit(main())
