"""Parser of task files. Reports all problems at once, with their lines.

Source: skypilot 0.14.1, sky/utils/dag_utils.py, for files with the tasks of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from holdfast.errors import InvalidInput, NotFound, Unsupported
from holdfast.jobs.task import model
from holdfast.jobs.task.document import (
    TaskDocument,
    fill_in,
    parse_documents,
    parse_variables,
    places,
    replace_aliases,
    resource_values,
    set_resource,
    set_value,
    unfolded,
)
from holdfast.jobs.task.model import (
    Accelerators,
    FileMount,
    JobRecovery,
    MountMode,
    Repository,
    Task,
    TaskFile,
)
from holdfast.jobs.task.problems import find_problems, format_problems
from holdfast.system.documents import decode_text

_HEADERS = ({"name"}, {"name", "execution"})  # keys of a header. With others too, it is a task.
MAX_TASKS = 100


class Overrides(Struct, frozen=True):
    """Options of the command line that override the file."""

    name: str | None = None
    envs: Mapping[str, str] = {}
    secrets: Mapping[str, str] = {}
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
    for task in tasks:
        _edit(task, given)
    problems = [found for task in tasks for found in find_problems(task, given.envs, given.secrets)]
    if problems:
        raise InvalidInput(format_problems(problems, name))
    title = given.name or header or Path(name).stem
    if len(tasks) == 1:
        # SkyPilot too prefers the name of the header to that of its only task.
        task_name = given.name or header or str(tasks[0].plain.get("name") or "") or title
        return TaskFile(task_name, (_task(tasks[0], name, task_name, given),), name)
    names = [str(task.plain.get("name") or "") or f"{title}-{number}" for number, task in enumerate(tasks)]
    parsed = (_task(task, name, own, given) for task, own in zip(tasks, names, strict=True))
    return TaskFile(title, tuple(parsed), name)


def command_task(command: str, overrides: Overrides | None = None) -> TaskFile:
    """Return the task of one shell command, in a copy of the current directory."""
    document = {"name": "command", "workdir": ".", "run": command}
    return parse_tasks(yaml.safe_dump(document, allow_unicode=True), "command line", overrides)


def _edit(task: TaskDocument, given: Overrides) -> None:
    """Replace aliases in a task, and put in the options of the command line."""
    if not isinstance(task.plain, dict):
        return  # which is reported as a problem
    replace_aliases(task)
    for key, value in (("num_nodes", given.num_nodes), ("workdir", given.workdir)):
        if value is not None:
            set_value(task, key, value)
    if given.priority is not None:
        set_resource(task, "priority", given.priority)
    if given.accelerators is not None:
        is_none = given.accelerators.lower() == "none"
        set_resource(task, "accelerators", None if is_none else given.accelerators)


def _check_overrides(given: Overrides, name: str, num_tasks: int) -> None:
    """Check that a file with several tasks is not combined with options for one task."""
    options = {"--gpus": given.accelerators, "--num-nodes": given.num_nodes, "--workdir": given.workdir}
    for option, value in options.items():
        if value is not None:
            raise InvalidInput(
                f"{option} is for a file with one task, and {name} has {num_tasks}. Change the tasks in the "
                "file. Nothing was started."
            )


def _task(task: TaskDocument, name: str, job_name: str, given: Overrides) -> Task:
    root = task.plain
    envs = parse_variables(root.get("envs"), given.envs)
    secrets = parse_variables(root.get("secrets"), given.secrets)
    variables = {**envs, **secrets}
    workdir = fill_in(root.get("workdir"), variables)
    priorities = [priority for priority in resource_values(root, "priority") if priority is not None]
    mounts = dict(_mounts(task, variables))
    return Task(
        name=job_name,
        run=str(root.get("run")),
        setup=str(root.get("setup") or ""),
        workdir=str(Path(workdir).expanduser().absolute()) if isinstance(workdir, str) else None,
        repository=_repository(workdir, task, name) if isinstance(workdir, Mapping) else None,
        num_nodes=root.get("num_nodes") or 1,
        accelerators=_accelerators(root),
        cpus=max(model.parse_cpus(cpus) or 0.0 for cpus in resource_values(root, "cpus")),
        memory_mib=max(model.memory_mib(memory) or 0 for memory in resource_values(root, "memory")),
        priority=max(priorities, default=0),
        recovery=_recovery(root),
        file_mounts=tuple(mounts.values()),
        envs=envs,
        secrets=secrets,
        document=_normalised(root, job_name, envs, secrets),
        lines=task.key_lines | {mount.key: task.key_lines[key] for key, mount in mounts.items()},
        notes=tuple(_notes(task)),
        path=name,
    )


def _repository(workdir: Mapping[str, Any], task: TaskDocument, name: str) -> Repository:
    url, ref = workdir.get("url"), workdir.get("ref")
    if not url or str(url).startswith("-") or str(ref or "").startswith("-"):
        raise InvalidInput(
            f"{name}:{task.value_lines['workdir']}: workdir: expected a url, and a branch, tag or commit as "
            f"ref, found {url!r} and {ref!r}. Nothing was started."
        )
    return Repository(str(url), None if ref is None else str(ref))


def _accelerators(root: Mapping[str, Any]) -> Accelerators:
    read = [_read(plain) for plain in resource_values(root, "accelerators")]
    if len(read) == 1:
        return read[0]
    choices = tuple(dict.fromkeys(choice for found in read for choice in found.choices))
    return Accelerators(choices, is_ordered="ordered" in root["resources"])


def _read(plain: Any) -> Accelerators:
    read = model.parse_accelerators(plain)
    assert isinstance(read, Accelerators)
    return read


def _recovery(root: Mapping[str, Any]) -> JobRecovery:
    asked = model.value_at(root, "resources.job_recovery")
    codes = model.value_at(asked, "recover_on_exit_codes")
    listed = codes if isinstance(codes, list) else [] if codes is None else [codes]
    return JobRecovery(model.value_at(asked, "max_restarts_on_errors") or 0, frozenset(listed))


def _mounts(task: TaskDocument, variables: Mapping[str, str]) -> Iterator[tuple[str, FileMount]]:
    """Yield the mounts with their keys in the file, which may have variables."""
    for target, spec in (task.plain.get("file_mounts") or {}).items():
        filled = fill_in(spec, variables)
        where = fill_in(str(target), variables)
        where = model.path_in_workdir(where) or where
        if isinstance(filled, str):
            yield f"file_mounts.{target}", FileMount(where, filled, MountMode.COPY)
            continue
        mode = MountMode(str(filled.get("mode", "MOUNT")).upper())
        source = filled.get("source")
        if isinstance(source, list):
            source = source[0] if len(source) == 1 else None
        mount = FileMount(where, source, mode, bucket=filled.get("name"), spec=filled)
        yield f"file_mounts.{target}", mount


def _normalised(
    root: Mapping[Any, Any], name: str, envs: dict[str, str], secrets: dict[str, str]
) -> dict[str, Any]:
    """Return the document for other engines: the user's file without forms that only Holdfast supports."""
    kept = {str(key): value for key, value in root.items() if value is not None}
    document = {"name": name, **{key: value for key, value in kept.items() if key != "name"}}
    if envs:
        document["envs"] = envs
    if secrets:
        document["secrets"] = dict.fromkeys(secrets)  # values are never written; `sky` takes --secret
    if "resources" in root:
        document["resources"] = unfolded(root["resources"])
    return document


