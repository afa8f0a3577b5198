"""Standbys: each next start of a script begins in a process that has imported its modules."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.system.entry import command
from holdfast.watch.standby import with_standby
from holdfast.watch.standby.start import sitecustomize
from stage.training import wait_until

LIMIT_S = 120
ENVIRONMENT = with_standby({**os.environ, "HOLDFAST_KEEP_IN_MEMORY": "2m"})
ARGUMENTS = ("--lr", "0.1")
FROM_STANDBY = "import sys\nprint('decimal' in sys.modules, flush=True)\n"


class Site:
    """Folder with a script, and the standby process of that script."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.script = folder / "script.py"
        self.standby: subprocess.Popen[bytes] | None = None
        self.running: list[subprocess.Popen[str]] = []

    def write(self, text: str) -> None:
        self.script.write_text(FROM_STANDBY + text)

    def make_standby(self, *modules: str, env: dict[str, str] = ENVIRONMENT) -> subprocess.Popen[bytes]:
        """Start a standby of the script, and wait until it has imported the modules."""
        with self._monkeypatch.context() as here:
            here.chdir(self.folder)
            here.setattr(sys, "orig_argv", [sys.executable, self.script.name, *ARGUMENTS])
            name = sitecustomize.socket_name(1)
        fd = os.memfd_create("plan")
        os.write(
            fd, json.dumps({"path": [*sys.path, str(self.folder)], "modules": ["decimal", *modules]}).encode()
        )
        self.standby = subprocess.Popen(
            command("holdfast.watch.standby", name, str(fd)),
            stdin=subprocess.PIPE, env=env, pass_fds=(fd,), start_new_session=True,
        )  # fmt: skip
        os.close(fd)
        wait_until(lambda: is_listening(name))
        return self.standby

    def start(self, **options: object) -> subprocess.Popen[str]:
        """Start the script as a launcher does."""
        found = subprocess.Popen(
            [sys.executable, self.script.name, *ARGUMENTS],
            **{
                "cwd": self.folder, "env": ENVIRONMENT, "text": True, "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options,
            },
        )  # fmt: skip
        self.running.append(found)
        return found

    def run(self, **options: object) -> tuple[int, str, str]:
        """Run the script to its end; return its exit status and output."""
        process = self.start(**options)
        out, error = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, error

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()
        if self.standby is not None:
            self.standby.kill()
            self.standby.communicate()


def is_listening(name: str) -> bool:
    found = sitecustomize.connect(name)
    if found is not None:
        found.close()
    return found is not None


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    found = Site(tmp_path, monkeypatch)
    yield found
    found.close()


# -- a start is as Python's own ------------------------------------------------------------------------------
FACTS = """
import inspect, json, os, resource, signal, types
class Mine: ...
import pickle
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "name": __name__, "file": __file__,
    "cwd": os.getcwd(), "umask": os.umask(0), "term": str(signal.getsignal(signal.SIGTERM)),
    "int": str(signal.getsignal(signal.SIGINT)), "hup": str(signal.getsignal(signal.SIGHUP)),
    "stdin": sys.stdin.read(), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "pickled": pickle.loads(pickle.dumps(Mine())).__class__ is Mine, "source": inspect.getsource(Mine),
    "spec": __spec__, "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "processors": sorted(os.sched_getaffinity(0)), "line": sys.stdout.line_buffering,
    "environment": {name: os.environ.get(name) for name in ("RANK", "HOME", "PYTHONPATH")},
    "globals": sorted(name for name in globals() if name.startswith("__")),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
}
print(json.dumps(facts))
"""


def test_a_script_finds_what_it_would_find_without_a_standby(site: Site) -> None:
    site.write(FACTS)
    options = {"env": {**ENVIRONMENT, "RANK": "3"}, "preexec_fn": _set_up, "stdin": None}
    (site.folder / "input").write_text("of the user")

    def run() -> tuple[int, list[str], str]:
        with (site.folder / "input").open() as file:
            status, out, error = site.run(**{**options, "stdin": file})
        return status, out.splitlines(), error

    status, (is_from_standby, alone), error = run()
    assert (status, is_from_standby, error) == (0, "False", "")
    site.make_standby()
    status, (is_from_standby, forked), error = run()
    assert (status, is_from_standby, error) == (0, "True", "")
    assert json.loads(forked) == json.loads(alone)


