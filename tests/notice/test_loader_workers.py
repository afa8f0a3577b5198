"""Signals to all processes of a training: its data loader workers, its last save and its exit status."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import PREEMPTED_STATUS
from nursery import shared

AT = 4
"""Step in which the signals arrive."""

TRAIN = """
import multiprocessing, os, signal, subprocess, sys, time
import torch, holdfast

class Data(torch.utils.data.Dataset):
    def __init__(self, item=None):
        self.item = item
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        if self.item:
            time.sleep(self.item)
        return torch.full((4,), float(index))

def signal_all(number, way):
    '''Have another process signal the process group, or each process, or kill the workers.'''
    name = signal.Signals(number).name[3:]
    workers = " ".join(str(one.pid) for one in multiprocessing.active_children())
    if way == "group":
        command = f"trap '' {name}; kill -{name} -{os.getpgid(0)}"
    else:
        command = f"kill -{name if way == 'each' else 'KILL'} {workers}; kill -{name} {os.getpid()}"
    return subprocess.Popen(["sh", "-c", command])

class Training:
    def __init__(self, **options):
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        options = {"num_workers": 2, "multiprocessing_context": "fork", **options}
        self.loader = torch.utils.data.DataLoader(Data(), 4, **options)
    def make(self, **options):
        return holdfast.Checkpointer("home", self.state, every=10**9, **options)
    def train(self, batch):
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

"""


def run(folder: Path, body: str, *, is_imported: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a script in a process group of its own.

    Args:
        is_imported: its child processes import it.
    """
    own = f"def main():\n{textwrap.indent(body, '    ')}\n\nif __name__ == '__main__':\n    main()\n"
    (folder / "script.py").write_text(f"{TRAIN}\n{own}")
    if not is_imported:
        return shared().run(["script.py"], cwd=folder)
    options = {"cwd": folder, "capture_output": True, "start_new_session": True}
    return subprocess.run([sys.executable, "script.py"], **options, text=True, check=False)


def saved_step(folder: Path, done: subprocess.CompletedProcess[str]) -> int:
    """Return the newest saved step of a training that has ended after a notice."""
    assert done.returncode == PREEMPTED_STATUS, done.stderr
    return holdfast.open(folder / "home").step


def loop(number: int, way: str, *, is_before: bool, options: str = "") -> str:
    """Return a script whose workers are started before or after its Checkpointer."""
    return f"""
t = Training({options})
before = iter(t.loader) if {is_before} else None
with t.make() as ckpt:
    batches = before or iter(t.loader)
    for step in ckpt.steps(900):
        if step == {AT}:
            signal_all({int(number)}, "{way}")
        t.train(next(batches))
"""


SPAWNED = itertools.product(
    (True, False),
    [("group", signal.SIGTERM), ("each", signal.SIGUSR1)],
    ("spawn", "forkserver"),
    (True, False),
)


@pytest.mark.parametrize(
    ("is_before", "way", "number", "options"),
    [
        (True, "group", signal.SIGTERM, ""),
        (True, "each", signal.SIGTERM, ""),
        (False, "group", signal.SIGUSR1, ""),
        (False, "each", signal.SIGTERM, ""),
        (False, "group", signal.SIGINT, ""),
        *(
            pytest.param(
                *(is_before, *signalled),
                f"multiprocessing_context={method!r}, persistent_workers={is_persistent}",
                marks=pytest.mark.slow,
            )
            for is_before, signalled, method, is_persistent in SPAWNED
        ),
    ],
)
def test_workers_survive_a_notice_until_the_save(
    tmp_path: Path, is_before: bool, way: str, number: int, options: str
) -> None:
    """They fork, or are spawned, before or after their Checkpointer is made."""
    script = loop(number, way, is_before=is_before, options=options)
    done = run(tmp_path, script, is_imported=bool(options))
    assert saved_step(tmp_path, done) > AT
    assert "has ended the step" not in done.stderr


