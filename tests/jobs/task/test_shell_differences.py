"""Commands that depend on SkyPilot's shell: the difference is noted when the job is launched."""

from __future__ import annotations

import pytest

from holdfast.jobs.registry import get_engine
from holdfast.jobs.task.parser import Overrides, parse_tasks


def notes(engine: str, setup: str) -> list[str]:
    task = parse_tasks(f"run: x\nsetup: |\n  {setup}\n", "task.yaml", Overrides()).only()
    return [one.what for one in get_engine(engine).unsupported_keys(task) if one.key == "setup"]


@pytest.mark.parametrize("engine", ["local", "slurm"])
@pytest.mark.parametrize(
    ("setup", "word"),
    [
        ("echo 'export A=1' >> ~/.bashrc", "~/.bashrc"),
        ('echo "export A=1" >>"$HOME/.bashrc"', "~/.bashrc"),
        ("uv pip install numpy", "`uv pip`"),
    ],
)
def test_what_the_commands_will_miss_is_noted(engine: str, setup: str, word: str) -> None:
    (note,) = notes(engine, setup)
    assert note.startswith(word)


@pytest.mark.parametrize(
    "setup", ["cat ~/.bashrc", "pip install uv", "uv venv && uv run train.py", "echo a > b"]
)
def test_other_commands_are_not_noted(setup: str) -> None:
    assert notes("local", setup) == []