def _notes(task: TaskDocument) -> Iterator[str]:
    for where, place in places(task.plain):
        accelerators = _read(place.get("accelerators"))
        if not accelerators.is_folded:
            continue
        choices = ", ".join(f"{name}:{count:g}" for name, count in accelerators.choices)
        line = task.value_lines[f"{where}.accelerators"]
        yield (
            f"line {line}: resources.accelerators: without a space after each colon YAML joins these lines "
            f"into one text; read as the set {{{choices}}}"
        )
    if 137 in _recovery(task.plain).free_codes:
        line = task.value_lines["resources.job_recovery"]
        yield (
            f"line {line}: recover_on_exit_codes contains 137, which is also the status after the kernel's "
            "out-of-memory killer, and which SkyPilot uses for cancelled jobs"
        )


def _split_documents(documents: list[TaskDocument], name: str) -> tuple[str | None, list[TaskDocument]]:
    """Return the name in the header of a file, if it has one, and the tasks."""
    found = [document for document in documents if document.plain is not None]
    if not found:
        raise InvalidInput(f"{name}:1: the file is empty; expected a task with at least `run`.")
    first = found[0]
    execution = model.value_at(first.plain, "execution")
    where = f"{name}:{first.key_lines.get('execution')}: execution"
    if execution == "parallel":
        raise Unsupported(
            f"{where}: parallel makes a job group, whose tasks run at the same time. Launch each of them "
            "from its own file, or the group with SkyPilot: `sky jobs launch FILE`. Nothing was started."
        )
    if execution not in ("serial", None):
        raise InvalidInput(f"{where}: expected serial, found {execution!r}. Nothing was started.")
    title = None
    if isinstance(first.plain, dict) and set(first.plain) in _HEADERS and len(found) > 1:
        title = found.pop(0).plain["name"]
    if len(found) > MAX_TASKS:
        raise InvalidInput(f"{name}: a pipeline has at most {MAX_TASKS} tasks, found {len(found)}.")
    return None if title is None else str(title), found
