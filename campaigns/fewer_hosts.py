"""Hosts that die without a replacement, and come back: `python -m campaigns.fewer_hosts`.

Hosts are network namespaces with processes and folders of their own. Each has a torchrun with `--nnodes 3:4`.
At a random moment all that one of them has is killed. The others have to continue without it, from the memory
of their peers, since home is far behind. Later the host comes back with an empty folder, and the training has
to take it in again. The samples, losses and last weights must be those of a run that nothing happened to, bit
for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from campaigns import counts
from holdfast.cli.demo.hosts import Host, isolated, make_network
from holdfast.cli.demo.lost_host import find_events
from holdfast.watch.standby import with_standby

ROOT = Path(__file__).resolve().parents[1]
TRAINING = ROOT / "campaigns" / "fewer_hosts_training.py"
NUM_HOSTS, LEAST = 4, 3
END_S = 240.0
STEPS_LEFT = 30  # more than ranks can be apart
HOME_BANDWIDTH = "2kB"  # of 26 kB that each rank saves, so that home is far behind the peers
# Survivors of a lost host wait for its last sign of life, then for hosts that may still come.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Pause:
    """Pause between two steps of a training whose hosts change."""

    seconds: float  # from the kill, or from the start of the new torchrun, to the next step
    pause_s: float  # from the last step before to the next one
    trained: int  # newest step of the attempt before
    mirrored: int  # newest step that peers were known to hold, when the host died
    restored: int
    source: str  # of most of its bytes
    in_home: int  # newest step in home at that moment


class Elastic:
    """Training under a torchrun on each host, which continues with fewer."""

    def __init__(self, folder: Path, options: list[str], *, ranks_each: int, has_standbys: bool) -> None:
        self.folder, self.home, self._logs = folder, folder / "home", folder / "logs"
        self._options, self._each, self._has_standbys = options, ranks_each, has_standbys
        self._logs.mkdir(parents=True)
        (self._logs / "slow").touch()
        self.hosts: dict[int, Host] = {}
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._first = next(NUMBERS)  # serves the rendezvous, and is not killed
        for number in (self._first, *(next(NUMBERS) for _ in range(NUM_HOSTS - 1))):
            self.add(number)

    def add(self, number: int) -> None:
        """Start torchrun on a new host."""
        host = self.hosts[number] = Host(number, self.folder / f"host{number}")
        is_first = number == self._first
        rendezvous = f"is_host={str(is_first).lower()},{RENDEZVOUS}"
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={LEAST}:{NUM_HOSTS}"]
        launcher += ["--nproc-per-node", str(self._each), "--max-restarts", "8", "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", f"{self.hosts[self._first].address}:29400", "--rdzv-id", "7"]
        launcher += ["--rdzv-conf", rendezvous, "--local-addr", host.address, str(TRAINING)]
        env = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "HOLDFAST_KEEP_IN_MEMORY": "2m",
            "HOLDFAST_PREEMPTION": "none",
            "LOGLEVEL": "INFO",
        }
        if self._has_standbys:
            env = with_standby({**os.environ, **env})
        command = [*launcher, str(self.home), str(self._logs), *self._options]
        output = self.folder / f"launcher-{host.name}.log"
        self._launchers[number] = host.start(command, env, output)

    def lose(self, number: int, *, is_silent: bool, has_slow_home: bool) -> None:
        """Kill a host whole; if silently, its connections stay open, as when it loses its power.

        The starts after that write to home at full speed, unless it is slow for ever.
        """
        if not has_slow_home:
            (self._logs / "slow").unlink()
        host = self.hosts.pop(number)
        if is_silent:
            host.run("ip", "link", "set", "eth0", "down")
        host.kill()
        if is_silent:  # connections that were not closed keep its network for a while
            subprocess.run(["ip", "link", "del", f"link{number}"], stderr=subprocess.DEVNULL)
        self._launchers.pop(number)

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines of all ranks, by time."""
        texts = [path.read_text() for path in self._logs.glob("*.jsonl")]
        lines = [line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return sorted(map(json.loads, lines), key=lambda row: row["at_s"])

    def wait(self, found: Callable[[list[dict[str, Any]]], Any], what: str) -> Any:
        """Wait until something is found in the lines of the ranks, and return it."""
        deadline_s = time.monotonic() + END_S
        while not (result := found(self.rows())):
            ended = [one.poll() for one in self._launchers.values() if one.poll() is not None]
            if any(ended) or time.monotonic() > deadline_s:
                raise AssertionError(f"{what}: not found; torchrun exited with {ended}; see {self.folder}")
            time.sleep(0.02)
        return result

    def wait_for_step(self, step: int) -> None:
        """Wait until all ranks have completed a step."""
        self.wait(lambda rows: newest(rows, "step") >= step, f"step {step}")

    def change(self, act: Callable[[], None], world_size: int) -> Pause:
        """Lose or add a host, and wait until the others train on."""
        rows, began_s = self.rows(), time.monotonic()
        in_home = max((one["step"] for one in self.events("committed")), default=0)
        act()
        after = self.wait(
            lambda rows: [
                row for row in rows if row["at_s"] > began_s and row["world"] == world_size and "step" in row
            ],
            f"a step on {world_size} ranks",
        )
        starts = [row for row in self.rows() if "restored" in row and row["at_s"] <= after[0]["at_s"]]
        restored = starts[-1]["restored"]
        self.wait(lambda _: self.sources(restored), "the event of the restore")
        before = [row for row in self.rows() if row["at_s"] < after[0]["at_s"] and "step" in row]
        return Pause(
            seconds=round(after[0]["at_s"] - began_s, 2),
            pause_s=round(after[0]["at_s"] - before[-1]["at_s"], 2),
            trained=max(row["step"] for row in before),
            mirrored=newest(rows, "mirrored"),
            restored=restored,
            source="+".join(sorted(self.sources(restored))),
            in_home=in_home,
        )

    def sources(self, step: int) -> set[str]:
        """Return the tiers that ranks of the newest attempt have restored a step from."""
        events = self.events("restored")
        attempt = max((one["attempt"] for one in events), default=0)
        return {one["tier"] for one in events if (one["step"], one["attempt"]) == (step, attempt)}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind of all attempts, by the history in home."""
        attempts = [int(path.stem[1:]) for path in (self.home / "attempts").glob("a????.json")]
        return [one for attempt in attempts for one in find_events(self.home, attempt, kind)]

    def finish(self) -> list[dict[str, Any]]:
        """Let the training end some steps from here, and return the lines of all ranks."""
        new = self.folder / "steps"
        new.write_text(str(newest(self.rows(), "step") + STEPS_LEFT))
        new.rename(self._logs / "steps")  # never seen empty
        for launcher in self._launchers.values():
            if status := launcher.wait(END_S):
                raise AssertionError(f"torchrun exited with {status}; see {self.folder}")
        return self.rows()

    def close(self) -> None:
        """Kill all hosts."""
        for host in self.hosts.values():
            host.kill()


def newest(rows: list[dict[str, Any]], name: str) -> int:
    """Return the newest step under a name that all ranks of the newest attempt have; 0 without one."""
    starts = [number for number, row in enumerate(rows) if "host" in row]
    world_size = rows[starts[-1]]["world"] if starts else 1
    found = dict[int, int]()
    for row in rows[starts[-world_size] if len(starts) >= world_size else 0 :]:
        found[row["rank"]] = max(found.get(row["rank"], 0), row.get(name, 0))
    return min((found.get(rank, 0) for rank in range(world_size)), default=0)


def check_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Raise unless samples, losses and weights are those of a run that nothing happened to."""
    same = {row["step"]: (row["samples"], row["loss"]) for row in expected if "step" in row}
    trained = {row["step"] for row in rows if "step" in row}
    assert trained == same.keys(), f"steps {sorted(same.keys() ^ trained)} are not in both"
    differing = [
        row["step"] for row in rows if "step" in row and same[row["step"]] != (row["samples"], row["loss"])
    ]
    assert not differing, f"samples or losses of the steps {differing} differ"
    digests = {row["sha256"] for row in [*rows, *expected] if "sha256" in row}
    assert len(digests) == 1, f"the weights differ: {digests}"


def train_undisturbed(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Train on one rank without peers and without a trouble, and return its lines."""
    (folder / "logs").mkdir(parents=True)
    places = [str(folder / "home"), str(folder / "logs")]
    command = [sys.executable, str(TRAINING), *places, "--steps", str(steps)]
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29300"}
    subprocess.run(command, env={**os.environ, **env}, check=True, timeout=END_S)
    (log,) = (folder / "logs").iterdir()
    return [json.loads(line) for line in log.read_text().splitlines()]


def run_once(
    folder: Path,
    seed: int,
    *,
    ranks_each: int,
    has_standbys: bool,
    is_silent: bool = False,
    has_slow_home: bool = False,
    pause_s: float = 0.05,
) -> list[Pause]:
    """Lose a host at a random moment, and take it back at another one. Return both pauses.

    Raises:
        AssertionError: more was lost than the steps since the last copy, or the results differ.
    """
    chance = random.Random(seed)
    options = ["--peers", "1", "--bandwidth", HOME_BANDWIDTH, "--pause", str(pause_s)]
    training = Elastic(folder, options, ranks_each=ranks_each, has_standbys=has_standbys)
    try:
        all_ranks = NUM_HOSTS * ranks_each
        training.wait(
            lambda rows: newest(rows, "mirrored") > 0 and rows[-1]["world"] == all_ranks, "the first copies"
        )
        if has_standbys:
            training.wait(lambda _: num_standbys() >= NUM_HOSTS, "the standby of each host")
        training.wait_for_step(newest(training.rows(), "step") + chance.randint(1, 20))
        victim = chance.choice(list(training.hosts)[1:])
        time.sleep(chance.uniform(0.0, 2 * pause_s))  # in the midst of a step, a save or a copy
        lost = training.change(
            lambda: training.lose(victim, is_silent=is_silent, has_slow_home=has_slow_home),
            LEAST * ranks_each,
        )
        print(f"{victim=} {lost}", flush=True)
        assert lost.source == "memory", f"restored from {lost.source}"
        assert lost.restored >= lost.mirrored > lost.in_home, f"not from the memory of peers: {lost}"
        training.wait(lambda rows: newest(rows, "mirrored") > lost.restored, "copies on fewer hosts")
        training.wait_for_step(newest(training.rows(), "step") + chance.randint(1, 20))
        back = training.change(lambda: training.add(victim), all_ranks)
        print(f"{victim=} {back}", flush=True)
        assert back.restored >= back.mirrored, f"not the newest copies: {back}"
        rows = training.finish()
        check_same(rows, train_undisturbed(folder / "undisturbed", max(row.get("step", 0) for row in rows)))
        return [lost, back]
    finally:
        training.close()


def num_standbys() -> int:
    """Return on how many hosts a standby waits for the next start."""
    networks = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if b"holdfast.watch.standby" in (process / "cmdline").read_bytes():
                lines = (process / "net" / "unix").read_text().splitlines()
                if any(" 00010000 " in line and "@holdfast-standby-" in line for line in lines):  # listens
                    networks.add(str((process / "ns" / "net").readlink()))
    return len(networks)


def main() -> int:
    """Run the command; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.fewer_hosts", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step")
    parser.add_argument("--ranks-each", type=int, default=1, help="ranks of each host")
    parser.add_argument("--standby", action="store_true", help="with standbys")
    parser.add_argument("--silent", action="store_true", help="the lost host closes no connection")
    parser.add_argument("--slow-home", action="store_true", help="home stays slow after the loss too")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--folder", type=Path, help="for the logs, which stay")
    parser.add_argument("--inside", action="store_true", help="this process may make hosts")
    parser.add_argument("--write", action="store_true", help="write the counts")
    options = parser.parse_args()
    if not options.inside:
        command = [sys.executable, "-m", "campaigns.fewer_hosts", "--inside", *sys.argv[1:]]
        return subprocess.run(isolated(command), cwd=ROOT).returncode
    make_network()
    began_s, failures = time.monotonic(), 0
    base = options.folder or Path(tempfile.mkdtemp(prefix="fewer-hosts-"))
    pauses: list[list[Pause]] = []
    for seed in range(options.seed, options.seed + options.runs):
        try:
            found = run_once(
                base / str(seed),
                seed,
                ranks_each=options.ranks_each,
                has_standbys=options.standby,
                is_silent=options.silent,
                has_slow_home=options.slow_home,
                pause_s=options.pause,
            )
            pauses.append(found)
            print(json.dumps({"seed": seed, "pauses": [asdict(one) for one in found]}), flush=True)
        except AssertionError as error:
            failures += 1
            print(f"seed {seed}: {error}", flush=True)
    if options.write:
        kind = f"{NUM_HOSTS} hosts of {options.ranks_each} ranks"
        counts.write(
            "fewer_hosts",
            [counts.Count(kind, options.runs, failures)],
            seconds=time.monotonic() - began_s,
        )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