def _set_up() -> None:
    import resource  # here: in the child

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o027)
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.mark.parametrize(
    "ending",
    ["sys.exit(3)", "sys.exit('why')", "1 / 0", "import os; os._exit(7)", "raise KeyboardInterrupt", "",
     "import os; os.kill(os.getpid(), 9)", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"],
)  # fmt: skip
def test_a_script_ends_as_without_a_standby(site: Site, ending: str) -> None:
    site.write(f"def end():\n    {ending or 'pass'}\nend()\n")
    alone = site.run()
    site.make_standby()
    assert site.run() == (alone[0], "True\n", alone[2])


def test_handlers_at_exit_see_the_script(site: Site) -> None:
    site.write(
        "import atexit\nclass Mine: ...\natexit.register(lambda: print(sys.modules['__main__'].Mine))\n"
    )
    site.make_standby()
    assert site.run() == (0, "True\n<class '__main__.Mine'>\n", "")


def test_processes_can_be_spawned(site: Site) -> None:
    site.write(
        "import multiprocessing\ndef double(x): return 2 * x\nif __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [4]))\n"
    )
    site.make_standby()
    status, out, _ = site.run()
    assert (status, out.splitlines()[-1]) == (0, "[8]")


def test_random_numbers_of_two_starts_differ(site: Site) -> None:
    site.write("import random, numpy\nprint(random.random(), numpy.random.rand())\n")
    site.make_standby("numpy", "random")
    found = [site.run()[1].splitlines() for _ in range(2)]
    assert [lines[0] for lines in found] == ["True", "True"]
    assert all(one != other for one, other in zip(found[0][1].split(), found[1][1].split(), strict=True))


def test_signals_reach_the_script(site: Site) -> None:
    site.write(
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    site.make_standby()
    process = site.start()
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["True\n", "ready\n"]
    process.terminate()
    assert process.wait(LIMIT_S) == 75


# -- nothing outlives its owner ------------------------------------------------------------------------------
def started(site: Site) -> tuple[subprocess.Popen[str], int]:
    """Start the script from its standby; return its process, and the pid of the process that runs it."""
    site.write("import os, signal\nprint(os.getpid(), flush=True)\nwhile True: signal.pause()\n")
    process = site.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process, int(process.stdout.readline())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_script_dies_with_its_process_before_the_next_one_starts(site: Site) -> None:
    site.make_standby()
    process, pid = started(site)
    process.kill()
    process.wait(LIMIT_S)
    site.write(f"import os\nprint(os.path.exists('/proc/{pid}'))\n")
    assert site.run()[:2] == (0, "True\nFalse\n")


def test_a_script_dies_with_its_standby(site: Site) -> None:
    standby = site.make_standby()
    process, pid = started(site)
    standby.kill()
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    wait_until(lambda: not is_running(pid))


def test_a_standby_ends_once_its_script_is_complete(site: Site) -> None:
    site.write("")
    standby = site.make_standby()
    assert standby.stdin is not None
    standby.stdin.close()  # the training that had made it was killed
    site.write("sys.exit(1)")
    assert site.run()[:2] == (1, "True\n")
    site.write("")
    assert site.run()[:2] == (0, "True\n")
    assert standby.wait(LIMIT_S) == 0


def test_a_standby_ends_if_no_start_follows(site: Site) -> None:
    site.write("")
    standby = site.make_standby(env={**ENVIRONMENT, "HOLDFAST_KEEP_IN_MEMORY": "100ms"})
    assert standby.stdin is not None
    standby.stdin.close()
    assert standby.wait(LIMIT_S) == 0


# -- a start that differs imports everything itself ----------------------------------------------------------
def refused(site: Site, reason: str, **options: object) -> None:
    status, out, error = site.run(**options)
    assert (status, out) == (0, "False\n")
    assert error == f"holdfast: this start does not use its standby: {reason}\n"


def test_a_changed_module_is_imported_anew(site: Site) -> None:
    module = site.folder / "mine.py"
    module.write_text("value = 1\n")
    site.write("")
    standby = site.make_standby("mine")
    assert site.run() == (0, "True\n", "")
    module.write_text("value = 2.0\n")
    refused(site, f"{module} has changed")
    assert standby.stdin is not None
    standby.stdin.close()
    assert standby.wait(LIMIT_S) == 0  # so that the next training makes another


def test_a_changed_script_is_run_anew(site: Site) -> None:
    site.write("")
    site.make_standby()
    site.write("print('changed')")
    assert site.run() == (0, "True\nchanged\n", "")


def test_a_changed_variable_is_seen_by_all_modules(site: Site) -> None:
    site.write("")
    site.make_standby()
    refused(site, "the variable OMP_NUM_THREADS has changed", env={**ENVIRONMENT, "OMP_NUM_THREADS": "7"})


def test_a_changed_limit_holds(site: Site) -> None:
    import resource

    site.write("")
    site.make_standby()
    low = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))  # noqa: E731
    refused(site, "its hard limits differ", preexec_fn=low)


