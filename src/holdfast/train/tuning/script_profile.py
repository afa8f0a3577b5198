"""Profile of a script: several runs of it in their own processes, one after the other, and their report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import InvalidInput
from holdfast.system import host_memory
from holdfast.system.documents import decode_dataclass, read_dataclass
from holdfast.system.entry import command
from holdfast.system.environment import sandbox_environment
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.linux.processes import end_of, process_group
from holdfast.system.units import plural
from holdfast.train.tuning import findings
from holdfast.train.tuning.findings import Finding, TrialResult, TuningReport
from holdfast.train.tuning.measurements import (
    MIN_GAIN,
    CompileMeasurements,
    CompileVerdict,
    GraphMeasurements,
    StepMeasurements,
    SyncMeasurements,
    Throughput,
    judge_compile,
    measure_throughput,
)

T = TypeVar("T")
QUESTIONS = ("syncs", "compile", "shapes", "batch", "input")
_DOUBLINGS = 5
_SHARE_OF_MEMORY = 0.9  # of the free memory; a longer run needs the rest
_POLL_S = 0.2
_EXIT_S = 20.0  # limit for the script's cleanup after SIGINT


@dataclasses.dataclass(frozen=True, slots=True)
class RunSpec:
    """Specification of a profile run."""

    question: str  # `steps`, `syncs`, `graphs` or `race`
    script: str
    args: tuple[str, ...]
    num_steps: int
    variant: str = ""  # the way to compile, in a comparison of compiled and eager steps
    compiles_itself: bool = False
    loader: int | None = None  # index of the data loader whose settings are changed
    num_workers: int | None = None
    batch_size: int | None = None

    @property
    def name(self) -> str:
        """A short name for files and messages."""
        parts = [self.question, self.variant]
        parts += [f"workers-{self.num_workers}"] if self.num_workers is not None else []
        parts += [f"batch-{self.batch_size}"] if self.batch_size is not None else []
        return "-".join(filter(None, parts)).replace(" ", "-")


class RunFailed(Exception):
    """A profile run without a result. The message has the reason and the end of the script's output."""


@dataclasses.dataclass(slots=True)
class ProfileRuns:
    """Runner of profile runs, one after the other."""

    folder: Path  # for all files of the runs: logs, results, the script's checkpoints
    ranks: int | None  # number of processes, started like torchrun does. None starts one plain process
    timeout_s: float  # limit of each run
    debug: bool  # let torch write its own logs and traces of compilation too
    num_runs: int = 0

    def run(self, spec: RunSpec, kind: type[T]) -> T:
        """Return the measurements of a run. Raises RunFailed without a result.

        Blocks: until the run has ended, at most the limit plus some seconds.
        """
        own = self.folder / f"{self.num_runs}-{spec.name}"
        self.num_runs += 1
        own.mkdir()
        (own / "spec.json").write_text(json.dumps(dataclasses.asdict(spec)))
        log = own / "log.txt"
        with process_group(self._command(own), self._environment(own), log) as process:
            status = self._wait(process, own)
        # The result counts, not the exit status: a gloo rank may abort after its work is done.
        result = read_result(own)
        if result is not None and "facts" in result:
            return read_dataclass(kind, result["facts"], "the result of a profile run")
        tail = end_of(log)
        if result is not None:
            raise RunFailed(f"{result['failure']}\n{tail}".rstrip())
        why = f"it ended with exit status {status} before the measurements were complete"
        if status is None:
            why = f"it took more than {self.timeout_s:.0f} s and was killed"
        raise RunFailed(f"{why}; the end of its output ({log}):\n{tail}")

    def _wait(self, process: subprocess.Popen[bytes], own: Path) -> int | None:
        """Wait for the result or the end of the process. Return its exit status; None if it was stopped."""
        deadline_s = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline_s and read_result(own) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
        if read_result(own) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_S)  # the result exists; a rank may still wait for one that has left
        return None

    def _command(self, own: Path) -> list[str]:
        script = command("holdfast.train.tuning", str(own))
        if self.ranks is None:
            return script
        options = ("--standalone", "--max-restarts", "0", "--nproc-per-node", str(self.ranks))
        return command("torch.distributed.run", *options, *script[1:])  # it starts Python itself

    def _environment(self, own: Path) -> Mapping[str, str]:
        env = sandbox_environment(own / "homes") | {
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),  # empty, so that compiling costs what it costs
            "TRITON_CACHE_DIR": str(own / "triton"),
        }
        if self.debug:
            env |= {"TORCH_TRACE": str(own / "trace"), "TORCH_LOGS": "recompiles,graph_breaks,perf_hints"}
        return env


def read_spec(own: Path) -> RunSpec:
    """Read the specification in a run's folder."""
    return decode_dataclass(RunSpec, (own / "spec.json").read_text(), "the specification of a profile run")


