"""Export of a checkpoint to other formats, at once or in a thread while training continues."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import HoldfastError, Internal, InvalidInput, NotFound, SaveWarning
from holdfast.system.callsite import warn
from holdfast.system.linux.partial_files import remove_partial_files
from holdfast.system.units import parse_bytes, parse_step

if TYPE_CHECKING:
    import torch

    from holdfast.checkpoint.keeper.save import Save

_NICENESS = 10
_EXIT_S = 5.0  # to remove what was written
KINDS = ("safetensors", "hf", "torch", "dcp", "trainer", "deepspeed")
"""Kinds of exports: a safetensors file, a Hugging Face folder, a file of torch.save, a DCP folder, a folder
`checkpoint-N` of Hugging Face's Trainer, a folder of DeepSpeed's checkpoints."""
_KIND_BY_SUFFIX = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "torch")}
_STEP = re.compile(r"(?:.*[-_.])?(?:checkpoint|step)[-_]?(\d+)(?:\.\w+)?", re.IGNORECASE)


def choose_kind(path: Path, kind: str | None) -> str:
    """Return the kind of an export; by default the one that the suffix of its name stands for."""
    by_suffix = _KIND_BY_SUFFIX.get(path.suffix.lower())
    if kind is not None:
        _check_kind(kind)
    elif by_suffix is None:
        raise InvalidInput(
            f"The name {path.name!r} does not choose a format: end it in {' or '.join(_KIND_BY_SUFFIX)}, or "
            f"choose one of {', '.join(KINDS)} (kind=, --to). Nothing was exported.",
            key=str(path),
        )
    if kind and by_suffix not in (None, kind):
        raise InvalidInput(
            f"The name {path.name!r} stands for the format {by_suffix}, but {kind} was asked for. Nothing "
            "was exported. Choose another name, or the other format (kind=, --to).",
            key=str(path),
        )
    return kind or by_suffix or ""


def _check_kind(kind: str) -> None:
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


class Exported(Struct, frozen=True):
    """Result of an export. `num_bytes` counts bytes of tensors."""

    path: str
    step: int
    kind: str
    num_tensors: int
    num_bytes: int
    seconds: float


def export_checkpoint(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    kind: str | None = None,
    only: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    max_shard_bytes: int | str = "5GB",
    rank: int = 0,
    overwrite: bool = False,
    num_threads: int = 4,
    on_total: Callable[[int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Exported:
    """Export a checkpoint, or a part of it, to another format. Every byte is verified.

    safetensors files and Hugging Face folders contain only tensors; a folder for the Trainer or for
    DeepSpeed has all that they resume from. Files of torch.save and DCP folders
    contain the values too, as plain Python values: arrays become lists, paths become strings.

    Memory: about 65 MiB in addition to torch, for any size; for DeepSpeed its largest file.

    Args:
        checkpoint: checkpoint from `holdfast.open`.
        path: file or folder to write; its parent must exist. A name such as `checkpoint-500` must have the
            step's number.
        kind: one of `exporter.KINDS`; by default the one of the suffix: .safetensors, or .pt and others
            for torch.
        only: prefixes of the names to export ("model" includes "model.weight"). By default everything is
            exported.
        rename: new prefix by old prefix; "" removes a prefix with its dot. For torch and DCP, whose trees
            are nested, only top-level keys can be renamed.
        max_shard_bytes: maximum bytes of tensors in a shard of a Hugging Face folder, such as "5GB".
        rank: rank whose per-rank tensors and values are exported.
        overwrite: replace an older export.
        num_threads: threads that read and hash.
        on_total: called once with the size of all tensors in bytes, before they are read.
        on_bytes: called with a number of bytes after they have been verified.

    Raises:
        Conflict: the destination exists and `overwrite` is False.
        NotFound: the checkpoint has no names with a prefix of `only`, or one of its files is missing.
        InvalidInput: the kind is unknown, the name of the path contradicts it or the step, two tensors get
            the same name, or the path is invalid.
        Corrupt: the checkpoint is damaged. Nothing was written.
        RetryLater: the store failed, or the destination could not be written.

    Ranks: not collective. Call it in one process.
    Blocks: until the export is durable.
    """
    began = time.perf_counter()
    target, limit = Path(path).expanduser(), parse_bytes(max_shard_bytes, "max_shard_bytes")
    kind = choose_kind(target, kind)
    check_step(target, checkpoint.step)
    from holdfast.checkpoint.exchange import trainer_export, weights_export  # slow, and needed only here
    from holdfast.checkpoint.exchange.export_selection import ExportSelection

    selection = ExportSelection(
        checkpoint, rank=rank, only=only, rename=rename, num_threads=num_threads, on_bytes=on_bytes
    )
    writers: dict[str, Callable[..., None]] = {
        "safetensors": weights_export.write_safetensors_file,
        "hf": partial(weights_export.write_hf_folder, max_shard_bytes=limit),
        "torch": weights_export.write_torch_file,
        "dcp": weights_export.write_dcp_folder,
        "trainer": partial(trainer_export.write_trainer_folder, max_shard_bytes=limit),
        "deepspeed": trainer_export.write_deepspeed_folder,
    }
    sizes = [one.num_bytes for one in selection.tensors.values()]
    if kind == "deepspeed":
        sizes = trainer_export.deepspeed_sizes(checkpoint)
    elif kind in ("torch", "dcp"):
        sizes = [one.num_bytes for name, one in selection.tensors.items() if selection.original(name) == name]
    if on_total is not None:
        on_total(sum(sizes))
    writers[kind](selection, target, overwrite=overwrite)
    count = len(sizes) if kind == "deepspeed" else len(selection.tensors)
    seconds = time.perf_counter() - began
    return Exported(str(target), checkpoint.step, kind, count, selection.num_bytes, seconds)


def map_weights(checkpoint: Checkpoint, key: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the state dict of the module saved under a key: whole tensors, verified, in a mapped file.

    The system drops their pages when memory is short, and reads them again. Tied tensors are the same object.
    The file in `folder` has no name any more when this returns; its space is free when the tensors are.
    """
    from safetensors.torch import load_file

    remove_partial_files(folder)  # also of a killed process
    path = folder / f".holdfast-weights.{secrets.token_hex(8)}.partial"
    try:
        export_checkpoint(checkpoint, path, kind="safetensors", only=[key], rename={key: ""})
        found = load_file(path)
    finally:
        path.unlink(missing_ok=True)
    prefix = f"{key}."
    roots = {name: checkpoint.info(prefix + name).tied_to or prefix + name for name in found}
    return {name: found.get(root.removeprefix(prefix), found[name]) for name, root in roots.items()}


