"""Other operating systems, imitated: macOS reads checkpoints, and Windows gets one clear line."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli import main

PROGRAM = Path(__file__).parent / "other_system.py"

READS = """
import contextlib, io, json, sys
import holdfast
from holdfast.cli import main

home, folder = {home!r}, {folder!r}
checkpoint = holdfast.open(home)
found = {{"step": checkpoint.step, "weight": checkpoint.tensor("model.weight").tolist()}}
found["problems"] = list(checkpoint.verify().problems)
holdfast.export_checkpoint(checkpoint, folder + "/direct.safetensors")
commands = {{
    "ls": ["ls", home], "show": ["show", home], "verify": ["verify", home], "diff": ["diff", home, home],
    "history": ["history", home], "report": ["report", home], "metrics": ["metrics", home],
    "export": ["export", home, folder + "/by-command.safetensors"],
}}
for name, words in commands.items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        found[name] = main(words)
    assert out.getvalue(), name
print(json.dumps(found))
"""


def on(platform: str, code: str, *modules: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that imitates another operating system after the import of some modules."""
    command = [sys.executable, str(PROGRAM), platform, code, *modules]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    model = torch.nn.Linear(64, 8)
    with holdfast.Checkpointer(tmp_path / "home", {"model": model}, every=1, quiet=True) as ckpt:
        ckpt.save(1)
    return tmp_path / "home"


@pytest.mark.slow
def test_checkpoints_are_read_on_macos(home: Path, tmp_path: Path) -> None:
    modules = "numpy", "rich.console", "multiprocessing.connection", "subprocess", "torch"
    done = on("darwin", READS.format(home=str(home), folder=str(tmp_path)), *modules)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("step") == 1
    assert found.pop("weight") == holdfast.open(home).tensor("model.weight").tolist()
    assert found.pop("problems") == []
    assert set(found.values()) == {0}
    written = [(tmp_path / name).read_bytes() for name in ("direct.safetensors", "by-command.safetensors")]
    assert written[0] == written[1]


def test_a_checkpointer_states_that_it_needs_linux() -> None:
    done = on("darwin", "import holdfast; holdfast.Checkpointer")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "holdfast.Checkpointer needs Linux (memfd_create" in last
    assert "not darwin" in last
    assert "holdfast.open()" in last


def test_a_command_that_needs_linux_states_it_in_one_line() -> None:
    done = on("darwin", "from holdfast.cli import main; raise SystemExit(main(['launch', 'task.yaml']))")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("holdfast: holdfast launch needs Linux")


@pytest.mark.parametrize("name", ["Checkpointer", "open", "import_checkpoint", "Keep"])
def test_a_public_name_gets_one_clear_line_on_windows(name: str) -> None:
    done = on("win32", f"import holdfast; holdfast.HoldfastError; holdfast.{name}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.endswith("Holdfast does not run on Windows. Use it on Linux, for example in WSL 2.")


def test_a_command_gets_one_clear_line_on_windows() -> None:
    done = on("win32", "from holdfast.cli import main; raise SystemExit(main(['ls', 'runs/gpt']))")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == "holdfast: Holdfast does not run on Windows. Use it on Linux, for example in WSL 2."


def test_the_versions_are_shown_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    code = "from holdfast.cli import main; raise SystemExit(main(['version', '--json']))"
    for platform in ("win32", "linux"):
        done = on(platform, code)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["holdfast"] == holdfast.__version__
        assert found["torch"] == importlib.metadata.version("torch")  # the module may name its build too
        assert {"python", "system", "release", "machine"} <= set(found)
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"holdfast                {holdfast.__version__}\npython")
