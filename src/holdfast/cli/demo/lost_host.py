"""Lost host of the demo: a training on several hosts, of which one dies whole, and continues from its peers.

The hosts are namespaces of this machine (`holdfast.cli.demo.hosts`). Run inside of them as `python -m
holdfast.cli.demo.lost_host FOLDER HOSTS STEPS BYTES`, it prints its events and its outcome as lines of JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from holdfast.cli.demo.hosts import Host, isolated, make_network
from holdfast.errors import RetryLater
from holdfast.system.documents import decode_as, to_plain
from holdfast.system.entry import command
from holdfast.system.units import format_duration

RANKS_EACH = 1
_LIMIT_S = 300.0
_POLL_S = 0.01
_EVERY = 2
_HOME_SHARE = 0.02  # of a save that home takes per second, so that it is far behind the memory of the peers


class Loss(Struct, frozen=True):
    """Outcome: the newest steps at the moment of the loss, and what the next start has restored."""

    host: str
    processes: int  # that died with it
    trained: int  # newest completed step of all ranks
    mirrored: int  # newest step of which the peers of all ranks held the files, by the history in home
    in_home: int  # newest complete checkpoint in home; 0 without one
    restored: int
    source: str  # of rank 0's bytes: "memory" or "home"
    restore_s: float
    back_s: float  # from the loss to the first step after it


def lose_host(folder: Path, num_hosts: int, steps: int, num_bytes: int, show: Callable[[str], None]) -> Loss:
    """Run the demo in namespaces of its own, and return the outcome."""
    arguments = [str(folder), str(num_hosts), str(steps), str(num_bytes)]
    process = subprocess.Popen(
        isolated(command(__name__, *arguments)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        message = json.loads(line)
        if "outcome" in message:
            process.wait()
            return decode_as(Loss, json.dumps(message["outcome"]), "the outcome of the demo")
        show(message["event"])
    _, errors = process.communicate()
    raise RetryLater(f"The hosts of the demo failed: {errors.strip()[-2000:] or 'without a message'}")


class Training:
    """One start of all ranks on some hosts."""

    def __init__(self, hosts: Sequence[Host], logs: Path, port: int, options: Sequence[str]) -> None:
        world = {"WORLD_SIZE": str(len(hosts) * RANKS_EACH), "MASTER_ADDR": hosts[0].address}
        world |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        self.began_s = time.monotonic()
        self._logs, self._processes = list[Path](), list[subprocess.Popen[bytes]]()
        for rank in range(len(hosts) * RANKS_EACH):
            self._logs.append(logs / f"{port}-rank{rank}.log")
            program = command("holdfast.cli.demo.training", *options)
            process = hosts[rank // RANKS_EACH].start(program, {**world, "RANK": str(rank)}, self._logs[-1])
            self._processes.append(process)

    @property
    def step(self) -> int:
        """Newest step that all ranks have completed."""
        steps = [[int(row["step"]) for row in rows if "step" in row] for rows in self._rows()]
        return min(max(of_rank, default=0) for of_rank in steps)

    def _rows(self) -> list[list[dict[str, Any]]]:
        found: list[list[dict[str, Any]]] = []
        for log in self._logs:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
            with contextlib.suppress(ValueError):  # the last line may not be complete
                found.append([json.loads(line) for line in lines])
        return found or [[]]

    def wait_for(self, is_true: Callable[[], object], what: str) -> None:
        """Wait until something is true, or raise once a rank has failed."""
        while not is_true():
            failed = [number for number, process in enumerate(self._processes) if process.poll()]
            if failed or time.monotonic() > self.began_s + _LIMIT_S:
                last = self._logs[failed[0] if failed else 0].read_text(errors="replace")[-1500:]
                raise RetryLater(f"The training did not reach {what}. Its last output: {last}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Kill the trainers, as a launcher does after the loss of a rank. Their keepers stay."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class LostHost:
    """The demo, in a process that may make hosts."""

    def __init__(self, folder: Path, num_hosts: int, steps: int, num_bytes: int) -> None:
        self._folder, self._home = folder, folder / "home"
        self._steps, self._bytes = steps, num_bytes
        self._numbers, self._ports = itertools.count(1), itertools.count(29500)
        self._hosts = [self._add() for _ in range(num_hosts)]

    def _add(self) -> Host:
        number = next(self._numbers)
        return Host(number, self._folder / f"host{number}")

    def _start(self, *options: str) -> Training:
        size = ("--steps", str(self._steps), "--every", str(_EVERY), "--bytes", str(self._bytes))
        return Training(self._hosts, self._folder, next(self._ports), (*size, *options))

    def run(self) -> Loss:
        """Train, lose a host, and continue."""
        names = ", ".join(host.name for host in self._hosts)
        _show(f"{names}: each with a rank, an address, processes and a folder of its own")
        bandwidth = str(max(1000, int(self._bytes * _HOME_SHARE)))
        saving = ("--home", str(self._home), "--peers", "1", "--bandwidth", bandwidth)
        training = self._start(*saving)
        enough = self._steps // 3
        training.wait_for(lambda: self._mirrored() >= enough and training.step < self._steps, "its copies")
        victim = self._hosts[1]
        lost_s, num_processes = time.monotonic(), victim.num_processes
        mirrored, in_home = self._mirrored(), self._in_home()
        victim.kill()
        trained = training.step
        training.kill()
        self._hosts[1] = self._add()
        new = self._hosts[1].name
        _show(f"{victim.name} is dead, with {num_processes} processes and its folder; {new} takes its place")
        again = self._start(*saving)
        again.wait_for(lambda: again.step, "its first step")
        back_s = time.monotonic() - lost_s
        _show(f"training continues, {format_duration(back_s)} after the loss")
        again.kill()
        lines, _ = read_lines(open_store(str(self._home)), 2)
        line = next(one for one in lines if one["event"] == "restored" and one["rank"] == 0)
        for host in self._hosts:
            host.kill()
        return Loss(
            host=victim.name,
            processes=num_processes,
            trained=trained,
            mirrored=mirrored,
            in_home=in_home,
            restored=line["step"],
            source=line["tier"],
            restore_s=line["seconds"],
            back_s=back_s,
        )

    def _mirrored(self) -> int:
        """Return the newest step that the peers of all ranks hold, by the history; 0 without one."""
        newest = dict.fromkeys(range(len(self._hosts) * RANKS_EACH), 0)
        with contextlib.suppress(OSError, RetryLater):
            for line in read_lines(open_store(str(self._home)), 1)[0]:
                if line["event"] == "mirrored":
                    newest[line["rank"]] = max(newest[line["rank"]], line["step"])
        return min(newest.values())

    def _in_home(self) -> int:
        found = candidates(list_home(open_store(str(self._home))))
        return found[0].step if found else 0


def _show(text: str) -> None:
    print(json.dumps({"event": text}), flush=True)


def main() -> None:
    """Run the demo of the arguments, and print its outcome."""
    folder, *numbers = sys.argv[1:]
    make_network()
    loss = LostHost(Path(folder), *map(int, numbers)).run()
    print(json.dumps({"outcome": to_plain(loss)}), flush=True)


if __name__ == "__main__":
    main()
