"""Session: one call of `train`, with the choice of a checkpoint, its saves and its end."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from msgspec.structs import asdict
from transformers import TrainerCallback, TrainerControl, TrainingArguments
from transformers.trainer_utils import HubStrategy, IntervalStrategy
from typing_extensions import Self, override

from holdfast.adapters.kit.run import Choice, TrainerRun
from holdfast.adapters.transformers import folders
from holdfast.adapters.transformers.folders import Folders
from holdfast.adapters.transformers.state import (
    DATA,
    GENERATORS,
    MODEL,
    PROGRESS,
    TRAINER_STATE,
    TRAINING,
    Progress,
    live_objects,
    read_counters,
    stops_early,
    trainer_state,
    write_counters,
)
from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.run import Checkpointer
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import InvalidInput, LoaderWarning, ResumeWarning, Unsupported
from holdfast.system.callsite import warn
from holdfast.system.log import get_logger

if TYPE_CHECKING:
    from holdfast.adapters.transformers.trainer import HoldfastTrainer

_log = get_logger("adapters")
_METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class _Source(Struct, frozen=True):
    """Checkpoint of a home that training resumes from. It has been verified as a whole."""

    checkpointer: Checkpointer  # that of this run, or of another one's home
    step: int
    trainer_state: str  # content of the Trainer's `trainer_state.json`
    progress: Progress  # of this rank


class Session(TrainerRun, TrainerCallback):
    """Saves and restores of one call of `train`, whose callback it is. All methods are collective."""

    def __init__(self, trainer: HoldfastTrainer, ignored_keys: list[str] | None) -> None:
        if type(trainer.optimizer).__name__ == "LayerWiseDummyOptimizer":
            raise Unsupported(
                "A layerwise optimizer keeps its state in hooks of the parameters, and neither the Trainer "
                "nor Holdfast can save it. Nothing was trained. Use the variant that is not layerwise, such "
                'as optim="galore_adamw".'
            )
        self._must_evaluate = False  # the evaluation of this step is left to the next start, after a notice
        self._saves_at_epoch_end = False
        self._trainer, self._args, self._ignored_keys = trainer, trainer.args, ignored_keys
        self._feed, self._writes_folders = trainer.holdfast_feed, trainer.holdfast_folders
        self._state: dict[str, Any] = {MODEL: live_objects(trainer)[MODEL], TRAINER_STATE: "", PROGRESS: {}}
        if self._feed is not None:
            self._state[DATA] = self._feed
        rule = _best_rule(self._args)
        super().__init__(trainer.holdfast_home, self._state, trainer.holdfast_options, keep=rule)
        self._folders = Folders(self._args.output_dir or ".", self.home, writes=self._args.should_save)
        self._exits = ExitStack()
        self.source: _Source | None = None  # None for a new training, or one from a folder of the Trainer
        self._steps: list[int] = []  # of all checkpoints, in the order in which they were saved
        self._in_home: set[int] = set()
        self._superseded: set[int] = set()  # steps that training goes back behind
        self._last: Save | None = None
        self._is_finished = False

    def __enter__(self) -> Self:
        self._exits.enter_context(self.checkpointer)
        self._trainer.holdfast_session = self
        self._trainer.add_callback(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._trainer.holdfast_session = None
        self._trainer.pop_callback(self)
        self._exits.__exit__(*raised)

    # -- the choice of a checkpoint --------------------------------------------------------------------------
    def begin(self, asked: str | bool | None) -> str | None:
        """Choose the checkpoint that `train` asks for, and return its folder; None for a new training."""
        if not asked and (newest := self.ranks.of_rank_0(self.checkpointer.latest_step)) is not None:
            what = "train() was called without resume_from_checkpoint"
            self.refuse_new_run(newest, what, "trained", "Call train(resume_from_checkpoint=True)")
        choice = self._choose(asked) if asked else None
        self._in_home = set(self.ranks.of_rank_0(self.checkpointer.all_steps))
        every = {*self._in_home, *self.ranks.of_rank_0(self._folders.steps)}
        if choice is not None:
            self._superseded = {step for step in every if step > choice.step}
        self._steps = sorted(every - self._superseded)
        if choice is None:
            return None
        if choice.home is None and self._feed is not None:
            raise InvalidInput(
                f"{choice.folder} is the Trainer's own, without a position in the data, and attach() was "
                "given data=, whose order is another one. Nothing was trained. Leave data= out to finish "
                "this run, or begin a new one.",
                step=choice.step,
            )
        if choice.home is None:
            return choice.folder
        self.source = source = self._open(choice.step, choice.home)
        self._folders.make(choice.step, source.trainer_state, self._trainer.model, home=choice.home)
        self._folders.remove_interrupted(choice.step, self._in_home)
        self.ranks.gather(None)
        self._folders.make_readable(choice.step, source.trainer_state)
        self.announce("resuming from step %d of %s", choice.step, choice.home)
        return self._folders.path(choice.step)

    def _choose(self, asked: str | bool) -> Choice | None:
        """Return the checkpoint that `resume_from_checkpoint` asks for; None for "auto" without any."""
        if asked is not True and asked not in ("auto", self.home):
            return self._of_path(str(asked))
        choice = self._newest()
        if choice is None and asked != "auto":
            raise InvalidInput(
                f"No valid checkpoint found in output directory ({self._folders.output_dir}), nor in "
                f"{self.home}. Nothing was trained. Leave resume_from_checkpoint out, or use "
                'resume_from_checkpoint="auto", which begins a new training where there is none.'
            )
        return choice

    def _newest(self) -> Choice | None:
        step = self.checkpointer.continue_from(verify=True)
        stock = self.ranks.of_rank_0(lambda: self._newest_stock(after=step or 0))
        if stock is not None:
            return Choice(self._folders.path(stock), stock)
        return None if step is None else Choice(self._folders.path(step), step, self.home)

    def _newest_stock(self, *, after: int) -> int | None:
        """Return the step of the newest complete folder that the Trainer has written itself."""
        for step, folder in reversed(folders.list_folders(Path(self._folders.output_dir))):
            if step <= after:
                return None
            if not folders.has_weights(folder):
                continue  # of an interrupted save, or of a checkpoint in a home
            fault = self._fault(folder)
            if fault is None:
                return step
            _log.warning("%s was skipped: %s", folder, fault)
        return None

    def _fault(self, folder: Path) -> str | None:
        with_training = not self._args.save_only_model
        return folders.find_fault(folder, world_size=self.ranks.world_size, with_training=with_training)

    def _of_path(self, path: str) -> Choice | None:
        step = folders.step_of(path)
        if step is None:
            raise InvalidInput(_invalid(path, "its name is not checkpoint-N, with N a step"))
        steps = self.ranks.of_rank_0(self.checkpointer.all_steps)
        home = self.ranks.of_rank_0(lambda: self._folders.home_of(path))
        if self._folders.is_here(path) and step in steps:
            self.checkpointer.continue_from(step, verify=True)
            return Choice(path, step, self.home)
        fault = self.ranks.of_rank_0(lambda: self._fault(Path(path)))
        if fault is None:
            self._go_back(step, steps, path)
            return Choice(path, step)
        if home is not None and home != self.home:
            self.ranks.of_rank_0(lambda: check_endpoint(home, f"The folder {path}", own=self.home))
            self._go_back(step, steps, path)
            return Choice(path, step, home)
        is_newer = self._folders.is_here(path) and bool(steps) and step > max(steps)
        if is_newer and self.ranks.of_rank_0(
            lambda: Path(path).is_dir() and not folders.has_weights(Path(path))
        ):
            _log.warning(
                "%s is of a save that was interrupted before it was complete. Training resumes from the "
                "newest checkpoint that is.",
                path,
            )
            return self._newest()
        raise InvalidInput(_invalid(path, fault))

    def _go_back(self, step: int, steps: list[int], path: str) -> None:
        """Continue the home after its newest checkpoint up to a step that was saved elsewhere."""
        older = [saved for saved in steps if saved <= step]
        if older:
            self.checkpointer.continue_from(max(older))
        elif steps:
            raise InvalidInput(
                f"{self.home} holds a run from step {min(steps)} on, which does not continue {path}. "
                "Nothing was trained. Give attach() another home for a training that begins there."
            )

    # -- the resume ------------------------------------------------------------------------------------------
    def _open(self, step: int, home: str) -> _Source:
        checkpointer = self.checkpointer
        if home != self.home:
            checkpointer = self._exits.enter_context(self.reader_of(home, self._state))
        checkpointer.restore(step, only=[TRAINER_STATE, PROGRESS])
        progress = Progress(**self._state[PROGRESS])
        return _Source(checkpointer, step, self._state[TRAINER_STATE], progress)

    def _load(self, *keys: str) -> _Source:
        """Load some keys of the checkpoint that training resumes from, and return the checkpoint."""
        source = self.source
        assert source is not None
        if keys:
            source.checkpointer.restore(source.step, only=keys)
        return source

    def load_model(self, model: torch.nn.Module | None) -> None:
        """Load the weights of the checkpoint."""
        self._state.update(live_objects(self._trainer, model))
        self._load(MODEL)

    def load_training(self) -> None:
        """Load optimizer, scheduler and scaler of the checkpoint, and the position in the data."""
        self._state.update(live_objects(self._trainer))
        position = () if self._feed is None else (DATA,)
        source = self._load(*position)
        if source.progress.has_training:
            self._load(*(key for key in TRAINING if key in self._state))
            return
        text = f"Step {source.step} was saved with save_only_model=True, so it has no optimizer or scheduler"
        if not self._args.save_only_model:
            raise InvalidInput(
                f"{text}. Nothing was resumed. To continue with a new optimizer and a new schedule, set "
                "save_only_model=True again; else resume from another checkpoint.",
                step=source.step,
            )
        warn(f"{text}. The training continues with new ones.", ResumeWarning)

    def load_generators(self) -> None:
        """Load the random number generators. Evaluate if the last start ended before its evaluation.

        The Trainer calls this before the first step, after it has skipped the batches of earlier steps.
        """
        source = self._load(GENERATORS)
        if source.checkpointer is not self.checkpointer:
            source.checkpointer.close()
        if source.progress.must_evaluate:
            metrics = self._trainer._evaluate(None, self._ignored_keys)
            self._trainer._determine_best_metric(metrics=metrics, trial=None)
            self._note_best()

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare the first save, and continue the log interval of the checkpoint.

        Log entries are then those of an unbroken run: the Trainer begins a new interval with each start. The
        sum of losses before this start is no part of the loss that `train` returns.
        """
        trainer, source = self._trainer, self.source
        self._state.update(live_objects(trainer))
        if self._feed is not None:
            self._feed.begin(state.global_step)
        if source is None:
            return
        if self.is_complete:
            self.load_generators()  # the Trainer does so before the first step
        if source.progress.world_size == self.ranks.world_size:
            write_counters(trainer, source.progress.counters)
            trainer._tr_loss.fill_(source.progress.loss_sum)
            trainer._total_loss_scalar -= source.progress.loss_sum
            trainer._globalstep_last_logged = source.progress.logged_step

    @property
    def is_complete(self) -> bool:
        """True if training resumes from its end, or where a callback stopped it."""
        state: Any = self._trainer.state
        if not 0 < state.global_step == self._trainer._initial_global_step:
            return False
        if state.global_step >= state.max_steps:
            return True
        was_stopped = self.source is not None and stops_early(self.source.trainer_state)
        return was_stopped and self._args.restore_callback_states_from_checkpoint

    # -- the loop --------------------------------------------------------------------------------------------
    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check for a preemption notice, and remove folders of deleted checkpoints."""
        if self._feed is not None:
            self._feed.reach(state.global_step)
        self.checkpointer.should_save(state.global_step)
        self._remove_doomed()
        is_whole = state.epoch is not None and float(state.epoch).is_integer()
        is_epoch_end = control.should_epoch_stop or control.should_training_stop or is_whole
        if self._must_stop(control):
            self._stop(control, saves=not is_epoch_end)
        elif (
            is_epoch_end
            and control.should_save
            and IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy)
        ):
            # The evaluation and the log entry of the epoch follow, and belong to the checkpoint.
            control.should_save, self._saves_at_epoch_end = False, True

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for the save of the epoch, which was put off until its evaluation and its log entry."""
        if self._saves_at_epoch_end:
            control.should_save, self._saves_at_epoch_end = True, False
        if self._must_stop(control):
            self._stop(control, saves=True)

    def _must_stop(self, control: TrainerControl) -> bool:
        """Return True if a preemption notice must stop the training before its end."""
        return self.checkpointer.preempted is not None and not control.should_training_stop

    def _stop(self, control: TrainerControl, *, saves: bool) -> None:
        """Leave an evaluation to the next start: after a notice it may take longer than is left."""
        self._must_evaluate |= control.should_evaluate
        control.should_evaluate, control.should_save = False, saves

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record metrics of the present step in the history."""
        metrics = {
            name: float(value)
            for name, value in (logs or {}).items()
            if isinstance(value, (int, float)) and _METRIC.fullmatch(name) and math.isfinite(value)
        }
        if metrics and not self._is_finished:
            self.checkpointer.record(state.global_step, **metrics)

    def save(self) -> None:
        """Save the present step. Does what `Trainer._save_checkpoint` does, in the same order."""
        trainer, step = self._trainer, self._trainer.state.global_step
        trainer.store_flos()
        self._steps = [*(saved for saved in self._steps if saved != step), step]
        self._in_home.add(step)
        self._note_best()
        state = trainer_state(trainer)
        self._folders.make(step, state, trainer.model)
        self._state.update(live_objects(trainer))
        self._state[TRAINER_STATE] = state
        progress = Progress(
            world_size=self.ranks.world_size,
            logged_step=trainer._globalstep_last_logged,
            loss_sum=trainer._tr_loss.item(),
            must_evaluate=self._must_evaluate,
            has_training=not self._args.save_only_model,
            counters=read_counters(trainer),
        )
        self._state[PROGRESS] = asdict(progress)
        # The Trainer brings its loaders back. A model alone never resumes exactly, which the resume says.
        silenced = ResumeWarning if self._args.save_only_model else LoaderWarning
        self._last = self.save_step(step, silenced=[silenced])
        if self._args.push_to_hub and self._args.hub_strategy != HubStrategy.END:
            # The Hub takes its files from a folder of the Trainer's own.
            folder = self._folders.path(step)
            trainer.save_model(folder, _internal_call=True)
            if not self._args.save_only_model:
                trainer._save_optimizer_and_scheduler(folder)
                trainer._save_scaler(folder)
                trainer._save_rng_state(folder)
            trainer._push_from_checkpoint(folder)
        for old in self._pop_surplus():
            if old in self._in_home:
                self.checkpointer.delete(old)
                self._in_home.discard(old)
            self.doomed[old] = ""

    @property
    def _best(self) -> int | None:
        """Step whose folder the Trainer names as that of the best model."""
        return folders.step_of(self._trainer.state.best_model_checkpoint or "")

    def _note_best(self) -> None:
        """Note the folder of the best model, once the step that has it is saved."""
        best = self._trainer.state.best_global_step
        if best and best in self._steps:
            self._trainer.state.best_model_checkpoint = self._folders.path(best)

    def _pop_surplus(self) -> list[int]:
        """Return the steps beyond the Trainer's limit, and those that training has passed again."""
        limit = self._args.save_total_limit
        found = folders.surplus(self._steps, limit=limit, best=self._best)
        if limit:  # a superseded step that is saved again must not be deleted
            passed = {step for step in self._superseded if step < self._steps[-1]}
            self._superseded -= {*passed, self._steps[-1]}
            found += sorted(passed)
        self._steps = [step for step in self._steps if step not in found]
        return found

    def _remove_doomed(self) -> None:
        self.settle()
        for step in self.pop_doomed():
            self._folders.remove(step)

    @override
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that a save has reached this session. After a preemption notice, end the process."""
        step = state.global_step
        if self._last is None or self._last.step != step:
            raise InvalidInput(
                f"Step {step} was not saved: _save_checkpoint of {type(self._trainer).__name__} does not "
                "call super()._save_checkpoint(model, trial). Call it there, or leave attach() out.",
                step=step,
            )
        if self._must_stop(control):
            self.checkpointer.stop(step)

    # -- the end ---------------------------------------------------------------------------------------------
    def load_best_model(self) -> bool:
        """Load the best model at the end; return False if the Trainer itself has its folder."""
        if self._best not in self._in_home:
            return False
        self._finish()  # a later save would have the best model's weights
        self._state.update(live_objects(self._trainer))
        self.checkpointer.restore(self._best, only=[MODEL])
        return True

    def end(self) -> None:
        """Wait until everything is durable, and write the folders of checkpoints.

        They are the newest and the best one, or all that are kept.
        """
        self._finish()
        self._remove_doomed()
        steps = self._in_home
        if self._writes_folders != "all":
            steps = steps & {self._trainer.state.global_step, self._best}
        if self._writes_folders and self._args.should_save and not self._trainer.is_fsdp_enabled:
            for step in sorted(steps):
                folders.write_folder(self._trainer, self.home, step, self._folders.path(step))
        self.ranks.gather(None)

    def _finish(self) -> None:
        """Mark the run as finished with its newest save, before anything else changes the state."""
        if self._is_finished:
            return
        step = self._trainer.state.global_step
        if self._last is None and (self.source is None or self.source.step != step):
            self.save()
        if self._last is not None and self._last.exception() is None and not self._last.skipped:
            step = self._last.step
        self.checkpointer.finish(step)
        self._is_finished = True


def _invalid(path: str, reason: str) -> str:
    return (
        f"Can't find a valid checkpoint at {path}: {reason}. Nothing was trained. Call "
        "train(resume_from_checkpoint=True) to resume from the newest one that verifies."
    )


def _best_rule(args: TrainingArguments) -> Keep:
    """Return a policy that keeps everything, with the Trainer's metric and mode."""
    if not args.metric_for_best_model:
        return Keep(last=None)
    metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    return Keep(last=None, metric=metric, mode="max" if args.greater_is_better else "min")
