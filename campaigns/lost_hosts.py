"""Whole hosts that die: `make lost-hosts`.

Hosts are network namespaces with processes and folders of their own. A training on several of them saves into
the memory of its peers, and to a home that is too slow to follow. At a random moment of a start, of the
training or of a save, all that a host has is killed; the others are restarted, with a new host in its place,
as torchrun does it. Each start has to restore the last step that was copied to all peers before the kill, and
the run that finishes in the end must have the weights of one that nothing happened to, bit for bit.

A host that dies after a restart, before the first copy of that attempt, may take the only copy with it. Then
what was durable in home is expected.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from campaigns import counts
from holdfast.cli.demo.hosts import Host, isolated, make_network

ROOT = Path(__file__).resolve().parents[1]
KILLS_PER_RUN = 5
END_S = 400.0
PORTS = itertools.count(29500)


@dataclass
class Attempt:
    """One start of all ranks, and what they have printed."""

    outputs: list[Path]
    processes: list[subprocess.Popen[bytes]]
    began_s: float = field(default_factory=time.monotonic)

    def facts(self) -> list[list[dict[str, object]]]:
        """Return the lines of each rank."""
        found: list[list[dict[str, object]]] = []
        for path in self.outputs:
            text = path.read_text(errors="replace") if path.exists() else ""
            lines = [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
            found.append([json.loads(line) for line in lines])
        return found

    def newest(self, name: str) -> int:
        """Return the newest step that all ranks have reported under a name; 0 without one."""
        return min(
            max((int(str(row[name])) for row in rows if name in row), default=0) for rows in self.facts()
        )

    @property
    def digests(self) -> list[str]:
        """Return the digests of the ranks that have finished."""
        return [str(row["sha256"]) for rows in self.facts() for row in rows if "sha256" in row]

    @property
    def restored(self) -> set[int]:
        """Return the steps that the ranks have restored."""
        return {int(str(row["restored"])) for rows in self.facts() for row in rows if "restored" in row}

    def kill(self) -> None:
        """Kill the trainers, as a launcher does after the loss of a rank. Keepers stay."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def wait(self, limit_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Return True once a trainer has exited, False after a time or once `until` returns True."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s and not until():
            if any(process.poll() is not None for process in self.processes):
                return True
            time.sleep(0.02)
        return False