def test_a_module_with_a_thread_is_not_forked(site: Site) -> None:
    (site.folder / "mine.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"
    )
    site.write("")
    site.make_standby("mine")
    refused(site, "an imported module starts threads, which no forked process has")


def test_other_arguments_are_another_script(site: Site) -> None:
    site.write("")
    site.make_standby()
    words = [sys.executable, site.script.name, "--lr", "0.2"]
    out = subprocess.run(words, cwd=site.folder, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("False\n", "")


def test_a_module_that_fails_fails_again_in_the_script(site: Site) -> None:
    (site.folder / "mine.py").write_text("raise ValueError('of mine')\n")
    site.write("import mine\n")
    site.make_standby("mine")
    status, out, error = site.run()
    assert (status, out) == (1, "True\n")
    assert error.endswith("ValueError: of mine\n")


# -- which programs have standbys ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "position"),
    [
        (["python", __file__, "-m"], 1),
        (["python", "-u", "-X", "utf8", "-W", "ignore", "-Werror", __file__], 7),
        (["python", "-m", "package.train", "x"], 1),
        (["python", "-c", "import mine", __file__], None),
        (["python", "-uc", "import mine", __file__], None),
        (["python", "-", __file__], None),
        (["python", "missing.py"], None),
        (["python"], None),
    ],
)
def test_scripts_and_modules_have_standbys(words: list[str], position: int | None) -> None:
    assert sitecustomize.find_script(words) == position


def test_the_own_file_of_a_machine_is_imported_too(site: Site) -> None:
    """Debian has a sitecustomize.py, and so have some companies."""
    (site.folder / "sitecustomize.py").write_text("import sys\nsys.is_customized = True\n")
    site.write("print(sys.is_customized, sys.modules['sitecustomize'].__file__)\n")
    paths = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(site.folder)])
    own = site.folder / "sitecustomize.py"
    assert site.run(env={**ENVIRONMENT, "PYTHONPATH": paths}) == (0, f"False\nTrue {own}\n", "")


# -- trainings -----------------------------------------------------------------------------------------------
TRAINING = """
import os, sys, time
is_warm = "torch" in sys.modules
import torch
import holdfast
from holdfast.watch.standby.start import sitecustomize

def main():
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(sys.argv[1], state, every=5) as ckpt:
        for step in ckpt.steps(80):
            optimizer.zero_grad()
            (model(torch.randn(4, 8)) - 1).square().mean().backward()
            optimizer.step()
            name = os.environ.get(sitecustomize.STANDBY, "").partition(":")[0]
            if step >= 20 and not is_warm and "killed" in sys.argv:
                time.sleep(0.5)  # so that the steps last until the standby is ready, at which it is killed
                if rank == num_ranks - 1 and sitecustomize.connect(name) is not None:
                    os.kill(os.getpid(), 9)
    total = sum(one.double().sum() for one in model.state_dict().values()).item()
    print(f"rank {rank} {'warm' if is_warm else 'cold'} {total.hex()}", flush=True)

if __name__ == "__main__":
    main()
"""


