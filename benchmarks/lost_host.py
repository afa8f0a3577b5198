"""Time to restore on two hosts: from memory that is left, from a peer's memory, from disks, and from home.

Hosts are network namespaces with one rank each. After a save both trainers are killed, and with them: nothing
(`memory`), one host with all that it had (`peer`), both keepers (`disk`: each host has a local folder, whose
files leave the page cache), or both hosts (`home`: a folder on the same disk, also out of the page cache). In
the first two the save was in memory only. The time is that of `restore()`, the longer of both ranks, with
every byte verified.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
from pagecache import evict
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from holdfast.cli.demo.hosts import Host, isolated, make_network  # noqa: E402

WAYS = ("memory", "peer", "disk", "home")
LIMIT_S = 180.0
NUM_TENSORS = 16
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Lose each thing in turn, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=400, help="of each rank's tensors")
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/losthost_<hardware>_<date>.json")
    parser.add_argument("--inside", action="store_true", help="this process may make hosts")
    parser.add_argument("--child", choices=("save", "restore"), help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _child(options)
    if not options.inside:
        return subprocess.run(isolated([sys.executable, __file__, "--inside", *sys.argv[1:]])).returncode
    make_network()
    folder = options.dir.resolve() / f"lost-host-{random.randrange(10**9)}"  # pids repeat in a namespace
    folder.mkdir(parents=True)
    facts, numbers = machine.describe(folder), itertools.count(1)
    runs = list[dict[str, Any]]()
    try:
        for number in range(options.rounds):
            for way in WAYS:
                cluster = Cluster(folder / f"{number}-{way}", options.megabytes, numbers)
                try:
                    runs.append({"way": way, "round": number, **cluster.lose(way)})
                finally:
                    cluster.close()
                console.print(json.dumps(runs[-1]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _report(options, facts, runs)


class Cluster:
    """Two hosts with a rank each, and the folder of a home."""

    def __init__(self, folder: Path, megabytes: int, numbers: itertools.count[int]) -> None:
        self._folder, self._megabytes, self._numbers = folder, megabytes, numbers
        self._hosts = [self._add(), self._add()]
        self._num_starts = 0

    def _add(self) -> Host:
        number = next(self._numbers)
        return Host(number, self._folder / f"host{number}")

    def _start(self, child: str, way: str) -> list[subprocess.Popen[bytes]]:
        self._num_starts += 1
        command = [sys.executable, __file__, "--child", child, "--way", way, "--dir", str(self._folder)]
        return [
            host.start(
                [*command, "--megabytes", str(self._megabytes)],
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": self._hosts[0].address,
                    "MASTER_PORT": str(29500 + self._num_starts),
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "HOST_FOLDER": str(host.folder),
                },
                self._output(rank),
            )
            for rank, host in enumerate(self._hosts)
        ]

    def _output(self, rank: int) -> Path:
        return self._folder / f"start{self._num_starts}-rank{rank}.log"

    def _wait(self, trainers: list[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
        """Return the line that each rank prints."""
        deadline_s = time.monotonic() + LIMIT_S
        texts = list[str]()
        while time.monotonic() < deadline_s:
            texts = [self._output(rank).read_text() for rank in range(2)]
            found = [line for text in texts for line in text.splitlines() if line.startswith("{")]
            if len(found) == 2:
                return [json.loads(line) for line in found]
            if any(trainer.poll() for trainer in trainers):
                break
            time.sleep(0.02)
        raise RuntimeError("\n".join(texts))

    def lose(self, way: str) -> dict[str, Any]:
        """Save, lose what `way` names, and return what the restore took."""
        trainers = self._start("save", way)
        self._wait(trainers)
        for trainer in trainers:
            os.killpg(trainer.pid, signal.SIGKILL)
        if way == "disk":
            for host in self._hosts:
                host.run("pkill", "-KILL", "-f", "checkpoint.keeper")
        for index in {"peer": [1], "home": [0, 1]}.get(way, []):
            self._hosts[index].kill()
            self._hosts[index] = self._add()
        evict(self._folder)
        found = self._wait(self._start("restore", way))
        sources = sorted({name for one in found for name in one["sources"]})
        return {"restore_s": max(one["restore_s"] for one in found), "sources": sources}

    def close(self) -> None:
        """Kill both hosts, and delete all files."""
        for host in self._hosts:
            host.kill()
        shutil.rmtree(self._folder)


def _child(options: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    import holdfast

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count = options.megabytes * 250_000 // NUM_TENSORS
    chance = torch.Generator().manual_seed(dist.get_rank())
    saved = {f"own{i}": torch.randn(count, generator=chance) for i in range(NUM_TENSORS)}
    state = saved if options.child == "save" else {name: torch.zeros(count) for name in saved}
    is_in_memory = options.way in ("memory", "peer")
    ckpt = holdfast.Checkpointer(
        holdfast.Home(options.dir / "home", bandwidth="100kB" if is_in_memory else None),
        state,
        every=10**9,
        peers=1,
        local=Path(os.environ["HOST_FOLDER"]) / "local" if options.way == "disk" else None,
    )
    with ckpt:
        began_s = time.perf_counter()
        step = ckpt.restore()
        restore_s = time.perf_counter() - began_s
        if options.child == "save":
            save = ckpt.save(1)
            (save.wait_mirrored if is_in_memory else save.wait_durable)(LIMIT_S)
        elif step != 1 or any(not torch.equal(state[name], tensor) for name, tensor in saved.items()):
            raise RuntimeError(f"step {step} is not what was saved")
        else:
            ckpt.save(2)  # a restore alone leaves no line in the history
        sources = list[str]()
        while options.child == "restore" and not sources:
            time.sleep(0.1)
            lines = (json.loads(line) for path in options.dir.glob("home/history/*") for line in path.open())
            sources = [line["tier"] for line in lines if line["event"] == "restored"]
        print(json.dumps({"restore_s": restore_s, "sources": sources}), flush=True)
        signal.pause()
    return 0


def _report(options: argparse.Namespace, facts: dict[str, Any], runs: list[dict[str, Any]]) -> int:
    times = {way: [run["restore_s"] for run in runs if run["way"] == way] for way in WAYS}
    medians = {f"{way}_s": statistics.median(found) for way, found in times.items()}
    path = options.out or machine.results_path("losthost", facts)
    document = {"machine": facts, "megabytes": options.megabytes, "rounds": options.rounds}
    path.write_text(json.dumps(document | {"medians": medians, "runs": runs}, indent=1) + "\n")
    table = Table("from", "median", "range", title=f"two ranks restore {options.megabytes} MB each, verified")
    for way, found in times.items():
        table.add_row(way, f"{statistics.median(found):.2f} s", f"{min(found):.2f}..{max(found):.2f}")
    console.print(table)
    console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