@pytest.mark.parametrize(
    "form",
    ["with", *(pytest.param(one, marks=pytest.mark.slow) for one in ("close", "no end", "own loop"))],
)
def test_the_last_complete_step_is_saved_if_workers_die_of_the_notice(tmp_path: Path, form: str) -> None:
    """Nothing protects them from SIGKILL."""
    script = f"""
t = Training()
batches = iter(t.loader)
ckpt = t.make()
def steps():
    for step in ckpt.steps(900):
        if step == {AT}:
            signal_all(signal.SIGTERM, "killed").wait()
        t.train(next(batches))
def own():
    ckpt.restore()
    for step in range(1, 900):
        t.train(next(batches))
        if ckpt.should_save(step):
            ckpt.save(step)
        if ckpt.preempted:
            ckpt.stop(step)
        if step == {AT}:
            signal_all(signal.SIGTERM, "killed").wait()
if {form!r} in ("with", "own loop"):
    with ckpt:
        own() if {form!r} == "own loop" else steps()
elif {form!r} == "close":
    try:
        steps()
    finally:
        ckpt.close()
else:
    steps()
"""
    done = run(tmp_path, script)
    assert saved_step(tmp_path, done) >= AT
    assert "preempted (SIGTERM" in done.stderr


@pytest.mark.slow
def test_a_run_whose_workers_died_of_the_notice_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    """Down to the next random number."""
    script = """
import hashlib, json
torch.manual_seed(0)
t = Training()
t.model.insert(1, torch.nn.Dropout(0.5))
batches = iter(t.loader)
with t.make() as ckpt:
    for step in ckpt.steps(12):
        if step == AT:
            signal_all(signal.SIGTERM, "killed").wait()
        t.train(next(batches) * 0 + step)
tensors = [tensor.tolist() for tensor in t.model.state_dict().values()]
print(json.dumps([tensors, torch.rand(1).item()]))
"""
    folders = [tmp_path / "uninterrupted", tmp_path / "interrupted"]
    for folder in folders:
        folder.mkdir()
    uninterrupted = run(folders[0], script.replace("AT", "99"))
    assert saved_step(folders[1], run(folders[1], script.replace("AT", str(AT)))) >= AT
    resumed = run(folders[1], script.replace("AT", "99"))
    assert uninterrupted.returncode == resumed.returncode == 0, resumed.stderr
    assert uninterrupted.stdout == resumed.stdout


@pytest.mark.slow
def test_an_error_in_the_middle_of_a_step_saves_nothing_under_the_number_of_the_step_before(
    tmp_path: Path,
) -> None:
    """The first half of the batches has changed the averages of a normalization."""
    script = f"""
t = Training()
batches = iter(t.loader)
with t.make() as ckpt:
    for step in ckpt.steps(900):
        t.train(next(batches))
        if step == 1:
            ckpt.save(2).wait_durable()
        if step == {AT}:
            t.model(next(batches))
            signal_all(signal.SIGTERM, "killed").wait()
            while True:
                next(batches)
"""
    done = run(tmp_path, script)
    assert saved_step(tmp_path, done) == 2
    assert "step 2 is durable" in done.stderr


@pytest.mark.slow
def test_a_worker_that_dies_of_the_notice_does_not_interrupt_an_optimizer(tmp_path: Path) -> None:
    script = f"""
t = Training()
batches = iter(t.loader)
class Interrupted(torch.optim.SGD):
    def step(self, *args):
        workers = multiprocessing.active_children()
        if at == {AT}:
            signal_all(signal.SIGTERM, "killed").wait()
            for worker in workers:
                os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        return super().step(*args)
t.optimizer = t.state["optimizer"] = Interrupted(t.model.parameters(), lr=0.01)
with t.make() as ckpt:
    for at in ckpt.steps(900):
        t.train(next(batches))
"""
    done = run(tmp_path, script)
    assert saved_step(tmp_path, done) > AT


