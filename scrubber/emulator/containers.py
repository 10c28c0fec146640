"""The container runtime of the emulated node: containers are real processes, and they outlive the kubelet.

Promise: a container's process is in its pod's control group (or carries the pod's marker) before its first instruction
runs; when its first process ends, the rest ends as well, unless the pod leaves its children; and
:meth:`ContainerRuntime.close` leaves no process and no group behind.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from scrubber.emulator import cgroups, markers

START_GATE_SCRIPT = 'read -r _ && exec "$@" </dev/null'
"""A shell that waits for a line before it becomes the container: meanwhile the runtime moves it into its group."""
TERMINATION_DEADLINE = 10.0
"""Seconds within which killed processes must be gone; after that something hangs in the kernel, which is an error."""


Result = TypeVar("Result")


class ContainerStartFailed(Exception):
    """The runtime could not create a container's process; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class ContainerCommand:
    """What a container runs: ``argv`` in ``root``, with ``env``; output is appended to ``log``."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    root: Path | None = None
    log: Path | None = None
    leave_children: bool = False


PAUSE = ContainerCommand(("sleep", "infinity"))
"""The process of a sandbox."""


@dataclass(eq=False, slots=True)
class Container:
    """One run of one container, or a pod's sandbox."""

    pod_uid: str
    name: str
    group: Path | None
    leave_children: bool
    process: asyncio.subprocess.Process
    started_at: float
    ended_at: float = 0.0
    exit_code: int | None = None
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Signal the first process, as the runtime does; nothing to do when it has ended."""
        if self.exit_code is None:
            try:
                # Not ``send_signal``: it reaps a child that has just ended, and asyncio then never learns its exit
                # code.
                os.kill(self.process.pid, number)
            except ProcessLookupError:
                return


@dataclass(slots=True)
class _RuntimePod:
    """What the runtime stores about one pod."""

    group: Path | None
    sandbox: Container
    containers: dict[str, Container] = field(default_factory=dict)
    """The last run of each container."""


class ContainerRuntime:
    """Starts and ends containers. ``groups`` is the parent of the ``pod<uid>`` groups; ``None``: markers only."""

    def __init__(self, groups: Path | None, rng: random.Random) -> None:
        self._groups = groups
        self._rng = rng
        self._pods: dict[str, _RuntimePod] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._uids: set[str] = set()
        self._removed: set[str] = set()
        self._failures: list[BaseException] = []
        self._starting = asyncio.Lock()
        self._closed = False
        self.on_exit: Callable[[Container], None] = lambda _container: None
        """Called when a container's first process has ended and, unless it leaves children, the rest with it."""

    async def run_sandbox(self, uid: str) -> None:
        """Create the pod's group and start its sandbox, which keeps the group open until the pod is over; idempotent.

        Raises:
            ContainerStartFailed: it could not be started, or the pod was removed meanwhile.
        """
        await self._run_shielded(self._run_sandbox(uid))

    async def _run_sandbox(self, uid: str) -> None:
        async with self._starting:
            if uid in self._pods:
                return
            self._refuse_removed(uid)
            group = None
            if self._groups is not None:
                group = self._groups / f"pod{uid}"
                group.mkdir(parents=True, exist_ok=True)
            sandbox = await self._start(uid, markers.SANDBOX, group, PAUSE)
            self._pods[uid] = _RuntimePod(group, sandbox)
        if uid in self._removed:
            await self.remove_pod(uid)
            raise ContainerStartFailed("the pod was removed while its sandbox was made")

    async def start(self, uid: str, name: str, command: ContainerCommand) -> Container:
        """Run ``command`` as container ``name`` of a pod whose sandbox runs.

        A container that already runs (its start was requested by a kubelet that was stopped meanwhile) is returned as
        it is.

        Raises:
            ContainerStartFailed: there is no such program, its group refused it, or the pod was removed meanwhile.
        """
        return await self._run_shielded(self._start_in_pod(uid, name, command))

    async def _start_in_pod(self, uid: str, name: str, command: ContainerCommand) -> Container:
        async with self._starting:
            pod = self._pods.get(uid)
            if pod is None:
                raise ContainerStartFailed("the pod's sandbox is gone")
            self._refuse_removed(uid)
            running = pod.containers.get(name)
            if running is not None and running.exit_code is None:
                return running
            container = await self._start(uid, name, pod.group, command)
            pod.containers[name] = container
        if uid in self._removed:
            container.signal(signal.SIGKILL)
            raise ContainerStartFailed("the pod was removed while its container was made")
        return container

    def _refuse_removed(self, uid: str) -> None:
        if uid in self._removed:
            raise ContainerStartFailed("the pod was removed")

    def container(self, uid: str, name: str) -> Container | None:
        """Return the last run of a container, ended or not."""
        pod = self._pods.get(uid)
        return pod.containers.get(name) if pod else None

    def has_pod(self, uid: str) -> bool:
        return uid in self._pods

    def sandbox_runs(self, uid: str) -> bool:
        """Whether the pod's sandbox exists and its process has not ended."""
        pod = self._pods.get(uid)
        return pod is not None and pod.sandbox.exit_code is None

    def kill_sandbox(self, uid: str) -> None:
        """End a pod's sandbox, as a fault of the runtime; its containers run until the kubelet notices."""
        pod = self._pods.get(uid)
        if pod is not None:
            pod.sandbox.signal(signal.SIGKILL)

    async def tear_down_sandbox(self, uid: str) -> None:
        """End what still runs of the pod, and forget its sandbox: :meth:`run_sandbox` makes another."""
        await self._run_shielded(self._tear_down(uid))

    async def _tear_down(self, uid: str) -> None:
        async with self._starting:
            pod = self._pods.get(uid)
            if pod is not None:
                await self._end(pod)
                self._pods.pop(uid, None)

    async def wait_until_removed(self, uid: str) -> None:
        """Wait until nothing runs any more in the containers of a pod that is being removed."""
        pod = self._pods.get(uid)
        for container in (*pod.containers.values(), pod.sandbox) if pod is not None else ():
            await container.exited.wait()

    async def reboot(self) -> None:
        """End every container and process of the node, and forget all pods."""
        async with self._starting:
            for pod in list(self._pods.values()):
                await self._end(pod)
            if self._groups is not None:
                cgroups.kill_processes(self._groups)
                await cgroups.wait_until_empty(self._groups)
            await markers.kill_marked_processes(self._uids)
            self._pods.clear()

    async def _end(self, pod: _RuntimePod) -> None:
        for container in (*pod.containers.values(), pod.sandbox):
            container.signal(signal.SIGKILL)
        for container in (*pod.containers.values(), pod.sandbox):
            await container.exited.wait()

    async def remove_pod(self, uid: str) -> None:
        """End what still runs of the pod, then its sandbox. Children that the pod leaves live on, in their group.

        A start in progress is waited for: nothing of the pod is started any more when this returns.
        """
        self._removed.add(uid)
        async with self._starting:
            pod = self._pods.get(uid)
        if pod is None:
            return
        await self._end(pod)
        self._pods.pop(uid, None)
        if pod.group is not None:
            self._in_background(self._remove_group(pod.group))

    def remove_pod_after(self, uid: str, seconds: float) -> None:
        """End the pod's processes, but only after ``seconds``: a forced deletion as the node sees it."""
        self._in_background(self._remove_later(uid, seconds))

    async def close(self) -> None:
        """End every process that this runtime ever started, leftover processes included, and remove its groups.

        Raises:
            RuntimeError: a process did not end; the message names the processes.
        """
        async with self._starting:
            self._closed = True  # a start in progress has finished, and no other will begin
        first_processes = [each for pod in self._pods.values() for each in (*pod.containers.values(), pod.sandbox)]
        for container in first_processes:
            container.signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(TERMINATION_DEADLINE):
                if self._groups is not None:
                    cgroups.kill_processes(self._groups)
                    await cgroups.wait_until_empty(self._groups)
                await markers.kill_marked_processes(self._uids)
                for container in first_processes:
                    await container.exited.wait()
        except TimeoutError:
            left = markers.marked_processes(self._uids)
            raise RuntimeError(
                f"processes of the emulated node did not end within {TERMINATION_DEADLINE:g} s: {left}"
            ) from None
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pods.clear()
        if self._groups is not None and not cgroups.remove_tree(self._groups):
            raise RuntimeError(f"cgroup {self._groups} could not be removed: a process is still in it")
        if self._failures:
            raise BaseExceptionGroup("a task of the container runtime failed", self._failures)

    async def _start(self, uid: str, name: str, pod_group: Path | None, command: ContainerCommand) -> Container:
        if self._closed:
            raise ContainerStartFailed("the node was closed")
        self._uids.add(uid)
        group = None
        argv = list(command.argv)
        if pod_group is not None:
            group = pod_group / self._rng.randbytes(32).hex()
            group.mkdir()
            argv = ["/bin/sh", "-c", START_GATE_SCRIPT, "sh", *argv]
        marker = markers.marker_environment(uid, name, self._rng.randbytes(8).hex())
        environment = {"PATH": os.environ.get("PATH", os.defpath), **command.env, **marker}
        output = os.open(command.log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=command.root,
                env=environment,
                stdin=asyncio.subprocess.PIPE if group is not None else asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            if group is not None:
                group.rmdir()
            raise ContainerStartFailed(f"failed to create the container's process: {error}") from error
        finally:
            os.close(output)
        now = asyncio.get_running_loop().time()
        container = Container(uid, name, group, command.leave_children, process, now)
        self._in_background(self._watch(container))
        if group is not None:
            await self._open_gate(container, group)
        return container

    async def _open_gate(self, container: Container, group: Path) -> None:
        stdin = container.process.stdin
        if stdin is None:
            raise ContainerStartFailed("the container's gate has no input")
        try:
            cgroups.add_process(group, container.pid)
            stdin.write(b"\n")
            await stdin.drain()
        except OSError as error:
            container.signal(signal.SIGKILL)
            raise ContainerStartFailed(f"failed to place process {container.pid} in its cgroup: {error}") from error
        finally:
            stdin.close()

    async def _watch(self, container: Container) -> None:
        """Reap the first process, end the rest of the container, call :attr:`on_exit`, and remove the empty group."""
        code = await container.process.wait()
        container.ended_at = asyncio.get_running_loop().time()
        if not container.leave_children:
            if container.group is not None:
                cgroups.kill_processes(container.group)
                await cgroups.wait_until_empty(container.group)
            else:
                await markers.kill_marked_processes({container.pod_uid}, container.name)
        container.exit_code = code if code >= 0 else 128 - code
        container.exited.set()
        self.on_exit(container)
        if container.group is not None:
            await self._remove_group(container.group)

    async def _remove_group(self, group: Path) -> None:
        while not cgroups.remove_tree(group):
            await cgroups.wait_until_empty(group)
            await asyncio.sleep(cgroups.POLL)

    async def _remove_later(self, uid: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.remove_pod(uid)

    async def _run_shielded(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Complete ``work`` even if the kubelet that requested it is gone: the runtime is a separate process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)
