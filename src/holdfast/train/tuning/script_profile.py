"""Profile of a training: questions, each answered by a run of some steps, and the report on the answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import InvalidInput
from holdfast.system.documents import decode_as, to_plain
from holdfast.system.entry import command
from holdfast.system.environment import sandbox_environment
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.linux.processes import end_of, process_group
from holdfast.system.units import plural
from holdfast.train.tuning import findings, measurements
from holdfast.train.tuning.findings import Finding, TrialResult, TuningReport
from holdfast.train.tuning.loaders import LoaderSettings
from holdfast.train.tuning.measurements import CompileVerdict, Measurements, StepMeasurements, Throughput


class RunSpec(Struct, frozen=True):
    """Specification of a run."""

    question: str  # "steps", "syncs", "graphs" or "race"
    script: str
    args: tuple[str, ...]
    num_steps: int
    variant: str = ""  # the way to compile, in a comparison of compiled and eager steps
    compiles_itself: bool = False
    loader: LoaderSettings | None = None  # the data loader whose settings are changed

    @property
    def name(self) -> str:
        """A short name for files and messages."""
        setting = "" if self.loader is None else f"workers-{self.loader.num_workers}"
        return "-".join(filter(None, (self.question, self.variant, setting))).replace(" ", "-")


class RunFailed(Exception):
    """A run without a result. The message has the reason and the end of the script's output."""


class Profile:
    """A profile in progress: the steps as they are, then an answer to each question.

    `measure` runs some steps as a specification has it, and returns their measurements. It raises RunFailed
    without a result.
    """

    def __init__(
        self,
        measure: Callable[[RunSpec], Any],
        spec: RunSpec,
        questions: Collection[str],
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.measure, self.spec, self.questions, self.on_progress = measure, spec, questions, on_progress
        self.unanswered: list[str] = []
        self.findings: list[Finding] = []
        self.verdicts: list[CompileVerdict] = []
        on_progress("plain steps")
        try:
            self.steps: StepMeasurements = measure(spec)
        except RunFailed as why:
            raise InvalidInput(
                f"{spec.script} could not be measured: {why}\nThe script was not modified."
            ) from None
        if not self.steps.steps:
            raise InvalidInput(
                f"{spec.script} ends after too few steps. Pass arguments with which it takes at least "
                f"{plural(spec.num_steps + 3, 'step')}, or a smaller --steps."
            )
        self.now = measurements.measure_throughput(self.steps.steps, self.steps.device)
        self.paddings = findings.compare_lengths(self.steps.lengths) if "shapes" in questions else None
        self.findings += findings.find_padding(self.steps, self.paddings)
        self._find_in_code()

    def _find_in_code(self) -> None:
        syncs, breaks = [], []
        if "syncs" in self.questions:
            seen = self.ask("looking for host syncs", question="syncs")
            syncs = [] if seen is None else findings.find_syncs(seen, self.now.step_s)
        if {"syncs", "shapes", "compile"} & set(self.questions):
            what, is_own = "looking for graph breaks and recompiles", self.steps.compiled_at is not None
            graphs = self.ask(what, question="graphs", compiles_itself=is_own)
            if graphs is not None:
                if graphs.failure:
                    self.unanswered.append(f"graphs: the compiler cannot trace the model: {graphs.failure}")
                breaks = findings.find_breaks(graphs, syncs)
                found = findings.find_recompiles(graphs, len(set(self.steps.shapes)))
                self.findings += findings.exclude_lines(found, breaks)
        self.findings += [*breaks, *findings.exclude_lines(syncs, breaks)]

    def race(self, variant: str) -> None:
        """Compare eager steps with those of one way to compile."""
        what = f"eager against compiled: {measurements.NAMES[variant]}"
        if measured := self.ask(what, question="race", variant=variant):
            self.verdicts.append(measurements.judge_compile(measured))

    def ask(self, what: str, **changes: Any) -> Any:
        """Return the measurements of a run with a changed specification; None if it has failed."""
        self.on_progress(what)
        spec = replace(self.spec, **changes)
        try:
            return self.measure(spec)
        except RunFailed as why:
            self.unanswered.append(f"{spec.name}: {why}")
            return None

    def report(self, **more: Any) -> TuningReport:
        """Return the report on everything that was found."""
        return TuningReport(
            script=self.spec.script,
            steps=self.steps,
            throughput=self.now,
            findings=tuple(sorted(self.findings, key=lambda finding: -(finding.share or 0.0))),
            verdicts=tuple(self.verdicts),
            paddings=self.paddings,
            unanswered=tuple(self.unanswered),
            **more,
        )


_RESULT = "result.json"
_MAX_RESULT_BYTES = 256 << 20
_POLL_S = 0.2
_EXIT_S = 20.0  # limit for the script's cleanup after SIGINT


class ProfileRuns(Struct):
    """Runner of profile runs, one after the other."""

    folder: Path  # for all files of the runs: logs, results, the script's checkpoints
    ranks: int | None  # number of processes, started like torchrun does. None starts one plain process
    timeout_s: float  # limit of each run
    debug: bool  # let torch write its own logs and traces of compilation too
    num_runs: int = 0

    def run(self, spec: RunSpec) -> Any:
        """Return the measurements of a run. Raises RunFailed without a result.

        Blocks: until the run has ended, at most the limit plus some seconds.
        """
        own = self.folder / f"{self.num_runs}-{spec.name}"
        self.num_runs += 1
        own.mkdir()
        (own / "spec.json").write_text(json.dumps(to_plain(spec)))
        log = own / "log.txt"
        words = command("holdfast.train.tuning", str(own))
        if self.ranks is not None:
            options = ("--standalone", "--max-restarts", "0", "--nproc-per-node", str(self.ranks))
            words = command("torch.distributed.run", *options, *words[1:])  # it starts Python itself
        with process_group(words, self._environment(own), log) as process:
            status = self._wait(process, own)
        # The result counts, not the exit status: a gloo rank may abort after its work is done.
        result = read_result(own)
        tail = end_of(log)
        if isinstance(result, measurements.RunFailure):
            raise RunFailed(f"{result.reason}\n{tail}".rstrip())
        if result is not None:
            return result
        why = f"it ended with exit status {status} before the measurements were complete"
        if status is None:
            why = f"it took more than {self.timeout_s:.0f} s and was killed"
        raise RunFailed(f"{why}; the end of its output ({log}):\n{tail}")

    def _wait(self, process: subprocess.Popen[bytes], own: Path) -> int | None:
        """Wait for the result or the end of the process. Return its exit status; None if it was stopped."""
        deadline_s = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline_s and not (own / _RESULT).exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
        if not (own / _RESULT).exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_S)  # the result exists; a rank may still wait for one that has left
        return None

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
    return decode_as(RunSpec, (own / "spec.json").read_text(), "the specification of a profile run")


