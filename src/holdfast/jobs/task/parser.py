"""Parser of task files. Reports all problems at once, with their lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import InvalidInput, NotFound, Unsupported
from holdfast.jobs.task.accelerators import Accelerators, parse_accelerators
from holdfast.jobs.task.document import Value, parse_documents
from holdfast.jobs.task.model import FileMount, MountMode, Recovery, Repository, Task
from holdfast.jobs.task.schema import TASK
from holdfast.jobs.task.shape import Problem
from holdfast.jobs.task.variables import fill_in, parse_variables, variable_problems

_MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Overrides:
    """Options of the command line that override the file."""

    name: str | None = None
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)


def load_task(path: str | Path, overrides: Overrides | None = None) -> Task:
    """Load a task from a file.

    Raises:
        NotFound: the file does not exist.
        InvalidInput: the file has errors. The message has a line for each.
        Unsupported: the file contains several tasks.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFound(
            f"The task file {path} does not exist. Give the path of a SkyPilot task file (YAML)."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"Cannot read the task file {path}: {error}.") from error
    return parse_task(text, str(path), overrides)


def parse_task(text: str, name: str, overrides: Overrides | None = None) -> Task:
    """Parse a task; see `load_task`.

    Args:
        name: name of the file, for messages. A relative `workdir` is resolved against the current directory.
    """
    given = overrides or Overrides()
    root = _only_document(parse_documents(text, name), name)
    problems = list(_all_problems(root, given))
    if problems:
        raise InvalidInput(_format_problems(problems, name))
    return _task(root, name, given)


def _only_document(documents: list[Value], name: str) -> Value:
    if not documents or documents[0].plain is None:
        raise InvalidInput(f"{name}:1: the file is empty; expected a task with at least `run`.")
    if len(documents) > 1:
        raise Unsupported(
            f"{name}:{documents[1].line}: the file contains {len(documents)} documents (a pipeline). "
            "This version supports one task per file. Put each into its own file."
        )
    return documents[0]


# -- problems --------------------------------------------------------------------------------------------


def _all_problems(root: Value, given: Overrides) -> Iterator[Problem]:
    yield from TASK.problems(root, "")
    if root.kind != "map":
        return
    if root.get("pool") is None and root.get("service") is None and not _plain(root, "run"):
        yield Problem(root.line, "run", "expected the commands of the job, found nothing")
    for key, option in (("envs", "--env"), ("secrets", "--secret")):
        chosen = given.envs if key == "envs" else given.secrets
        yield from variable_problems(root.get(key), chosen, where=key, option=option)
    for key in ("service", "pool"):
        if (member := root.get(key)) is not None:
            yield Problem(member.line, key, "services and pools are not jobs; start them with `sky` itself")
    yield from _resource_problems(root.get("resources"))


def _resource_problems(resources: Value | None) -> Iterator[Problem]:
    if resources is None or resources.kind != "map":
        return
    places = [("resources", resources)]
    for key in ("any_of", "ordered"):
        member = resources.get(key)
        if member is not None:
            places += [(f"resources.{key}[{i}]", item) for i, item in enumerate(member.items)]
    for where, place in places:
        asked = place.get("accelerators")
        if asked is None:
            continue
        read = parse_accelerators(asked.plain)
        if isinstance(read, str):
            yield Problem(asked.line, f"{where}.accelerators", read)


def _format_problems(problems: list[Problem], name: str) -> str:
    ordered = sorted(set(problems), key=lambda one: (one.line, one.where, one.what))
    lines = [f"{name}:{one.line}: {one.where}: {one.what}" for one in ordered[:_MAX_LISTED]]
    if len(ordered) > _MAX_LISTED:
        lines.append(f"and {len(ordered) - _MAX_LISTED} more")
    head = "The task file has errors. Nothing was started."
    return "\n".join([head, *(f"  {line}" for line in lines)])


# -- values ----------------------------------------------------------------------------------------------


