"""Rollback from a spike: back to a healthy checkpoint in the same process, without the samples since then."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
import nursery
from checkpointer.sampling import SkippingSampler
from checkpointer.skipping import GO_BACK, Story, feed
from health.test_spikes import BLOOM_LOSS, BLOOM_NORM
from holdfast.checkpoint.format.run import Rollback
from holdfast.checkpoint.home.rollbacks import read_rollbacks
from holdfast.checkpoint.run.going_back import range_to_skip
from holdfast.checkpoint.store import open_store
from holdfast.cli import main
from holdfast.errors import Diverged, InvalidInput, ResumeWarning
from servers import reserve_port
from stage.training import make_checkpointer, wait_until

SCRIPT = str(Path(__file__).with_name("spiking.py"))
BAD = range(400, 440)  # samples; those of the steps 101 to 110


def rollbacks(home: Path) -> list[Rollback]:
    return list(read_rollbacks([open_store(home)], None).found)


# -- in one process --------------------------------------------------------------------------------------


@pytest.mark.essential
def test_training_goes_back_and_leaves_the_samples_out(home: Path) -> None:
    story = Story(home, bad=BAD)
    assert story.train(200)[-1] == 200
    first, *others = rollbacks(home)
    assert (first.attempt, first.base_step, first.first_step, first.in_a_row) == (1, 90, 101, 1)
    assert first.skipped == {"data": (360, 412)}  # 3 high values are a spike
    assert [one.in_a_row for one in others] == list(range(2, len(others) + 2))
    assert set(BAD) <= story.left_out()
    assert story.seen[-1] not in story.left_out()
    assert sorted(set(story.trained())) == story.trained()
    kept = [sample for sample in range(2000) if sample not in story.left_out()][: 200 * 4]
    assert story.weight.item() == sum(kept), "the lost stretch has left no trace"
    assert holdfast.open(home).step == 200


@pytest.mark.slow
@pytest.mark.parametrize("bad", [range(0), range(400, 408), range(20, 60)])
def test_without_a_spike_or_without_a_checkpoint_training_continues(home: Path, bad: range) -> None:
    """Two high values are no spike; at step 5 nothing healthy has been saved."""
    story = Story(home, bad=bad)
    assert story.train(200) == list(range(1, 201))
    assert rollbacks(home) == []


def test_a_spike_without_a_checkpoint_is_reported(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    story = Story(home, bad=range(180, 220), every=1000)
    assert story.train(100) == list(range(1, 101))
    shown = capfd.readouterr().err
    assert "There is no healthy checkpoint to go back to, up to step 40: training continues" in shown
    assert shown.count("SPIKE") == 1


@pytest.mark.slow
def test_by_default_a_spike_is_only_reported(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    story = Story(home, bad=BAD, on_spike=holdfast.Spike("report"))
    assert story.train(200) == list(range(1, 201))
    assert capfd.readouterr().err.count("SPIKE: loss is 90 at step 101, usually") == 1
    story = Story(home, bad=BAD, on_spike=holdfast.Spike("off"))
    story.train(250)
    assert "SPIKE" not in capfd.readouterr().err


def test_after_as_many_rollbacks_as_allowed_the_run_ends(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = range(400, 10**6)
    with pytest.raises(
        Diverged, match=r"loss is 9.* again after 2 rollbacks in a row.*step 90 of attempt"
    ) as found:
        Story(home, bad=bad, on_spike=holdfast.Spike("rollback", back=5, max_rollbacks=2)).train(200)
    assert found.value.step is not None
    assert [one.in_a_row for one in rollbacks(home)] == [1, 2]
    # A start that changes nothing ends with the same reason, and goes back no more.
    with pytest.raises(Diverged, match="again after 2 rollbacks in a row"):
        Story(home, bad=bad, on_spike=holdfast.Spike("rollback", back=5, max_rollbacks=2)).train(200)
    assert len(rollbacks(home)) == 2
    # With the cause removed it continues.
    assert Story(home, bad=range(0)).train(200)[-1] == 200
    assert capfd.readouterr().err.count("Training went back") == 2


@pytest.mark.slow
def test_progress_begins_a_new_count(home: Path) -> None:
    bad = {*range(400, 412), *range(1200, 1212), *range(2000, 2012), *range(2800, 2812)}
    story = Story(home, bad=bad, on_spike=holdfast.Spike("rollback", back=5, max_rollbacks=1))
    assert story.train(900)[-1] == 900
    assert [one.in_a_row for one in rollbacks(home)] == [1, 1, 1, 1]


def test_a_restore_of_any_checkpoint_leaves_the_samples_out(home: Path) -> None:
    story = Story(home, bad=BAD, keep=None)
    story.train(200)
    left_out = story.left_out()
    for step in (10, 50, 90, 150, 200):
        data = SkippingSampler(4)
        with make_checkpointer(home, story.make_state(data)) as ckpt:
            assert ckpt.restore(step) == step
            samples = [sample for _ in range(300) for sample in data.take()]
        assert left_out.isdisjoint(samples)
        assert samples == sorted(samples)
    data = SkippingSampler(4)
    with make_checkpointer(home, story.make_state(data)) as ckpt:
        ckpt.restore(10)
        last = list(ckpt.steps(11))  # a new attempt from before the rollback
        assert last == [10]
    assert left_out <= set().union(*(range(*one) for one in data.skipped))


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_does_not_bring_the_samples_back(home: Path) -> None:
    story = Story(home, bad=BAD, keep=None)
    story.train(104)
    for path in home.glob("step-*/*.safetensors"):
        if path.parent.name > "step-00000050":
            path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    data = SkippingSampler(4)
    with make_checkpointer(home, story.make_state(data)) as ckpt:
        assert ckpt.restore() == 50
        assert story.left_out().isdisjoint(sample for _ in range(200) for sample in data.take())


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_by_a_rollback(home: Path) -> None:
    story = Story(home, bad=BAD, keep=None)

    def damage(step: int) -> None:
        if step == 95:
            wait_until(lambda: list(home.glob("step-00000090/manifest-*")))
            for path in home.glob("step-00000090/*.safetensors"):
                path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)

    assert story.train(200, before_step=damage)[-1] == 200
    assert rollbacks(home)[0].base_step == 80


@pytest.mark.slow
def test_a_damaged_record_is_reported_and_training_resumes(home: Path) -> None:
    story = Story(home, bad=BAD)
    story.train(130)
    for path in home.glob("attempts/*-rollback.json"):
        path.write_bytes(path.read_bytes()[:-20])
    with (
        make_checkpointer(home, story.make_state(SkippingSampler(4))) as ckpt,
        pytest.warns(ResumeWarning, match="record of a rollback cannot be read"),
    ):
        assert ckpt.restore() == 130


def test_a_state_without_the_object_is_warned_of(home: Path) -> None:
    story = Story(home, bad=BAD)
    story.train(130)
    state = {"weight": torch.zeros(1, dtype=torch.float64), "data": {"position": 0, "skipped": []}}
    with (
        make_checkpointer(home, state) as ckpt,
        pytest.warns(ResumeWarning, match="Rollbacks have left out samples of 'data'"),
    ):
        ckpt.restore(strict=False)


def test_loops_of_their_own_go_back_too(home: Path) -> None:
    story = Story(home, bad=range(400, 412))
    with make_checkpointer(home, story.state, every=10, watches=[story.on_spike]) as ckpt:
        step = ckpt.restore() or 0
        while step < 150:
            story.step(ckpt)
            step = ckpt.step_done()
        ckpt.finish()
    assert len(rollbacks(home)) == 1
    assert holdfast.open(home).step == 150

    other = Story(home.with_name("other"), bad=range(400, 412))
    with make_checkpointer(other.home, other.state, every=10, watches=[other.on_spike]) as ckpt:
        step = ckpt.restore() or 0
        while step < 150:
            other.step(ckpt)
            step += 1
            if ckpt.should_save(step):
                ckpt.save(step)
            if ckpt.must_go_back:
                assert ckpt.must_go_back.startswith("loss is 90 at step 101")
                step = ckpt.roll_back()
        ckpt.finish(step)
    assert len(rollbacks(other.home)) == 1


def test_a_loop_that_does_not_go_back_is_refused(home: Path) -> None:
    story = Story(home, bad=range(400, 412))
    with make_checkpointer(home, story.state, every=10, watches=[story.on_spike]) as ckpt:
        ckpt.restore()
        with pytest.raises(InvalidInput, match="roll_back"):
            ckpt.roll_back()
        with pytest.raises(InvalidInput, match=r"loop of your own calls `step = ckpt.roll_back\(\)`"):
            count_past(ckpt, story)


def count_past(ckpt: holdfast.Checkpointer, story: Story) -> None:
    for step in range(1, 150):
        story.step(ckpt)
        if ckpt.should_save(step):
            ckpt.save(step)


def test_the_word_is_refused_where_nothing_can_go_back(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="Give it a state"):
        holdfast.Checkpointer(tmp_path, watches=[holdfast.Spike("rollback")])
    for value in ("back", 3, None):
        with pytest.raises(InvalidInput, match=r"Spike\(action=\) must be one of report, rollback, off"):
            holdfast.Spike(value)  # pyright: ignore[reportArgumentType]
    for options in ({"max_rollbacks": 0}, {"back": -1}, {"skip": 1.5}):
        with pytest.raises(InvalidInput, match="Spike"):
            holdfast.Spike("rollback", **options)  # pyright: ignore[reportArgumentType]


class Loader:
    """A loader with a state and without `skip`, such as StatefulDataLoader."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.num_read += 1
            yield self.num_read - 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_read = state["num_read"]