def write_result(own: Path, result: Mapping[str, Any]) -> None:
    """Write the result atomically."""
    write_atomic(own / "result.json", json.dumps(result), is_durable=False)


def read_result(own: Path) -> dict[str, Any] | None:
    """Return the result, or None if it is missing."""
    try:
        return json.loads((own / "result.json").read_text())
    except FileNotFoundError:
        return None


# -- the questions -------------------------------------------------------------------------------------------


def profile_script(
    script: str,
    args: Sequence[str] = (),
    *,
    questions: Collection[str] = QUESTIONS,
    ranks: int | None = None,
    num_steps: int = 10,
    memory_bytes: int | None = None,
    timeout_s: float = 600.0,
    debug: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> TuningReport:
    """Run a few steps of a training script in several ways, and report possible improvements.

    Each run is a separate process. Its checkpoints go to a temporary folder.

    Args:
        ranks: number of processes, started like torchrun does. None starts one plain process.
        memory_bytes: memory limit for larger batches. Default: the free memory.
        debug: keep all logs, including torch's own.

    Blocks: for the duration of all runs.
    """
    if not Path(script).is_file():
        raise InvalidInput(
            f"The script {script!r} does not exist. Pass the Python file that trains, then its arguments."
        )
    with contextlib.ExitStack() as stack:
        if debug:
            folder = Path(tempfile.mkdtemp(prefix="holdfast-tune-"))
        else:
            folder = stack.enter_context(temporary_folder("tune"))
        runs = ProfileRuns(folder, ranks, timeout_s, debug)
        spec = RunSpec("steps", script, tuple(args), num_steps)
        profile = _ScriptProfile(runs, spec, frozenset(questions), on_progress)
        return profile.report(memory_bytes, logs=str(folder) if debug else None)


class _ScriptProfile:
    """A profile of a script in progress."""

    def __init__(
        self, runs: ProfileRuns, spec: RunSpec, questions: frozenset[str], on_progress: Callable[[str], None]
    ) -> None:
        self._runs, self._spec, self._questions, self._on_progress = runs, spec, questions, on_progress
        self._unanswered: list[str] = []
        self._findings: list[Finding] = []

    def report(self, memory_bytes: int | None, *, logs: str | None) -> TuningReport:
        self._on_progress("plain steps")
        try:
            steps = self._runs.run(self._spec, StepMeasurements)
        except RunFailed as why:
            raise InvalidInput(
                f"{self._spec.script} could not be measured: {why}\nThe script was not modified."
            ) from None
        if not steps.steps:
            raise InvalidInput(
                f"{self._spec.script} ends after too few steps. Pass arguments with which it takes at least "
                f"{plural(self._spec.num_steps + 3, 'step')}, or a smaller --steps."
            )
        now = measure_throughput(steps.steps, steps.device)
        paddings = findings.compare_lengths(steps.lengths) if "shapes" in self._questions else None
        self._findings += findings.find_padding(steps, paddings)
        self._find_in_code(steps, now)
        verdicts = self._verdicts(steps) if "compile" in self._questions else []
        self._findings += findings.find_compile(steps, verdicts)
        workers = self._workers(steps, now) if "input" in self._questions else []
        self._findings += findings.find_input(steps, now, workers)
        batches = self._batches(steps, now, memory_bytes) if "batch" in self._questions else []
        return TuningReport(
            script=self._spec.script,
            steps=steps,
            throughput=now,
            findings=tuple(sorted(self._findings, key=lambda one: -(one.share or 0.0))),
            verdicts=tuple(verdicts),
            paddings=paddings,
            batches=tuple(batches),
            workers=tuple(workers),
            unanswered=tuple(self._unanswered),
            logs=logs,
        )

    def _find_in_code(self, steps: StepMeasurements, now: Throughput) -> None:
        syncs, breaks = [], []
        if "syncs" in self._questions:
            seen = self._ask("looking for host syncs", SyncMeasurements, question="syncs")
            syncs = [] if seen is None else findings.find_syncs(seen, now.step_s)
        if self._questions & {"syncs", "shapes", "compile"}:
            graphs = self._ask(
                "looking for graph breaks and recompiles",
                GraphMeasurements,
                question="graphs",
                compiles_itself=steps.compiled_at is not None,
            )
            if graphs is not None:
                if graphs.failure:
                    self._unanswered.append(f"graphs: the compiler cannot trace the model: {graphs.failure}")
                breaks = findings.find_breaks(graphs, syncs)
                found = findings.find_recompiles(graphs, len(set(steps.shapes)))
                self._findings += findings.exclude_lines(found, breaks)
        self._findings += [*breaks, *findings.exclude_lines(syncs, breaks)]

    def _verdicts(self, steps: StepMeasurements) -> list[CompileVerdict]:
        found: list[CompileVerdict] = []

        def race(variant: str) -> None:
            what = f"eager against compiled: {findings.NAMES[variant]}"
            measured = self._ask(what, CompileMeasurements, question="race", variant=variant)
            if measured is not None:
                found.append(judge_compile(measured))

        is_own = steps.compiled_at is not None
        race("own" if is_own else "whole")
        # Repeat if it seems useless: two runs differ by more than the steps of one run.
        if is_own and found and found[0].is_idle and not found[0].costs:
            race("own")
        slow = bool(found) and not found[0].pays
        if slow and steps.has_random and steps.device == "cpu":
            race("own random" if is_own else "random")
        if slow and not is_own and steps.num_blocks > 1:
            race("blocks")
        return found

    def _workers(self, steps: StepMeasurements, now: Throughput) -> list[TrialResult]:
        loader = steps.loader
        waits = now.wait_share >= findings.MIN_WAIT_SHARE
        if loader is None or loader.index < 0 or loader.is_iterable or not waits:
            return []
        numbers = [number for number in (1, 2, 4, 8) if number <= (os.cpu_count() or 1)]
        return [_result(loader.num_workers, now, now.items_per_s)] + [
            self._try(f"{number} loader workers", steps, num_workers=number)
            for number in numbers
            if number != loader.num_workers
        ]

    def _batches(
        self, steps: StepMeasurements, now: Throughput, memory_bytes: int | None
    ) -> list[TrialResult]:
        loader = steps.loader
        if loader is None or loader.index < 0 or loader.batch_size is None or not now.items_per_s:
            self._unanswered.append(
                "batch: no DataLoader with a batch_size feeds the steps. Use holdfast.fit_batch for other "
                "batches"
            )
            return []
        limit_bytes = memory_bytes or _memory_limit(steps, now)
        found = [_result(loader.batch_size, now, now.items_per_work_s)]
        for doubling in range(1, _DOUBLINGS + 1):
            value = loader.batch_size * 2**doubling
            if not findings.fits_next(found, value, limit_bytes):
                found.append(dataclasses.replace(found[0], value=value, failure="would not fit into memory"))
                break
            trial = self._try(f"batches of {value}", steps, batch_size=value)
            found.append(trial)
            if trial.failure or trial.items_per_s < found[-2].items_per_s * (1 + MIN_GAIN):
                break
        if findings.find_batch(steps, found[0], found[1:]):
            self._findings += self._confirmed(steps, found)
        return found

    def _confirmed(self, steps: StepMeasurements, found: Sequence[TrialResult]) -> list[Finding]:
        """Return the finding about the batch size if a second run of both confirms it."""
        now, chosen = found[0], findings.choose_batch(found)
        now_again, again = (
            self._try(f"batches of {one.value} again", steps, batch_size=one.value) for one in (now, chosen)
        )
        if now_again.failure or again.failure:
            return []
        # Two runs differ by more than the steps of one run, so the best run of the current batch size must
        # be worse than the worst of the other.
        best_now = max(now, now_again, key=lambda one: one.items_per_s)
        worst = min(chosen, again, key=lambda one: one.items_per_s)
        return findings.find_batch(steps, best_now, [worst])

    def _try(
        self,
        what: str,
        steps: StepMeasurements,
        *,
        num_workers: int | None = None,
        batch_size: int | None = None,
    ) -> TrialResult:
        """Return the measurements of a run whose loader has another setting."""
        self._on_progress(what)
        value = num_workers or batch_size or 0
        index = None if steps.loader is None else steps.loader.index
        spec = dataclasses.replace(self._spec, loader=index, num_workers=num_workers, batch_size=batch_size)
        try:
            tried = self._runs.run(spec, StepMeasurements)
        except RunFailed as why:
            return TrialResult(value, failure=str(why).partition("\n")[0])
        if not tried.steps:
            return TrialResult(value, failure="the script ends before it can be measured")
        got = measure_throughput(tried.steps, steps.device)
        return _result(value, got, got.items_per_s if batch_size is None else got.items_per_work_s)

    def _ask(self, what: str, kind: type[T], **changes: Any) -> T | None:
        """Return the measurements of a run with a changed specification; None if it has failed."""
        self._on_progress(what)
        spec = dataclasses.replace(self._spec, **changes)
        try:
            return self._runs.run(spec, kind)
        except RunFailed as why:
            self._unanswered.append(f"{spec.name}: {why}")
            return None


def _result(value: int, got: Throughput, items_per_s: float) -> TrialResult:
    return TrialResult(value, got.step_s, items_per_s, got.wait_share, got.noise, got.peak_bytes)


def _memory_limit(steps: StepMeasurements, now: Throughput) -> int:
    """Return the memory limit of a run. On a GPU, the device itself is the limit."""
    if steps.device != "cpu":
        return 2**63
    return int(_SHARE_OF_MEMORY * host_memory.available_bytes()) + (now.peak_bytes or 0)