END = """
global batches  # alive until the end of the process
t = Training()
t.loader = torch.utils.data.DataLoader(Data(600), 4, num_workers=2, multiprocessing_context="fork")
with t.make(quiet=True) as ckpt:
    for step in ckpt.steps(2):
        t.train(torch.ones(4, 4) * step)
        batches = iter(t.loader) if step == 0 else batches
"""


OF_MULTIPROCESSING = """
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("raise ValueError('mine')", 1), ("sys.exit(9)", 9), (OF_MULTIPROCESSING, 0)],
    ids=["end", "error", "exit", "multiprocessing"],
)
def test_workers_do_not_delay_the_end_of_the_process(tmp_path: Path, ending: str, status: int) -> None:
    """They are busy for ten minutes, and multiprocessing waits for them after it has sent them SIGTERM."""
    is_child = ending == OF_MULTIPROCESSING
    script = f"def train():\n{textwrap.indent(END, '    ')}" if is_child else END
    done = run(tmp_path, script + ending)
    assert done.returncode == status, done.stderr
    assert "killed by signal" not in done.stderr


TERMINATES_A_CHILD = """
class Decoded(Data):
    def __getitem__(self, index):
        process = subprocess.Popen(["sleep", "600"])
        process.terminate()
        return torch.full((4,), float(process.wait()))
t = Training()
t.loader = torch.utils.data.DataLoader(Decoded(), 4, num_workers=1, multiprocessing_context="fork")
with t.make(quiet=True) as ckpt:
    for step, batch in zip(ckpt.steps(2), t.loader):
        t.train(batch)
        print(int(batch[0, 0]))
"""
HAS_A_FIRST_FUNCTION = """
def first(number):
    os.write(1, f"worker {number}\\n".encode())
t = Training(worker_init_fn=first)
with t.make(quiet=True) as ckpt:
    for step, batch in zip(ckpt.steps(3), t.loader):
        t.train(batch)
assert t.loader.worker_init_fn is first
"""


@pytest.mark.parametrize(
    ("script", "printed"),
    [(TERMINATES_A_CHILD, ["-15", "-15"]), (HAS_A_FIRST_FUNCTION, ["worker 0", "worker 1"])],
    ids=["children can be terminated", "the user's first function is called and stays theirs"],
)
def test_a_worker_does_what_the_user_wants(tmp_path: Path, script: str, printed: list[str]) -> None:
    done = run(tmp_path, script)
    assert sorted(done.stdout.splitlines()) == printed, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loop_that_never_asks_for_notices_keeps_the_usual_effect_of_signals(
    tmp_path: Path, number: int
) -> None:
    script = f"""
t = Training()
ckpt = t.make(quiet=True)
for step in range(1, 5):
    t.train(torch.ones(4, 4))
    ckpt.save(step)
    if step == 2:
        os.kill(os.getpid(), {int(number)})
print("trained on")
"""
    done = run(tmp_path, script)
    assert done.stdout == ""
    is_interrupted = "KeyboardInterrupt" in done.stderr
    assert is_interrupted if number == signal.SIGINT else done.returncode == -signal.SIGTERM


CHILD = """
import multiprocessing.forkserver, signal, sys
from multiprocessing import resource_tracker
def tell(queue):
    queue.put([str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)])
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    if sys.argv[1:]:
        context.set_forkserver_preload(["holdfast.watch.preemption.fork_server"])
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    queue = context.Queue()
    child = context.Process(target=tell, args=(queue,))
    child.start()
    print(queue.get())
    child.join()
"""


def test_other_children_of_the_fork_server_keep_the_usual_handlers(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    program = [sys.executable, str(script)]
    found = [subprocess.check_output([*program, *words], text=True) for words in ([], ["with"])]
    assert found[0] == found[1], found
    assert "default_int_handler" in found[0]
