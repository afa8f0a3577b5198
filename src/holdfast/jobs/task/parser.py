"""Parser of task files. Reports all problems at once, with their lines.

Source: skypilot 0.14.1, sky/utils/dag_utils.py, for files with the tasks of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from holdfast.errors import InvalidInput, NotFound, Unsupported
from holdfast.jobs.task.amounts import Accelerators, memory_mib, parse_accelerators, parse_cpus
from holdfast.jobs.task.document import Value, parse_documents
from holdfast.jobs.task.edits import (
    alternatives,
    fill_in,
    parse_variables,
    places,
    replace_aliases,
    set_resource,
    unfold_accelerators,
)
from holdfast.jobs.task.model import FileMount, JobRecovery, MountMode, Repository, Task, TaskFile
from holdfast.jobs.task.problems import find_problems, format_problems
from holdfast.jobs.task.sky_workdir import path_in_workdir
from holdfast.system.documents import decode_text

_HEADERS = ({"name"}, {"name", "execution"})  # keys of a header. With others too, it is a task.
MAX_TASKS = 100


@dataclass(frozen=True, slots=True)
class Overrides:
    """Options of the command line that override the file."""

    name: str | None = None
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    accelerators: str | None = None
    num_nodes: int | None = None
    workdir: str | None = None
    priority: int | None = None


def load_tasks(path: str | Path, overrides: Overrides | None = None) -> TaskFile:
    """Load the tasks of a file."""
    path = Path(path)
    try:
        text = decode_text(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        what = f"The task file {path} does not exist"
        raise NotFound(f"{what}. Give the path of a SkyPilot task file (YAML).") from error
    except OSError as error:
        raise InvalidInput(f"Cannot read the task file {path}: {error}.") from error
    return parse_tasks(text, str(path), overrides)


def parse_tasks(text: str, name: str, overrides: Overrides | None = None) -> TaskFile:
    """Parse the tasks of a file; see `load_tasks`. Its name is for messages."""
    given = overrides or Overrides()
    header, tasks = _split_documents(parse_documents(text, name), name)
    if len(tasks) > 1:
        _check_overrides(given, name, len(tasks))
    roots = [_edited(root, given) for root in tasks]
    problems = [one for root in roots for one in find_problems(root, given.envs, given.secrets)]
    if problems:
        raise InvalidInput(format_problems(problems, name))
    title = given.name or header or Path(name).stem
    if len(roots) == 1:
        # SkyPilot too prefers the name of the header to that of its only task.
        task_name = given.name or header or str(roots[0].get("name").plain or "") or title
        return TaskFile(task_name, (_task(roots[0], name, task_name, given),), name)
    names = [str(root.get("name").plain or "") or f"{title}-{number}" for number, root in enumerate(roots)]
    parsed = (_task(root, name, one, given) for root, one in zip(roots, names, strict=True))
    return TaskFile(title, tuple(parsed), name)


def load_task(path: str | Path, overrides: Overrides | None = None) -> Task:
    """Load the only task of a file; see `load_tasks`."""
    return _only(load_tasks(path, overrides))


def parse_task(text: str, name: str, overrides: Overrides | None = None) -> Task:
    """Parse the only task of a file; see `load_task`."""
    return _only(parse_tasks(text, name, overrides))


def command_task(command: str, overrides: Overrides | None = None) -> Task:
    """Return the task of one shell command, in a copy of the current directory."""
    document = {"name": "command", "workdir": ".", "run": command}
    return parse_task(yaml.safe_dump(document, allow_unicode=True), "command line", overrides)


def _edited(root: Value, given: Overrides) -> Value:
    """Return a task with its aliases replaced, and with the options of the command line."""
    if root.kind != "map":
        return root
    root = replace_aliases(root)
    for key, value in (("num_nodes", given.num_nodes), ("workdir", given.workdir)):
        root = root if value is None else root.with_member(key, Value(0, value))
    if given.priority is not None:
        root = set_resource(root, "priority", given.priority)
    if given.accelerators is not None:
        is_none = given.accelerators.lower() == "none"
        root = set_resource(root, "accelerators", None if is_none else given.accelerators)
    return root


def _check_overrides(given: Overrides, name: str, num_tasks: int) -> None:
    """Check that a file with several tasks is not combined with options for one task."""
    options = {"--gpus": given.accelerators, "--num-nodes": given.num_nodes, "--workdir": given.workdir}
    for option, value in options.items():
        if value is not None:
            raise InvalidInput(
                f"{option} is for a file with one task, and {name} has {num_tasks}. Change the tasks in the "
                "file. Nothing was started."
            )


def _only(file: TaskFile) -> Task:
    if file.is_pipeline:
        raise Unsupported(f"{file.path}: expected one task, found {len(file.tasks)} (a pipeline).")
    return file.tasks[0]


def _task(root: Value, name: str, job_name: str, given: Overrides) -> Task:
    envs = parse_variables(root.get("envs"), given.envs)
    secrets = parse_variables(root.get("secrets"), given.secrets)
    variables = {**envs, **secrets}
    resources = root.get("resources")
    workdir = fill_in(root.get("workdir").plain, variables)
    return Task(
        name=job_name,
        run=str(root.get("run").plain),
        setup=str(root.get("setup").plain or ""),
        workdir=str(Path(workdir).expanduser().absolute()) if isinstance(workdir, str) else None,
        repository=_repository(workdir, root, name) if isinstance(workdir, Mapping) else None,
        num_nodes=root.get("num_nodes").plain or 1,
        accelerators=_accelerators(resources),
        cpus=max(parse_cpus(one) or 0.0 for one in _plains(resources, "cpus")),
        memory_mib=max(memory_mib(one) or 0 for one in _plains(resources, "memory")),
        priority=max((one for one in _plains(resources, "priority") if one is not None), default=0),
        recovery=_recovery(resources),
        file_mounts=tuple(_mounts(root.get("file_mounts"), variables)),
        envs=envs,
        secrets=secrets,
        document=_normalised(root, job_name, envs, secrets),
        lines=dict(_lines(root, "")),
        notes=tuple(_notes(resources)),
        path=name,
    )


def _repository(workdir: Mapping[str, Any], root: Value, name: str) -> Repository:
    url, ref = workdir.get("url"), workdir.get("ref")
    if not url or str(url).startswith("-") or str(ref or "").startswith("-"):
        line = root.members["workdir"].line
        raise InvalidInput(
            f"{name}:{line}: workdir: expected a url, and a branch, tag or commit as ref, found {url!r} and "
            f"{ref!r}. Nothing was started."
        )
    return Repository(str(url), None if ref is None else str(ref))


def _plains(resources: Value, key: str) -> list[Any]:
    """Return the values of a key in all alternatives. One without its own has that of the resources."""
    return [(one if key in one.members else resources).get(key).plain for one in alternatives(resources)]


def _accelerators(resources: Value) -> Accelerators:
    read = [_read(plain) for plain in _plains(resources, "accelerators")]
    if len(read) == 1:
        return read[0]
    choices = tuple(dict.fromkeys(choice for one in read for choice in one.choices))
    return Accelerators(choices, is_ordered="ordered" in resources.members)


def _read(plain: Any) -> Accelerators:
    read = parse_accelerators(plain)
    assert isinstance(read, Accelerators)
    return read


def _recovery(resources: Value) -> JobRecovery:
    asked = resources.get("job_recovery")
    codes = asked.get("recover_on_exit_codes").plain
    listed = codes if isinstance(codes, list) else [] if codes is None else [codes]
    return JobRecovery(asked.get("max_restarts_on_errors").plain or 0, frozenset(listed))


def _mounts(mounts: Value, variables: Mapping[str, str]) -> Iterator[FileMount]:
    for target, value in mounts.members.items():
        filled = fill_in(value.plain, variables)
        line = mounts.key_lines[target]
        where = str(fill_in(target, variables))
        where = path_in_workdir(where) or where
        if isinstance(filled, str):
            yield FileMount(where, filled, MountMode.COPY, line=line)
            continue
        mode = MountMode(str(filled.get("mode", "MOUNT")).upper())
        source = filled.get("source")
        if isinstance(source, list):
            source = source[0] if len(source) == 1 else None
        yield FileMount(where, source, mode, bucket=filled.get("name"), line=line, spec=filled)


def _normalised(root: Value, name: str, envs: dict[str, str], secrets: dict[str, str]) -> dict[str, Any]:
    """Return the document for other engines: the user's file without forms that only Holdfast supports."""
    kept = {str(key): value for key, value in root.plain.items() if value is not None}
    document = {"name": name, **{key: value for key, value in kept.items() if key != "name"}}
    if envs:
        document["envs"] = envs
    if secrets:
        document["secrets"] = dict.fromkeys(secrets)  # values are never written; `sky` takes --secret
    if "resources" in root.members:
        document["resources"] = unfold_accelerators(root).members["resources"].plain
    return document


