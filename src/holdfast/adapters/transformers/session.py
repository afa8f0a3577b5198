"""Session: one call of `train`, with the choice of a checkpoint, its saves and its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerControl, TrainingArguments
from transformers.trainer_utils import HubStrategy
from typing_extensions import Self

from holdfast.adapters.kit.run import TrainerRun
from holdfast.adapters.transformers.folders import Choice, Chooser, Folders, step_of, surplus, write_folder
from holdfast.adapters.transformers.live_state import (
    DATA,
    MODEL,
    PROGRESS,
    TRAINER_STATE,
    Progress,
    ResumeSource,
    live_objects,
    read_counters,
    stops_early,
    trainer_state,
    write_counters,
)
from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.run import Checkpointer
from holdfast.errors import InvalidInput, LoaderWarning, Unsupported

if TYPE_CHECKING:
    from holdfast.adapters.transformers.trainer import HoldfastTrainer, Settings


class Session:
    """Saves and restores of one call of `train`.

    Args:
        trainer: the attached Trainer.
        settings: settings given to `attach`.
        ignored_keys: argument of `train` for evaluations.

    Attributes:
        must_evaluate: the evaluation of this step is left to the next start, after a preemption notice.

    Ranks: collective.
    """

    def __init__(
        self, trainer: HoldfastTrainer, settings: Settings, ignored_keys: list[str] | None = None
    ) -> None:
        _check_optimizer(trainer.optimizer)
        self.must_evaluate = False
        self._trainer, self._settings, self._ignored_keys = trainer, settings, ignored_keys
        self._args = trainer.args
        self._state: dict[str, Any] = {MODEL: live_objects(trainer)[MODEL], TRAINER_STATE: "", PROGRESS: {}}
        self._feed = settings.feed
        if self._feed is not None:
            self._state[DATA] = self._feed
        self._run = TrainerRun(settings.home, self._state, settings.options, keep=_best_rule(self._args))
        self._checkpointer, self._ranks, self._home = self._run.checkpointer, self._run.ranks, self._run.home
        self._folders = Folders(self._args.output_dir or ".", self._home, writes=self._args.should_save)
        self._elsewhere: Checkpointer | None = None
        self._source: ResumeSource | None = None
        self._steps: list[int] = []  # of all checkpoints, in the order in which they were saved
        self._in_home: set[int] = set()
        self._superseded: set[int] = set()  # steps that training goes back behind
        self._last: Save | None = None
        self._is_finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._elsewhere is not None:
            self._elsewhere.__exit__(kind, error, traceback)
        self._checkpointer.__exit__(kind, error, traceback)

    @property
    def restores(self) -> bool:
        """True if training resumes from a home, not from a folder of the Trainer."""
        return self._source is not None

    @property
    def waited_for_copy_s(self) -> float:
        """Time that the optimizer has waited for copies under way, in all."""
        return self._checkpointer.waited_for_copy_s

    # -- the beginning ---------------------------------------------------------------------------------------

    def begin(self, asked: str | bool | None) -> str | None:
        """Choose the checkpoint to resume from, and return its folder; None for a new training.

        Args:
            asked: argument `resume_from_checkpoint` of `train`.

        Ranks: collective.
        """
        chooser = Chooser(self._run, self._folders, with_training=not self._args.save_only_model)
        choice = chooser.choose(asked) if asked else chooser.check_new()
        self._list_steps(choice)
        if choice is None or not choice.home:
            self._check_position(choice)
            return None if choice is None else choice.folder
        self._source = source = ResumeSource(self._checkpointer_of(choice), self._state, choice.step)
        self._folders.make(choice.step, source.trainer_state, self._trainer.model, home=choice.home)
        self._folders.remove_interrupted(choice.step, self._in_home)
        self._ranks.gather(None)
        self._folders.make_readable(choice.step, source.trainer_state)
        self._run.announce("resuming from step %d of %s", choice.step, choice.home)
        return self._folders.path(choice.step)

    def _check_position(self, choice: Choice | None) -> None:
        """Check that a checkpoint without a position in the data is not resumed with `data=`."""
        if choice is not None and self._feed is not None:
            raise InvalidInput(
                f"{choice.folder} is the Trainer's own, without a position in the data, and attach() was "
                "given data=, whose order is another one. Nothing was trained. Leave data= out to finish "
                "this run, or begin a new one.",
                step=choice.step,
            )

    def _list_steps(self, choice: Choice | None) -> None:
        """List all checkpoints except those after the one that training resumes from."""
        self._in_home = set(self._ranks.of_rank_0(self._checkpointer.all_steps))
        every = {*self._in_home, *self._ranks.of_rank_0(self._folders.steps)}
        if choice is not None:
            self._superseded = {one for one in every if one > choice.step}
        self._steps = sorted(every - self._superseded)

    def _checkpointer_of(self, choice: Choice) -> Checkpointer:
        if choice.home == self._home:
            return self._checkpointer
        self._elsewhere = self._run.reader_of(choice.home, self._state)
        return self._elsewhere

    def _leave_elsewhere(self) -> None:
        """Close the Checkpointer of another run's home, if training resumed from one."""
        if self._elsewhere is not None:
            self._elsewhere.close()
            self._elsewhere = None

    def load_model(self, model: torch.nn.Module | None) -> None:
        """Load the weights of the checkpoint."""
        self._state.update(live_objects(self._trainer, model))
        self._resumed.load_model()

    def load_training(self) -> None:
        """Load optimizer, scheduler and scaler of the checkpoint."""
        self._state.update(live_objects(self._trainer))
        if self._feed is not None:
            self._resumed.load_data()
        self._resumed.load_training(may_lack=self._args.save_only_model)

    def load_generators(self) -> None:
        """Load the random number generators. Evaluate if the last start ended before its evaluation.

        The Trainer calls this before the first step, after it has skipped the batches of earlier steps.
        """
        self._resumed.load_generators()
        self._leave_elsewhere()
        if not self._resumed.progress.must_evaluate:
            return
        metrics = self._trainer._evaluate(None, self._ignored_keys)
        self._trainer._determine_best_metric(metrics=metrics, trial=None)
        self._note_best()

    @property
    def _resumed(self) -> ResumeSource:
        assert self._source is not None
        return self._source

    def begin_loop(self) -> None:
        """Prepare the first save, and continue the log interval of the checkpoint.

        Log entries are then those of an unbroken run.

        The Trainer begins a new interval with each start. The sum of losses before this start is no part of
        the loss that `train` returns.
        """
        trainer, source = self._trainer, self._source
        self._state.update(live_objects(trainer))
        if self._feed is not None:
            self._feed.begin(trainer.state.global_step)
        if source is None:
            return
        if self.is_complete:
            self.load_generators()  # the Trainer does so before the first step
        if source.progress.world_size == self._ranks.world_size:
            write_counters(trainer, source.progress.counters)
            trainer._tr_loss.fill_(source.progress.loss_sum)
            trainer._total_loss_scalar -= source.progress.loss_sum
            trainer._globalstep_last_logged = source.progress.logged_step

    @property
    def is_complete(self) -> bool:
        """True if training resumes from its end, or where a callback stopped it."""
        trainer, source = self._trainer, self._source
        state: Any = trainer.state
        if not 0 < state.global_step == trainer._initial_global_step:
            return False
        if state.global_step >= state.max_steps:
            return True
        was_stopped = source is not None and stops_early(source.trainer_state)
        return was_stopped and self._args.restore_callback_states_from_checkpoint

    # -- the loop --------------------------------------------------------------------------------------------

    def finish_step(self, step: int) -> None:
        """Check for a preemption notice after a step, and remove folders of deleted checkpoints.

        Ranks: collective.
        """
        if self._feed is not None:
            self._feed.reach(step)
        self._checkpointer.should_save(step)
        self._remove_doomed()

    def must_stop(self, control: TrainerControl) -> bool:
        """Return True if a preemption notice must stop the training before its end."""
        return self._checkpointer.preempted is not None and not control.should_training_stop

    def record(self, metrics: Mapping[str, float]) -> None:
        """Record metrics of the present step in the history."""
        if metrics and not self._is_finished:
            self._checkpointer.record(self._trainer.state.global_step, **metrics)

    def save(self) -> None:
        """Save the present step. Does what `Trainer._save_checkpoint` does, in the same order."""
        trainer, step = self._trainer, self._trainer.state.global_step
        trainer.store_flos()
        self._steps = [*(one for one in self._steps if one != step), step]
        self._in_home.add(step)
        self._note_best()
        state = trainer_state(trainer)
        self._folders.make(step, state, trainer.model)
        self._state.update(live_objects(trainer))
        self._state[TRAINER_STATE] = state
        self._state[PROGRESS] = dataclasses.asdict(self._progress())
        self._last = self._run.save(step, silenced=[LoaderWarning])  # the Trainer brings its loaders back
        if self._args.push_to_hub and self._args.hub_strategy != HubStrategy.END:
            self._push(self._folders.path(step))
        self._delete_surplus()

    def _progress(self) -> Progress:
        trainer = self._trainer
        return Progress(
            world_size=self._ranks.world_size,
            logged_step=trainer._globalstep_last_logged,
            loss_sum=trainer._tr_loss.item(),
            must_evaluate=self.must_evaluate,
            has_training=not self._args.save_only_model,
            counters=read_counters(trainer),
        )

    def _note_best(self) -> None:
        """Note the folder of the best model, once the step that has it is saved."""
        best = self._trainer.state.best_global_step
        if best and best in self._steps:
            self._trainer.state.best_model_checkpoint = self._folders.path(best)

    def _push(self, folder: str) -> None:
        """Push to the Hub, which takes its files from a folder of the Trainer's own."""
        trainer = self._trainer
        trainer.save_model(folder, _internal_call=True)
        if not self._args.save_only_model:
            trainer._save_optimizer_and_scheduler(folder)
            trainer._save_scaler(folder)
            trainer._save_rng_state(folder)
        trainer._push_from_checkpoint(folder)

    def _delete_surplus(self) -> None:
        best = self._trainer.state.best_model_checkpoint
        limit = self._args.save_total_limit
        surplus_steps = surplus(self._steps, limit=limit, best=None if best is None else step_of(best))
        if limit:  # a superseded step that is saved again must not be deleted
            passed = {one for one in self._superseded if one < self._steps[-1]}
            self._superseded -= {*passed, self._steps[-1]}
            surplus_steps += sorted(passed)
        for step in surplus_steps:
            if step in self._in_home:
                self._checkpointer.delete(step)
        self._steps = [one for one in self._steps if one not in surplus_steps]
        self._in_home -= set(surplus_steps)
        self._run.doomed |= dict.fromkeys(surplus_steps, "")

    def _remove_doomed(self) -> None:
        self._run.settle()
        for step in self._run.pop_doomed():
            self._folders.remove(step)

    def finish_save(self, step: int) -> None:
        """Check that a save has reached this session. After a preemption notice, end the process."""
        if self._last is None or self._last.step != step:
            raise InvalidInput(
                f"Step {step} was not saved: _save_checkpoint of {type(self._trainer).__name__} does not "
                "call super()._save_checkpoint(model, trial). Call it there, or leave attach() out.",
                step=step,
            )
        if self.must_stop(self._trainer.control):
            self._checkpointer.stop(step)

    # -- the end ---------------------------------------------------------------------------------------------

    def load_best_model(self) -> bool:
        """Load the best model at the end; return False if the Trainer itself has its folder.

        Ranks: collective.
        """
        best = step_of(self._trainer.state.best_model_checkpoint or "")
        if best not in self._in_home:
            return False
        self._finish()  # a later save would have the best model's weights
        self._state.update(live_objects(self._trainer))
        self._checkpointer.restore(best, only=[MODEL])
        return True

    def end(self) -> None:
        """Wait until everything is durable, and write the folders of checkpoints.

        They are the newest and the best one, or all that are kept.

        Ranks: collective.
        """
        self._finish()
        self._remove_doomed()
        best = step_of(self._trainer.state.best_model_checkpoint or "")
        steps = self._in_home
        if self._settings.folders != "all":
            steps = steps & {self._trainer.state.global_step, best}
        if self._settings.folders and self._args.should_save and not self._trainer.is_fsdp_enabled:
            for step in sorted(steps):
                write_folder(self._trainer, self._home, step, self._folders.path(step))
        self._ranks.gather(None)

    def _finish(self) -> None:
        """Mark the run as finished with its newest save, before anything else changes the state."""
        if self._is_finished:
            return
        step = self._trainer.state.global_step
        if self._last is None and (self._source is None or self._source.step != step):
            self.save()
        if self._last is not None and self._last.exception() is None and not self._last.skipped:
            step = self._last.step
        self._checkpointer.finish(step)
        self._is_finished = True


def _best_rule(args: TrainingArguments) -> Keep:
    """Return a policy that keeps everything, with the Trainer's metric and mode."""
    metric = args.metric_for_best_model
    if not metric:
        return Keep(last=None)
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    return Keep(last=None, metric=name, mode="max" if args.greater_is_better else "min")


def _check_optimizer(optimizer: Any) -> None:
    """Check that the state of an optimizer is in reach, and not in hooks."""
    if type(optimizer).__name__ == "LayerWiseDummyOptimizer":
        raise Unsupported(
            "A layerwise optimizer keeps its state in hooks of the parameters, and neither the Trainer nor "
            "Holdfast can save it. Nothing was trained. Use the variant that is not layerwise, such as "
            'optim="galore_adamw".'
        )
