"""A device plugin as vendors write them, with no knowledge of this project, its gate, or earlier users of a device.

It registers with the given kubelet socket, keeps its own socket in the same directory, and restarts whenever the
kubelet's socket is no longer the one that it registered with. It hands out every device as it is.
``python -m tests.vendor_plugin`` runs it. A test changes its behaviour through the control file (a JSON object, see
:class:`Control`), and reads the calls that it received in the record, one JSON line per call.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import watchfiles

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc

DEADLINE = 40.0
"""Seconds after which a test gives up; no test measures it."""
RETRY = 0.2
"""Seconds after which a failed start is retried; NVIDIA's plugin waits 30."""

Context = Any


@dataclass(frozen=True, slots=True)
class Control:
    """What a test may change while the plugin runs.

    Attributes:
        unhealthy: ids that it reports as unhealthy.
        hang: names of calls that it never answers.
        pre_start: whether it requires ``PreStartContainer``; read when it registers.
    """

    unhealthy: tuple[str, ...] = ()
    hang: tuple[str, ...] = ()
    pre_start: bool = False

    @classmethod
    def read(cls, path: Path) -> Control:
        try:
            written = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return cls()
        return cls(tuple(written.get("unhealthy", ())), tuple(written.get("hang", ())), written.get("pre_start", False))

    def write(self, path: Path) -> None:
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps({"unhealthy": self.unhealthy, "hang": self.hang, "pre_start": self.pre_start}))
        draft.replace(path)


def device_ids(sim: Path, naming: str) -> dict[str, Path]:
    """Return what the plugin calls the devices of the simulated node: id → the device's memory.

    ``naming``: ``uuid``, ``index``, ``replicas`` (two of each) or ``serial``, which no service can map to a device;
    ``directory``: by the names of the directories, of an AMD machine's devices.
    """
    if naming == "directory":
        places = sorted(place for place in (sim / "devices").iterdir() if not place.is_symlink())
        return {place.name: place / "memory" for place in places}
    found: dict[str, Path] = {}
    for place in sorted((sim / "devices").iterdir()):
        uuid, memory = json.loads((place / "device.json").read_text())["id"], place / "memory"
        names = {
            "uuid": (uuid,),
            "index": (place.name,),
            "replicas": (f"{uuid}::0", f"{uuid}::1"),
            "serial": (f"SN-{place.name}",),
        }[naming]
        found |= dict.fromkeys(names, memory)
    return found


