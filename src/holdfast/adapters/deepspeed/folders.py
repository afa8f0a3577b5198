"""Checkpoint folders of DeepSpeed: its own files, or a note if Holdfast has the checkpoint."""

from __future__ import annotations

from pathlib import Path

from holdfast.restore.atomic_output import atomic_file

NOTE = "HOLDFAST.txt"
_PATTERN = "*_states.pt"


def stock_tag(folder: str, tag: str | None) -> str | None:
    """Return the tag to load from DeepSpeed's own files; None if a folder does not have them.

    Args:
        folder: folder of checkpoints.
        tag: tag of the checkpoint; None for that in the file `latest`.
    """
    wanted = _latest(folder) if tag is None else str(tag)
    if wanted is None or next((Path(folder) / wanted).glob(_PATTERN), None) is None:
        return None
    return wanted


def _latest(folder: str) -> str | None:
    try:
        return (Path(folder) / "latest").read_text().strip() or None
    except FileNotFoundError:
        return None


def write_note(folder: str, tag: str, home: str, step: int) -> None:
    """Write a note into the folder of a tag: the place of the checkpoint, and the command for its files."""
    place = Path(folder) / tag
    place.mkdir(parents=True, exist_ok=True)
    text = (
        f"This checkpoint is step {step} of the run in {home}, saved by Holdfast.\n\n"
        "engine.load_checkpoint() of an engine that is attached to Holdfast resumes from it.\n"
        "For DeepSpeed's own files, as zero_to_fp32.py and ds_to_universal.py read them, run\n\n"
        f"    holdfast export {home} FOLDER --to deepspeed --step {step}\n"
    )
    with atomic_file(place / NOTE, overwrite=True) as partial:
        partial.write_text(text)
