"""Container of a node in one attempt of a Slurm job: made on its machine, and removed before it is left."""

from __future__ import annotations

import os
from collections.abc import Mapping

from holdfast.errors import Unsupported
from holdfast.jobs.environment import container_base
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.lease import (
    ContainerOwner,
    find_runtime,
    make_image_spec,
    start_warden,
    warden_of,
)
from holdfast.jobs.node.roles import STOPPED
from holdfast.jobs.slurm.job_files import SubmittedJob

_OF_STEP = ("SLURM", "PMI")
"""Beginnings of the names of Slurm's variables, which describe the allocation and the step."""
_OF_DEVICES = frozenset(
    {"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}
)
"""Variables with the devices that Slurm has given to the step."""


class AttemptContainer:
    """Container of a node. Its warden removes it too if this process is killed and the warden is not.

    Args:
        folder: folder of the job.
        machine: name of this machine in Slurm.
    """

    def __init__(self, folder: JobFolder, job: SubmittedJob, attempt: int, rank: int, machine: str) -> None:
        self._folder, self._job = folder, job
        self._attempt, self._rank, self._machine = attempt, rank, machine
        self._files = folder.node(attempt, rank).container

    def open(self, *, has_gpus: bool, scratch: JobFolder | None) -> None:
        """Specify the container for this machine. The agent has it made."""
        runtime = find_runtime()
        if runtime is None:
            raise Unsupported(
                f"the commands run in the image {self._job.image}, and neither podman nor docker answers on "
                f"{self._machine} (`podman info`, `docker info`). Install podman on the nodes (`apt-get "
                "install podman uidmap`), or choose nodes that have it, with a partition in `infra` or "
                "sbatch's `constraint`. Without image_id, the commands run on the nodes as they are."
            )
        own = processes.find(os.getpid())
        assert own is not None
        spec = make_image_spec(
            self._folder,
            runtime,
            self._job.image,
            self._job.task_id,
            has_gpus=has_gpus,
            scratch=scratch,
            owner=ContainerOwner(self._machine, self._attempt, own.pid, own.start),
        )
        self._files.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_document(self._files.image, spec)

    def stop(self) -> None:
        """Let an agent that waits for the container end."""
        (self._folder.attempt(self._attempt) / STOPPED).touch()

    def release(self) -> None:
        """Have the container removed, by its warden."""
        if self._files.image.exists():
            self._files.unneeded.touch()
            start_warden(self._folder, self._files, self._folder.log(self._rank))

    @property
    def is_gone(self) -> bool:
        """True if the container is removed, or its warden has given up."""
        return self._files.removed.exists() or not warden_of(self._files).is_alive


def step_variables(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a step of Slurm that its containers have too; see `container_base`."""
    own = {name: value for name, value in base.items() if name.startswith(_OF_STEP) or name in _OF_DEVICES}
    return {**container_base(base), **own}
