"""Kind of an export by its name, and checks of that name; without torch."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.errors import InvalidInput

KINDS = ("safetensors", "hf", "torch", "dcp", "trainer", "deepspeed")
"""Kinds of exports: a safetensors file, a Hugging Face folder, a file of torch.save, a DCP folder, a folder
`checkpoint-N` of Hugging Face's Trainer, a folder of DeepSpeed's checkpoints."""
_KIND_BY_SUFFIX = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "torch")}
_STEP = re.compile(r"(?:.*[-_.])?(?:checkpoint|step)[-_]?(\d+)(?:\.\w+)?", re.IGNORECASE)


def choose_kind(path: Path, kind: str | None) -> str:
    """Return the kind of an export; by default the one that the suffix of its name stands for."""
    by_suffix = _KIND_BY_SUFFIX.get(path.suffix.lower())
    if kind is None and by_suffix is None:
        raise InvalidInput(
            f"The name {path.name!r} does not choose a format: end it in {' or '.join(_KIND_BY_SUFFIX)}, or "
            f"choose one of {', '.join(KINDS)} (kind=, --to). Nothing was exported.",
            key=str(path),
        )
    if kind is not None:
        check_kind(kind)
    if kind is not None and by_suffix not in (None, kind):
        raise InvalidInput(
            f"The name {path.name!r} stands for the format {by_suffix}, but {kind} was asked for. Nothing "
            "was exported. Choose another name, or the other format (kind=, --to).",
            key=str(path),
        )
    return kind or by_suffix or ""


def check_kind(kind: str) -> None:
    """Raise InvalidInput unless a kind of export is one of `KINDS`."""
    if kind not in KINDS:
        raise InvalidInput(
            f"Unknown kind of export {kind!r}: use {', '.join(KINDS)}. Nothing was exported.", key=kind
        )


def check_step(path: Path, step: int) -> None:
    """Check that the name of an export does not have the number of another step."""
    named = _STEP.fullmatch(path.name)
    if named is not None and int(named[1]) != step:
        raise InvalidInput(
            f"{path.name} names step {int(named[1])}, but the checkpoint is of step {step}. Nothing was "
            f"exported. Choose that checkpoint (--step {int(named[1])}), or another name.",
            key=str(path),
            step=step,
        )
