"""Two ranks whose local folders differ, as on two hosts: hosts die, lose their disks, lag, and home fails."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from faults.playground import TOTAL, Playground, flip_bit, keepers_of, kill
from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.store import open_store
from nursery import Child
from servers import reserve_port

pytestmark = pytest.mark.ranks
HOSTS = (0, 1)
LATE = ("--home-every", "1000000")
"""Options of a run whose saves are not due in home."""


class Hosts:
    """Two machines in name: each has a rank, a local folder and keepers of its own; they share the home."""

    def __init__(self, playground: Playground) -> None:
        self.playground = playground
        self.children: list[Child] = []

    def local(self, host: int) -> Path:
        return self.playground.folder / f"local-{host}"

    def keepers(self, host: int) -> list[psutil.Process]:
        return keepers_of(self._runtime(host))

    def _runtime(self, host: int) -> Path:
        return self.playground.folder / f"runtime-{host}"

    def start(self, *options: str, total: int = TOTAL) -> list[Child]:
        """Start a rank on each host."""
        local = str(self.playground.folder / "local-{rank}")
        return self.start_without_folders("--local", local, *options, total=total)

    def start_without_folders(self, *options: str, total: int = TOTAL) -> list[Child]:
        """Start a rank on each host. The hosts have no local folders."""
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
        self.children = [
            self.playground.start(
                *options,
                total=total,
                **world,
                RANK=str(host),
                HOLDFAST_RUNTIME_DIR=str(self._runtime(host)),
            )
            for host in HOSTS
        ]
        return self.children

    def finish_like(self, expected: str, *options: str) -> str:
        """Run to the end, with the weights of a run that nothing happened to; what rank 0 has said."""
        children = self.start(*options)
        assert [child.wait() for child in children] == [0, 0], "\n".join(one.said() for one in children)
        assert self.playground.final() == expected
        return children[0].said()

    def kill(self, *, with_keepers: tuple[int, ...] = ()) -> None:
        """SIGKILL both trainers, and the keepers of some hosts."""
        for host in with_keepers:
            self.kill_keepers(host)
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait()
        for host in with_keepers:
            self.kill_keepers(host)
            self.playground.wait_for(lambda host=host: not self.keepers(host), "the keepers to end")

    def kill_keepers(self, host: int) -> None:
        for keeper in self.keepers(host):
            kill(keeper)

    def wait_for_keepers(self) -> None:
        self.playground.wait_for(lambda: not any(map(self.keepers, HOSTS)), "the keepers to end")

    def lose_disk(self, host: int) -> None:
        shutil.rmtree(self.local(host), ignore_errors=True)

    def steps(self, host: int) -> list[int]:
        """Steps of which the host's own rank has its files in the host's folder, newest first."""
        saved = list_home(open_store(self.local(host))).saved.values()
        return sorted({one.step for one in saved if host in one.parts}, reverse=True)

    def both_have(self, num_steps: int) -> bool:
        return min(len(self.steps(host)) for host in HOSTS) >= num_steps


@pytest.fixture
def hosts(playground: Playground) -> Iterator[Hosts]:
    found = Hosts(playground)
    yield found
    found.wait_for_keepers()


def restored(said: str) -> int:
    """The step that was restored."""
    found = re.search(r"restored step (\d+) from", said)
    assert found, said
    return int(found[1])


def train_and_kill(
    hosts: Hosts, is_enough: Callable[[], object], *options: str, **kill: tuple[int, ...]
) -> None:
    """Train some steps, wait until enough has happened, then kill both trainers."""
    hosts.start("--pause-at", "9", *options)
    hosts.playground.wait_for(is_enough, "enough")
    hosts.kill(**kill)


def test_each_host_has_its_own_files_and_home_has_all(hosts: Hosts, uninterrupted_ranks: str):
    """No manifest exists where files are missing, and each folder keeps only its number of steps."""
    hosts.finish_like(uninterrupted_ranks)
    assert hosts.playground.complete()[0] == (1, TOTAL)
    assert hosts.playground.check_all_complete_verify() >= 1, "it may have been behind"
    for host in HOSTS:
        assert hosts.steps(host) == [TOTAL, TOTAL - 2]
        assert not list(hosts.local(host).glob("step-*/manifest-*"))
        assert not list(hosts.local(host).glob(f"step-*/rank-{1 - host:05d}-*"))


@pytest.mark.essential
def test_a_checkpoint_that_is_not_in_home_is_assembled_from_both_disks(
    hosts: Hosts, uninterrupted_ranks: str
):
    """Each rank sends what the other lacks, and the restored step is then sent home."""
    train_and_kill(hosts, lambda: hosts.both_have(2), *LATE, with_keepers=HOSTS)
    assert not hosts.playground.complete()
    common = max(set(hosts.steps(0)) & set(hosts.steps(1)))
    said = hosts.finish_like(uninterrupted_ranks, *LATE, "--keep", "9")
    assert restored(said) == common
    assert "other ranks (" in said
    assert (2, TOTAL) in hosts.playground.complete()
    assert hosts.playground.check_all_complete_verify() > 0


@pytest.mark.slow
def test_each_host_restores_from_the_memory_of_its_own_keepers(hosts: Hosts, uninterrupted_ranks: str):
    """Each host reads the memory of its own keepers, and sends it to the other."""
    train_and_kill(hosts, lambda: hosts.both_have(2), *LATE, "--hold", "60s")
    said = hosts.finish_like(uninterrupted_ranks)
    assert "memory (" in said


def test_after_a_lost_host_the_survivor_reads_its_own_disk_and_the_other_home(
    hosts: Hosts, uninterrupted_ranks: str
):
    """Files of the survivor's rank come from its disk, those of the lost one from home."""
    train_and_kill(
        hosts, hosts.playground.complete, "--home-every", "2", "--keep-local", "50", with_keepers=HOSTS
    )
    in_home = hosts.playground.complete()[0][1]
    hosts.lose_disk(1)
    said = hosts.finish_like(uninterrupted_ranks, "--home-every", "2")
    assert restored(said) >= in_home
    assert re.search(rf"from (?=.*{hosts.local(0)} \()(?=.*{hosts.playground.home} \()", said), said


