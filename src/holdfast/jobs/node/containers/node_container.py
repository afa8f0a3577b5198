"""Container of one node: found by its label, created from the image, started, and removed."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from holdfast.errors import Conflict, HoldfastError, RetryLater, Unsupported
from holdfast.jobs.folder import ContainerFolder, JobFolder
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.image_spec import ContainerOwner, ContainerState, ImageSpec
from holdfast.jobs.node.containers.runtime import ContainerRuntime, RuntimeCalls
from holdfast.jobs.node.mounts.mount_spec import Link, read_links, write_links
from holdfast.jobs.node.processes import CONTAINER_PREFIX
from holdfast.jobs.task.image import qualified
from holdfast.jobs.task.sky_workdir import SKY_WORKDIR
from holdfast.system.documents import Fields, decode
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.mount_namespace import JoinedNamespaces, open_namespaces

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_INSPECT_BYTES = 16 << 20
_ROOT_NAMES = ("", "0", "root")
_LABEL = "holdfast.node"
_MACHINE_LABEL = "holdfast.machine"
_SHARED_MEMORY = "/dev/shm"
_SLEEP = "exec sleep 2147483647"
"""Command of a container: its only process waits, and holds the namespaces that the job's processes join."""
_PASSWD = Path("/etc/passwd")
_MAX_PASSWD_BYTES = 1 << 20
_DONE, _FAILED = b"+", b"-"


