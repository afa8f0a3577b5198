"""The checkpoints that training may go back to."""

from __future__ import annotations

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sections import Mark
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.home.rollbacks import find_healthy
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store.memory import MemoryStore
from making import RUN_ID, make_checkpoint, make_home


def test_one_of_the_choices_survives_a_retention_that_runs_late() -> None:
    """The keeper may delete between the choice and the restore, on a busy machine far behind the training."""
    store = MemoryStore()
    make_home(store)
    for step in range(1, 31):
        make_checkpoint(store, step, mark=Mark.FOR)
    newest, back = CheckpointId(attempt=1, step=30), 16
    choices = find_healthy(
        [store], newest, (), run_id=RUN_ID, upto_step=25, kept_upto_step=newest.step - back
    )
    assert [one.step for one in choices] == [25, 24, 23, 22, 14]
    assert len(list(Retention(store, Keep(1), healthy_back=back).apply(newest, (), ()))) == 27
    kept = candidates(list_home(store))
    assert [one.step for one in kept] == [30, 15, 14]
    assert [one.step for one in choices if one in kept] == [14]