@pytest.mark.slow
def test_after_a_lost_host_and_an_empty_home_training_starts_from_scratch(
    hosts: Hosts, uninterrupted_ranks: str
):
    """No rank has the lost rank's files: no checkpoint is made of the rest, and a warning names them."""
    train_and_kill(hosts, lambda: hosts.both_have(1), *LATE, with_keepers=HOSTS)
    hosts.lose_disk(1)
    said = hosts.finish_like(uninterrupted_ranks)
    assert "of attempt 1 is incomplete: the files of ranks 1 are missing" in said
    assert "restored step" not in said


PEERS = ("--peers", "1", "--host", "host{rank}")
SLOW_HOME = ("--bandwidth", "10kB")  # a save takes ten seconds, and the copy of one none


def mirrored(hosts: Hosts) -> int:
    """The newest step of which the peers of every rank have said that they hold it; 0 without one."""
    logs = [hosts.playground.home / names.history(1, rank) for rank in HOSTS]
    lines = [log.read_text().splitlines() if log.exists() else [] for log in logs]
    events = [[json.loads(line) for line in of_rank if '"mirrored"' in line] for of_rank in lines]
    return min(max((event["step"] for event in of_rank), default=0) for of_rank in events)


@pytest.mark.essential
def test_a_lost_host_costs_only_the_steps_since_its_last_copy(hosts: Hosts, uninterrupted_ranks: str):
    """All that a host has is gone: processes, memory, and its folder. The copies are on the other one."""
    hosts.start_without_folders("--pause-at", "9", *PEERS, *SLOW_HOME)
    hosts.playground.wait_for(lambda: mirrored(hosts) >= 2, "copies")
    hosts.kill(with_keepers=(1,))
    copied = mirrored(hosts)
    shutil.rmtree(hosts.playground.folder / "runtime-1")
    children = hosts.start_without_folders(*PEERS)
    assert [child.wait() for child in children] == [0, 0], "\n".join(one.said() for one in children)
    assert restored(children[0].said()) >= copied
    # Not for the save that is on its way to the slow home: its files are in memory, and offered at once.
    assert "waiting for the keepers" not in children[0].said()
    assert "is in memory and folders of several hosts only; without them:" in children[0].said()
    assert hosts.playground.final() == uninterrupted_ranks