class Cluster:
    """Cluster of hosts with equally many ranks."""

    def __init__(self, folder: Path, num_hosts: int, ranks_each: int, numbers: itertools.count[int]) -> None:
        self.folder, self.home, self._each, self._numbers = folder, folder / "home", ranks_each, numbers
        self.hosts = [self._add() for _ in range(num_hosts)]
        self._num_starts = 0

    def _add(self) -> Host:
        number = next(self._numbers)
        return Host(number, self.folder / f"host{number}")

    def start(self, *options: object) -> Attempt:
        """Start all ranks; the first host serves the rendezvous."""
        self._num_starts += 1
        world_size, port = len(self.hosts) * self._each, next(PORTS)
        outputs, processes = list[Path](), list[subprocess.Popen[bytes]]()
        program = ROOT / "campaigns" / "lost_hosts_training.py"
        command = [sys.executable, str(program), str(self.home), *map(str, options)]
        for rank in range(world_size):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": self.hosts[0].address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            outputs.append(self.folder / f"start{self._num_starts:03d}-rank{rank}.log")
            processes.append(self.hosts[rank // self._each].start(command, env, outputs[-1]))
        return Attempt(outputs, processes)

    def lose(self, host: Host) -> None:
        """Kill a host whole, and put a new one in its place."""
        host.kill()
        self.hosts[self.hosts.index(host)] = self.newest = self._add()

    def close(self) -> None:
        """Kill all hosts."""
        for host in self.hosts:
            host.kill()


def finish(cluster: Cluster, attempt: Attempt) -> list[str]:
    """Wait for the end of an attempt, and return the digests of its ranks."""
    for process in attempt.processes:
        process.wait(END_S)
    digests = attempt.digests
    if len(digests) != len(attempt.processes):
        raise AssertionError(f"not all ranks have finished; see {attempt.outputs}")
    return digests


def run_once(
    folder: Path, num_hosts: int, options: Sequence[object], expected: list[str], seed: int, late_s: float
) -> int:
    """Kill hosts at random moments until the run finishes. Return the number of kills.

    A new host comes `late_s` after each loss.
    """
    chance, cluster = random.Random(seed), Cluster(folder, num_hosts, 2, NUMBERS)
    try:
        attempt, must, num_kills = cluster.start(*options), MustHave(cluster), 0
        for _ in range(KILLS_PER_RUN):
            if chance.random() < 0.6:
                attempt.wait(END_S, until=lambda attempt=attempt: attempt.newest("step") > 0)
            ended = attempt.wait(chance.uniform(0.0, 8.0))
            if ended and all(process.wait(END_S) == 0 for process in attempt.processes):
                break
            if ended:
                raise AssertionError(f"a rank failed before any kill; see {attempt.outputs}")
            victim = chance.choice(cluster.hosts)
            name = victim.name
            cluster.lose(victim)
            attempt.kill()
            num_kills += 1
            check_restored(attempt, must.step)
            must.update(attempt, name, cluster)
            print(f"lost {name} at step {attempt.newest('step')}: expect step {must.step}", flush=True)
            if chance.random() < 0.3:
                chance.shuffle(cluster.hosts)  # ranks get other numbers
            time.sleep(late_s)
            attempt = cluster.start(*options)
        found = finish(cluster, attempt)
        check_restored(attempt, must.step)
        if found != expected:
            raise AssertionError(
                f"the weights differ from those of an uninterrupted run: {found}, {expected}"
            )
        return num_kills
    finally:
        cluster.close()


class MustHave:
    """The step that the next start must restore at least."""

    def __init__(self, cluster: Cluster) -> None:
        self.step = 0
        self._mirrored = self._durable = 0
        self._holders = {host.name for host in cluster.hosts}  # of the copies of the mirrored step

    def update(self, attempt: Attempt, lost: str, cluster: Cluster) -> None:
        """Count the loss of a host in an attempt. A second loss of the same copies may lose them."""
        self._durable = max(self._durable, attempt.newest("durable"))
        if mirrored := attempt.newest("mirrored"):
            self._mirrored = mirrored
            self._holders = {lost, *(host.name for host in cluster.hosts[:])} - {cluster.newest.name}
        self._holders.discard(lost)
        has_lost_one_at_most = len(self._holders) >= len(cluster.hosts) - 1
        self.step = max(self._durable, self._mirrored if has_lost_one_at_most else 0)


def check_restored(attempt: Attempt, must_have: int) -> None:
    """Raise unless the ranks that have restored a step have restored one that is new enough, and the same."""
    restored = attempt.restored
    if len(restored) > 1 or any(step < must_have for step in restored):
        raise AssertionError(f"restored {restored}, and step {must_have} was on all peers; {attempt.outputs}")


NUMBERS = itertools.count(1)
PEERS_NETWORK = "10.84.0"  # of a second device of each host, so that the network of the ranks stays as it is
TROUBLE_S = 5.0


@dataclass(frozen=True)
class Trouble:
    """Trouble of one host's peers, as commands that begin and end it there."""

    name: str
    begin: tuple[str, ...]
    end: tuple[str, ...]


_TC = ("tc", "qdisc")
TROUBLES = (
    Trouble("none", ("true",), ("true",)),
    Trouble(
        "slow network",
        (*_TC, "add", "dev", "peers", "root", "tbf", "rate", "400kbit", "burst", "32kb", "latency", "400ms"),
        (*_TC, "del", "dev", "peers", "root"),
    ),
    Trouble(
        "cut network",
        ("ip", "route", "replace", "blackhole", f"{PEERS_NETWORK}.0/25"),
        ("ip", "route", "del", "blackhole", f"{PEERS_NETWORK}.0/25"),
    ),
    Trouble(
        "stopped keeper", ("pkill", "-STOP", "-f", "checkpoint.keeper"), ("pkill", "-CONT", "-f", "keeper")
    ),
    Trouble("killed keeper", ("pkill", "-KILL", "-f", "checkpoint.keeper"), ("true",)),
    Trouble("no memory for copies", ("true",), ("true",)),
)


def find_trouble(folder: Path, trouble: Trouble) -> tuple[float, float, bool]:
    """Train on two hosts while the second one's peers have trouble.

    Returns:
        The longest step before the trouble and in it, in seconds, and whether copies were made afterwards.
    """
    cluster = Cluster(folder, 2, 1, NUMBERS)
    try:
        for host in cluster.hosts:
            number = host.address.rpartition(".")[2]
            host.run("ip", "link", "add", "link", "eth0", "name", "peers", "type", "macvlan")
            host.run("ip", "addr", "add", f"{PEERS_NETWORK}.{number}/24", "dev", "peers")
            host.run("ip", "link", "set", "peers", "up")
        options = ["--steps", 400, "--every", 2, "--peers", 1, "--pause", 0.03, "--width", 512]
        options += ["--peers-network", PEERS_NETWORK]
        is_full = trouble.name == "no memory for copies"
        attempt = cluster.start(*options, *(["--peers-memory", "100kB"] if is_full else []))
        attempt.wait(END_S, until=lambda: attempt.newest("step") >= 60)
        began = attempt.newest("step")
        cluster.hosts[1].run(*trouble.begin)
        attempt.wait(TROUBLE_S)
        ended = attempt.newest("step")
        cluster.hosts[1].run(*trouble.end)
        finish(cluster, attempt)
        times = [float(str(row["at_s"])) for row in attempt.facts()[0] if "at_s" in row]
        longest = [
            max(b - a for a, b in itertools.pairwise(times[i:j])) for i, j in ((10, began), (began, ended))
        ]
        return longest[0], longest[1], attempt.newest("mirrored") > ended or is_full
    finally:
        cluster.close()


def main() -> int:
    """Run the command; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.lost_hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, action="append", help="default: 2, 3 and 4")
    parser.add_argument("--runs", type=int, default=7, help="trainings of each size, each killed five times")
    parser.add_argument("--troubles", action="store_true", help="trouble of peers instead of lost hosts")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--late", type=float, default=0.0, help="seconds until a new host comes")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--folder", type=Path, help="for the logs, which stay")
    parser.add_argument("--inside", action="store_true", help="this process may make hosts")
    parser.add_argument("--write", action="store_true", help="write the counts")
    options = parser.parse_args()
    if not options.inside:
        command = [sys.executable, "-m", "campaigns.lost_hosts", "--inside", *sys.argv[1:]]
        return subprocess.run(isolated(command), cwd=ROOT).returncode
    print(f"--seed {options.seed}", flush=True)
    make_network()
    began_s, found = time.monotonic(), []
    base = options.folder or Path(tempfile.mkdtemp(prefix="lost-hosts-"))
    if options.troubles:
        for trouble in TROUBLES:
            before_s, during_s, recovers = find_trouble(base / trouble.name.replace(" ", "-"), trouble)
            times = f"longest step {before_s:.3f} s, then {during_s:.3f} s"
            print(f"{trouble.name:22} {times}; copies after it: {recovers}", flush=True)
            found += [trouble.name] if during_s > TROUBLE_S / 2 or not recovers else []
        return int(bool(found))
    for num_hosts in options.hosts or (2, 3, 4):
        cluster = Cluster(base / f"{num_hosts}-hosts", num_hosts, 2, NUMBERS)
        expected = finish(cluster, cluster.start("--steps", options.steps, "--pause", 0))
        cluster.close()
        training = ("--steps", options.steps, "--every", 2, "--peers", 1, "--bandwidth", "60kB")
        kills = failures = 0
        for number in range(options.runs):
            seed, folder = options.seed + number, base / f"{num_hosts}-hosts-{number}"
            try:
                kills += run_once(folder, num_hosts, training, expected, seed, options.late)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failures += 1
                print(f"{num_hosts} hosts, seed {seed}: {error}", flush=True)
        found.append(counts.Count(f"{num_hosts} hosts of 2 ranks", kills, failures))
        print(f"{num_hosts} hosts: {kills} kills in {options.runs} runs, {failures} failed", flush=True)
    if options.write:
        counts.write("lost_hosts", found, seconds=time.monotonic() - began_s)
    return int(any(one.failures for one in found))


if __name__ == "__main__":
    sys.exit(main())
