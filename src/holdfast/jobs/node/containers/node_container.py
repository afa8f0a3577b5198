"""Container of one node, and its warden, which creates it, keeps it running, and removes it at the end."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import Conflict, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.jobs.environment import tag
from holdfast.jobs.folder import ContainerFolder, JobFolder
from holdfast.jobs.journal import read_document, write_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.container import ContainerRuntime, ContainerState, ImageSpec
from holdfast.jobs.node.mounts.mount_records import Link, read_links
from holdfast.jobs.node.processes import CONTAINER_PREFIX
from holdfast.jobs.node.roles import log_line
from holdfast.jobs.task.model import SKY_WORKDIR, qualified
from holdfast.system.documents import Count, decode_as
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.mount_namespace import JoinedNamespaces, open_namespaces
from holdfast.system.linux.processes import adopt_orphans
from holdfast.system.linux.program_runs import run_program

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_INSPECT_BYTES = 16 << 20
_MAX_ERROR_CHARS = 2000
_ROOT_NAMES = ("", "0", "root")
_NODE_LABEL, _MACHINE_LABEL = "holdfast.node", "holdfast.machine"
_SHARED_MEMORY = "/dev/shm"
_SLEEP = "exec sleep 2147483647"
"""Command of a container: its only process waits, and holds the namespaces that the job's processes join."""
_PASSWD = Path("/etc/passwd")
_MAX_PASSWD_BYTES = 1 << 20
_T = TypeVar("_T")
_CHECK_S = 0.25
_REMOVALS = 3  # limit of attempts to remove a container. The next command about the job tries again


# What both runtimes print about a container and an image.
class _RunState(Struct, frozen=True, rename="pascal"):
    running: bool
    pid: Count  # 0: it does not run


class _InspectedContainer(Struct, frozen=True, rename="pascal"):
    image: str
    state: _RunState


class _ImageConfig(Struct, frozen=True, rename="pascal"):
    env: tuple[str, ...] | None = None
    user: str | None = None


class _InspectedImage(Struct, frozen=True, rename="pascal"):
    id: str
    config: _ImageConfig