def write_result(own: Path, result: Measurements | measurements.RunFailure) -> None:
    """Write the result atomically."""
    write_atomic(own / _RESULT, json.dumps(to_plain(result)), is_durable=False)


def read_result(own: Path) -> Measurements | measurements.RunFailure | None:
    """Return the result, or None if it is missing."""
    try:
        text = (own / _RESULT).read_bytes()
    except FileNotFoundError:
        return None
    limits: dict[str, Any] = {"max_bytes": _MAX_RESULT_BYTES, "any_text": True}
    return decode_as(Measurements | measurements.RunFailure, text, "the result of a profile run", **limits)


def profile_script(
    script: str,
    args: Sequence[str] = (),
    *,
    questions: Collection[str] = measurements.QUESTIONS,
    ranks: int | None = None,
    num_steps: int = 10,
    timeout_s: float = 600.0,
    debug: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> TuningReport:
    """Run a few steps of a training script in several ways, and report possible improvements.

    Each run is a separate process. Its checkpoints go to a temporary folder.

    Blocks: for the duration of all runs.
    """
    with contextlib.ExitStack() as stack:
        if debug:
            folder = Path(tempfile.mkdtemp(prefix="holdfast-tune-"))
        else:
            folder = stack.enter_context(temporary_folder("tune"))
        runs = ProfileRuns(folder, ranks, timeout_s, debug)
        spec = RunSpec("steps", script, tuple(args), num_steps)
        profile = Profile(runs.run, spec, questions, on_progress)
        if "compile" in questions:
            _compare_compiled(profile)
        profile.findings += findings.find_compile(profile.steps, profile.verdicts)
        workers = _try_workers(profile) if "input" in questions else []
        profile.findings += findings.find_input(profile.steps, profile.now, workers)
        logs = str(folder) if debug else None
        return profile.report(workers=tuple(workers), logs=logs)


def _compare_compiled(profile: Profile) -> None:
    steps, verdicts = profile.steps, profile.verdicts
    is_own = steps.compiled_at is not None
    profile.race("own" if is_own else "whole")
    # Repeat if it seems useless: two runs differ by more than the steps of one run.
    if is_own and verdicts and verdicts[0].is_idle and not verdicts[0].costs:
        profile.race("own")
    slow = bool(verdicts) and not verdicts[0].pays
    if slow and steps.has_random and steps.device == "cpu":
        profile.race("own random" if is_own else "random")
    if slow and not is_own and steps.num_blocks > 1:
        profile.race("blocks")


def _try_workers(profile: Profile) -> list[TrialResult]:
    loader, now = profile.steps.loader, profile.now
    waits = now.wait_share >= findings.MIN_WAIT_SHARE
    if loader is None or loader.index < 0 or loader.is_iterable or not waits:
        return []
    numbers = [number for number in (1, 2, 4, 8) if number <= (os.cpu_count() or 1)]
    return [_result(loader.num_workers, now)] + [
        _try(profile, LoaderSettings(loader.index, number))
        for number in numbers
        if number != loader.num_workers
    ]


def _try(profile: Profile, settings: LoaderSettings) -> TrialResult:
    """Return the measurements of a run whose loader has another setting."""
    number = settings.num_workers
    profile.on_progress(f"{number} loader workers")
    try:
        tried = profile.measure(replace(profile.spec, loader=settings))
    except RunFailed as why:
        return TrialResult(number, failure=str(why).partition("\n")[0])
    if not tried.steps:
        return TrialResult(number, failure="the script ends before it can be measured")
    return _result(number, measurements.measure_throughput(tried.steps, profile.steps.device))


def _result(num_workers: int, got: Throughput) -> TrialResult:
    return TrialResult(num_workers, got.step_s, got.wait_share, got.noise)
