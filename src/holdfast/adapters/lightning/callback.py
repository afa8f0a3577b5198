"""ModelCheckpoint for Lightning that saves in the background and resumes exactly."""

# The annotations are values and no strings, because LightningCLI reads them.

import os
import signal
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.adapters.kit.run import Notices, PrivateMemory, private_memory
from holdfast.adapters.lightning import resume_point
from holdfast.adapters.lightning.ckpt_file import HomePlace, absolute, home_beside, is_local
from holdfast.adapters.lightning.packages import ModelCheckpoint, SIGTERMException, TorchCheckpointIO
from holdfast.adapters.lightning.plugin import BackgroundSaver, HoldfastCheckpointIO
from holdfast.adapters.lightning.resume_point import KEY
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.run.options import Memory
from holdfast.errors import PREEMPTED_STATUS, InvalidInput, Preempted, SaveWarning, Unsupported
from holdfast.system.callsite import warn


def memory_of_trainer(trainer: Any) -> list[PrivateMemory]:
    """Return the state of a Trainer's optimizers that may be copied beside the next batches; [] if none is.

    Weights and buffers are left out: callbacks write to them after a save, for example to exchange averaged
    ones. Optimizers that are not torch's are left out too, since others may write to their state.
    """
    module = trainer.lightning_module
    found = [
        value
        for optimizer in trainer.optimizers
        if type(optimizer).__module__.startswith("torch.optim.")
        for slots in optimizer.state.values()
        for value in slots.values()
        if type(value) is torch.Tensor and value.device.type == "cpu" and value.is_leaf
    ]
    return private_memory(found, [*module.parameters(), *module.buffers()])


_RANKS_S = 3600.0
"""Longest wait for a rank that does not reach the end of its batch."""


class HoldfastCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that saves in the background, survives crashes, and resumes exactly.

    In place of ModelCheckpoint: `Trainer(callbacks=[HoldfastCheckpoint(dirpath="runs/x", save_last=True)])`.
    To resume, pass `ckpt_path="last"` to `fit`, also at the first start.

    All options of ModelCheckpoint have their meaning. Those that are new:

    Args:
        *args: as for ModelCheckpoint.
        home: folder or URL in which each save is durable first; by default `dirpath` with ".holdfast"
            appended, beside it. One run, one home.
        memory: limit of the staging memory.
        preemption: sources of preemption notices: "aws", "gcp", "azure", "file:PATH", several with commas,
            "none", or "auto" for the cloud of this machine. By default the value of HOLDFAST_PREEMPTION, else
            "auto". SIGTERM, SIGUSR1 and SIGHUP are always notices. Training then saves after the running
            step, and exits with 75.
        **kwargs: as for ModelCheckpoint.

    Raises:
        InvalidInput: the trainer has another CheckpointIO.
        Unsupported: the strategy writes its shards without a CheckpointIO.
    """

    def __init__(
        self,
        *args: Any,
        home: str | os.PathLike[str] | None = None,
        memory: int | str | Memory = "8GiB",
        preemption: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._home, self._memory, self._preemption = home, memory, preemption
        self._notices: Notices | None = None  # while training
        self._point: dict[str, Any] | None = None  # to be restored before training
        self._has_batch = False  # the checkpoint was saved at the end of a batch
        self._unsent: list[tuple[Any, str]] = []  # loggers to be notified once a file is written
        self._saver = BackgroundSaver(HomePlace(""), memory)  # until `setup` it saves nothing
        self._found: str | None = None  # file that "last" means

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint: that of ModelCheckpoint, so that both read it."""
        return str(super().state_key).replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    # -- begin -----------------------------------------------------------------------------------------------
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set the trainer's CheckpointIO, and record the position in the data."""
        super().setup(trainer, pl_module, stage)
        self._saver = self._set_io(trainer).saver_for(f"{absolute(self.dirpath)}/any.ckpt")
        reference = weakref.ref(trainer)  # the saver outlives it
        self._saver.is_training = lambda: (alive := reference()) is not None and _is_fitting(alive)
        if stage == "fit":
            resume_point.watch_position(trainer)

    def _set_io(self, trainer: Any) -> HoldfastCheckpointIO:
        strategy = trainer.strategy
        _check_strategy(strategy)
        found = strategy.checkpoint_io
        if type(found) is TorchCheckpointIO:
            found = strategy.checkpoint_io = HoldfastCheckpointIO(
                self._home_for(self.dirpath), memory=self._memory
            )
        if not isinstance(found, HoldfastCheckpointIO):
            raise InvalidInput(
                f"HoldfastCheckpoint needs its own CheckpointIO, but the Trainer has {type(found).__name__}. "
                "Nothing was changed. Remove that one from Trainer(plugins=...) or from the strategy, or use "
                "ModelCheckpoint."
            )
        if found.home is None:
            found.home = self._home_for(self.dirpath)
        if self._home is not None and absolute(self._home) != found.home:
            raise InvalidInput(
                f"HoldfastCheckpoint has the home {absolute(self._home)}, but another callback or plugin of "
                f"this Trainer saves to {found.home}. Nothing was saved. Use one home for all of them."
            )
        return found

    def _home_for(self, folder: str) -> str:
        return home_beside(folder) if self._home is None else absolute(self._home)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the generators and data positions of a checkpoint until training begins."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._point = checkpoint.get(KEY)
        is_resumed = self._point is not None and trainer.state.fn == "fit"
        self._has_batch = is_resumed and resume_point.complete_batch(checkpoint)
        if self._point is not None and is_resumed:
            # Else the next batch saves again, perhaps in the middle of accumulated gradients.
            last = self._point.get("last_saved", {}).get(self.state_key, 0)
            self._last_global_step_saved = last

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the generators and the position in the data."""
        super().on_train_start(trainer, pl_module)
        self._notices = _watch_notices(trainer, self._preemption)
        resume_point.begin_epoch(trainer)
        resume_point.check_batches(trainer)
        point, self._point = self._point, None
        if self._has_batch:
            resume_point.finish_batch(trainer)
            self._has_batch = False
        if point is not None and (difference := resume_point.restore_point(trainer, point)) is not None:
            warn(difference, UserWarning)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the generators if no step of training was left, so that `on_train_start` did not run."""
        super().on_fit_end(trainer, pl_module)
        point, self._point = self._point, None
        if point is not None and len(point["ranks"]) == trainer.world_size:
            resume_point.set_generators(point["ranks"][trainer.global_rank]["generators"])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Complete what a killed process has left, also if no step of training is left."""
        super().on_fit_start(trainer, pl_module)
        if trainer.is_global_zero:
            self._saver.sort_out(absolute(self.dirpath))
        self._renew_last(trainer)

    def _renew_last(self, trainer: Any) -> None:
        """Write the "last" file of the checkpoint that training resumes from."""
        found = self._found
        if not self.save_last or found is None or trainer.ckpt_path != found:
            return
        name = self.CHECKPOINT_NAME_LAST
        last = self.last_model_path or self.format_checkpoint_name(self._monitor_candidates(trainer), name)
        if self.save_last == "link" and last != found:
            self._link_checkpoint(trainer, found, last)
        elif trainer.is_global_zero:
            self._saver.write_as(found, last)
        self.last_model_path = last

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Check GlobalBatches again: a callback may have changed the accumulation of gradients."""
        super().on_train_epoch_start(trainer, pl_module)
        resume_point.check_batches(trainer)
        trainer.fit_loop._combined_loader.on_error = partial(self._end_preempted, trainer)

    # -- saves -----------------------------------------------------------------------------------------------
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the generators and data positions of all ranks to a checkpoint."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if KEY not in checkpoint and _is_fitting(trainer):
            checkpoint[KEY] = resume_point.capture_point(trainer)
        if KEY in checkpoint:
            checkpoint[KEY].setdefault("last_saved", {})[self.state_key] = self._last_global_step_saved

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Save if it is due, or if a preemption notice has arrived."""
        resume_point.reach_batch(trainer)
        notices = self._notices
        if notices is not None:
            notices.end_step(self._saver.save_s)
            if any(notices.exchange(bool(self._saver.dropped(wait=False)))):
                self._replace_dropped(trainer)
        with self._saver.moment(lambda: memory_of_trainer(trainer)):
            super().on_train_batch_end(trainer, *args, **kwargs)
        self._notify_loggers()
        if notices is not None and _may_stop(trainer, notices):
            self._save_notice(trainer)
            notices.finish()
            raise Preempted(trainer.global_step, str(notices.reason))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is due."""
        with self._saver.moment():
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is due."""
        with self._saver.moment(lambda: memory_of_trainer(trainer)):
            super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is due, and wait until all files are written."""
        with self._saver.moment():
            super().on_train_end(trainer, pl_module)
        self._wait(trainer)
        if self._notices is not None:
            self._notices.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save if that is asked for, or if the exception is a preemption."""
        if isinstance(exception, SystemExit) and isinstance(exception, SIGTERMException):
            self._save_notice(trainer)
            exception.code = PREEMPTED_STATUS
        with self._saver.moment():
            super().on_exception(trainer, pl_module, exception)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        """Save a checkpoint. The loggers are notified when its file is written."""
        self._last_global_step_saved = trainer.global_step  # part of the checkpoint
        trainer.save_checkpoint(filepath, self.save_weights_only)
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            self._unsent += [(logger, filepath) for logger in trainer.loggers]
            self._notify_loggers()

    def _replace_dropped(self, trainer: Any) -> None:
        """Save the present state for the paths whose saves were dropped, copied at once."""
        paths = trainer.strategy.broadcast(self._saver.dropped(wait=True))
        with self._saver.moment():
            for path in paths:
                trainer.save_checkpoint(path)
        if paths and trainer.is_global_zero:
            warn(
                f"The save of {' and '.join(paths)} was dropped: something other than its step wrote to the "
                f"optimizer's state while that was copied. The state after step {trainer.global_step} was "
                "saved in its place. Write to that state in a callback's on_train_batch_end: all callbacks "
                "run before the save.",
                SaveWarning,
            )

    def _notify_loggers(self) -> None:
        """Notify the loggers of files that are written: some of them send the file."""
        waiting = []
        for logger, path in self._unsent:
            if self._saver.is_pending(absolute(path)):
                waiting.append((logger, path))
            else:
                logger.after_save_checkpoint(weakref.proxy(self))
        self._unsent = waiting

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Any) -> bool:
        """Return True if a file exists or will be written. All ranks return the same."""
        is_pending = self._saver.is_pending(absolute(filepath))
        if trainer.strategy.reduce_boolean_decision(is_pending, all=False):
            return True
        return bool(super().file_exists(filepath, trainer))

    # -- preemption and the end ------------------------------------------------------------------------------
    def _end_preempted(self, trainer: Any, error: Exception) -> None:
        """End training if a loader fails after a notice.

        Its workers may have died of it. The last complete step is saved. On several ranks it is not: others
        compute with their next batch.
        """
        notices = self._notices
        if notices is None or notices.reason is None or not trainer.training:
            return
        notices.agreed = notices.reason
        if trainer.world_size == 1 and not resume_point.has_begun(trainer) and _may_stop(trainer, notices):
            self._save_notice(trainer)
        reason = f"{notices.reason}; {type(error).__name__} has ended the next batch: {error}"
        raise Preempted(self._last_global_step_saved, reason) from error

    def _save_notice(self, trainer: Any) -> None:
        """Save this step unless it is saved already, and wait until its file is written."""
        if self._last_global_step_saved != trainer.global_step and trainer.global_step > 0:
            metrics = self._monitor_candidates(trainer)
            with self._saver.moment():
                if not self.save_last:
                    self._save_checkpoint(trainer, self.format_checkpoint_name(metrics))
                self._save_last_checkpoint(trainer, metrics)
        self._wait(trainer)

    def _wait(self, trainer: Any) -> None:
        self._replace_dropped(trainer)
        self._saver.wait()  # other ranks have nothing to wait for
        self._notify_loggers()
        trainer.strategy.barrier()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop watching for preemption notices."""
        super().teardown(trainer, pl_module, stage)
        notices, self._notices = self._notices, None
        if notices is not None:
            notices.close()

    @staticmethod
    def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        """Link to a file, which may not be written yet, nor its folder made."""
        if trainer.is_global_zero:
            Path(linkpath).parent.mkdir(parents=True, exist_ok=True)
        ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        """Return True if a save replaces a file, also that found by "last"."""
        is_found = previous == self._found and previous != current
        return is_found or bool(super()._should_remove_checkpoint(trainer, previous, current))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Return the newest checkpoint that verifies; else the files that ModelCheckpoint finds."""
        folder, *others = (
            absolute(str(one._ModelCheckpoint__resolve_ckpt_dir(trainer)))
            for one in (self, *trainer.checkpoint_callbacks)
            if isinstance(one, HoldfastCheckpoint)
        )
        home = self._home_for(folder)
        if is_local(folder) and Path(home).is_dir():
            self._found = BackgroundSaver(HomePlace(home), self._memory).newest(folder, others)
            if self._found is not None:
                return {self._found}
        return set(super()._find_last_checkpoints(trainer))


def _is_fitting(trainer: Any) -> bool:
    """Return True from the start of `fit` to its end, also in its validation."""
    return trainer.state.fn == "fit" and trainer.state.status == "running"


def _watch_notices(trainer: Any, sources: str | None) -> Notices:
    """Watch for preemption notices from the start of training on.

    Lightning's handler of SIGTERM is replaced: on several ranks it communicates wherever it interrupts them,
    and it ends training with status 0. Under Slurm's requeueing it stays.
    """
    environment = trainer._accelerator_connector.cluster_environment
    is_requeued = bool(getattr(environment, "auto_requeue", False))
    takes_signals = threading.current_thread() is threading.main_thread() and not is_requeued
    if takes_signals:
        before = trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    return Notices(sources, Ranks(timeout_s=_RANKS_S), signals=takes_signals)


def _may_stop(trainer: Any, notices: Notices) -> bool:
    """Return True if the ranks have a notice, and training may stop here."""
    # Gradients that were accumulated over some batches are not part of a checkpoint.
    return notices.agreed is not None and not trainer.fit_loop._should_accumulate()


def _check_strategy(strategy: Any) -> None:
    """Check that a strategy saves with its CheckpointIO."""
    if getattr(strategy, "_state_dict_type", "full") == "sharded":
        raise Unsupported(
            f'{type(strategy).__name__}(state_dict_type="sharded") writes its shards without a CheckpointIO, '
            'so Holdfast cannot save them. Use state_dict_type="full", or ModelCheckpoint.'
        )
    if any(one.__name__ == "DeepSpeedStrategy" for one in type(strategy).__mro__):
        raise Unsupported(
            "DeepSpeedStrategy saves with DeepSpeed's engine and not with a CheckpointIO, so Holdfast cannot "
            "save its checkpoints. Use ModelCheckpoint with it."
        )
    if getattr(strategy, "_save_distributed_checkpoint", False):
        raise Unsupported(
            f"{type(strategy).__name__} writes its shards without a CheckpointIO, so Holdfast cannot save "
            f"them. Use {type(strategy).__name__}(save_distributed_checkpoint=False), or ModelCheckpoint."
        )
