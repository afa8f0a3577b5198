"""Checkpoint folders of DeepSpeed: its own files, or a note if Holdfast has the checkpoint."""

from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.errors import Corrupt, Denied
from holdfast.system.linux.files import open_regular

NOTE = "HOLDFAST.txt"
_PATTERN = "*_states.pt"
_MAX_TAG_BYTES = 4096


def stock_tag(folder: str, tag: str | None) -> str | None:
    """Return the tag to load from DeepSpeed's own files; None if a folder does not have them.

    Args:
        folder: folder of checkpoints.
        tag: tag of the checkpoint; None for that in the file `latest`.

    Raises:
        Corrupt: `latest` is not a file with a tag.
        Denied: it may not be read.
    """
    wanted = _latest(folder) if tag is None else str(tag)
    if wanted is None or next((Path(folder) / wanted).glob(_PATTERN), None) is None:
        return None
    return wanted


def _latest(folder: str) -> str | None:
    path = Path(folder) / "latest"
    try:
        with open_regular(path) as file:
            tag = file.read(_MAX_TAG_BYTES + 1).decode().strip()
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise Denied(f"{path} cannot be read: {error}. Nothing was loaded.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Corrupt(_not_a_tag(path, str(error))) from error
    if len(tag) > _MAX_TAG_BYTES or "\0" in tag:
        raise Corrupt(_not_a_tag(path, f"it has {len(tag)} characters, or a NUL"))
    return tag or None


def _not_a_tag(path: Path, why: str) -> str:
    return (
        f"{path} does not contain the tag of a checkpoint: {why}. Nothing was loaded. Write the tag into it, "
        "name the tag as you load, or remove that file if no checkpoint of DeepSpeed's own is there."
    )


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
