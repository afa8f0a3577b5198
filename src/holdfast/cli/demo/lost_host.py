"""Lost host of the demo: one of several hosts dies whole, and the training continues from copies on peers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from holdfast.cli.demo.hosts import Host, make_network
from holdfast.cli.demo.screen import Screen
from holdfast.cli.tables import Column, print_json, print_table
from holdfast.errors import HoldfastError, RetryLater
from holdfast.system.entry import command
from holdfast.system.units import format_duration

_LIMIT_S = 300.0
_POLL_S = 0.01
_HOME_SHARE = 0.02  # of a save that home takes per second, so that it is far behind the memory of the peers


class HostedTraining:
    """One start of a training with a rank on each host."""

    def __init__(self, hosts: Sequence[Host], logs: Path, port: int, options: Sequence[str]) -> None:
        world = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port)}
        world |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        self._logs = [logs / f"{port}-rank{rank}.log" for rank in range(len(hosts))]
        program = command("holdfast.cli.demo.training", *options)
        self._processes = [
            host.start(program, {**world, "RANK": str(rank)}, self._logs[rank])
            for rank, host in enumerate(hosts)
        ]

    @property
    def step(self) -> int:
        """Newest step that all ranks have completed."""
        newest = []
        for log in self._logs:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.endswith("}")]
            rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
            newest.append(max((row["step"] for row in rows if "step" in row), default=0))
        return min(newest)

    def wait_for(self, is_true: Callable[[], object]) -> None:
        """Wait until something is true, or raise once a rank has failed."""
        deadline_s = time.monotonic() + _LIMIT_S
        while not is_true():
            for log, process in zip(self._logs, self._processes, strict=True):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    output = log.read_text(errors="replace")[-1500:]
                    raise RetryLater(f"The training ended, or made no progress: {output}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Kill the trainers, as a launcher does after the loss of a rank. Their keepers stay."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lose_host(
    folder: Path, num_hosts: int, options: list[str], show: Callable[[str], None]
) -> dict[str, Any]:
    """Train on several hosts, lose one of them, and continue; return what was lost."""
    numbers, ports, home = itertools.count(1), itertools.count(29500), folder / "home"

    def add_host() -> Host:
        number = next(numbers)
        return Host(number, folder / f"host{number}")

    def start() -> HostedTraining:
        return HostedTraining(hosts, folder, next(ports), ["--home", str(home), "--peers", "1", *options])

    hosts = [add_host() for _ in range(num_hosts)]
    names = ", ".join(host.name for host in hosts)
    show(f"{names}: each with a rank, an address, processes and a folder of its own")
    training = start()
    training.wait_for(lambda: find_mirrored(home, num_hosts) >= 8)
    victim, lost_s = hosts[1], time.monotonic()
    mirrored = find_mirrored(home, num_hosts)
    in_home = candidates(list_home(open_store(str(home))))
    victim.kill()
    trained = training.step
    training.kill()
    hosts[1] = add_host()
    show(f"{victim.name} is dead, with all processes and its folder; {hosts[1].name} replaces it")
    training = start()
    training.wait_for(lambda: training.step)
    back_s = time.monotonic() - lost_s
    show(f"training continues, {format_duration(back_s)} after the loss")
    training.wait_for(lambda: find_events(home, 2, "restored"))  # the keepers write them
    training.kill()
    restored = max(find_events(home, 2, "restored"), key=itemgetter("bytes"))
    return {
        "proven": restored["step"] >= mirrored,
        "host": victim.name,
        "trained": trained,
        "mirrored": mirrored,
        "in_home": in_home[0].step if in_home else 0,
        "restored": restored["step"],
        "source": restored["tier"],
        "restore_s": restored["seconds"],
        "back_s": back_s,
    }


def find_mirrored(home: Path, world_size: int) -> int:
    """Return the newest step that the peers of all ranks hold, by the history in home; 0 without one."""
    newest = [0] * world_size
    for line in find_events(home, 1, "mirrored"):
        newest[line["rank"]] = max(newest[line["rank"]], line["step"])
    return min(newest)


def find_events(home: Path, attempt: int, kind: str) -> list[dict[str, Any]]:
    """Return the lines of the history about one kind of events in an attempt, in order of time."""
    with contextlib.suppress(HoldfastError):  # nothing was saved yet
        return [line for line in read_lines(open_store(str(home)), attempt)[0] if line["event"] == kind]
    return []


def main() -> int:
    """Run the demo of the arguments, and print its outcome; the exit status is 0 if nothing else was lost."""
    folder, num_hosts, steps, num_bytes, form = sys.argv[1:]  # the last one is "text" or "json"
    screen = Screen(sys.stderr if form == "json" else sys.stdout)
    make_network()
    bandwidth = str(int(int(num_bytes) * _HOME_SHARE))
    options = ["--steps", steps, "--every", "2", "--bytes", num_bytes, "--bandwidth", bandwidth]
    loss = lose_host(Path(folder), int(num_hosts), options, screen.show_event)
    if form == "json":
        print_json(loss)
        return 0 if loss["proven"] else 1
    took = format_duration(loss["restore_s"])
    rows = [
        ("newest step that all ranks had trained", loss["trained"]),
        ("newest step in the memory of peers, as announced", loss["mirrored"]),
        ("newest step in home", loss["in_home"]),
        (f"restored step, from {loss['source']}, in {took}", loss["restored"]),
        ("steps lost beyond the announced one", max(0, loss["mirrored"] - loss["restored"])),
    ]
    print()
    columns = Column("WHEN THE HOST DIED", itemgetter(0), "text"), Column("STEP", itemgetter(1), "right")
    print_table(columns, rows)
    return 0 if loss["proven"] else 1


if __name__ == "__main__":
    sys.exit(main())
