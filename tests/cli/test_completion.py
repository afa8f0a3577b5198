"""`holdfast completion`: candidates for a command line, and the script in a real bash."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.conftest import Command
from holdfast.cli.commands import COMMANDS
from holdfast.cli.completion import SCRIPTS, VALUES, arguments_of, complete

PATHS = {"HOME", "PLACE", "DIR", "FILE", "DEST", "SOURCE", "SCRIPT", "TASK"}


def texts(line: str) -> list[str]:
    return list(complete(line).values)


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a home `runs/gpt`, a folder `runs/old` and a file."""
    runs = home.parent / "runs"
    (runs / "old").mkdir(parents=True)
    (runs / ".hidden").mkdir()
    (runs / "notes.txt").write_text("")
    home.rename(runs / "gpt")
    monkeypatch.chdir(runs.parent)
    return runs.parent


def test_commands_are_completed() -> None:
    assert texts("holdfast ") == [*COMMANDS, "--help", "--version"]
    assert texts("holdfast l") == ["ls", "launch", "logs"]
    assert texts("holdfast -") == ["--help", "--version"]
    assert texts("A=1 /usr/bin/holdfast l") == ["ls", "launch", "logs"]
    assert texts("holdfast") == []
    assert complete("holdfast sh").values["show"].startswith("show the contents")


def test_options_and_choices_are_completed() -> None:
    assert texts("holdfast queue --") == ["--all", "--help", "--json", "--on", "--status", "--tail"]
    assert texts("holdfast ls HOME --j") == ["--json"]
    assert texts("holdfast history HOME --tier ") == ["memory", "local", "home"]
    assert texts("holdfast history HOME --tier=l") == ["--tier=local"]
    assert texts("holdfast completion ") == ["bash", "zsh", "fish"]
    assert texts("holdfast completion --l") == []
    assert texts("holdfast nonsense ") == []
    assert texts("holdfast ls --nonsense=") == []


def test_homes_of_this_machine_are_completed(folder: Path) -> None:
    assert texts("holdfast ls ") == ["runs/"]
    assert texts("holdfast ls runs/") == ["runs/gpt", "runs/old/"]
    assert texts("holdfast ls 'runs/g") == ["runs/gpt"]
    assert texts("holdfast ls runs/gpt/") == []
    assert texts("holdfast ls runs/missing/") == []
    assert texts("holdfast ls runs/gpt runs/") == []
    assert texts(f"holdfast ls {folder}/runs/o") == [f"{folder}/runs/old/"]
    assert complete("holdfast ls ").kind == "paths"


def test_steps_of_a_home_are_completed(folder: Path) -> None:
    assert texts("holdfast show runs/gpt --step ") == ["400", "300", "250", "200", "100"]
    assert texts("holdfast show --json runs/gpt --step=2") == ["--step=250", "--step=200"]
    assert texts("holdfast rm runs/gpt --before 4") == ["400"]
    assert texts("holdfast diff runs/gpt@1") == ["runs/gpt@100"]
    assert texts("holdfast diff runs/gpt@100 runs/gpt@3") == ["runs/gpt@300"]
    assert texts("holdfast show s3://bucket/run --step ") == []


@pytest.mark.parametrize(
    "line",
    [
        "holdfast launch ",
        "holdfast check train.py --n",
        "holdfast check -- tor",
        "holdfast report H -o ",
        "holdfast ls H --local ",
    ],
)
def test_files_are_completed_by_the_shell(line: str) -> None:
    assert complete(line).kind == "files"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_among_the_arguments_is_completed(command: str) -> None:
    for action in arguments_of(command):
        assert action.metavar not in PATHS or action.dest in VALUES, action.dest


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_printed(shell: str, holdfast: Command) -> None:
    result = holdfast("completion", shell).printed("completion " + shell)
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=result.out, text=True, check=True)


@pytest.fixture
def terminal_env(folder: Path) -> dict[str, str]:
    """An environment in which `holdfast` is a command."""
    program = folder / "bin" / "holdfast"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast.cli "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "$ "}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("holdfast hist", "holdfast history "),
        ("holdfast ls runs/g", "holdfast ls runs/gpt/"),
        ("holdfast show runs/gpt --step 4", "holdfast show runs/gpt --step 400 "),
        ("holdfast show runs/gpt --step=4", "holdfast show runs/gpt --step=400 "),
        ("holdfast diff runs/gpt@4", "holdfast diff runs/gpt@400 "),
        ("holdfast launch runs/no", "holdfast launch runs/notes.txt "),
        ("holdfast verify runs/gpt --thr", "holdfast verify runs/gpt --threads "),
    ],
)
def test_bash_completes_on_tab(
    typed: str, completed: str, folder: Path, terminal_env: dict[str, str]
) -> None:
    """An interactive bash on a terminal, with the script of its start file."""
    pty = pytest.importorskip("pty")
    start = folder / "bashrc"
    source = "source <(holdfast completion bash)"
    start.write_text(f"{source}\nbind 'set enable-bracketed-paste off'\nPS1='ready> '\n")
    person, terminal = pty.openpty()
    words = ["bash", "--noprofile", "--rcfile", str(start), "-i"]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = subprocess.Popen(words, **streams, env=terminal_env, cwd=folder, start_new_session=True)
    os.close(terminal)
    try:
        receive_until(person, "ready> ")
        os.write(person, f"{typed}\t".encode())
        assert receive_until(person, completed).endswith(completed)
    finally:
        process.kill()
        process.wait()
        os.close(person)


def receive_until(terminal: int, expected: str, limit_s: float = 600.0) -> str:
    """Return what a terminal shows, up to an expected text or the time limit."""
    shown, deadline = "", time.monotonic() + limit_s
    while expected not in shown and (left_s := deadline - time.monotonic()) > 0:
        if not select.select([terminal], [], [], left_s)[0]:
            break
        received = os.read(terminal, 1 << 16).decode(errors="replace")
        for character in received.replace("\a", ""):
            shown = shown[:-1] if character == "\b" else shown + character
    return shown
