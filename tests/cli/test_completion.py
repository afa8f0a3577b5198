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
from holdfast.cli import make_parser
from holdfast.cli.commands import COMMANDS
from holdfast.cli.completion import COMPLETERS, SHELLS

PATHS = {"HOME", "PLACE", "DIR", "FILE", "DEST", "SOURCE", "SCRIPT", "TASK"}


def answer(line: str, shell: str) -> list[str]:
    """Return what a process prints for a shell that completes a line."""
    answers = {
        "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_DFS": "\t",
    }
    question = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": shell, "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    place = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'@><=;|&(:",
    }
    words = [sys.executable, "-m", "holdfast.cli"]
    env = {**os.environ, **answers, **question, **place}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def texts(line: str) -> list[str]:
    return [text.partition("\t")[0] for text in answer(line, "bash")]


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
    assert texts("holdfast ") == [*COMMANDS]
    assert texts("/usr/bin/holdfast l") == ["ls", "launch", "logs"]
    assert texts("holdfast -") == ["--help", "--version"]
    (shown,) = answer("holdfast sh", "fish")
    assert shown.startswith("show\tshow the contents")


def test_options_and_choices_are_completed() -> None:
    assert texts("holdfast queue --") == ["--help", "--status", "--all", "--tail", "--on", "--json"]
    assert texts("holdfast ls HOME --j") == ["--json"]
    assert texts("holdfast history HOME --tier ") == ["memory", "peers", "local", "home"]
    assert texts("holdfast history HOME --tier=l") == ["local"]
    assert texts("holdfast completion ") == ["bash", "zsh", "fish"]


def test_folders_of_this_machine_are_completed(folder: Path) -> None:
    assert texts("holdfast ls ") == ["runs/"]
    assert sorted(texts("holdfast ls runs/")) == ["runs/.hidden/", "runs/gpt/", "runs/old/"]
    assert texts("holdfast ls 'runs/g") == ["runs/gpt/"]
    assert texts("holdfast diff runs/g") == ["runs/gpt/"]
    assert texts("holdfast ls runs/missing/") == []
    assert texts("holdfast logs runs/") == []
    assert texts(f"holdfast ls {folder}/runs/o") == [f"{folder}/runs/old/"]


@pytest.mark.usefixtures("folder")
def test_steps_of_a_home_are_completed() -> None:
    assert texts("holdfast show runs/gpt --step ") == ["400", "300", "250", "200", "100"]
    assert texts("holdfast show --json runs/gpt --step=2") == ["250", "200"]
    assert texts("holdfast rm runs/gpt --before 4") == ["400"]
    assert texts("holdfast show runs/missing --step ") == []
    assert texts("holdfast show s3://bucket/run --step ") == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("before", ["launch", "check --", "report H -o"])
def test_files_are_completed(before: str) -> None:
    assert texts(f"holdfast {before} runs/n") == ["runs/notes.txt"]


def test_every_path_among_the_arguments_is_completed() -> None:
    commands = make_parser()._subparsers
    assert commands is not None
    for parser in commands._group_actions[0].choices.values():  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        for action in parser._actions:
            assert action.metavar not in PATHS or action.dest in COMPLETERS, action.dest


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_printed(shell: str, holdfast: Command) -> None:
    result = holdfast("completion", shell).printed("_ARGCOMPLETE")
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