def test_a_loader_that_cannot_skip_stays_at_its_position(home: Path) -> None:
    loader, seen = Loader(), []
    batches = iter(loader)
    state = {"weight": torch.zeros(1), "loaders": {"train": loader}}
    with make_checkpointer(home, state, every=10, keep=None, watches=[GO_BACK]) as ckpt:
        for _ in ckpt.steps(150):
            seen.append(next(batches))
            ckpt.record(loss=feed(seen[-1], bad=range(100, 103)))
    assert seen == list(range(len(seen)))  # it runs on
    (only,) = rollbacks(home)
    assert (only.base_step, only.kept, only.skipped) == (90, ("loaders.train",), {})
    loader.load_state_dict({"num_read": 0})
    with make_checkpointer(home, state) as ckpt:
        ckpt.restore(150)
        assert loader.num_read == 163
        with pytest.warns(ResumeWarning, match=r"'loaders.train' cannot skip, so the samples from step"):
            ckpt.restore(80)
        assert loader.num_read == 80


@pytest.mark.slow
def test_the_loader_of_the_step_after_a_rollback_is_durable_at_once(home: Path) -> None:
    loader = Loader()
    batches = iter(loader)
    state = {"weight": torch.zeros(1), "data": loader}
    with make_checkpointer(home, state, every=10, keep=None, watches=[GO_BACK]) as ckpt:
        for step in ckpt.steps(150):
            if step == 90 and loader.num_read > 90:
                break  # as if it were killed
            ckpt.record(loss=feed(next(batches), bad=range(100, 103)))
    loader.load_state_dict({"num_read": 0})
    with make_checkpointer(home, state) as ckpt:
        assert ckpt.restore() == 90
        assert loader.num_read == 103


