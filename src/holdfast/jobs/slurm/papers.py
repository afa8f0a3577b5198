"""The papers of a Slurm job: files by which login node, controller and runners know the same."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from holdfast.documents import decode_dataclass, decode_object, read_dataclass
from holdfast.errors import Corrupt, Internal
from holdfast.jobs.machine import Life, Terms
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.node.plan import MAX_OWN_BYTES, write_whole
from holdfast.jobs.records import life_text, read_life, read_terms, terms_text


@dataclass(frozen=True, slots=True)
class Facts:
    """What was submitted; it never changes."""

    number: int
    name: str
    task_id: str
    num_nodes: int
    num_gpus: int  # per node, as the task has it
    has_setup: bool
    user: str
    terms: Terms
    task_environment: Mapping[str, str]  # `envs` and `secrets`


@dataclass(frozen=True, slots=True)
class Story:
    """Where the job stands, as its controller has written it down."""

    life: Life = field(default_factory=Life)
    restart: int = -1  # how often Slurm had restarted the job when this was written
    slurm_id: str = ""
    step_before: int | None = None  # newest checkpoint when the attempt began
    num_answered: int = 0  # requests
    num_silent: int = 0  # attempts in a row in which no node said a word
    started_unix_s: float | None = None
    ended_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command asks of a job."""

    kind: str  # cancel or preempt
    lead_s: float


class Papers:
    """The files of one job. All nodes see the same: their file system is shared."""

    def __init__(self, job: JobFolder) -> None:
        self.job = job
        self.script = job.path / "sbatch.sh"
        self.output = job.path / "slurm.log"
        self._facts = job.path / "facts.json"
        self._story = job.path / "story.json"
        self._asked = job.path / "asked"

    def write_facts(self, facts: Facts) -> None:
        """Write down what was submitted; only the owner may read it, since values of secrets stand there."""
        told = {**asdict(facts), "terms": terms_text(facts.terms)}
        write_whole(self._facts, json.dumps(told))
        # There from the beginning: a node's file system may long believe that a file is not there.
        self._asked.touch(mode=0o600)
        self.job.changed.touch()
        self.write_story(Story())

    def facts(self) -> Facts:
        """What was submitted."""
        told = decode_object(
            self._facts.read_bytes(), str(self._facts), max_bytes=MAX_OWN_BYTES, any_text=True
        )
        terms = asdict(read_terms(told.text("terms")))
        body = {**told.members, "terms": {**terms, "free_codes": sorted(terms["free_codes"])}}
        return read_dataclass(Facts, body, str(self._facts))

    def write_story(self, story: Story) -> None:
        """Write down where the job stands."""
        told = {name: getattr(story, name) for name in Story.__dataclass_fields__}
        write_whole(self._story, json.dumps({**told, "life": life_text(story.life)}))

    def story(self) -> Story:
        """Where the job stands.

        Raises:
            Internal: it is no such document.
        """
        try:
            told = decode_object(self._story.read_bytes(), str(self._story), any_text=True)
            life = read_life(told.text("life"))
            facts = {name: value for name, value in told.members.items() if name != "life"}
            return replace(read_dataclass(Story, facts, str(self._story)), life=life)
        except (OSError, Corrupt) as error:
            raise Internal(f"{self._story} does not say where the job stands: {error}") from error

    def ask(self, asked: Asked) -> None:
        """Ask something of the controller, which looks once a second."""
        fd = os.open(self._asked, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(asdict(asked)).encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def asked(self) -> list[Asked]:
        """All that was ever asked of it, the oldest first."""
        lines = self._asked.read_bytes().split(b"\n")[:-1]
        return [decode_dataclass(Asked, line, "a request to a job") for line in lines]