@pytest.mark.slow
def test_checkpoints_that_both_hosts_have_are_kept_while_one_host_is_behind(
    hosts: Hosts, uninterrupted_ranks: str
):
    """One keeper hangs while the other continues to save: checkpoints of both are kept, and restored."""
    hosts.start("--step-s", "0.03", *LATE, total=100_000)
    wait = hosts.playground.wait_for
    wait(lambda: hosts.both_have(2), "saves of both")
    for keeper in hosts.keepers(1):
        keeper.suspend()
        wait(lambda keeper=keeper: keeper.status() == psutil.STATUS_STOPPED, "the keeper to hang")
    stuck = hosts.steps(1)[0]
    wait(lambda: hosts.steps(0)[0] >= stuck + 20, "saves of the first host")
    hosts.kill(with_keepers=HOSTS)
    assert stuck in hosts.steps(0), "it is the newest that both have"
    assert restored(hosts.finish_like(uninterrupted_ranks, *LATE)) == stuck


@pytest.mark.slow
def test_training_continues_while_home_is_unavailable(hosts: Hosts):
    """Local saves continue on both hosts, old ones are deleted there, and the drain catches up."""
    children = hosts.start("--pause-at", "10", total=150)
    playground = hosts.playground
    playground.wait_for(playground.complete, "a checkpoint in home")
    away = playground.folder / "away"
    playground.home.rename(away)
    seen = hosts.steps(1)[0]
    playground.let_go(10)
    playground.wait_for(lambda: min(hosts.steps(host)[0] for host in HOSTS) > seen + 20, "local saves")
    # The oldest may be the one that came home last.
    playground.wait_for(lambda: min(hosts.steps(host)[-2] for host in HOSTS) > seen, "old ones to go")
    playground.wait_for(lambda: playground.has_event("drain-failed", hosts.local(0)), "a failed drain")
    away.rename(playground.home)
    assert [child.wait() for child in children] == [0, 0], children[0].said()
    assert "Home cannot be reached" in children[0].said()
    assert playground.complete()[0] == (1, 150)
    assert playground.check_all_complete_verify() > 0


@pytest.mark.slow
def test_damage_on_the_only_disk_that_has_a_file_falls_back_to_an_older_step(
    hosts: Hosts, uninterrupted_ranks: str
):
    """It is named on the way."""
    train_and_kill(hosts, lambda: hosts.both_have(2), *LATE, "--keep-local", "9", with_keepers=HOSTS)
    common = sorted(set(hosts.steps(0)) & set(hosts.steps(1)))
    (path,) = hosts.local(1).glob(f"{names.step_dir(common[-1])}/*.safetensors")
    flip_bit(path)
    said = hosts.finish_like(uninterrupted_ranks)
    assert f"skipped step {common[-1]} of attempt 1" in said
    assert restored(said) == common[-2]


@pytest.mark.slow
def test_one_rank_resumes_from_what_two_hosts_have_sent_home(hosts: Hosts):
    """The files of its own host are read from there; what it cannot use there is deleted in time."""
    train_and_kill(hosts, hosts.playground.complete, with_keepers=HOSTS)
    child = hosts.playground.finish("--local", str(hosts.local(0)))
    assert "restored step" in child.said()
    assert hosts.playground.complete()[0] == (2, TOTAL)
    assert hosts.playground.check_all_complete_verify(hosts.local(0)) == 2


def check_random_kills(hosts: Hosts, expected: str, seed: int, num_kills: int) -> None:
    """Kill at random moments; what home called complete, or both disks had, is never lost."""
    draw = random.Random(seed)
    options = "--every", "1", "--home-every", "2", "--hold", "60s"
    least = 0
    for _ in range(num_kills):
        hosts.start("--step-s", "0.01", *options)
        playground = hosts.playground
        playground.wait_for_steps(playground.num_steps() + draw.randint(0, 4), hosts.children[0])
        playground.pause(draw.random() * 0.03)
        dead = tuple(host for host in HOSTS if draw.random() < 0.5)
        for host in dead:
            hosts.kill_keepers(host)
        least = max(least, max((step for _, step in playground.complete()), default=0))
        hosts.kill(with_keepers=dead)
        if dead and draw.random() < 0.5:
            hosts.lose_disk(draw.choice(dead))
        playground.check_all_complete_verify()
    said = hosts.finish_like(expected, *options)
    if least:
        assert restored(said) >= least
    assert hosts.playground.check_all_complete_verify() > 0


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "num_kills"), [(1, 3), *((seed, 5) for seed in range(300, 312))])
def test_random_kills_of_hosts(hosts: Hosts, uninterrupted_ranks: str, seed: int, num_kills: int):
    check_random_kills(hosts, uninterrupted_ranks, seed, num_kills)
