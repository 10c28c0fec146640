"""The stage with NVIDIA GPUs: the shipped service over a simulated machine, the shipped plugin, an emulated kubelet.

Tenants are real processes in their pods' cgroups. They allocate memory with the stand-in for CuPy, in the machine, by the
name in the plugin's answer: a container that was given another device sees another device.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from scrubber.emulator.playground import Daemon, Playground
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodPhase, PodSpec, RestartPolicy
from tests.integration.acting import SOON
from tests.nvidia.machine import Gpu, Machine
from tests.nvidia.service import cuda_environment

__all__ = ["POLICY", "RESOURCE", "NvidiaStage", "found_by", "staged"]

RESOURCE = "nvidia.com/gpu"
POLICY = str(Path(__file__).with_name("nvidia.yaml"))

_SECRET = "81985529216486895"

_AS_THE_RUNTIME_WOULD = 'CUDA_VISIBLE_DEVICES="$NVIDIA_VISIBLE_DEVICES" exec "$0" "$@"'
"""NVIDIA's runtime shows a container only the devices in this variable; here a shell has to."""

_LEAVES_A_PROCESS = """
import subprocess, sys
holding = "from cupy.cuda import runtime; import signal; runtime.malloc(4 << 20); print('held', flush=True); signal.pause()"
left = subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE, start_new_session=True)
print(left.stdout.readline().decode(), left.pid, flush=True)
left.returncode = 0  # it is not waited for
"""


class NvidiaStage(Playground):
    """A temporary node with GPUs; see :class:`scrubber.emulator.playground.Playground`.

    Args:
        serve: additional arguments of ``scrubber serve``.
        plugin: additional arguments of ``scrubber plugin``.
        environment: additional variables for both.
    """

    def __init__(
        self,
        *,
        gpus: int = 2,
        mebibytes: int = 16,
        policy: str = POLICY,
        serve: Sequence[str] = (),
        plugin: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(devices=gpus, policy=policy)
        self.machine = Machine.create(self.directory / "w", gpus=gpus, mebibytes=mebibytes)
        words = list(self.service.arguments)
        words[words.index("sim")] = "nvidia"
        del words[(at := words.index("--sim-dir")) : at + 2]
        program = ("tests.nvidia.service", str(self.machine.root))
        self.service = Daemon([*words, *serve], self.directory / "service.log", environment or {}, program)
        words = list(self.plugin.arguments)
        del words[(at := words.index("--resource-name")) : at + 2]
        self.plugin = Daemon([*words, *plugin], self.directory / "plugin.log", environment or {})

    async def __aenter__(self) -> Self:
        await self.kubelet.start()
        return self

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self.machine.close()

    async def start_daemons(self, timeout: float = SOON) -> None:
        await self.service.start()
        await self.plugin.start()
        await self.offers(self._devices, timeout=timeout)

    async def offers(self, count: int, resource: str = RESOURCE, *, timeout: float = SOON) -> None:
        """Wait until the kubelet counts ``count`` healthy devices, in use or not."""
        await self.kubelet.wait_until(lambda kubelet: kubelet.allocatable(resource) == count, timeout)

    async def logged(self, event: str) -> Mapping[str, Any]:
        """Wait for the first log line of the service with ``event``."""
        async with asyncio.timeout(SOON):
            while True:
                text = self.service.log.read_text()
                whole = text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete
                for line in (json.loads(each) for each in whole if each[:1] == "{"):
                    if line["event"] == event:
                        return dict(line)
                await asyncio.sleep(0.02)

    async def are(self, *states: str) -> None:
        """Wait until the devices, in the order of their indices, are in these states."""
        await self.wait_for_devices(
            lambda devices: tuple(each.state for each in sorted(devices, key=lambda each: each.index)) == states, SOON
        )

    async def command_json(self, *arguments: str, status: int = 0) -> Any:
        """Return the command's JSON output, a list or one object, once it has exited with ``status``."""
        answer = await self.run_command(*arguments, "-o", "json")
        assert answer.returncode == status, answer
        output = json.loads(answer.stdout)
        return output.get("items", output)

    async def certificate(self, device: str) -> Mapping[str, Any]:
        """Return the current slow-path certificate of ``device`` (an index)."""
        (found,) = [each for each in await self.command_json("devices") if each["index"] == device]
        assert found["certificate"] is not None, found
        return dict(found["certificate"])

    def gpu_of(self, pod: EmulatedPod) -> Gpu:
        """Return the GPU that the pod's only device is or belongs to."""
        (device,) = pod.device_ids
        return self.machine.find(device)[0]

    # --- pods

    def tenant(
        self, name: str, namespace: str, *words: str, gpus: int = 1, resource: str = RESOURCE, restart: bool = False
    ) -> PodSpec:
        """Return a pod of one container that runs ``python WORDS`` with the stand-in for CuPy, on its devices."""
        argv = ("/bin/sh", "-c", _AS_THE_RUNTIME_WOULD, sys.executable, *words)
        again = RestartPolicy.ALWAYS if restart else RestartPolicy.NEVER
        main = ContainerSpec("main", argv, {resource: gpus}, dict(cuda_environment(self.machine.root)), again)
        return PodSpec(name, namespace, [main])

    def leaving(self, place: str, name: str, namespace: str, **more: Any) -> PodSpec:
        """Return a pod that fills ``place`` of its device with a secret, and then stays idle."""
        return self.tenant(name, namespace, "-m", "tests.gpu.tenant", "leave", place, _SECRET, **more)

    def looking(self, place: str, name: str, namespace: str, **more: Any) -> PodSpec:
        """Return a pod that prints how many bytes of the secret it found in ``place`` of its device, and ends."""
        return self.tenant(name, namespace, "-m", "tests.gpu.tenant", "look", place, _SECRET, **more)

    def littering(self, name: str, namespace: str) -> PodSpec:
        """Return a pod that ends, and leaves a process with a context on its device."""
        spec = self.tenant(name, namespace, "-c", _LEAVES_A_PROCESS)
        return PodSpec(spec.name, spec.namespace, spec.containers, leave_children=True)

    async def settled(self, spec: PodSpec) -> EmulatedPod:
        """Run the pod; return it once its tenant has reported that its task is complete, and stays."""
        pod = await self.kubelet.run(spec)
        assert pod.admitted, pod.describe()
        await pod.wait(lambda status: status.phase.terminal or pod.read_log("main").endswith("\n"), SOON)
        assert not pod.phase.terminal, f"{pod.describe()}: {pod.read_log('main')}"
        return pod

    async def delete(self, pod: EmulatedPod) -> None:
        """Delete it like ``kubectl delete --grace-period=0``."""
        await self.kubelet.delete(pod, grace=0)


@asynccontextmanager
async def staged(**options: Any) -> AsyncIterator[NvidiaStage]:
    """Provide a stage with both daemons, on GPUs that are all clean."""
    async with NvidiaStage(**options) as stage:
        try:
            await stage.start_daemons()
            await stage.wait_until_clean(SOON)
            yield stage
        except BaseException:
            print(stage.service.log.read_text())  # pytest shows it with a failed test
            raise


async def found_by(pod: EmulatedPod) -> int:
    """Return how many bytes of the secret a looking pod found, once it has succeeded."""
    await pod.wait(PodPhase.SUCCEEDED, SOON)
    return int(json.loads(pod.read_log("main"))["found_bytes"])