@dataclass(slots=True)
class VendorPlugin(rpc.DevicePluginServicer):
    """The plugin, which serves one resource."""

    kubelet: Path
    resource: str
    devices: dict[str, Path]
    control_file: Path
    record: Path
    control: Control = field(default_factory=Control)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    stopping: bool = False
    registered_with: tuple[int, int] | None = None
    """The kubelet socket registered with: the notification of its creation may arrive after the registration."""

    @property
    def socket(self) -> Path:
        return self.kubelet.with_name(f"vendor-{self.resource.rpartition('/')[2]}.sock")

    async def run(self) -> None:
        """Serve and register, and repeat both whenever the kubelet's socket is created again."""
        watching = watchfiles.awatch(
            self.kubelet.parent, watch_filter=None, debounce=50, step=10, recursive=False, rust_timeout=1000
        )
        serving = asyncio.create_task(self._serve())
        try:
            async for changes in watching:
                if (watchfiles.Change.added, str(self.kubelet)) in changes and self._found() != self.registered_with:
                    serving.cancel()
                    await asyncio.wait({serving})
                    serving = asyncio.create_task(self._serve())
                if any(path == str(self.control_file) for _, path in changes):
                    async with self.changed:
                        self.control = Control.read(self.control_file)
                        self.changed.notify_all()
        finally:
            serving.cancel()
            await asyncio.wait({serving})

    async def _serve(self) -> None:
        while True:
            self.control = Control.read(self.control_file)
            self.stopping = False
            server = grpc.aio.server()
            rpc.add_DevicePluginServicer_to_server(self, server)
            self.socket.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{self.socket}")
            await server.start()
            try:
                await self._register()
                await server.wait_for_termination()
            except grpc.aio.AioRpcError as error:
                self._note("NotRegistered", [str(error.details())])
            finally:
                async with self.changed:
                    self.stopping = True
                    self.changed.notify_all()
                await server.stop(0.1)
            await asyncio.sleep(RETRY)

    def _found(self) -> tuple[int, int] | None:
        """Return the identity of the kubelet's current socket."""
        try:
            found = self.kubelet.stat()
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns

    async def _register(self) -> None:
        found = self._found()
        request = api.RegisterRequest(version="v1beta1", endpoint=self.socket.name, resource_name=self.resource)
        async with grpc.aio.insecure_channel(
            f"unix:{self.kubelet}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            await rpc.RegistrationStub(channel).Register(request, timeout=15)
        self.registered_with = found
        self._note("Registered", ())

    async def GetDevicePluginOptions(self, request: api.Empty, context: Context) -> api.DevicePluginOptions:
        await self._maybe_hang("GetDevicePluginOptions")
        return api.DevicePluginOptions(pre_start_required=self.control.pre_start)

    async def ListAndWatch(self, request: api.Empty, context: Context) -> AsyncIterator[api.ListAndWatchResponse]:
        await self._maybe_hang("ListAndWatch")
        sent: Control | None = None
        while not self.stopping:
            if sent != self.control:
                sent = self.control
                yield self._list(sent)
            async with self.changed:
                await self.changed.wait_for(functools.partial(self._has_news, sent))

    def _has_news(self, sent: Control | None) -> bool:
        return self.stopping or sent != self.control

    def _list(self, control: Control) -> api.ListAndWatchResponse:
        return api.ListAndWatchResponse(
            devices=[
                api.Device(
                    ID=id_,
                    health="Unhealthy" if id_ in control.unhealthy else "Healthy",
                    topology=api.TopologyInfo(nodes=[api.NUMANode(ID=0)]),
                )
                for id_ in self.devices
            ]
        )

    async def Allocate(self, request: api.AllocateRequest, context: Context) -> api.AllocateResponse:
        await self._maybe_hang("Allocate")
        responses = []
        for container in request.container_requests:
            self._note("Allocate", container.devices_ids)
            memories = {self.devices[id_] for id_ in container.devices_ids}
            responses.append(
                api.ContainerAllocateResponse(
                    envs={"VENDOR_VISIBLE_DEVICES": ",".join(sorted(container.devices_ids))},
                    mounts=[
                        api.Mount(container_path=f"/dev/simgpu{memory.parent.name}", host_path=str(memory))
                        for memory in sorted(memories)
                    ],
                )
            )
        return api.AllocateResponse(container_responses=responses)

    async def PreStartContainer(
        self, request: api.PreStartContainerRequest, context: Context
    ) -> api.PreStartContainerResponse:
        await self._maybe_hang("PreStartContainer")
        self._note("PreStartContainer", request.devices_ids)
        return api.PreStartContainerResponse()

    async def _maybe_hang(self, call: str) -> None:
        if call in self.control.hang:
            async with self.changed:
                await self.changed.wait_for(lambda: call not in self.control.hang)

    def _note(self, call: str, ids: Sequence[str]) -> None:
        with self.record.open("a") as record:
            record.write(json.dumps({"call": call, "ids": sorted(ids)}) + "\n")


@dataclass(slots=True)
class Running:
    """The plugin as a process."""

    process: asyncio.subprocess.Process
    control_file: Path
    record: Path

    def set_control(self, control: Control) -> None:
        """Change its behaviour."""
        control.write(self.control_file)

    def calls(self, call: str) -> list[list[str]]:
        """Return the ids of each call of that name so far."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        noted = [json.loads(line) for line in lines]
        return [each["ids"] for each in noted if each["call"] == call]

    async def has_called(self, call: str, times: int) -> None:
        """Wait until there have been so many calls of that name."""
        async with asyncio.timeout(DEADLINE):
            if len(self.calls(call)) < times:
                watching = watchfiles.awatch(self.record.parent, debounce=50, step=10, rust_timeout=200,
                                             yield_on_timeout=True)  # fmt: skip
                async for _ in watching:
                    if len(self.calls(call)) >= times:
                        return

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def running(
    directory: Path, sim: Path, *, resource: str = "vendor.example/gpu", naming: str = "uuid"
) -> AsyncIterator[Running]:
    """Run the plugin beside ``directory/kubelet.sock``, for the simulated node at ``sim``."""
    name = resource.rpartition("/")[2]
    control, record = directory / f"{name}.control.json", directory / f"{name}.record"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.vendor_plugin", "--kubelet-socket", str(directory / "kubelet.sock")),
        *("--sim-dir", str(sim), "--resource", resource, "--naming", naming),
        *("--control", str(control), "--record", str(record)),
        cwd=Path(__file__).parents[1],
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    here = Running(process, control, record)
    try:
        yield here
    finally:
        await here.kill()


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="vendor_plugin", description=__doc__)
    for flag in ("kubelet-socket", "sim-dir", "control", "record"):
        parser.add_argument(f"--{flag}", type=Path, required=True)
    parser.add_argument("--resource", required=True)
    parser.add_argument("--naming", required=True)
    options = parser.parse_args(words)

    async def run() -> None:
        plugin = VendorPlugin(
            options.kubelet_socket,
            options.resource,
            device_ids(options.sim_dir, options.naming),
            options.control,
            options.record,
        )
        task = asyncio.ensure_future(plugin.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())


if __name__ == "__main__":
    main(sys.argv[1:])