class NodeContainer:
    """Container of one node of a job. Those of other jobs and nodes are never changed.

    Args:
        folder: files of the container.
        calls: calls of the runtime.
        log: writes a line to the log of the node.
    """

    def __init__(
        self,
        job: JobFolder,
        rank: int,
        folder: ContainerFolder,
        spec: ImageSpec,
        calls: RuntimeCalls,
        log: Callable[[str], None],
    ) -> None:
        self._job, self._rank, self._spec = job, rank, spec
        self._folder = folder
        self._calls, self._log = calls, log

    def ensure_running(self) -> ContainerState:
        """Return the state of the container, which is created and started if necessary.

        Blocks: while the image is pulled.
        """
        container = self._find()
        if container is None:
            self._remove_earlier()
            container = self._create()
        facts = self._inspect(container)
        if not facts.fields("State").flag("Running"):
            with self._bash_expected():
                self._calls.run(start_command(self._spec, container))
            facts = self._inspect(container)
        pid = facts.fields("State").integer("Pid")
        process = processes.find(pid) if pid else None
        if process is None:
            raise RetryLater(f"The container {container[:12]} ended as soon as it had been started.")
        namespaces = self._enter(pid)
        try:
            environment = self._environment(facts.text("Image"), namespaces)
            self._link(container, namespaces, environment["HOME"])
        finally:
            namespaces.close()
        return ContainerState(pid, process.start, environment)

    def remove(self) -> None:
        """Remove the container, if it exists. Files of the job belong to the job's user afterwards."""
        if (container := self._find()) is not None:
            self._remove(container)

    def _remove_earlier(self) -> None:
        """Remove what earlier attempts have left on this machine, as their owner was killed."""
        if (owner := self._spec.owner) is not None:
            for container in self._list(find_earlier_command(self._spec, owner)):
                self._log(f"removing the container {container[:12]} that an earlier attempt has left here")
                self._remove(container)

    def _remove(self, container: str) -> None:
        with suppress(HoldfastError):  # a container that does not start has run nothing
            self._own_files(container)
        self._calls.run(remove_command(self._spec, container))

    def _own_files(self, container: str) -> None:
        """Make the user of the job the owner of all files in the job's folder."""
        self._calls.run(start_command(self._spec, container))
        namespaces = self._enter(self._inspect(container).fields("State").integer("Pid"))
        try:
            own_files(namespaces, self._job.path)
        finally:
            namespaces.close()

    # -- the image -------------------------------------------------------------------------------------------

    def _create(self) -> str:
        image_id = self._find_image() or self._pull()
        self._log(f"creating a container of {self._spec.image} with {self._spec.runtime.value}")
        with self._bash_expected():
            return self._calls.run(create_command(self._spec, self._rank, image_id)).splitlines()[-1]

    def _find_image(self) -> str | None:
        for name in dict.fromkeys((self._spec.image, qualified(self._spec.image))):
            try:
                return self._image(name).text("Id")
            except RetryLater:
                continue  # this machine does not have it, or pulling it fails for the same reason
        return None

    def _pull(self) -> str:
        name = qualified(self._spec.image)
        self._log(f"pulling {name} with {self._spec.runtime.value}")
        self._calls.run(pull_command(self._spec, name), is_logged=True)
        return self._image(name).text("Id")

    def _image(self, name: str) -> Fields:
        return self._ask(image_command(self._spec, name))

    def _environment(self, image_id: str, namespaces: JoinedNamespaces) -> dict[str, str]:
        """Return the variables that the image defines, with HOME and PATH."""
        config = self._image(image_id).fields("Config").members
        pairs = [str(line).partition("=") for line in config.get("Env") or ()]
        environment = {"PATH": _DEFAULT_PATH, **{name: value for name, _, value in pairs}}
        user = str(config.get("User") or "")
        if "HOME" not in environment:
            environment["HOME"] = find_home(namespaces, user)
        if user.partition(":")[0] not in _ROOT_NAMES and not self._folder.linked.exists():
            self._log(f"commands run as root in the image, whose own user is {user}: so the files are yours")
        return environment

    # -- the container ---------------------------------------------------------------------------------------

    def _find(self) -> str | None:
        found = self._list(find_command(self._spec, self._rank))
        return found[0] if found else None

    def _list(self, command: list[str]) -> list[str]:
        return self._calls.run(command).splitlines()

    def _inspect(self, container: str) -> Fields:
        return self._ask(inspect_command(self._spec, container))

    def _ask(self, command: list[str]) -> Fields:
        what = f"the answer of `{' '.join(command[:3])}`"
        found = decode(self._calls.run(command), what, max_bytes=_MAX_INSPECT_BYTES, any_text=True)
        return Fields(found[0] if isinstance(found, list) and len(found) == 1 else found, what)

    def _enter(self, pid: int) -> JoinedNamespaces:
        """Open the namespaces of the container, whose process is one of this machine."""
        try:
            own, there = self._job.path.stat(), Path(f"/proc/{pid}/root{self._job.path}").stat()
            namespaces = open_namespaces(pid)
        except OSError as error:
            raise self._is_elsewhere(str(error)) from error
        if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino):
            namespaces.close()
            raise self._is_elsewhere(f"process {pid} has other files")
        return namespaces

    def _is_elsewhere(self, why: str) -> Unsupported:
        name = self._spec.runtime.value
        return Unsupported(
            f"The commands cannot join the container that {name} has started: {why}. {name} must run "
            "containers on this machine and as this user, not through a service of another one."
        )

    def _link(self, container: str, namespaces: JoinedNamespaces, home: str) -> None:
        """Create the job's links in a new container, once: its commands may replace them."""
        if self._folder.linked.exists() and self._folder.linked.read_text() == container:
            return
        mounts = JobFolder(Path(self._spec.scratch)) if self._spec.scratch else self._job
        links = _at_home(read_links(mounts), home)
        # A source is at its own path already.
        targets = {one.target: one.source for one in links if one.is_inside and one.target != one.source}
        make_links(namespaces, {f"{home}/{SKY_WORKDIR}": str(self._job.workdir(self._rank)), **targets})
        write_links(self._job, _at_home(read_links(self._job), home))  # as the job's programs report them
        write_atomic(self._folder.linked, container)

    @contextmanager
    def _bash_expected(self) -> Iterator[None]:
        """Explain the failure of a runtime to start bash."""
        try:
            yield
        except RetryLater as error:
            if "bash" not in str(error):
                raise
            raise Unsupported(
                f"The image {self._spec.image} has no bash, in which the commands of a task run, as on "
                f"SkyPilot. Add it to the image, or choose another one. {error}"
            ) from error


def _at_home(links: list[Link], home: str) -> list[Link]:
    """Return links with the home of the image in the place of ~."""
    return [
        replace(link, target=link.target.replace("~", home, 1)) if link.target.startswith("~") else link
        for link in links
    ]


def explain(error: HoldfastError, spec: ImageSpec) -> str:
    """Return why a container does not run, and possible remedies."""
    text = str(error)
    if "nvidia.com/gpu" in text or "could not select device driver" in text:
        return (
            f"{text}. GPUs in containers need NVIDIA's container toolkit; for podman also run "
            "`sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
        )
    if "`" in text and " pull" in text:
        return f"{text}. If the image is not public, log in first: `{spec.runtime.value} login REGISTRY`"
    return text


def container_name(spec: ImageSpec, rank: int) -> str:
    """Return the name of a node's container, as the lists of the runtime show it."""
    return CONTAINER_PREFIX.decode() + _node(spec, rank).replace("/", "-")