def test_a_state_without_data_is_warned_of(home: Path) -> None:
    state = {"weight": torch.zeros(1)}
    with (
        make_checkpointer(home, state, watches=[holdfast.Spike("rollback")]) as ckpt,
        pytest.warns(ResumeWarning, match="no object that can skip samples"),
    ):
        ckpt.save(1).wait_durable()


def test_a_resumed_run_notices_the_spike_that_ended_the_last_start(home: Path) -> None:
    """The values before the checkpoint are read from the history: otherwise the spike would be the normal."""
    story = Story(home, bad=range(396, 10**6), on_spike=holdfast.Spike("report"))
    story.train(101)  # two high values: not yet a spike
    again = Story(home, bad=range(396, 420))
    assert again.train(200)[-1] == 200
    assert rollbacks(home)[0].first_step == 100
    assert rollbacks(home)[0].base_step == 90


@pytest.mark.slow
def test_retention_keeps_a_healthy_checkpoint_to_go_back_to(home: Path) -> None:
    """With `keep=1` the newest checkpoint is of a step of the spike."""
    story = Story(home, bad=BAD, every=1, keep=1, on_spike=holdfast.Spike("rollback", back=10))
    assert story.train(150)[-1] == 150
    back = 10 + 16  # at which retention keeps one; and one more, which is newer by at most as much
    assert 101 - 3 * back <= rollbacks(home)[0].base_step <= 101 - 1 - 10


