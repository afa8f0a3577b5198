"""CheckpointIO for Lightning and Fabric: background saves, durable in a home first, and verified loads."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import itemgetter
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from msgspec import Struct, field
from torch.optim import Optimizer

from holdfast.adapters.kit.run import NO_NOTICES
from holdfast.adapters.kit.store_ranks import sole_rank
from holdfast.adapters.lightning import ckpt_file
from holdfast.adapters.lightning.ckpt_file import Facts, FileId, HomeContent, HomePlace, Pickled, absolute
from holdfast.adapters.lightning.packages import TorchCheckpointIO
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.claim import read_run
from holdfast.checkpoint.home.commit import find_loadable
from holdfast.checkpoint.keeper import Save, wait_for_orphans
from holdfast.checkpoint.run import Checkpointer
from holdfast.checkpoint.run.options import Memory
from holdfast.checkpoint.store import open_store
from holdfast.errors import (
    Corrupt,
    HoldfastError,
    InvalidInput,
    NotFound,
    ResumeWarning,
    SaveWarning,
    TornSaveWarning,
)
from holdfast.system.callsite import warn
from holdfast.system.linux.partial_files import remove_partial_files, temporary_folder
from holdfast.system.log import get_logger
from holdfast.watch.compiled.trainer import CompileCache

_log = get_logger("lightning")
_ORPHANS_S = 600.0
"""Longest wait for the keeper of a dead process, which may be about to complete a checkpoint."""


class _Job(Struct):
    """File to be written from a checkpoint of the home."""

    path: str
    step: int
    save: Save | None = None  # None: it was durable before
    pickled: bytes | None = None  # None: the checkpoint's own
    is_removed: bool = False  # or replaced by a newer job
    error: Exception | None = None
    written: Future[None] = field(default_factory=Future)

    @property
    def is_waiting(self) -> bool:
        """True if the file is still to be written."""
        return not self.written.done() or self.error is not None

    def was_dropped(self, *, wait: bool) -> bool:
        """Return True if the copy of its save was torn."""
        if self.save is None:
            return False
        if wait:
            with contextlib.suppress(HoldfastError):
                self.save.wait_staged()
        return isinstance(self.save.failed, InvalidInput)


class BackgroundSaver:
    """Saver of one rank. Each save is staged at once, and written by the keeper and a thread.

    The home holds the newest checkpoint, and those whose files are not written yet. A copy in another process
    opens the home by itself.

    Attributes:
        is_training: returns True while a Trainer trains: then saves may complete in the background.
        private: returns the memory that is copied after a save has returned.
        save_s: time of the last save, until its file was written.
    """

    def __init__(self, place: HomePlace, memory: int | str | Memory) -> None:
        self.place, self._memory = place, memory
        self.is_training: Callable[[], bool] = lambda: True
        self.private: Callable[[], Iterable[Optimizer]] = tuple
        self.save_s = 0.0
        self._moment: object = None  # block without training
        self._checkpointer: Checkpointer | None = None
        self._base: int | None = None  # step that the next saves continue
        self._last = 0  # step of the newest save
        self._shared: tuple[tuple[object, ...], Save] | None = None  # moment and marks of a save
        self._jobs: dict[str, _Job] = {}  # newest job of each path
        self._earlier: list[HomeContent] = []  # checkpoints of the home when it was opened, the newest first
        self._folders: set[str] = set()  # folders of the files of this session
        self._steps: set[int] = set()  # in the home, to be deleted unless a file waits for them
        self._writer: ThreadPoolExecutor | None = None  # one thread

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.place, self._memory)

    # -- saves -----------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def moment(self, private: Callable[[], Iterable[Optimizer]] = tuple) -> Iterator[None]:
        """Mark a block without training. Tensors that do not change in it are saved once."""
        self._moment, self.private = object(), private
        try:
            yield
        finally:
            self._moment, self.private = None, tuple

    def save(self, pickled: Pickled, path: str, facts: Facts, private: Iterable[Optimizer] = ()) -> None:
        """Save a checkpoint for a path."""
        checkpointer = self._open()
        self._sort_out(ckpt_file.folder_of(path))
        self._warn_of_failures()
        marks = () if self._moment is None else (self._moment, *pickled.marks())
        if marks and self._shared is not None and self._shared[0] == marks:
            save, own = self._shared[1], pickled.data
        else:
            save, own = self._save(checkpointer, pickled, facts, private), None
            self._shared = (marks, save)
        self._add(_Job(path, save.step, save, own))
        self._delete_written(checkpointer)

    def _save(
        self, checkpointer: Checkpointer, pickled: Pickled, facts: Facts, private: Iterable[Optimizer]
    ) -> Save:
        step = max(facts.global_step or 0, self._last + 1)
        with warnings.catch_warnings():
            # Positions in the data are part of the checkpoint, so open data loaders are no doubt.
            warnings.simplefilter("ignore", ResumeWarning)
            # The callback replaces the save, and warns itself.
            warnings.simplefilter("ignore", TornSaveWarning)
            save = checkpointer.save(step, ckpt_file.make_state(pickled, facts), optimizers=private)
        self._last = step
        return save

    def continue_from(self, file: FileId) -> None:
        """Continue from the checkpoint of a file with the next save."""
        if self._checkpointer is not None:
            self._close_checkpointer()
        self._base = file.step

    def remove(self, path: str) -> None:
        """Remove a queued file, and wait for one being written."""
        job = self._jobs.pop(path, None)
        if job is not None:
            job.is_removed = True
            wait([job.written])
            if self._checkpointer is not None:
                self._delete_written(self._checkpointer)  # else the next start would write the file again

    def is_pending(self, path: str) -> bool:
        """Return True if a file will be written at this absolute path."""
        return path in self._jobs and not self._jobs[path].written.done()

    def dropped(self, *, wait: bool) -> list[str]:
        """Return the paths whose saves were dropped: something wrote to the memory while it was copied."""
        return [path for path, job in self._jobs.items() if job.was_dropped(wait=wait)]

    def _add(self, job: _Job) -> None:
        """Have a file written, in place of an earlier job of its path."""
        if job.path in self._jobs:
            self._jobs.pop(job.path).is_removed = True
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-lightning")
        job.written = self._writer.submit(self._run, job)
        self._jobs[job.path] = job
        self._steps.add(job.step)

    def _run(self, job: _Job) -> None:
        """Write the file of a job, in the thread."""
        try:
            if job.save is not None:
                job.save.wait_durable()
            if not job.is_removed:
                content = HomeContent(self.place.home, job.step)
                self.place.write(job.path, lambda path: ckpt_file.write_ckpt(content, path, job.pickled))
                if job.save is not None:
                    self.save_s = time.monotonic() - job.save.began_s
            job.error = None
        except Exception as error:  # noqa: BLE001 - of any storage library; `wait` raises it
            job.error = error

    def _warn_of_failures(self) -> None:
        """Warn about files that could not be written; `wait` tries them again."""
        for job in self._jobs.values():
            if job.is_waiting and job.error is not None and job.save is not None and job.save.durable:
                warn(f"{job.path} is not written yet: {job.error} Its checkpoint is complete.", SaveWarning)

    # -- the home --------------------------------------------------------------------------------------------
    def _open(self) -> Checkpointer:
        """Return the Checkpointer; a new one continues the run."""
        if self._checkpointer is not None:
            return self._checkpointer
        checkpointer = Checkpointer(
            self.place.home,
            keep=None,
            memory=self._memory,
            watches=[NO_NOTICES, CompileCache("off")],
            group=sole_rank(),
            quiet=True,
        )
        steps = checkpointer.all_steps()
        base = self._base if self._base in steps else None
        self._last = checkpointer.continue_from(base) or 0
        self._checkpointer = checkpointer
        self._earlier = [content for content in self._contents() if content.step in steps]
        return checkpointer

    def sort_out(self, folder: str) -> None:
        """Write the missing files of a folder and remove incomplete ones: a save may never come."""
        if not ckpt_file.is_local(self.place.home) or Path(self.place.home).is_dir():
            self._open()
            self._sort_out(folder)

    def write_as(self, found: str, path: str) -> None:
        """Write the checkpoint of a file to another path too, if that is not current."""
        file = ckpt_file.read_id(Path(found))
        for content in self._earlier:
            is_same = file is not None and content.checkpoint_id == file.checkpoint_id
            if is_same and not self._is_written(path, content) and ckpt_file.may_replace(Path(path)):
                self._add(_Job(path, content.step))

    def _sort_out(self, folder: str) -> None:
        """Have a folder's missing files written, and note the checkpoints that have files.

        Only in folders that the user saves to: the home may come from somebody else, and name any path.
        """
        if folder in self._folders:
            return
        self._folders.add(folder)
        newest: dict[str, HomeContent] = {}  # by path in the folder
        lacking: list[tuple[str, int]] = []
        for content in self._earlier:
            path = self.place.absolute(content.facts.path)
            is_newest = ckpt_file.folder_of(path) == folder and newest.setdefault(path, content) is content
            if is_newest and not self._is_written(path, content):
                lacking.append((path, content.step))
            elif path in newest or (ckpt_file.is_local(path) and self._is_written(path, content)):
                self._steps.add(content.step)
        if ckpt_file.is_local(folder):
            remove_partial_files(Path(folder))
        for path, step in reversed(lacking):  # the oldest first
            if not ckpt_file.is_local(path) or ckpt_file.may_replace(Path(path)):
                self._add(_Job(path, step))

    def _is_written(self, path: str, content: HomeContent) -> bool:
        """Return True if a file exists that is not older than a checkpoint."""
        if not ckpt_file.is_local(path):
            return self.place.exists(path)
        file = ckpt_file.read_id(Path(path))
        return file is not None and file.run == content.run and file.checkpoint_id >= content.checkpoint_id

    def write_again(self, path: str) -> bool:
        """Write the file of a path from the home; return False if no checkpoint there verifies."""
        for content in self._contents():
            if self.place.absolute(content.facts.path) == path and _write_if_whole(content, Path(path)):
                return True
        return False

    def newest(self, folder: str, others: Sequence[str] = ()) -> str | None:
        """Return the file of the newest checkpoint of the home or a local folder that verifies.

        Those from which training cannot resume are left out. A missing or damaged file is written again. If
        the home names a path outside of the folder and the others, the file has the same name in the folder.
        """
        folders = [Path(known) for known in (folder, *others) if ckpt_file.is_local(known)]
        found: dict[tuple[CheckpointId, str], HomeContent | None] = {}
        for content in self._contents():
            if content.facts.is_full:
                path = Path(self.place.absolute(content.facts.path))
                is_known = any(ckpt_file.is_inside(str(path), known) for known in folders)
                found[content.checkpoint_id, str(path if is_known else folders[0] / path.name)] = content
        for file in folders[0].glob("*.ckpt"):
            id_ = None if file.is_symlink() else ckpt_file.read_id(file)
            if id_ is not None and id_.is_full:
                found.setdefault((id_.checkpoint_id, str(file)), None)
        for (checkpoint, path), content in sorted(found.items(), key=itemgetter(0), reverse=True):
            if self._is_good(Path(path), checkpoint) or (content and self._put_back(content, Path(path))):
                return path
            warn(f"The checkpoint of {path} is damaged, so an older one is used.", SaveWarning)
        return None

    def _put_back(self, content: HomeContent, path: Path) -> bool:
        """Write a missing or damaged file; return False if that is not possible."""
        is_own = self.place.absolute(content.facts.path) == str(path)
        is_free = ckpt_file.may_replace(path) if is_own else not os.path.lexists(path)
        return is_free and _write_if_whole(content, path)

    def _is_good(self, path: Path, checkpoint: CheckpointId) -> bool:
        """Return True if a file verifies and was written from a checkpoint."""
        try:
            file = ckpt_file.verify_ckpt(path)
        except (Corrupt, OSError):
            return False
        return file is not None and file.checkpoint_id == checkpoint

    def _contents(self) -> list[HomeContent]:
        """Return the checkpoints in the home, the newest first. Damaged ones are left out."""
        wait_for_orphans(self.place.home, timeout_s=_ORPHANS_S, notify=_log.info)
        store, found = open_store(self.place.home), []
        run = read_run(store)
        for loadable in find_loadable(store, run.id if run else None):
            with contextlib.suppress(Corrupt, NotFound):
                found.append(HomeContent(self.place.home, loadable.step, loadable.attempt))
        return found

    def _delete_written(self, checkpointer: Checkpointer) -> None:
        """Delete the checkpoints whose files are written, except the newest."""
        kept = {self._last, *(job.step for job in self._jobs.values() if job.is_waiting)}
        for step in sorted(self._steps - kept):
            checkpointer.delete(step)
        self._steps &= kept
        self._jobs = {path: job for path, job in self._jobs.items() if job.step in kept}

    # -- waits -----------------------------------------------------------------------------------------------
    def wait(self, path: str | None = None) -> None:
        """Wait until a file, or all files, are written."""
        for job in [job for job in self._jobs.values() if path in (None, job.path)]:
            wait([job.written])
            if job.error is not None:
                self._run(job)  # once more: the cause may have passed
            if job.error is not None:
                raise job.error

    def close(self) -> None:
        """Wait until everything is written, and let the keeper end. A later save opens the home again."""
        if self._checkpointer is None:
            return
        try:
            self.wait()
            self._delete_written(self._checkpointer)
        finally:
            self._close_checkpointer()

    def _close_checkpointer(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        self._base, self._shared = self._last or None, None
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        self._jobs, self._steps = {}, set()
        self._earlier, self._folders = [], set()
        if checkpointer is not None:
            checkpointer.close()


def _write_if_whole(content: HomeContent, path: Path) -> bool:
    """Write the file of a checkpoint; return False if the checkpoint is damaged."""
    try:
        ckpt_file.write_ckpt(content, path)
    except (Corrupt, NotFound):
        return False
    return True


_FULL = ("optimizer_states", "loops")
"""Entries without which Lightning cannot resume training."""


class HoldfastCheckpointIO(TorchCheckpointIO):
    """CheckpointIO that saves in the background: `Fabric(plugins=[HoldfastCheckpointIO("runs/x.holdfast")])`.

    Each save is copied to memory at once, made durable in `home`, and then written as the file that Lightning
    asks for: an ordinary one of torch.save, with the hashes of its records. With a Trainer, use
    `HoldfastCheckpoint`, which sets this plugin, and also resumes exactly.

    Args:
        home: folder or URL for the newest checkpoint; by default the folder of the first file with
            ".holdfast" appended, beside that folder.
        memory: limit of the staging memory.
        wait: return from each save when its file is written.
    """

    def __init__(
        self,
        home: str | os.PathLike[str] | None = None,
        *,
        memory: int | str | Memory = "8GiB",
        wait: bool = False,
    ) -> None:
        super().__init__()
        self.home = None if home is None else absolute(home)
        self._memory, self._wait = memory, wait
        self._saver: BackgroundSaver | None = None

    # -- CheckpointIO ----------------------------------------------------------------------------------------
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint for a path or an fsspec URL, with the options of its file system.

        Its tensors are copied before this returns, but for those of the optimizers while a Trainer trains.

        Raises:
            TypeError: `storage_options` is not a mapping, or the path is local.
            HoldfastError: this save failed, or an earlier one.

        Blocks: for the copy; outside of training until the file is written.
        """
        target = absolute(path)
        saver = self.saver_for(target, _parse_options(storage_options, target))
        facts = Facts(
            saver.place.relative(target),
            _integer(checkpoint.get("global_step")),
            _integer(checkpoint.get("epoch")),
            all(key in checkpoint for key in _FULL),
        )
        saver.save(ckpt_file.pickle_content(checkpoint), target, facts, () if self._wait else saver.private())
        if self._wait:
            saver.wait(target)
        elif not saver.is_training():
            saver.close()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the checkpoint of a path or fsspec URL. Files that Holdfast has written are verified first.

        A file that is missing or damaged is written again from the home, if it is there.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            Corrupt: the file is damaged, and the home does not hold its checkpoint.
        """
        target = absolute(path)
        if self._saver is not None:
            self._saver.wait(target)
        if not ckpt_file.is_local(target):
            return self._load_remote(target, map_location, weights_only)
        file = self._verify(target)
        loaded = super().load_checkpoint(path, map_location, weights_only)
        if file is not None and (saver := self._existing_saver(target)) is not None:
            saver.continue_from(file)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file of a path. The home loses its checkpoint after the next save."""
        target = absolute(path)
        if self._saver is not None:
            self._saver.remove(target)
        if ckpt_file.is_local(target) and Path(target).is_symlink():
            Path(target).unlink()  # perhaps of a file that is not written yet
        else:
            super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait until all files are written, at the end of a trainer's work."""
        super().teardown()
        if self._saver is not None:
            self._saver.close()

    def wait(self, path: str | os.PathLike[str] | None = None) -> None:
        """Wait until a file, or all files, are written.

        Raises:
            HoldfastError, OSError: a save failed, or a file could not be written.
        """
        if self._saver is not None:
            self._saver.wait(None if path is None else absolute(path))

    # -- parts -----------------------------------------------------------------------------------------------
    def saver_for(self, path: str, storage_options: Mapping[str, Any] | None = None) -> BackgroundSaver:
        """Return the saver. At the first call its home is that of the options, or the one beside a path."""
        if self._saver is None:
            self.home = self.home or ckpt_file.home_beside(ckpt_file.folder_of(path))
            self._saver = BackgroundSaver(HomePlace(self.home, storage_options or {}), self._memory)
            weakref.finalize(self, self._saver.close)
        elif storage_options:
            self._saver.place = HomePlace(self._saver.place.home, storage_options)
        return self._saver

    def _existing_saver(self, path: str) -> BackgroundSaver | None:
        """Return the saver of a loaded file, if there is a home that may hold it."""
        is_known = self._saver is not None or self.home
        has_home = is_known or Path(ckpt_file.home_beside(ckpt_file.folder_of(path))).is_dir()
        return self.saver_for(path) if has_home else None

    def _verify(self, path: str) -> FileId | None:
        """Return the checkpoint that a local file was written from; None if it is not Holdfast's.

        A missing or damaged file is written again from the home.
        """
        damage: Corrupt | None = None
        if Path(path).is_file():
            try:
                return ckpt_file.verify_ckpt(Path(path))
            except Corrupt as error:
                damage = error
        saver = self._existing_saver(path)
        if saver is not None and saver.write_again(path):
            if damage is not None:
                warn(f"{damage} It was written again from {saver.place.home}.", SaveWarning)
            return ckpt_file.verify_ckpt(Path(path))
        if damage is not None:
            raise Corrupt(
                f"{damage} It was not loaded, and its checkpoint is no longer in the home. Resume from "
                'another file, or with ckpt_path="last", which takes the newest one that verifies.',
                key=path,
            )
        return None

    def _load_remote(self, url: str, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
        options = {} if self._saver is None else self._saver.place.storage_options
        fs, name = url_to_fs(url, **options)
        if not fs.exists(name):
            raise FileNotFoundError(f"Checkpoint file not found: {url}")
        with temporary_folder("lightning") as folder:
            local = Path(folder) / "file.ckpt"
            fs.get_file(name, str(local))
            ckpt_file.verify_ckpt(local)
            return super().load_checkpoint(local, map_location, weights_only)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options: a copy in another process opens the home by itself."""
        return {**vars(self), "_saver": None}


def _integer(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _parse_options(given: Any, path: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or ckpt_file.is_local(path):
        raise TypeError(
            "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported "
            "for `HoldfastCheckpointIO`, unless it is a mapping of fsspec's options for the file system of a "
            "URL. Leave it out, or make it one."
        )
    return given
