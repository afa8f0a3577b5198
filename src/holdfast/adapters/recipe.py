"""Decorators `save_checkpoint` and `load_checkpoint` of SkyPilot's training guide, crash-safe."""

from __future__ import annotations

import functools
import inspect
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import xxhash
from msgspec import Meta, Struct
from msgspec.structs import replace

from holdfast.checkpoint.home.newest import LIMIT_S, Patience
from holdfast.checkpoint.store.contract import check_name
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import Corrupt, Denied, HoldfastError, InvalidInput, NotFound, RetryLater
from holdfast.system.documents import Count, decode_as, to_plain
from holdfast.system.environment import JobReport, report_to_job
from holdfast.system.linux.files import NOT_A_FILE, open_regular
from holdfast.system.log import get_logger
from holdfast.system.units import parse_step

__all__ = ["load_checkpoint", "save_checkpoint"]

logger = get_logger("adapters")
_P = ParamSpec("_P")
_T = TypeVar("_T")
_BLOCK_BYTES = 8 << 20
_BEFORE = ".before-"  # prefix of a step's files while the step is saved again
_PRUNED = ".pruned-"  # prefix of a step's metadata while its files are deleted


def save_checkpoint(
    save_dir: str, max_checkpoints: int = 5, checkpoint_prefix: str = "checkpoint"
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a function that saves a step into files below `save_dir`. File names must contain the step.

    The function is called once. After it returns, its files are hashed and made durable. Only then
    `{prefix}_step_{step}_metadata.json` is written, which completes the step. If the function is killed, an
    earlier version of the step is kept. Its exceptions propagate.

    Args:
        save_dir: folder of the checkpoints, created if it does not exist.
        max_checkpoints: number of steps to keep. The step that was just saved is always kept.
        checkpoint_prefix: prefix that separates several series in one folder. Functions with the same
            prefix save different files of the same checkpoint.

    Returns:
        The decorator. The step is the argument `step`, or else the first one. With None, nothing is recorded.

    Raises:
        InvalidInput: raised by the decorated function if the step is invalid, or no file with the step in
            its name was written.
        RetryLater: raised by the decorated function if the disk is full or fails.

    Ranks: one process at a time. Ranks that save their own files need different prefixes.
    Source: the training guide in SkyPilot's documentation, "Robust checkpointing with error handling".
    """
    if max_checkpoints < 1:
        raise InvalidInput(f"max_checkpoints must be at least 1, not {max_checkpoints}.")

    def decorate(func: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(func)
        name = _step_name(signature)
        Path(save_dir).mkdir(parents=True, exist_ok=True)

        @functools.wraps(func)
        def save(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            arguments = signature.bind_partial(*args, **kwargs).arguments
            step = arguments.get(name)
            if step is None:
                return func(*args, **kwargs)
            step = parse_step(step, "save_checkpoint")
            series = _Series(Path(save_dir), checkpoint_prefix)
            model = arguments.get("model", next(iter([*arguments.values()][1:]), None))
            result = series.save(step, lambda: func(*args, **kwargs), type(model).__name__)
            series.prune(max_checkpoints, step)
            series.report(step)
            return result

        return save

    return decorate


def load_checkpoint(
    save_dir: str, checkpoint_prefix: str = "checkpoint"
) -> Callable[[Callable[_P, _T]], Callable[_P, _T | None]]:
    """Decorate a function that loads a step saved with `save_checkpoint`.

    The function is called with the newest step whose files match their hashes, instead of the given step.
    Damaged steps are skipped with a warning. Steps without a file that the function needs are skipped too,
    because another function may have been killed before it saved that file.

    Args:
        save_dir: folder of `save_checkpoint`.
        checkpoint_prefix: prefix of `save_checkpoint`.

    Returns:
        The decorator. The decorated function returns None, without a call, if no step was ever saved.

    Raises:
        Corrupt: raised by the decorated function if all checkpoints are damaged.
        RetryLater, Denied: raised by the decorated function if the newest step could not be read for 2
            minutes. It may be intact, so an older one is not loaded.

    Source: like `save_checkpoint`.
    """

    def decorate(func: Callable[_P, _T]) -> Callable[_P, _T | None]:
        signature = inspect.signature(func)
        name = _step_name(signature)

        @functools.wraps(func)
        def load(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
            bound = signature.bind_partial(*args, **kwargs)

            def call(step: int) -> _T:
                bound.arguments[name] = step
                return func(*bound.args, **bound.kwargs)

            return _Series(Path(save_dir), checkpoint_prefix).load(call)

        return load

    return decorate


class _File(Struct, frozen=True):
    """Size and hash of a file of a step."""

    num_bytes: Count
    xxh3: Annotated[str, Meta(max_length=64)]


class _Metadata(Struct, frozen=True, kw_only=True):
    """Metadata of a step.

    `files` are by path in the folder; None if the guide's own code wrote it without hashes.
    """

    step: Any = None  # replaced by that in the name of the metadata's file
    timestamp: Any
    model_type: Any
    files: dict[str, _File] | None = None


class _Unusable(Exception):
    """Reason to skip a step."""


class _Series:
    """Checkpoints of one prefix in a folder."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self._store = LocalStore(folder)
        self._is_metadata = re.compile(re.escape(prefix) + r"_step_(\d+)_metadata\.json")

    # -- save ------------------------------------------------------------------------------------------------
    def save(self, step: int, write: Callable[[], _T], model_type: str) -> _T:
        """Call `write` for a step, then complete the step."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        earlier = self._earlier(step)
        for name in earlier:
            (self._folder / name).replace(self._before(name))
        try:
            seen = self._stat_files(step)
            result = write()
            files: dict[str, _File] = {}
            for name in self._new_files(step, seen):
                with (self._folder / name).open("rb") as file:
                    os.fsync(file.fileno())
                self._store.sync(posixpath.dirname(name))
                files[name] = _hash_file(self._folder / name)
        except BaseException:
            self._move_back(earlier)  # after a kill, the next load does this
            raise
        kept = [name for name in earlier if name not in files]
        self._move_back(kept)
        files |= {name: earlier[name] for name in kept}
        now = datetime.now(timezone.utc).isoformat()
        metadata = _Metadata(step=step, timestamp=now, model_type=model_type, files=files)
        self._store.put(self._metadata_name(step), json.dumps(to_plain(metadata), indent=1).encode())
        self._remove_before(earlier)
        logger.info("Saved checkpoint at step %d", step)
        return result

    def report(self, step: int) -> None:
        """Report a step to the job, if any. A job with progress is restarted."""
        report_to_job(JobReport(home=str(self._folder.absolute() / self._prefix), step=step))

    def prune(self, max_checkpoints: int, newest: int) -> None:
        """Delete the oldest steps beyond the limit, but never `newest`, which was just saved."""
        older = [step for step in sorted(self._steps()) if step != newest]
        for step in older[: max(0, len(older) + 1 - max_checkpoints)]:
            # The metadata first, so that an incomplete step is never visible.
            path = self._folder / self._metadata_name(step)
            path.replace(path.with_name(_PRUNED + path.name))
            self._store.sync("")
        self._remove_pruned()

    def _remove_leftovers(self) -> None:
        """Finish what a killed process began: a step that was saved again, and deletions."""
        self._store.sweep(f"{self._prefix}_step_")
        for step in list(self._steps()):
            with suppress(NotFound, Corrupt):
                metadata = self._read(step)
                names = [name for name in metadata.files or {} if self._before(name).exists()]
                if names and not self._fault(metadata):
                    self._remove_before(names)
        self._remove_pruned()

    def _remove_before(self, names: Iterable[str]) -> None:
        for name in names:
            self._before(name).unlink(missing_ok=True)

    def _remove_pruned(self) -> None:
        """Delete the files of pruned steps that no other step has."""
        kept = {name for step in self._steps() for name in self._names(step)}
        for path in list(self._folder.glob(f"{_PRUNED}*")):
            found = self._is_metadata.fullmatch(path.name.removeprefix(_PRUNED))
            if found is None:  # of another series
                continue
            names = set(self._names(int(found[1]), path.name)) - kept
            for name in names:
                self._store.delete(name)
            self._remove_before(names)
            path.unlink()

    def _earlier(self, step: int) -> dict[str, _File]:
        """Return the files of the step if it was saved before and is intact."""
        with suppress(NotFound, Corrupt):
            metadata = self._read(step)
            if metadata.files is not None and not self._fault(metadata):
                return metadata.files
        return {}

    def _move_back(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._before(name).replace(self._folder / name)

    def _before(self, name: str) -> Path:
        path = self._folder / name
        return path.with_name(_BEFORE + path.name)

    def _new_files(self, step: int, seen: dict[str, tuple[int, int, int]]) -> list[str]:
        """Return the files of the step that are new or changed."""
        written = sorted(name for name, look in self._stat_files(step).items() if seen.get(name) != look)
        if not written:
            raise InvalidInput(
                f"The function for step {step} did not write a file in {self._folder} with {step} in its "
                f"name. Include the step in file names, such as model_{step}.pt, so that no file is "
                "overwritten."
            )
        return written

    def _stat_files(self, step: int) -> dict[str, tuple[int, int, int]]:
        """Return size, modification time and inode of the files that may belong to a step."""
        has_step = re.compile(rf"(?<!\d)0*{step}(?!\d)")
        looks = {}
        for path in self._folder.rglob("*"):
            name = path.relative_to(self._folder).as_posix()
            is_ours = path.name.startswith((_BEFORE, ".unfinished-")) or path.name.endswith("_metadata.json")
            if has_step.search(name) and not is_ours:
                with suppress(FileNotFoundError):
                    info = path.stat()
                    if path.is_file():
                        looks[name] = info.st_size, info.st_mtime_ns, info.st_ino
        return looks

    # -- load ------------------------------------------------------------------------------------------------
    def load(self, call: Callable[[int], _T]) -> _T | None:
        """Call the function with the newest valid step. Returns None if no step exists."""
        faults = []
        patience = Patience(LIMIT_S, logger.warning)
        steps = patience.spend(str(self._folder), lambda: sorted(self._steps(), reverse=True))
        for step in steps:
            try:
                metadata = patience.spend(f"Step {step}", lambda step=step: self._examine(step))
                result = self._call(metadata, call)
            except _Unusable as fault:
                logger.warning("Step %d was skipped: %s", step, fault)
                faults.append(f"step {step}: {fault}")
            else:
                self.report(step)
                logger.info("Loaded checkpoint from step %d", step)
                return result
        if faults:
            raise Corrupt(
                f"None of the {len(faults)} checkpoints in {self._folder} can be loaded: "
                f"{'; '.join(faults)}. Nothing was loaded. To start from scratch, move them away."
            )
        logger.warning("No checkpoints found in %s", self._folder)
        return None

    def _examine(self, step: int) -> _Metadata:
        """Return a step's metadata, once its files match it."""
        with self._convert_errors(step):
            try:
                metadata = self._read(step)
            except (Corrupt, NotFound) as error:
                raise _Unusable(str(error)) from error
            if metadata.files is None:  # without hashes, but a failure to read would look like damage
                for name in self._stat_files(step):
                    _hash_if_present(self._folder / name)
            if fault := self._fault(metadata):
                raise _Unusable(fault)
            return metadata

    @contextmanager
    def _convert_errors(self, step: int | None = None) -> Iterator[None]:
        """Convert errors of the operating system to errors of Holdfast."""
        try:
            yield
        except HoldfastError:
            raise
        except OSError as error:
            kind = Denied if isinstance(error, PermissionError) else RetryLater
            what = error.filename or self._folder
            raise kind(f"{what} could not be read: {error.strerror or error}.", step=step) from error

    def _call(self, metadata: _Metadata, call: Callable[[int], _T]) -> _T:
        """Return the result of loading a step.

        Damage of a step that the guide's own code saved, without hashes, only shows when loading fails.
        """
        if metadata.files is None:
            logger.warning("Step %d was saved without hashes and is loaded unverified", metadata.step)
        try:
            return call(metadata.step)
        except Exception as error:
            is_missing = isinstance(error, FileNotFoundError)
            if metadata.files is None and (is_missing or not isinstance(error, OSError)):
                raise _Unusable(f"it has no hashes, and could not be loaded: {error!r}") from error
            name = error.filename if is_missing else None
            path = Path(os.fsdecode(name)).absolute() if isinstance(name, (str, bytes)) else None
            if path is not None and path.is_relative_to(self._folder.absolute()):
                raise _Unusable(f"it has no {name}") from error
            raise  # its bytes could not be read, or the function itself is wrong

    def _steps(self) -> Iterator[int]:
        with self._convert_errors(), suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                if found := self._is_metadata.fullmatch(path.name):
                    yield int(found[1])

    def _read(self, step: int, name: str | None = None) -> _Metadata:
        name = name or self._metadata_name(step)
        try:
            found = decode_as(_Metadata, self._store.get(name), name)
            for file in found.files or {}:
                self._check_own(file)
            return replace(found, step=step)
        except (Corrupt, InvalidInput) as error:
            raise Corrupt(f"{self._folder / name} cannot be read: {error}", step=step) from error

    def _check_own(self, name: str) -> None:
        """Check a name in the metadata. Its file may be moved or deleted: it must be below the folder."""
        check_name(name)
        folder = (self._folder / name).parent.resolve()
        if not folder.is_relative_to(self._folder.resolve()):
            raise InvalidInput(f"{name} is in {folder}, outside of {self._folder}.", key=name)

    def _names(self, step: int, metadata_name: str | None = None) -> list[str]:
        with suppress(Corrupt, NotFound):
            metadata = self._read(step, metadata_name)
            return list(metadata.files or [f"{self._prefix}_step_{step}.pt"])
        return []

    def _fault(self, metadata: _Metadata) -> str:
        """Return the fault of a step's files, or "". Files of a save that did not finish are restored."""
        for name, wanted in (metadata.files or {}).items():
            found = _hash_if_present(self._folder / name)
            if found != wanted and _hash_if_present(self._before(name)) == wanted:
                self._move_back([name])
            elif found is None:
                return f"{name} is missing"
            elif found != wanted:
                return f"{name} is damaged: expected {wanted}, found {found}"
        return ""

    def _metadata_name(self, step: int) -> str:
        return f"{self._prefix}_step_{step}_metadata.json"


def _hash_if_present(path: Path) -> _File | None:
    try:
        return _hash_file(path)
    except OSError as error:
        if error.errno in NOT_A_FILE:
            return None
        raise


def _hash_file(path: Path) -> _File:
    hashed, num_bytes = xxhash.xxh3_128(), 0
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            hashed.update(block)
            num_bytes += len(block)
    return _File(num_bytes, hashed.hexdigest())


def _step_name(signature: inspect.Signature) -> str:
    names = list(signature.parameters)
    if not names:
        raise InvalidInput("The decorated function has no arguments. It needs one named `step`.")
    return "step" if "step" in names else names[0]