def _task(root: Value, name: str, given: Overrides) -> Task:
    envs = parse_variables(root.get("envs"), given.envs)
    secrets = parse_variables(root.get("secrets"), given.secrets)
    variables = {**envs, **secrets}
    resources = root.get("resources") or Value(0, {})
    accelerators = _accelerators(resources)
    job_name = given.name or str(_plain(root, "name") or "") or Path(name).stem
    mounts = root.get("file_mounts")
    workdir = fill_in(_plain(root, "workdir"), variables)
    repository = _repository(workdir, root, name) if isinstance(workdir, Mapping) else None
    return Task(
        name=job_name,
        run=str(_plain(root, "run")),
        setup=str(_plain(root, "setup") or ""),
        workdir=str(Path(workdir).expanduser().absolute()) if isinstance(workdir, str) else None,
        repository=repository,
        num_nodes=_plain(root, "num_nodes") or 1,
        accelerators=accelerators,
        recovery=_recovery(resources),
        file_mounts=tuple(_mounts(mounts, variables)) if mounts is not None else (),
        envs=envs,
        secrets=secrets,
        document=_normalised(root, job_name, envs, secrets, accelerators),
        lines=dict(_lines(root, "")),
        notes=tuple(_notes(resources, accelerators)),
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


def _plain(root: Value, key: str) -> Any:
    member = root.get(key)
    return None if member is None else member.plain


def _accelerators(resources: Value) -> Accelerators:
    read = parse_accelerators(_plain(resources, "accelerators"))
    assert isinstance(read, Accelerators)
    return read


def _recovery(resources: Value) -> Recovery:
    asked = resources.get("job_recovery")
    if asked is None or asked.kind != "map":
        return Recovery()
    codes = _plain(asked, "recover_on_exit_codes")
    listed = codes if isinstance(codes, list) else [] if codes is None else [codes]
    return Recovery(_plain(asked, "max_restarts_on_errors") or 0, frozenset(listed))


def _mounts(mounts: Value, variables: Mapping[str, str]) -> Iterator[FileMount]:
    for target, value in mounts.members.items():
        filled = fill_in(value.plain, variables)
        line = mounts.key_lines[target]
        where = str(fill_in(target, variables))
        if isinstance(filled, str):
            yield FileMount(where, filled, MountMode.COPY, line=line)
            continue
        mode = MountMode(str(filled.get("mode", "MOUNT")).upper())
        source = filled.get("source")
        if isinstance(source, list):
            source = source[0] if len(source) == 1 else None
        yield FileMount(where, source, mode, bucket=filled.get("name"), line=line, spec=filled)


def _normalised(
    root: Value, name: str, envs: Mapping[str, str], secrets: Mapping[str, str], accelerators: Accelerators
) -> dict[str, Any]:
    """Return the document for other engines: the user's file without forms that only Holdfast supports."""
    kept = {str(key): value for key, value in root.plain.items() if value is not None}
    document = {"name": name, **{key: value for key, value in kept.items() if key != "name"}}
    if envs:
        document["envs"] = dict(envs)
    if secrets:
        document["secrets"] = dict.fromkeys(secrets)  # values are never written; `sky` takes --secret
    if accelerators.is_folded:
        document["resources"] = {**document["resources"], "accelerators": accelerators.plain()}
    return document


def _notes(resources: Value, accelerators: Accelerators) -> Iterator[str]:
    asked = resources.get("accelerators")
    if asked is not None and accelerators.is_folded:
        choices = ", ".join(f"{name}:{count:g}" for name, count in accelerators.choices)
        yield (
            f"line {asked.line}: resources.accelerators: without a space after each colon YAML joins these "
            f"lines into one text; read as the set {{{choices}}}"
        )
    recovery = resources.get("job_recovery")
    if recovery is not None and 137 in _recovery(resources).free_codes:
        yield (
            f"line {recovery.line}: recover_on_exit_codes contains 137, which is also the status after the "
            "kernel's out-of-memory killer, and which SkyPilot uses for cancelled jobs"
        )


def _lines(value: Value, where: str) -> Iterator[tuple[str, int]]:
    for key, member in value.members.items():
        path = f"{where}.{key}" if where else key
        yield path, value.key_lines[key]
        yield from _lines(member, path)
