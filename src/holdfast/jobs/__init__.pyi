"""Public names, and the modules that have them, for type checkers and for `__init__.py`."""

from holdfast.jobs.description import JobDescription as JobDescription
from holdfast.jobs.engine import Job as Job
from holdfast.jobs.engine import Line as Line
from holdfast.jobs.history import Durations as Durations
from holdfast.jobs.history import JobAttempt as JobAttempt
from holdfast.jobs.interface import cancel as cancel
from holdfast.jobs.interface import clear_node as clear_node
from holdfast.jobs.interface import describe as describe
from holdfast.jobs.interface import find as find
from holdfast.jobs.interface import forget as forget
from holdfast.jobs.interface import job as job
from holdfast.jobs.interface import launch as launch
from holdfast.jobs.interface import logs as logs
from holdfast.jobs.interface import nodes as nodes
from holdfast.jobs.interface import preempt as preempt
from holdfast.jobs.interface import queue as queue
from holdfast.jobs.interface import wait as wait
from holdfast.jobs.machines import NodeStanding as NodeStanding
from holdfast.jobs.node.checks.result import Check as Check
from holdfast.jobs.node.checks.result import NodeChecks as NodeChecks
from holdfast.jobs.notifications import Delivery as Delivery
from holdfast.jobs.status import JobStatus as JobStatus

__all__: list[str]
