"""Runs the program of a command backend: one run per device at a time, each in a supervisor, never past its deadline.

Guarantee: after a call has returned or was cancelled, no process of that run is left, or the device's lock is held and
the device is not used. The digest that a certificate names is that of the file before and after the run.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scrubber.adapters.children.eraser_report import wait_for_report
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Child, ChildDied, Children
from scrubber.adapters.children.zygote_client import Zygote
from scrubber.adapters.command.answers import API_VERSION, Answer, Verb, read_answer
from scrubber.adapters.command.executable import Executable
from scrubber.adapters.command.leftovers import kill_lock_holders
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.kernel_text import parse_stat
from scrubber.adapters.locks import lock_holder, lock_path
from scrubber.domain.device import Device
from scrubber.domain.errors import BrokenCommand, DriverTimeout, ResetInProgress, Unavailable, Unreadable
from scrubber.ports.device import EraseProgress

__all__ = ["SUPERVISOR_MODULE", "CommandOptions", "CommandRun", "CommandRunner"]

SUPERVISOR_MODULE = "scrubber.adapters.command.child"
_ZYGOTE_MODULE = "scrubber.adapters.command.zygote"

_SLACK = 10.0
"""Seconds beyond the deadline in which the supervisor kills the run and reports that; its start is included."""
_KILL_SECONDS = 2.0
_WORK = frozenset({Verb.ERASE, Verb.RESET, Verb.DIAGNOSE})
_LIMITS_OF_WORK = "limits in the policy, or --timeout of `scrubber backend check`"
_FIXED_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C", "HOME": "/"}
_MAX_ANCESTORS = 64


class CommandOptions(Protocol):
    """What an administrator's file says about the command.

    Attributes:
        program: the absolute path of the program.
        deadlines: seconds by verb, for those that the policy gives none.
        environment: variables of the program, added to the fixed ones.
        poll_interval: seconds between two snapshots that look for new errors.
    """

    @property
    def program(self) -> Path: ...
    @property
    def deadlines(self) -> Mapping[str, float]: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def poll_interval(self) -> float: ...


@dataclass(frozen=True, slots=True)
class CommandRun:
    """A run that was answered, and the seconds that it might have taken."""

    verb: Verb
    deadline: float
    answer: Answer


class CommandRunner:
    """Runs one program.

    Args:
        options: returns the options in force.
        lock_directory: directory of the devices' locks.
        owner: uid that may own the program, besides root.
        observe: called after each run that was answered.
    """

    def __init__(
        self,
        options: Callable[[], CommandOptions],
        children: Children,
        *,
        lock_directory: Path,
        owner: int,
        observe: Callable[[CommandRun], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._observe = observe
        self._owner = owner
        self._executable = Executable(options().program, owner=owner)
        self._children = children
        self._zygote = Zygote(children, _ZYGOTE_MODULE, programs=(SUPERVISOR_MODULE,))
        self._locks = lock_directory
        self._serial: dict[str, asyncio.Lock] = {}
        self._working: dict[str, Verb] = {}
        self.verbs: frozenset[Verb] = frozenset()
        self.digest = ""
        """Digest of the program as of the last inventory."""

    async def load_capabilities(self) -> None:
        """Ask the program which verbs it supports.

        Raises:
            Unavailable: that is impossible now, or the program is broken.
        """
        answer = await self.run(Verb.CAPABILITIES)
        names = answer.texts("verbs")
        self.verbs = frozenset(each for each in Verb if each in names)

    def check_digest(self) -> str:
        """Return the digest of the program as it is now.

        Raises:
            BrokenCommand: it may not run.
        """
        program = self._options().program
        if program != self._executable.path:
            self._executable = Executable(program, owner=self._owner)
        return self._executable.digest()

    async def run(
        self,
        verb: Verb,
        device: Device | None = None,
        body: Message | None = None,
        *,
        deadline: float | None = None,
        progress: Callable[[EraseProgress], None] = lambda _: None,
    ) -> Answer:
        """Run ``verb`` and return its answer.

        A verb that works on the device excludes all others; a query waits for another query, and fails at once while
        the device is worked on.

        Args:
            body: further members of the request.
            deadline: seconds; None: that of the verb.

        Raises:
            DeviceFault: the command reports one; DriverTimeout also when the deadline expired.
            DeviceBusy: the command reports that the device is held.
            BrokenCommand: the program misbehaved; no device is at fault.
            ResetInProgress: the command works on the device.
            Unavailable: nothing was run, or the command cannot answer now.
        """
        name = "" if device is None else device.id
        if device is not None and name in self._working:
            raise ResetInProgress(
                f"Device {device.index} is not queried now: the command works on it ({self._working[name]})."
            )
        if verb not in _WORK:
            async with self._serial.setdefault(name, asyncio.Lock()):
                return await self._run(verb, device, body or {}, deadline, progress)
        self._working[name] = verb  # from now on queries fail; those that wait already come first
        try:
            async with self._serial.setdefault(name, asyncio.Lock()):
                return await self._run(verb, device, body or {}, deadline, progress)
        finally:
            del self._working[name]

    def find_orphan(self, device: Device) -> int | None:
        """Return the process that holds the device's lock, as :meth:`scrubber.ports.Eraser.find_orphan` does."""
        return lock_holder(self.lock_of(device))

    def lock_of(self, device: Device) -> Path:
        return lock_path(self._locks, device.id)

    def is_own(self, pid: int) -> bool:
        """Whether ``pid`` belongs to a run, or has exited since it was seen: neither holds a device."""
        own = self._children.pids()
        for _ in range(_MAX_ANCESTORS):
            if pid in own:
                return True
            try:
                pid = parse_stat(Path(f"/proc/{pid}/stat").read_bytes()).parent
            except (OSError, Unreadable):
                return True
            if pid <= 1:
                return False
        return False

    async def close(self) -> None:
        """End the process that forks the supervisors, and with it all of them."""
        await self._zygote.close()

    # --- one run

    async def _run(
        self,
        verb: Verb,
        device: Device | None,
        body: Message,
        deadline: float | None,
        progress: Callable[[EraseProgress], None],
    ) -> Answer:
        digest, options = self.check_digest(), self._options()
        command = f"{self._executable.path} {verb}"
        limit = _LIMITS_OF_WORK if verb in _WORK else f"deadlines.{verb} in the file of the backend"
        if device is not None and digest != self.digest:
            raise BrokenCommand(
                f"The command {self._executable.path} has changed; its devices are listed again before it runs."
            )
        request_id = secrets.token_hex(8)
        seconds = options.deadlines[verb] if deadline is None else deadline
        request = {"apiVersion": API_VERSION, "kind": "Request", "id": request_id, "verb": verb.value, **body}
        if device is not None:
            request["device"] = _device_object(device)
        lock = None if device is None else self._lock_for(verb, device)
        if lock is not None and verb not in _WORK and not await kill_lock_holders(lock, _KILL_SECONDS):
            raise DriverTimeout(
                f"An earlier run of {self._executable.path} cannot be killed; nothing is asked meanwhile."
            )
        child = await self._zygote.fork(SUPERVISOR_MODULE, device=None if device is None else device.id)
        try:
            await child.send(
                {
                    "path": str(self._executable.path),
                    "verb": verb.value,
                    "stdin": json.dumps(request),
                    "deadline": seconds,
                    "limit": limit,
                    "lock": "" if lock is None else str(lock),
                    "environment": {**_FIXED_ENVIRONMENT, **options.environment},
                }
            )
            async with stall_tolerant_timeout(seconds + _SLACK):
                result = await wait_for_report(child, progress, silence_timeout=seconds + _SLACK)
        except TimeoutError as error:
            raise DriverTimeout(f"{command} did not end within {seconds:g} s, and could not be killed.") from error
        except ChildDied as died:
            if await self._zygote.died_with_zygote(child):
                raise Unavailable(f"{command} was killed together with its supervisor; this is retried.") from died
            error_type = Unreadable if verb in _WORK else Unavailable
            raise error_type(f"{command} gave no result: its supervisor was killed.") from died
        finally:
            await asyncio.shield(self._end(child, lock))
        if self.check_digest() != digest:
            raise BrokenCommand(f"The command {self._executable.path} changed while it ran; this is retried.")
        answer = read_answer(str(self._executable.path), verb, request_id, result)
        self._observe(CommandRun(verb, seconds, answer))
        return answer

    async def _end(self, child: Child, lock: Path | None) -> None:
        """End the supervisor. What its run left behind, if it was cut off, is killed by the lock that it holds."""
        await child.kill()
        if lock is not None:
            with suppress(Unavailable, Unreadable):  # a lock that stays held blocks the device
                await kill_lock_holders(lock, _KILL_SECONDS)

    def _lock_for(self, verb: Verb, device: Device) -> Path:
        """Return the lock that a run of ``verb`` holds: a query is no eraser, so it does not hold that of the device."""
        lock = self.lock_of(device)
        return lock if verb in _WORK else lock.with_name(f"{device.id}.query")

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        """Kill what holds the device's lock, as :meth:`scrubber.ports.Eraser.terminate_orphan` does.

        Only runs of the command inherit that lock, and no other user may open it.
        """
        return await kill_lock_holders(self.lock_of(device), deadline)


def _device_object(device: Device) -> Message:
    pci = dict(device.traits).get("pci_address")
    nodes = [{"path": each.host_path} for each in device.access if each.kind.value in ("node", "mount")]
    return {"id": device.id, "index": device.index, "pci": pci, "nodes": nodes}
