"""Images of the tests for real container runtimes, made of this machine's bash and busybox."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import pytest
import torch

IMAGE = "localhost/holdfast-test-image:1"
IMAGE_FOR_TORCH = "localhost/holdfast-test-torch:1"
"""The same with the shared libraries of this Python and of torch, which a job mounts."""
_BUSYBOX = "/bin/busybox"
_CHANGES = ("ENV HOME=/srv/home", "ENV SETTING=of-the-image")


@functools.cache
def why_unavailable(runtime: str) -> str | None:
    """Return why a runtime cannot run containers of the image here, or None. Makes the image if necessary."""
    if shutil.which(runtime) is None:
        return f"{runtime} is not installed"
    if not os.access(_BUSYBOX, os.X_OK):
        return "busybox-static is not installed"
    if why := _make(runtime, IMAGE, []):
        return why
    shared = ("--network", "host", "--pid", "host")
    trial = [runtime, "run", "--rm", *shared, IMAGE, "bash", "-c", "cat /srv/marker"]
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    if done.returncode or done.stdout.strip() != IMAGE:
        return f"{runtime} cannot run containers: {done.stderr.strip()}"
    return None


def require(runtime: str) -> None:
    """Skip a test if a runtime cannot run containers here."""
    if why := why_unavailable(runtime):
        pytest.skip(why)


def require_for_torch(runtime: str) -> None:
    """Skip a test if a runtime cannot run containers of the image for torch here."""
    require(runtime)
    folders = (Path(sysconfig.get_path("stdlib"), "lib-dynload"), Path(torch.__file__).parent / "lib")
    programs = [Path(sys.executable), *(path for folder in folders for path in folder.glob("*.so*"))]
    if why := _make(runtime, IMAGE_FOR_TORCH, programs):
        pytest.skip(why)


def _make(runtime: str, name: str, programs: list[Path]) -> str | None:
    """Make an image, unless it exists. Return why that is not possible, or None."""
    if not subprocess.run([runtime, "image", "inspect", name], capture_output=True, check=False).returncode:
        return None
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "image.tar")
        _write(archive, programs)
        changes = [word for change in _CHANGES for word in ("--change", change)]
        words = [runtime, "import", *changes, str(archive), name]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"{runtime} cannot import an image: {done.stderr.strip()}" if done.returncode else None


def _libraries(programs: list[Path]) -> set[str]:
    """Return the shared libraries of programs that are in folders of this system."""
    words = ["ldd", *(str(path) for path in programs)]
    listed = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return {path for path in re.findall(r"(/\S+) \(", listed) if path.startswith(("/lib", "/usr/lib"))}


def _write(archive: Path, programs: list[Path]) -> None:
    """Write the files of an image for programs to an archive."""
    bash = shutil.which("bash")
    assert bash is not None
    with tempfile.TemporaryDirectory() as name, tarfile.open(archive, "w") as tar:
        root = Path(name)
        for folder in ("bin", "dev", "etc", "proc", "srv/home", "sys", "tmp", "usr/bin"):
            (root / folder).mkdir(parents=True)
        for path in (bash, *_libraries([Path(bash), *programs])):
            to = root / (f"bin/{Path(path).name}" if path == bash else path[1:])
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
        shutil.copy(_BUSYBOX, root / "bin" / "busybox")
        applets = subprocess.run([_BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout
        for applet in set(applets.split()) - {"busybox", "bash"}:
            (root / "bin" / applet).symlink_to("busybox")
        (root / "usr/bin/env").symlink_to("/bin/busybox")
        (root / "etc/passwd").write_text("root:x:0:0:root:/srv/home:/bin/bash\n")
        (root / "srv/marker").write_text(f"{IMAGE}\n")
        (root / "tmp").chmod(0o1777)
        tar.add(root, arcname=".", filter=_of_root)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.mode |= 0o555 if entry.isdir() else 0o444
    return entry
