"""Activities of a thread, from its frames and its state in the kernel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType

import pytest
import torch

from holdfast.checkpoint.keeper.pulse import Pulse, PulseReader
from holdfast.watch.pace.sampler import NAME, Activity, ActivitySampler, activity_of
from stage.training import wait_until

SITE = "/venv/lib/python3.11/site-packages"
FRAMES = {
    "script": ("/home/me/train.py", "main"),
    "linear": (f"{SITE}/torch/nn/modules/linear.py", "forward"),
    "backward": (f"{SITE}/torch/autograd/graph.py", "_engine_run_backward"),
    "all_reduce": (f"{SITE}/torch/distributed/distributed_c10d.py", "all_reduce"),
    "fsdp": (f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", "_pre_forward"),
    "loader": (f"{SITE}/torch/utils/data/dataloader.py", "__next__"),
    "dataset": ("/home/me/data.py", "__getitem__"),
    "compiled": (f"{SITE}/torch/_dynamo/eval_frame.py", "compile_wrapper"),
    "compiler": (f"{SITE}/torch/_dynamo/convert_frame.py", "_compile"),
    "evaluate": ("/home/me/train.py", "evaluate"),
    "exchange": (f"{SITE}/holdfast/ranks.py", "exchange_flags"),
}


def codes(*names: str) -> list[CodeType]:
    """Return functions at the places of some frames, innermost first."""
    made = (lambda: None).__code__
    return [made.replace(co_filename=FRAMES[name][0], co_name=FRAMES[name][1]) for name in names]


@pytest.mark.parametrize(
    ("frames", "state", "activity"),
    [
        (("linear", "script"), "R", Activity.RUNS),
        (("backward", "script"), "R", Activity.RUNS),
        (("backward", "script"), "S", Activity.WAITS),
        (("all_reduce", "script"), "S", Activity.WAITS),
        (("all_reduce", "fsdp", "linear", "script"), "S", Activity.WAITS),
        (("exchange", "script"), "S", Activity.WAITS),
        (("script",), "S", Activity.SLEEPS),
        (("script",), "D", Activity.SLEEPS),
        (("loader", "script"), "S", Activity.LOADS),
        (("loader", "script"), "R", Activity.LOADS),
        (("dataset", "loader", "script"), "S", Activity.LOADS),
        (("linear", "compiled", "script"), "R", Activity.RUNS),
        (("compiler", "compiled", "script"), "R", Activity.APART),
        (("all_reduce", "evaluate", "script"), "S", Activity.APART),
        ((), "S", Activity.SLEEPS),
    ],
)
def test_place_and_state_give_the_activity(frames: tuple[str, ...], state: str, activity: Activity) -> None:
    assert activity_of(codes(*frames), state) is activity


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    found = Pulse()
    yield found
    found.close()


def sampled(pulse: Pulse, work: Callable[[], object]) -> tuple[int, ...]:
    """Return the samples of a thread that works, by activity, once there are some."""
    reading, stop = PulseReader.of_process(threading.get_native_id(), pulse.share()), threading.Event()

    def train() -> None:
        pulse.begin(0)
        pulse.beat(1)
        while not stop.is_set():
            work()

    thread = threading.Thread(target=train)
    sampler = ActivitySampler(pulse, 0.3)
    thread.start()
    sampler.start()
    try:
        wait_until(lambda: sum(reading.read().words(NAME)) >= 30)
        return reading.read().words(NAME)
    finally:
        sampler.close()
        stop.set()
        thread.join()
        reading.close()


class SlowData(torch.utils.data.Dataset[int]):
    """Samples that each take a while."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def evaluate(pulse: Pulse) -> None:
    """Take a while in a phase."""
    with pulse.phase("eval"):
        time.sleep(0.05)


NUMBERS, LOADER = torch.randn(64, 64), torch.utils.data.DataLoader(SlowData())


@pytest.mark.parametrize(
    ("work", "activity"),
    [
        (lambda _: time.sleep(0.05), Activity.SLEEPS),
        (lambda _: NUMBERS @ NUMBERS, Activity.RUNS),
        (lambda _: list(LOADER), Activity.LOADS),
        (evaluate, Activity.APART),
    ],
)
def test_a_thread_is_sampled_in_its_activity(
    pulse: Pulse, work: Callable[[Pulse], object], activity: Activity
) -> None:
    found = sampled(pulse, lambda: work(pulse))
    assert found[activity] > 0.6 * sum(found)


def test_nothing_is_sampled_before_the_first_step_is_complete(pulse: Pulse) -> None:
    pulse.begin(0)
    assert not pulse.is_in_loop
    pulse.beat(1)
    assert pulse.is_in_loop
    pulse.end()
    assert not pulse.is_in_loop