def serve(folder: Path) -> None:
    """Run the warden. The caller holds its lock."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Processes of the runtime outlive the call that starts them. They must not become children of the agent,
    # which ends all that are left of the job's commands.
    adopt_orphans()
    own = read_document(ContainerFolder(folder).image, ImageSpec)
    job = JobFolder(folder.parents[2 if own is None else 3])  # one attempt's container is in its folder
    if (spec := own or read_document(job.image, ImageSpec)) is not None:
        _Warden(job, ContainerFolder(folder), spec).serve()


class _Warden:
    """Warden of the container of one node, which holds its lock. Others are never changed."""

    def __init__(self, job: JobFolder, folder: ContainerFolder, spec: ImageSpec) -> None:
        self._job, self._folder, self._spec = job, folder, spec
        self._rank = int(folder.path.parent.name)
        self._is_ending = False

    def serve(self) -> None:
        """Keep the container running until it is unneeded, and remove it then."""
        state = ContainerState() if self._is_unneeded else self._start()
        while not self._is_unneeded:
            self._pause()
            if not state.error and not self._is_unneeded and not processes.is_running(state.pid, state.start):
                log_line("the container has ended, starting it again")
                state = self._start()
        owner, task_id = self._spec.owner, self._spec.task_id
        mark = tag(task_id) if owner is None else tag(task_id, owner.attempt, self._rank)
        # Keepers of the last attempt may be uploading, with programs of the image.
        while processes.tagged(mark, processes.snapshot()):
            self._pause()
        self._is_ending = True
        self._remove()

    def _pause(self) -> None:
        time.sleep(_CHECK_S)
        processes.reap()

    @property
    def _is_unneeded(self) -> bool:
        if self._folder.unneeded.exists() or not self._folder.path.exists():
            return True
        owner = self._spec.owner
        return owner is not None and not processes.is_running(owner.pid, owner.start)

    def _start(self) -> ContainerState:
        try:
            state = self._ensure_running()
        except HoldfastError as error:
            state = ContainerState(error=explain(error, self._spec))
        if not self._is_unneeded:
            write_document(self._folder.state, state)
        return state

    def _remove(self) -> None:
        """Remove the container, if it exists. Files of the job belong to the job's user afterwards."""
        for _ in range(_REMOVALS):
            try:
                if (container := self._find()) is not None:
                    self._remove_container(container)
            except RetryLater as error:
                log_line(f"cannot remove the container yet: {error}")
                time.sleep(_CHECK_S)
                continue
            except HoldfastError as error:
                log_line(f"cannot remove the container: {error}")
                return
            if self._folder.path.exists():
                self._folder.removed.touch()
            return

    def _ensure_running(self) -> ContainerState:
        """Return the state of the container, which is created and started if necessary."""
        container = self._find()
        if container is None:
            machine = _machine(self._spec)
            for left in self._list(_MACHINE_LABEL, machine) if machine else ():  # their owner was killed
                log_line(f"removing the container {left[:12]} that an earlier attempt has left here")
                self._remove_container(left)
            image_id = self._image_id()
            log_line(f"creating a container of {self._spec.image} with {self._spec.runtime.value}")
            container = self._run(*create_command(self._spec, self._rank, image_id)[1:]).splitlines()[-1]
        found = self._inspect(container)
        if not found.state.running:
            self._run("start", container)
            found = self._inspect(container)
        pid = found.state.pid
        process = processes.find(pid) if pid else None
        if process is None:
            raise RetryLater(f"The container {container[:12]} ended as soon as it had been started.")
        with self._entered(pid) as namespaces:
            environment = self._environment(found.image, namespaces)
            self._link(container, namespaces, environment["HOME"])
        return ContainerState(pid, process.start, environment)

    def _remove_container(self, container: str) -> None:
        with suppress(HoldfastError):  # a container that does not start has run nothing
            self._run("start", container)
            with self._entered(self._inspect(container).state.pid) as namespaces:
                own_files(namespaces, self._job.path)
        self._run("rm", "--force", "--volumes", container)

    def _image_id(self) -> str:
        name = qualified(self._spec.image)
        for known in dict.fromkeys((self._spec.image, name)):
            with suppress(RetryLater):  # it is not on this machine, or pulling it fails for the same reason
                return self._ask(_InspectedImage, "image", known).id
        log_line(f"pulling {name} with {self._spec.runtime.value}")
        self._run("pull", name, on_output=lambda data: os.write(sys.stdout.fileno(), data))
        return self._ask(_InspectedImage, "image", name).id

    def _environment(self, image_id: str, namespaces: JoinedNamespaces) -> dict[str, str]:
        """Return the variables that the image defines, with HOME and PATH."""
        config = self._ask(_InspectedImage, "image", image_id).config
        pairs = [line.partition("=") for line in config.env or ()]
        environment = {"PATH": _DEFAULT_PATH, **{name: value for name, _, value in pairs}}
        user = config.user or ""
        if "HOME" not in environment:
            environment["HOME"] = find_home(namespaces, user)
        if user.partition(":")[0] not in _ROOT_NAMES and not self._folder.linked.exists():
            log_line(f"commands run as root in the image, whose own user is {user}: so the files are yours")
        return environment

    def _find(self) -> str | None:
        return next(iter(self._list(_NODE_LABEL, _node(self._spec, self._rank))), None)

    def _list(self, label: str, value: str) -> list[str]:
        return self._run(
            "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={label}={value}"
        ).splitlines()

    def _inspect(self, container: str) -> _InspectedContainer:
        return self._ask(_InspectedContainer, "container", container)

    def _ask(self, kind: type[_T], noun: str, name: str) -> _T:
        """Return the only object in the JSON array that the runtime prints about a container or an image."""
        what = f"the answer of `{self._spec.runtime.value} {noun} inspect`"
        text = self._run(noun, "inspect", name)
        return decode_as(tuple[kind], text, what, max_bytes=_MAX_INSPECT_BYTES, any_text=True)[0]

    def _run(self, *words: str, on_output: Callable[[bytes], object] = lambda _: None) -> str:
        """Run a command of the runtime to its end, and return what it prints."""
        program = self._spec.runtime.value
        what = f"`{program} {words[0]}`"

        def check() -> None:
            if self._is_unneeded and not self._is_ending:
                raise RetryLater(f"{what} was stopped: the job has ended.")

        try:
            done = run_program(
                (program, *words), timeout_s=None, has_own_session=True, on_output=on_output, on_look=check
            )
        except FileNotFoundError as error:
            raise NotFound(f"The program {program} is not installed on this machine any more.") from error
        if done.status != 0:
            raise RetryLater(f"{what} failed: {done.error[-_MAX_ERROR_CHARS:] or f'status {done.status}'}")
        return done.text

    @contextmanager
    def _entered(self, pid: int) -> Iterator[JoinedNamespaces]:
        """Open the namespaces of the container, whose process is one of this machine, for the block."""
        why, namespaces = f"process {pid} has other files", None
        try:
            own, there = self._job.path.stat(), Path(f"/proc/{pid}/root{self._job.path}").stat()
            if (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino):
                namespaces = open_namespaces(pid)
        except OSError as error:
            why = str(error)
        if namespaces is None:
            name = self._spec.runtime.value
            raise Unsupported(
                f"The commands cannot join the container that {name} has started: {why}. {name} must run "
                "containers on this machine and as this user, not through a service of another one."
            )
        with closing(namespaces):
            yield namespaces

    def _link(self, container: str, namespaces: JoinedNamespaces, home: str) -> None:
        """Create the job's links in a new container, once: its commands may replace them."""
        if self._folder.linked.exists() and self._folder.linked.read_text() == container:
            return
        mounts = JobFolder(Path(self._spec.scratch)) if self._spec.scratch else self._job
        links = _at_home(read_links(mounts), home)
        # A source is at its own path already.
        targets = {one.target: one.source for one in links if one.is_inside and one.target != one.source}
        make_links(namespaces, {f"{home}/{SKY_WORKDIR}": str(self._job.workdir(self._rank)), **targets})
        # As the job's programs report them.
        write_document(self._job.links, _at_home(read_links(self._job), home))
        write_atomic(self._folder.linked, container)