def create_command(spec: ImageSpec, rank: int, image_id: str) -> list[str]:
    """Return the command that creates a node's container.

    It shares the machine's network, names and processes, so that addresses and pids mean the same inside.
    """
    # Docker refuses it for a file system that the machine does not share.
    propagation = ("bind-propagation=rslave",) if spec.has_file_systems else ()
    return [
        *(spec.runtime.value, "create"),
        *("--name", container_name(spec, rank), "--label", _label(spec, rank), *_machine_label(spec)),
        *("--pull", "never", "--log-driver", "none", "--no-healthcheck"),
        # For a rootless runtime, the host's user namespace is its own: root inside is the user outside.
        *("--network", "host", "--pid", "host", "--uts", "host", "--userns", "host"),
        *("--user", "0:0", "--workdir", "/"),
        *_bind(_SHARED_MEMORY),
        *(word for path in spec.binds for word in _bind(path, *propagation)),
        *(_gpus(spec.runtime) if spec.has_gpus else ()),
        *("--entrypoint", "bash", image_id, "-c", _SLEEP),
    ]


def find_command(spec: ImageSpec, rank: int) -> list[str]:
    """Return the command that prints the id of a node's container, or nothing."""
    return _list_command(spec, _label(spec, rank))


def find_earlier_command(spec: ImageSpec, owner: ContainerOwner) -> list[str]:
    """Return the command that lists all containers of a job on a machine."""
    return _list_command(spec, f"{_MACHINE_LABEL}={spec.task_id}/{owner.machine}")


def start_command(spec: ImageSpec, container: str) -> list[str]:
    """Return the command that starts a container."""
    return [spec.runtime.value, "start", container]


def inspect_command(spec: ImageSpec, container: str) -> list[str]:
    """Return the command that prints a container as a JSON array of one object."""
    return [spec.runtime.value, "container", "inspect", container]


def remove_command(spec: ImageSpec, container: str) -> list[str]:
    """Return the command that ends and removes a container, with its anonymous volumes."""
    return [spec.runtime.value, "rm", "--force", "--volumes", container]


def image_command(spec: ImageSpec, image: str) -> list[str]:
    """Return the command that prints an image as such an array, or fails."""
    return [spec.runtime.value, "image", "inspect", image]


def pull_command(spec: ImageSpec, image: str) -> list[str]:
    """Return the command that pulls an image."""
    return [spec.runtime.value, "pull", image]


def _list_command(spec: ImageSpec, label: str) -> list[str]:
    return [spec.runtime.value, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={label}"]


def _label(spec: ImageSpec, rank: int) -> str:
    return f"{_LABEL}={_node(spec, rank)}"


def _node(spec: ImageSpec, rank: int) -> str:
    """Return the name of a node among all containers of a machine."""
    if spec.owner is None:
        return f"{spec.task_id}/{rank}"
    return f"{spec.task_id}/{spec.owner.machine}/{spec.owner.attempt}"


def _machine_label(spec: ImageSpec) -> tuple[str, ...]:
    if spec.owner is None:
        return ()
    return ("--label", f"{_MACHINE_LABEL}={spec.task_id}/{spec.owner.machine}")


def _bind(path: str, *further: str) -> Iterator[str]:
    """Yield the options for a path that is the same outside and inside."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(("type=bind", f"source={path}", f"target={path}", *further))
    yield from ("--mount", line.getvalue())


def _gpus(runtime: ContainerRuntime) -> tuple[str, ...]:
    """Return the options for all GPUs of this machine. `CUDA_VISIBLE_DEVICES` selects those of the job."""
    if runtime is ContainerRuntime.PODMAN:
        return ("--device", "nvidia.com/gpu=all")
    return ("--gpus", "all")


def find_home(namespaces: JoinedNamespaces, user: str) -> str:
    """Return the home of a user of an image. By default, it is /.

    Args:
        user: name or number, with or without a group after a colon. Empty is root.
    """
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
    """Create symbolic links in a container. They replace files and empty folders of the image.

    Args:
        links: absolute paths of the files, by that of the link.
    """

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
    """Make root inside, which is the user outside, the owner of all files.

    Only files of other users inside are changed, as `tar` creates them for root.
    """

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
        answer = _FAILED
        try:
            namespaces.join()
            answer = _DONE + os.fsencode(function())
        except OSError as error:
            answer = _FAILED + os.fsencode(str(error))
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    text = os.fsdecode(answer[1:])
    if not answer.startswith(_DONE):
        raise RetryLater(f"Cannot change the container of the job: {text or 'its process was killed'}.")
    return text
