"""Names in a checkpoint cannot send control sequences to a terminal."""

from __future__ import annotations

from pathlib import Path

from cli.conftest import Command
from holdfast import Checkpointer


def test_names_cannot_send_control_sequences_to_a_terminal(tmp_path: Path, holdfast: Command) -> None:
    name = "w\x1b[2J\x1b]0;owned\x07"
    with Checkpointer(tmp_path / "home", {name: 1, "t": {"x\x9b31m": "v\x1b[5m"}}, quiet=True) as ckpt:
        ckpt.save(1).wait_durable()
    for command in ("show", "verify", "ls"):
        result = holdfast(command, tmp_path / "home")
        assert "\x1b" not in result.out + result.err
        assert "\x9b" not in result.out + result.err