def _notes(resources: Value) -> Iterator[str]:
    for _, place in places(resources):
        asked = place.get("accelerators")
        accelerators = _read(asked.plain)
        if not accelerators.is_folded:
            continue
        choices = ", ".join(f"{name}:{count:g}" for name, count in accelerators.choices)
        yield (
            f"line {asked.line}: resources.accelerators: without a space after each colon YAML joins these "
            f"lines into one text; read as the set {{{choices}}}"
        )
    recovery = resources.get("job_recovery")
    if 137 in _recovery(resources).free_codes:
        yield (
            f"line {recovery.line}: recover_on_exit_codes contains 137, which is also the status after the "
            "kernel's out-of-memory killer, and which SkyPilot uses for cancelled jobs"
        )


def _lines(value: Value, where: str) -> Iterator[tuple[str, int]]:
    for key, member in value.members.items():
        path = f"{where}.{key}" if where else key
        yield path, value.key_lines[key]
        yield from _lines(member, path)


def _split_documents(documents: list[Value], name: str) -> tuple[str | None, list[Value]]:
    """Return the name in the header of a file, if it has one, and the tasks."""
    found = [document for document in documents if document.plain is not None]
    if not found:
        raise InvalidInput(f"{name}:1: the file is empty; expected a task with at least `run`.")
    execution = found[0].get("execution").plain
    where = f"{name}:{found[0].key_lines.get('execution')}: execution"
    if execution == "parallel":
        raise Unsupported(
            f"{where}: parallel makes a job group, whose tasks run at the same time. Launch each of them "
            "from its own file, or the group with SkyPilot: `sky jobs launch FILE`. Nothing was started."
        )
    if execution not in ("serial", None):
        raise InvalidInput(f"{where}: expected serial, found {execution!r}. Nothing was started.")
    title = None
    if set(found[0].members) in _HEADERS and len(found) > 1:
        title = found.pop(0).members["name"].plain
    if len(found) > MAX_TASKS:
        raise InvalidInput(f"{name}: a pipeline has at most {MAX_TASKS} tasks, found {len(found)}.")
    return None if title is None else str(title), found
