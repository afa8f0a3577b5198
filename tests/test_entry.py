"""Processes that Holdfast starts import nothing from the directory that one happens to stand in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.jobs.status import JobStatus
from holdfast.system.entry import command
from jobs.harness import JobHarness, started_harness

PACKAGE = Path(holdfast.__file__).parent
NAMES = ("xxhash", "logging", "json", "sqlite3", "yaml", "obstore", "numpy", "ctypes", "subprocess", "queue")
LIMIT_S = 600
_TRAIN = """
import torch
from beside import SIZE
model = torch.nn.Linear(SIZE, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1000):
    optimizer.zero_grad()
    model(torch.ones(2, SIZE)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with modules that leave a mark when anybody imports them."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    (folder / "holdfast").mkdir()
    (folder / "holdfast" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('us ')\n")
    return folder


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[JobHarness]:
    with started_harness(tmp_path) as found:
        yield found


def _run(words: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert not (cwd.parent / "ran").exists(), (cwd.parent / "ran").read_text()
    assert done.returncode == 0, done.stderr
    return done


def test_launch_runs_nothing_of_the_current_folder(desk: JobHarness, hostile: Path, tmp_path: Path) -> None:
    """`cd /tmp && holdfast launch ~/t.yaml` ran anybody's /tmp/xxhash.py."""
    task = tmp_path / "t.yaml"
    task.write_text("run: pwd; echo PYTHONPATH=$PYTHONPATH SAFE=$PYTHONSAFEPATH\n")
    _run([*command("holdfast.cli"), "launch", str(task)], hostile)
    job = desk.engine.job(1)
    assert desk.wait(job).status is JobStatus.SUCCEEDED
    assert not (tmp_path / "ran").exists()
    said = _run([*command("holdfast.cli"), "logs", "1"], hostile).stdout
    assert "PYTHONPATH= SAFE=" in said.splitlines(), "the user's own commands keep their environment"


@pytest.mark.parametrize("path", [None, "", ":", "{}:", ":/none"])
def test_a_mount_runs_nothing_of_the_current_folder(hostile: Path, tmp_path: Path, path: str | None) -> None:
    """Nor does an empty part of PYTHONPATH, which Python takes for the current directory, lead there."""
    script = (
        "import sys; sys.path[:] = [p for p in sys.path if p not in ('', sys.argv[3])]\n"
        f"sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
        "from holdfast.jobs.writeback.mount import mount\n"
        "with mount(sys.argv[1], sys.argv[2], timeout_s=120):\n"
        "    open(sys.argv[1] + '/file', 'w').write('x')\n"
    )
    (tmp_path / "script.py").write_text(script)
    environment = {} if path is None else {"PYTHONPATH": path.format(tmp_path)}
    places = [str(tmp_path / name) for name in ("script.py", "d", "p")]
    _run([sys.executable, *places, str(hostile)], hostile, **environment)


def test_a_keeper_runs_nothing_of_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys; sys.path.append(sys.argv[2])\n"
        "import holdfast\n"
        "with holdfast.Checkpointer(sys.argv[1], {'n': 1}, quiet=True) as ckpt:\n"
        "    ckpt.save(1).wait_durable()\n"
    )
    _run([sys.executable, str(script), str(tmp_path / "home"), str(PACKAGE.parent)], hostile)
    assert holdfast.open(tmp_path / "home").step == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_tune_runs_nothing_of_the_current_folder(hostile: Path, tmp_path: Path, ranks: int | None) -> None:
    """Its processes run the user's script, which finds modules beside itself and nowhere else."""
    (tmp_path / "beside.py").write_text("SIZE = 4\n")
    (tmp_path / "train.py").write_text(_TRAIN)
    options = [] if ranks is None else ["--ranks", str(ranks)]
    words = [*command("holdfast.cli", "tune", "--only", "syncs"), *options, str(tmp_path / "train.py")]
    said = _run(words, hostile).stdout
    assert "step" in said


def test_a_child_finds_this_very_package_and_what_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    words = command("holdfast.cli", "--version")
    done = _run(words, tmp_path / "elsewhere", PYTHONSAFEPATH="1")
    assert holdfast.__version__ in done.stdout


def test_only_one_place_starts_python() -> None:
    """`python -m` and `python -c` put the current directory on the path; -I does not."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text().splitlines():
            is_script = "# their script" in line
            if re.search(r"sys\.executable, *[\"*]", line) and '"-I"' not in line and not is_script:
                found[path.relative_to(PACKAGE).as_posix()] = line.strip()
    assert not found