@pytest.mark.slow
def test_a_norm_of_gradients_that_is_nan_is_a_spike(home: Path) -> None:
    story = Story(home, bad=BAD, metric="grad_norm", high=math.nan)
    assert story.train(150)[-1] == 150
    assert rollbacks(home)[0].reason.startswith("grad_norm is nan at step 101")


@pytest.mark.parametrize(
    ("metric", "values"),
    [("loss", BLOOM_LOSS), pytest.param("grad_norm", BLOOM_NORM, marks=pytest.mark.slow)],
)
def test_the_spike_that_bloom_printed_is_gone_back_behind(
    home: Path, metric: str, values: list[float]
) -> None:
    usual = {"loss": 2.2, "grad_norm": 0.24}[metric]
    generator, data = random.Random(1), SkippingSampler(1)
    state = {"weight": torch.zeros(1), "data": data}
    with make_checkpointer(home, state, every=10, watches=[GO_BACK]) as ckpt:
        for _ in ckpt.steps(140):
            (sample,) = data.take()
            normal = usual * (1 + 0.01 * generator.gauss(0, 1))
            ckpt.record(**{metric: values[sample - 100] if 100 <= sample < 100 + len(values) else normal})
    assert len(rollbacks(home)) >= 1
    assert 100 <= rollbacks(home)[0].first_step <= 108


@pytest.mark.slow
def test_healthy_noise_never_goes_back(home: Path) -> None:
    generator, data = random.Random(2), SkippingSampler(1)
    state = {"weight": torch.zeros(1), "data": data}
    with make_checkpointer(home, state, every=50, watches=[holdfast.Spike("rollback")]) as ckpt:
        for step in ckpt.steps(600):
            data.take()
            ckpt.record(loss=(2 + 9 * math.exp(-step / 100)) * math.exp(generator.gauss(0, 0.25)))
    assert rollbacks(home) == []


# -- what people see -------------------------------------------------------------------------------------