def _at_home(links: list[Link], home: str) -> list[Link]:
    """Return links with the home of the image in the place of ~."""
    return [
        replace(link, target=link.target.replace("~", home, 1)) if link.target.startswith("~") else link
        for link in links
    ]


def explain(error: HoldfastError, spec: ImageSpec) -> str:
    """Return why a container does not run, and possible remedies."""
    text = str(error)
    if re.match(r"`\w+ (create|start)` failed", text) and "bash" in text:
        return (
            f"The image {spec.image} has no bash, in which the commands of a task run, as on SkyPilot. "
            f"Add it to the image, or choose another one. {text}"
        )
    if "nvidia.com/gpu" in text or "could not select device driver" in text:
        return (
            f"{text}. GPUs in containers need NVIDIA's container toolkit; for podman also run "
            "`sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
        )
    if "`" in text and " pull" in text:
        return f"{text}. If the image is not public, log in first: `{spec.runtime.value} login REGISTRY`"
    return text


def create_command(spec: ImageSpec, rank: int, image_id: str) -> list[str]:
    """Return the command that creates a node's container. Addresses and pids mean the same inside.

    Source: podman-create(1), with the Container Device Interface; the reference of `docker run`.
    """
    node, machine = _node(spec, rank), _machine(spec)
    # Docker refuses it for a file system that the machine does not share.
    propagation = ("bind-propagation=rslave",) if spec.has_file_systems else ()
    # All GPUs of this machine: `CUDA_VISIBLE_DEVICES` selects those of the job.
    gpus = {ContainerRuntime.PODMAN: ("--device", "nvidia.com/gpu=all")}.get(spec.runtime, ("--gpus", "all"))
    return [
        *(spec.runtime.value, "create", "--name", CONTAINER_PREFIX.decode() + node.replace("/", "-")),
        *("--label", f"{_NODE_LABEL}={node}"),
        *(("--label", f"{_MACHINE_LABEL}={machine}") if machine else ()),
        *("--pull", "never", "--log-driver", "none", "--no-healthcheck"),
        # For a rootless runtime, the host's user namespace is its own: root inside is the user outside.
        *("--network", "host", "--pid", "host", "--uts", "host", "--userns", "host"),
        *("--user", "0:0", "--workdir", "/"),
        *_bind(_SHARED_MEMORY),
        *(word for path in spec.binds for word in _bind(path, *propagation)),
        *(gpus if spec.has_gpus else ()),
        *("--entrypoint", "bash", image_id, "-c", _SLEEP),
    ]


