"""Real compiles in real processes: what was compiled once comes back on a machine that has nothing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.store import open_store
from holdfast.watch.compiled.transfer import FOLDER, PackName, parse_name

HERE = Path(__file__).parent
LIMIT_S = 600
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@dataclass
class Start:
    """What one start of the trainer did."""

    status: int
    err: str
    told: list[dict[str, Any]]  # by each rank
    compiles: list[str]  # command lines of the compiler, but for questions about itself

    @property
    def warnings(self) -> list[str]:
        return [line for rank in self.told for line in rank["warnings"]]


Machine = Callable[..., Start]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Starts a trainer on an empty machine: other folders for temporary files and for what is compiled."""
    compiler = tmp_path_factory.mktemp("compiler") / "g++"  # one path for all: it is part of inductor's keys

    def start(
        home: Path, steps: int = 1, *, ranks: int = 1, cache: dict[str, Any] | None = None, **env: str
    ) -> Start:
        folder = tmp_path_factory.mktemp("machine")
        calls = folder / "calls"
        calls.touch()
        compiler.write_text(
            f'#!/bin/sh\necho "$@" >> {shlex.quote(str(calls))}\nexec {shutil.which("g++")} "$@"\n'
        )
        compiler.chmod(0o755)
        env = {
            name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")
        } | env
        env |= {"TMPDIR": str(folder), "XDG_CONFIG_HOME": str(folder), "CXX": str(compiler)}
        env.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # torch's default takes long
        env["TRAINER_CACHE"] = json.dumps(cache or {})
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = [*(launcher if ranks > 1 else ()), str(HERE / "trainer.py"), str(home), str(steps)]
        done = subprocess.run(
            [sys.executable, *words], env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        compiles = [*filter(_is_compile, calls.read_text().splitlines())]
        return Start(done.returncode, done.stderr, told, compiles)

    return start


def _is_compile(command: str) -> bool:
    """False for questions about the compiler itself, such as `--version`."""
    return ".cpp" in command or ".h.gch" in command


@pytest.fixture(scope="module")
def cold(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Start]:
    """A home with one step, trained on a machine that had nothing."""
    home = tmp_path_factory.mktemp("cold") / "home"
    start = machine(home, cache={"trust": True})
    assert start.status == 0, start.err
    assert start.compiles, "nothing was compiled, so nothing would be shown"
    assert start.warnings == []
    return home, start


@pytest.fixture
def home(cold: tuple[Path, Start], tmp_path: Path) -> Path:
    """A copy of that home."""
    return Path(shutil.copytree(cold[0], tmp_path / "home"))


def packs_of(home: Path) -> list[Path]:
    names = [entry.name for entry in open_store(home).list(FOLDER)]
    return [home / name for name in sorted(names) if isinstance(parse_name(name), PackName)]


@pytest.mark.slow
def test_an_empty_machine_compiles_nothing_when_home_is_trusted(machine: Machine, home: Path, cold: Any):
    again = machine(home, 2, HOLDFAST_TRUST_HOMES=str(home.parent))
    assert again.status == 0, again.err
    assert again.compiles == []
    assert "compiled code from" in again.err
    assert again.warnings == []
    assert again.told[0]["cpu_s"] < cold[1].told[0]["cpu_s"]


@pytest.mark.slow
def test_a_damaged_file_is_compiled_and_uploaded_again(machine: Machine, home: Path, cold: Any):
    (pack,) = packs_of(home)
    damaged = bytearray(pack.read_bytes())
    for at in range(0, len(damaged), 64):  # every file has some
        damaged[at] ^= 1
    pack.write_bytes(damaged)
    again = machine(home, 2, cache={"trust": True})
    assert again.status == 0, again.err
    assert len(again.compiles) == len(cold[1].compiles)
    assert len(again.warnings) == 1
    assert "is damaged" in again.warnings[0]
    third = machine(home, 3, cache={"trust": True})
    assert third.compiles == []


@pytest.mark.slow
def test_a_cache_of_another_environment_is_not_loaded(machine: Machine, home: Path):
    (folder,) = (home / FOLDER).iterdir()
    folder.rename(folder.with_name("0" * 32))
    again = machine(home, 2, cache={"trust": True})
    assert again.status == 0, again.err
    assert again.compiles
    assert "compiled code" not in again.err


@pytest.mark.slow
def test_with_the_cache_turned_off_nothing_is_uploaded_or_loaded(
    machine: Machine, home: Path, tmp_path: Path
):
    again = machine(home, 2, cache={"limit": "off"})
    assert again.compiles
    assert "compiled code" not in again.err
    other = machine(tmp_path / "other", cache={"limit": "off"})
    assert other.compiles
    assert not (tmp_path / "other" / FOLDER).exists()


@pytest.mark.slow
def test_a_kill_during_an_upload_costs_only_the_remaining_files(machine: Machine, tmp_path: Path):
    home = tmp_path / "home"
    killed = machine(home, 20, HOLDFAST_KILL_AT="compiled.packed")
    assert killed.status == -signal.SIGKILL
    assert len(packs_of(home)) == 1
    second = machine(home, 21, cache={"trust": True})
    assert second.status == 0, second.err
    assert second.compiles
    assert second.warnings == []
    assert len(packs_of(home)) == 1  # that of the killed one, which nothing lists, has gone
    third = machine(home, 22, cache={"trust": True})
    assert third.compiles == []
    assert third.told[0]["warnings"] == []


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_share_the_download_of_one(machine: Machine, tmp_path: Path):
    home = tmp_path / "home"
    first = machine(home, 2, ranks=2, cache={"trust": True})
    assert first.status == 0, first.err
    assert first.compiles
    again = machine(home, 3, ranks=2, cache={"trust": True})
    assert again.status == 0, again.err
    assert again.compiles == []
    assert again.err.count("compiled code from") == 1
    assert len({rank["weights"] for rank in again.told}) == 1


@pytest.mark.slow
def test_commands_ignore_compile_caches(cold: tuple[Path, Start], capsys: pytest.CaptureFixture[str]):
    from holdfast.cli import main

    home = str(cold[0])
    assert main(["ls", home, "--all", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["checkpoints"]) == 1
    assert main(["verify", home]) == 0
    assert main(["history", home]) == 0
    assert "compiled-sent" in capsys.readouterr().out
