"""Damage to files of checkpoints."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit in a byte of a file: by default the last, which belongs to a tensor."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def middle(path: Path) -> int:
    """Return the place of the byte in the middle of a file."""
    return path.stat().st_size // 2