def _node(spec: ImageSpec, rank: int) -> str:
    """Return the name of a node among all containers of a machine."""
    return f"{spec.task_id}/{rank}" if spec.owner is None else f"{_machine(spec)}/{spec.owner.attempt}"


def _machine(spec: ImageSpec) -> str:
    """Return the name of all containers of a job on one machine; empty if it has only one machine."""
    return "" if spec.owner is None else f"{spec.task_id}/{spec.owner.machine}"


def _bind(path: str, *further: str) -> tuple[str, str]:
    """Return the option for a path that is the same outside and inside."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(("type=bind", f"source={path}", f"target={path}", *further))
    return "--mount", line.getvalue()


def find_home(namespaces: JoinedNamespaces, user: str) -> str:
    """Return the home of a user of an image: a name or number, perhaps with a group; empty for root."""
    name = user.partition(":")[0] or "0"

    def look() -> str:
        try:
            with _PASSWD.open(errors="replace") as file:
                lines = file.read(_MAX_PASSWD_BYTES).splitlines()
        except OSError:
            return ""
        rows = [line.split(":") for line in lines]
        return next((row[5] for row in rows if len(row) > 5 and name in (row[0], row[2])), "")

    return _call(namespaces, look) or ("/root" if name in ("0", "root") else "/")


def make_links(namespaces: JoinedNamespaces, links: Mapping[str, str]) -> None:
    """Create links to paths in a container. They replace files and empty folders of the image."""

    def make() -> str:
        for target, source in links.items():
            path = Path(target)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif path.exists():
                try:
                    path.rmdir()
                except OSError:
                    return target
            path.symlink_to(source)
        return ""

    if covered := _call(namespaces, make):
        raise Conflict(
            f"file_mounts: the image has a folder with files at {covered}, which was not changed. Choose "
            "another path for the mount."
        )


def own_files(namespaces: JoinedNamespaces, folder: Path) -> None:
    """Make root inside, which is the user outside, the owner of all files."""

    def change() -> str:
        for parent, folders, names in os.walk(folder):
            for path in (parent, *(os.path.join(parent, name) for name in (*folders, *names))):  # noqa: PTH118
                try:
                    if os.lstat(path).st_uid != 0:
                        os.lchown(path, 0, 0)
                except OSError:
                    continue  # of a user who does not exist inside, or removed meanwhile
        return ""

    _call(namespaces, change)


def _call(namespaces: JoinedNamespaces, function: Callable[[], str]) -> str:
    """Return the result of a function that a process inside calls. It must not import anything."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            namespaces.join()
            os.write(writer, os.fsencode(function()))
            status = 0
        except OSError as error:
            os.write(writer, os.fsencode(str(error)))
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = os.fsdecode(pipe.read())
    if os.waitpid(child, 0)[1] != 0:
        raise RetryLater(f"Cannot change the container of the job: {text or 'its process was killed'}.")
    return text