def test_history_and_report_show_the_rollback(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Story(home, bad=range(400, 412)).train(150)
    shown = capfd.readouterr().err
    assert "SPIKE: loss is 90 at step 101, usually 2" in shown
    went_back = "Training went back from step 103 to step 90 of attempt 1; samples 360 to 411 of 'data' are"
    assert went_back in shown
    assert main(["history", str(home)]) == 0
    shown = capfd.readouterr().out
    assert "samples 360 to 411 of 'data' are left out for ever" in shown
    assert main(["report", str(home), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    (only,) = found["rollbacks"]
    assert (only["last_step"], only["base_step"], only["skipped"]) == (103, 90, {"data": [360, 412]})
    assert [(one["kind"], one["steps_lost"]) for one in found["interruptions"]] == [("went back", 13)]


# -- ranges, pure ----------------------------------------------------------------------------------------

positions = st.integers(0, 500)
ranges = st.tuples(positions, positions).map(lambda one: (min(one), max(one)))


@given(positions, positions, st.lists(ranges), st.integers(1, 50), st.integers(1, 9), st.integers(0, 9))
def test_what_was_read_since_the_checkpoint_is_always_left_out(
    start: int, more: int, skipped: list[tuple[int, int]], num_steps: int, in_a_row: int, extra: int
) -> None:
    now = start + more
    first, stop = range_to_skip(
        start, now, skipped, num_steps=num_steps, in_a_row=in_a_row, extra_steps=extra
    )
    assert first == start
    assert stop >= now
    if in_a_row == 1 and not extra:
        assert stop == now
    if in_a_row > 1 and more:
        assert stop - start >= 2 * more


def test_further_rollbacks_double_the_range() -> None:
    skipped: list[tuple[int, int]] = []
    position = 1000
    for in_a_row, expected in ((1, 1100), (2, 1240), (3, 1520)):
        now = position + (100 if in_a_row == 1 else 20)
        found = range_to_skip(position, now, skipped, num_steps=10, in_a_row=in_a_row, extra_steps=0)
        skipped.append(found)
        assert found[1] == expected
        position = found[1]
    assert range_to_skip(0, 100, [], num_steps=10, in_a_row=1, extra_steps=3) == (0, 130)


# -- a GPT, with real kills ------------------------------------------------------------------------------


def run(home: Path, *options: str, steps: int = 300, **env: str) -> tuple[int, str]:
    """Run the small GPT in a process of its own; return its status and what it printed."""
    found = nursery.shared().run([SCRIPT, str(home), str(steps), *options], env={**os.environ, **env})
    return found.returncode, found.stdout + found.stderr


def final(text: str) -> float:
    return float(text.split("final ")[1].split()[0])


POISONED = ("--poison", "1200", "1360")
GOES_BACK = (*POISONED, "--on-spike", "rollback")


@pytest.mark.parametrize(
    "point", [pytest.param("rollback.restored", marks=pytest.mark.slow), "rollback.noted"]
)
def test_a_gpt_survives_poison_and_a_kill_within_the_rollback(tmp_path: Path, point: str) -> None:
    status, _ = run(tmp_path / "run", *GOES_BACK, HOLDFAST_KILL_AT=point)
    assert status == -signal.SIGKILL
    status, text = run(tmp_path / "run", *GOES_BACK)
    assert status == 0
    assert final(text) < 0.8
    assert "skipped ((1120, 1376),)" in text  # those of a run that is not killed


@pytest.mark.slow
def test_the_final_loss_is_that_of_clean_runs_within_noise(tmp_path: Path) -> None:
    clean = [final(run(tmp_path / f"clean{seed}", "--seed", str(seed))[1]) for seed in range(3)]
    lost = final(run(tmp_path / "lost", *POISONED)[1])
    back = final(run(tmp_path / "back", *GOES_BACK)[1])
    noise = max(clean) - min(clean)
    assert lost > 3 * max(clean)
    assert back < max(clean) + noise


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_gpt_survives_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    generator, home = random.Random(seed), tmp_path / "run"
    for number in range(8):
        child = nursery.shared().start(
            [SCRIPT, str(home), "300", *GOES_BACK], tmp_path / f"output{number}", env=dict(os.environ)
        )
        wanted = generator.choice(("step 14", "step 15", "SPIKE", "step 141 ", "step 2"))
        deadline = time.monotonic() + 300
        while wanted not in child.said() and child.ended.empty() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(generator.random() * 0.3)
        child.kill()
        child.wait()
    status, text = run(home, *GOES_BACK)
    assert status == 0
    assert final(text) < 0.8
    assert set(range(1200, 1360)) <= set().union(*(range(*one) for one in skipped_of(text)))


def skipped_of(text: str) -> list[tuple[int, int]]:
    found = text.split("skipped ")[-1].splitlines()[0]
    return [tuple(map(int, pair.split(", "))) for pair in found.strip("() ,").replace("), (", "|").split("|")]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_ranks_go_back_together(tmp_path: Path, layout: str) -> None:
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    env = {**os.environ, **world, "OMP_NUM_THREADS": "1"}
    arguments = [SCRIPT, str(tmp_path / "run"), "200", *GOES_BACK, "--layout", layout]
    children = [
        nursery.shared().start(arguments, tmp_path / f"output{rank}", env={**env, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [child.wait() for child in children] == [0, 0], children[0].said()
    text = children[0].said()
    assert final(text) < 1.0
    assert text.count("Training went back") == 2
