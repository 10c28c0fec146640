"""Jobs: tenants that are no pods. A job is recorded as a claim of its manager, so that one path grants and releases both."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from scrubber.domain.assignment import Claim, JobManager, Pod
from scrubber.domain.device import Device, find_device
from scrubber.domain.errors import InvalidRequest

__all__ = ["Job", "find_numbered_device", "job_of", "parse_process_group", "process_group"]

_ID = re.compile(r"[0-9A-Za-z]{1,32}")
_GROUP = re.compile(rf"(?P<manager>{'|'.join(JobManager)})-job-(?P<id>[0-9A-Za-z]{{1,32}})")
_MAX_USER = 128


# See docs/decisions/0048-jobs.md.
@dataclass(frozen=True, slots=True)
class Job:
    """A job of a workload manager, or a command that ``scrubber run`` started.

    Attributes:
        id: unique among the running jobs of its manager on this node.
        user: name of its user, who is the tenant.
        user_id: UID of that user: managers may use an ID again, for a job of another user.

    Raises:
        InvalidRequest: an invalid ID or user.
    """

    manager: JobManager
    id: str
    user: str
    user_id: int

    def __post_init__(self) -> None:
        if _ID.fullmatch(self.id) is None:
            raise InvalidRequest(f"A job ID has 1 to 32 letters and digits, unlike {self.id[:64]!r}.")
        if not self.user.strip() or len(self.user) > _MAX_USER or not self.user.isprintable():
            raise InvalidRequest(f"The user of a job must have 1 to {_MAX_USER} printable characters.")

    @property
    def uid(self) -> str:
        """What identifies the job in records; no UID of a resource claim contains a colon."""
        return f"{self.manager}:{self.user_id}:{self.id}"

    @property
    def pod(self) -> Pod:
        """What represents the job's processes wherever those of a pod are looked for."""
        return Pod(self.user, f"job-{self.id}", process_group(self.manager, self.id))

    @property
    def claim(self) -> Claim:
        """The job as the grantee of a grant."""
        return Claim(self.uid, self.user, self.id, self.manager.value, (self.pod,), manager=self.manager)

    def __str__(self) -> str:
        return self.claim.title


def process_group(manager: JobManager, id: str) -> str:
    """Return the name of a job's processes, in the place of a pod's UID."""
    return f"{manager}-job-{id}"


def parse_process_group(name: str) -> tuple[JobManager, str] | None:
    """Return the manager and the ID of the job whose processes are called ``name``; None for the UID of a pod."""
    named = _GROUP.fullmatch(name)
    return None if named is None else (JobManager(named["manager"]), named["id"])


def job_of(claim: Claim | None) -> str:
    """Return the job that ``claim`` represents, as events name it (``slurm/4711``); empty for a resource claim."""
    return "" if claim is None or claim.manager is None else f"{claim.manager}/{claim.name}"


def find_numbered_device(devices: Iterable[Device], query: str) -> Device:
    """Return the device that ``query`` names: as :func:`find_device`, but a number is that of its device node.

    A workload manager numbers devices by their device nodes, whose numbers need not be those of the driver's
    list. Without such numbers, it is the index.

    Raises:
        InvalidRequest: no device, or more than one, matches.
    """
    everything = tuple(devices)
    numbered = {each.id: dict(each.traits).get("minor", "") for each in everything if each.parent is None}
    if not query.isdecimal() or not any(numbered.values()):
        return find_device(everything, query)
    found = [each for each in everything if numbered.get(each.id) == query]
    if len(found) != 1:
        known = ", ".join(f"{number} ({id})" for id, number in sorted(numbered.items()) if number)
        raise InvalidRequest(f"No device has the number {query}; this node has: {known}.")
    return found[0]