class _ProgramEnds(Exception):
    """The program ends before the export does."""


_program_ends = threading.Event()
_under_way: dict[Future[Exported], tuple[threading.Thread, Path]] = {}
"""Exports in the background that have not ended, each with its thread and its path."""


def export_in_background(
    home: str | os.PathLike[str] | Store,
    path: str | os.PathLike[str],
    *,
    after: Save | None = None,
    step: int | None = None,
    kind: str = "safetensors",
    only: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    max_shard_bytes: int | str = "5GB",
    rank: int = 0,
    overwrite: bool = False,
) -> Future[Exported]:
    """Start an export of a checkpoint in the background. Every byte is read from home and verified.

    The thread has a lower priority and reads one block after the other, so that training keeps the processor.
    A failure is a SaveWarning, and raised by `result`. A program that ends earlier stops the export, with a
    warning: call `result` first. Nothing incomplete ever appears at `path`.

    Memory: as `export_checkpoint`. The tensors in memory are not used, so that no second copy of them exists.

    Args:
        home: home of the run, as for `holdfast.open`.
        path: file or folder to write; its parent must exist.
        after: a save of this program, whose step is exported as soon as it is in home. Keep that checkpoint
            long enough: an export of one that `keep` deletes meanwhile fails.
        step: step to export; by default the newest.
        kind: see `export_checkpoint`.
        only: see `export_checkpoint`.
        rename: see `export_checkpoint`.
        max_shard_bytes: see `export_checkpoint`.
        rank: see `export_checkpoint`.
        overwrite: replace an older export.

    Returns:
        The future of the export. It cannot be cancelled. `result(timeout)` takes seconds and raises
        `concurrent.futures.TimeoutError`, while the export continues.

    Raises:
        InvalidInput: the kind, the size or the step is invalid, or both `after` and `step` are given.

    Ranks: not collective. Call it on one rank.
    Blocks: no.
    """
    _check_kind(kind)
    limit = parse_bytes(max_shard_bytes, "max_shard_bytes")
    if after is not None and step is not None:
        raise InvalidInput("export_in_background() takes after= or step=, not both. Nothing was exported.")
    chosen = None if step is None else parse_step(step, "export_in_background()")

    target = Path(path).expanduser()

    def write() -> Exported:
        return export_checkpoint(
            open_checkpoint(home, chosen if after is None else _wait_for(after)),
            target,
            kind=kind,
            only=only,
            rename=rename,
            max_shard_bytes=limit,
            rank=rank,
            overwrite=overwrite,
            num_threads=1,
            on_bytes=_stop_if_program_ends,
        )

    export: Future[Exported] = Future()
    export.set_running_or_notify_cancel()  # so that it cannot be cancelled
    export.add_done_callback(_under_way.pop)
    run = partial(_run, export, write, target, after)
    thread = threading.Thread(target=run, name="holdfast-export", daemon=True)
    _under_way[export] = thread, target
    thread.start()
    return export


def _run(export: Future[Exported], write: Callable[[], Exported], target: Path, after: Save | None) -> None:
    """Write an export with a lower priority, and give the future its result."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread
    try:
        export.set_result(write())
    except _ProgramEnds:
        pass
    except HoldfastError as error:
        if isinstance(error, NotFound) and after is not None and not after.skipped:
            text = (
                f"{error} It was saved by this program: if it was only due in the local folder, save it with "
                "to_home=True; if `keep` has deleted it since, keep more."
            )
            error = NotFound(text, step=after.step)
        _fail(export, target, error)
    except Exception as error:  # noqa: BLE001 - the thread must not end without a result
        text = f"{error!r}. Nothing was written there. This is a bug of Holdfast: report it."
        _fail(export, target, Internal(text))


def _fail(export: Future[Exported], target: Path, error: HoldfastError) -> None:
    try:
        warn(f"The export to {target} failed: {error}", SaveWarning)
    finally:
        export.set_exception(error)


def _stop_if_program_ends(num_bytes: int) -> None:
    """Stop the export after some of its bytes if the program ends."""
    if _program_ends.is_set():
        raise _ProgramEnds


def _wait_for(save: Save) -> int:
    """Wait until a save is in home, and return its step."""
    save.wait_home()
    if save.skipped:
        raise NotFound(
            f"The save of step {save.step} was skipped, since no staging memory was free. Nothing was "
            "exported. Export another step.",
            step=save.step,
        )
    return save.step


@atexit.register
def _stop_all() -> None:
    """Stop all exports of a program that ends, and warn. A thread that is still in C++ would abort it."""
    _program_ends.set()
    for export, (thread, target) in list(_under_way.items()):
        thread.join(_EXIT_S)
        if not export.done():
            warn(
                f"The program ended before the export to {target} did, so nothing is there. Call result() "
                "of the export before the end, or run `holdfast export`.",
                SaveWarning,
            )