def endings(out: str) -> list[list[str]]:
    return sorted(line.split() for line in out.splitlines() if line.startswith("rank"))


def test_a_killed_training_continues_from_its_standby(site: Site) -> None:
    site.write(TRAINING)

    def train(*words: str) -> tuple[int, list[list[str]]]:
        program = [sys.executable, site.script.name, *words]
        done = subprocess.run(
            program,
            cwd=site.folder,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        return done.returncode, endings(done.stdout)

    status, [[_, _, how, whole]] = train("whole")
    assert (status, how) == (0, "cold")
    assert train("home", "killed") == (-signal.SIGKILL, [])
    assert train("home", "killed") == (0, [["rank", "0", "warm", whole]])


@pytest.mark.parametrize(
    ("ending", "fails"), [("raise holdfast.Preempted(1, 'x')", True), ("1 / 0", True), ("", False)]
)
def test_a_training_that_is_complete_needs_no_standby(site: Site, ending: str, fails: bool) -> None:
    """A preempted one does, although its script ends in order."""
    site.write(
        f"import holdfast\nfrom holdfast.system import process_exit\nimport atexit\n"
        f"atexit.register(lambda: print(process_exit.is_failure()))\n{ending}\n"
    )
    assert site.run()[1].splitlines()[-1] == str(fails)


MODULE = """
import os
import torch

def make(width):
    with open("calls", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if FAILS and len(open("calls").readlines()) == 2:
        raise RuntimeError("in the standby")
    return torch.nn.Linear(8, width)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_built_before_the_start_bit_for_bit(site: Site, fails: bool) -> None:
    """The training is killed once its standby has called the function; if that failed, the start calls it."""
    calls = site.folder / "calls"
    (site.folder / "mine.py").write_text(f"FAILS = {fails}\n{MODULE}")
    found = "sitecustomize.connect(name) is not None"
    assert found in TRAINING
    site.write(
        TRAINING.replace("torch.nn.Linear(8, 8)", "holdfast.prebuild(mine.make, 8)")
        .replace("import holdfast\n", "import holdfast\nimport mine\n")
        .replace(found, "len(open('calls').readlines()) == 2")
        .replace("state = {", "print('first', os.getpid(), torch.rand(1).item(), flush=True)\n    state = {")
    )

    def train(*words: str) -> tuple[list[list[str]], list[str], list[str]]:
        calls.unlink(missing_ok=True) if "again" not in words else None
        program = [sys.executable, site.script.name, words[0], *words[1:2]]
        done = subprocess.run(
            program, cwd=site.folder, env=ENVIRONMENT, capture_output=True, text=True, check=False,
            timeout=LIMIT_S,
        )  # fmt: skip
        first = next(line.split() for line in done.stdout.splitlines() if line.startswith("first"))
        return endings(done.stdout), first, calls.read_text().split()

    whole, (_, pid, number), pids = train("whole")
    assert pids == [pid]
    ended, (_, killed_pid, _), pids = train("home", "killed")
    assert ended == []
    assert pids[0] == killed_pid
    ended, (_, pid, its_number), after = train("home", "killed", "again")
    assert ended == [[*whole[0][:2], "warm", whole[0][3]]]
    assert after[:2] == pids
    assert (pid == pids[1]) is not fails
    assert pid in after
    assert its_number == number


def test_torchrun_restarts_all_ranks_from_their_standby(site: Site) -> None:
    site.write(TRAINING)
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "HOLDFAST_KEEP_IN_MEMORY": "2m"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]

    def train(*words: str) -> list[list[str]]:
        program = [
            sys.executable,
            "-m",
            "holdfast.cli",
            "standby",
            sys.executable,
            *launcher,
            site.script.name,
        ]
        done = subprocess.run(
            [*program, *words], cwd=site.folder, env=env, capture_output=True, text=True, check=False,
            timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return endings(done.stdout)

    whole = train("whole")
    assert [one[2] for one in whole] == ["cold", "cold"]
    assert train("home", "killed") == [[*one[:2], "warm", one[3]] for one in whole]
