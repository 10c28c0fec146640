"""A complete backend in one file, over plain files, as an example of what a backend consists of.

A toy node is a directory. A device is a subdirectory with its ``memory``; every process that has that file open holds
the device. Other state is in files beside the memory: ``errors`` (one number a line), ``ecc``, ``mode``, ``worn-out``,
and the flags ``lost``, ``stuck``, ``spoiled`` and ``reset-fails``. The file ``driver`` of the node contains the driver
version.

Run as a program, this module is the child that clears or diagnoses a device; or, with ``NODE serve …``, the
``scrubber`` command with the backend ``toy``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from scrubber.adapters import locks
from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault, ParentSocket
from scrubber.adapters.children.diagnostics import CheckTally, parse_checks
from scrubber.adapters.children.eraser_report import parse_byte_count, parse_seconds_by_phase, wait_for_report
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.orphans import terminate_lock_holder
from scrubber.adapters.children.process import ChildDied, Children
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.procwalk import start_time
from scrubber.domain.device import Access, AccessKind, Device, NodeIdentity
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.errors import DeviceBusy, DeviceLost, DriverTimeout, Unavailable, Unreadable
from scrubber.domain.evidence import Severity
from scrubber.domain.health.signal_table import COMMON_SIGNALS, Classification, ErrorCodeFormat
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.states import RecoveryMethod
from scrubber.domain.telemetry import Holder, HolderReport, Signal, Snapshot
from scrubber.ports.device import DeviceBackend, EraseProgress, EraseReport, EraseRequest

TOY_SIGNALS = COMMON_SIGNALS.with_conditions(
    {"worn-out": Classification(Severity.WARNING, RecoveryMethod.OPERATOR, "it was used too often")},
    ErrorCodeFormat("fault", "Fault"),
)
DEFAULTS = {"mode": "fair"}
CHUNK = 64 * 1024
QUESTION = 1.0
MODULE = "tests.toy_backend"


class ToyNode:
    """The files of a toy node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def of(self, device: Device) -> Path:
        return self.directory / device.id

    def memory(self, device: Device) -> Path:
        return self.of(device) / "memory"

    def lock(self, device: Device) -> Path:
        (self.directory / "locks").mkdir(exist_ok=True)
        return locks.lock_path(self.directory / "locks", device.id)

    def has(self, device: Device, flag: str) -> bool:
        return (self.of(device) / flag).exists()

    def driver(self) -> str:
        try:
            return (self.directory / "driver").read_text()
        except FileNotFoundError:
            raise Unavailable("No driver of toys is loaded.") from None

    def errors(self, device: Device) -> Counter[int]:
        file = self.of(device) / "errors"
        return Counter(map(int, file.read_text().split() if file.exists() else ()))

    def settings(self, device: Device) -> dict[str, str]:
        return {name: (self.of(device) / name).read_text() for name in DEFAULTS}

    def apply(self, device: Device, settings: Mapping[str, str]) -> None:
        for name in DEFAULTS.keys() & settings.keys():
            (self.of(device) / name).write_text(settings[name])


class ToyInventory:
    def __init__(self, node: ToyNode) -> None:
        self._node = node

    async def devices(self) -> tuple[Device, ...]:
        self._node.driver()
        places = sorted(self._node.directory.glob("toy-*"))
        return tuple(self._device(index, place) for index, place in enumerate(places))

    def _device(self, index: int, place: Path) -> Device:
        memory = place / "memory"
        access = (Access(AccessKind.MOUNT, str(memory), f"/run/toys/{index}"),)
        return Device(place.name, str(index), "Toy 1", memory.stat().st_size, access=access)

    async def identity(self) -> NodeIdentity:
        return NodeIdentity("node-1", "boot-1", self._node.driver())


class ToyHolders:
    def __init__(self, node: ToyNode, children: Children) -> None:
        self._node = node
        self._children = children

    async def is_held(self, device: Device) -> bool:
        return bool(self.found(device))

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        return HolderReport(self.found(device))

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        return self.found(device)

    def not_covered(self, device: Device) -> tuple[str, ...]:
        return ()

    def found(self, device: Device) -> tuple[Holder, ...]:
        memory = self._node.memory(device).stat()
        pids = {int(each) for each in os.listdir("/proc") if each.isdecimal()} - {os.getpid()} - self._children.pids()
        having = [pid for pid in sorted(pids) if _has_open(pid, memory)]
        return tuple(Holder(pid, started) for pid in having if (started := start_time(pid)) is not None)


def _has_open(pid: int, file: os.stat_result) -> bool:
    place = f"/proc/{pid}/fd"
    with suppress(OSError):
        for descriptor in os.listdir(place):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"{place}/{descriptor}"), file):
                    return True
    return False


class ToyTelemetry:
    def __init__(self, node: ToyNode) -> None:
        self._node = node

    async def snapshot(self, device: Device) -> Snapshot:
        node, place = self._node, self._node.of(device)
        if node.has(device, "stuck"):
            await asyncio.sleep(QUESTION)
            raise DriverTimeout(f"Device {device.index} gave no answer within {QUESTION:g} s.")
        if node.has(device, "lost"):
            raise DeviceLost(f"Device {device.index} is gone.")
        try:
            node.driver()
        except Unavailable as away:
            raise Unreadable(str(away)) from away
        ecc = int((place / "ecc").read_text()) if node.has(device, "ecc") else 0
        settings = node.settings(device)
        worn = {"worn-out": (place / "worn-out").read_text()} if node.has(device, "worn-out") else {}
        return Snapshot(
            device.id,
            errors=dict(node.errors(device)),
            ecc_uncorrected=ecc,
            settings=settings,
            defaults=DEFAULTS,
            conditions=worn,
        )

    def signals(self) -> AsyncIterator[Signal]:
        return self._follow(self._errors())

    def _errors(self) -> Counter[tuple[str, int]]:
        found: Counter[tuple[str, int]] = Counter()
        for file in self._node.directory.glob("toy-*/errors"):
            found.update((file.parent.name, int(code)) for code in file.read_text().split())
        return found

    async def _follow(self, before: Counter[tuple[str, int]]) -> AsyncIterator[Signal]:
        while True:
            now = self._errors()
            for device, code in (now - before).elements():
                yield Signal(device, "fault", code)
            before = now
            await asyncio.sleep(0.01)


class ToySettings:
    def __init__(self, node: ToyNode) -> None:
        self._node = node

    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        self._node.apply(device, expected)
        now = self._node.settings(device)
        return {name: now[name] for name in expected if name in now}


class ToyResetter:
    def __init__(self, node: ToyNode, holders: ToyHolders) -> None:
        self._node = node
        self._holders = holders

    async def plan(self, device: Device) -> ResetPlan:
        blockers = tuple(f"Process {each.pid} holds device {device.index}." for each in self._holders.found(device))
        return ResetPlan(device.id, "toy reset", ("Forget all errors.",), blockers=blockers)

    async def reset(self, device: Device, deadline: float) -> None:
        blockers = (await self.plan(device)).blockers
        if blockers:
            raise DeviceBusy(" ".join(blockers))
        if self._node.has(device, "stuck"):
            await asyncio.sleep(deadline)
            raise DriverTimeout(f"The reset of device {device.index} did not finish within {deadline:g} s.")
        if self._node.has(device, "reset-fails"):
            raise Unreadable(f"The reset of device {device.index} failed.")
        for name in ("errors", "ecc"):
            (self._node.of(device) / name).unlink(missing_ok=True)


class ToyWork:
    """The eraser and the diagnostics: operations on a device's memory by a child that holds the device's lock."""

    def __init__(self, node: ToyNode, holders: ToyHolders, children: Children) -> None:
        self._node = node
        self._holders = holders
        self._children = children

    async def erase(
        self, device: Device, request: EraseRequest, progress: Callable[[EraseProgress], None]
    ) -> EraseReport:
        order: Message = {"audit": request.audit, "pattern": request.pattern}
        answer = await self._child(device, order, request.deadline, progress)
        total = parse_byte_count(answer, "total_bytes")
        return EraseReport(
            total_bytes=total,
            cleared_bytes=parse_byte_count(answer, "cleared_bytes"),
            verified_bytes=parse_byte_count(answer, "verified_bytes"),
            residue_bytes=parse_byte_count(answer, "residue_bytes") if request.audit else None,
            failed_bytes=parse_byte_count(answer, "failed_bytes"),
            seconds_by_phase=parse_seconds_by_phase(answer),
            fence_broken=bool(self._holders.found(device)),
        )

    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        if level is DiagnosticLevel.NONE:
            return ()
        return parse_checks(await self._child(device, {"seconds": level.seconds}, deadline, lambda _: None))

    async def find_orphan(self, device: Device) -> int | None:
        return locks.lock_holder(self._node.lock(device))

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        return await terminate_lock_holder(self._node.lock(device), deadline)

    async def _child(
        self, device: Device, order: Message, deadline: float, progress: Callable[[EraseProgress], None]
    ) -> Message:
        if self._holders.found(device):
            raise DeviceBusy(f"A process has device {device.index} open.")
        files = {"lock": str(self._node.lock(device)), "memory": str(self._node.memory(device))}
        worker = await self._children.start(MODULE, device=device.id)
        try:
            async with stall_tolerant_timeout(deadline):
                await worker.send({**order, **files})
                return await wait_for_report(worker, progress)
        except TimeoutError as error:
            raise DriverTimeout(f"The work on device {device.index} did not finish within {deadline:g} s.") from error
        except ChildDied as died:
            raise Unreadable(f"The work on device {device.index} broke off: {died}") from died
        finally:
            await worker.kill()


@asynccontextmanager
async def toy_backend(directory: Path, children: Children) -> AsyncIterator[DeviceBackend]:
    """Provide the backend of the toys in ``directory``."""
    node = ToyNode(directory)
    holders = ToyHolders(node, children)
    work = ToyWork(node, holders, children)
    try:
        yield DeviceBackend(
            inventory=ToyInventory(node),
            holders=holders,
            telemetry=ToyTelemetry(node),
            settings=ToySettings(node),
            resetter=ToyResetter(node, holders),
            eraser=work,
            diagnostics=work,
            children=children,
        )
    finally:
        await children.close()


# --- the child process ---


class _Memory:
    """The memory of the device that the child works on."""

    def __init__(self, link: ParentSocket, path: str) -> None:
        self._link = link
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.total = os.fstat(self._file).st_size
        self.keeps = not Path(path).with_name("spoiled").exists()
        self.seconds: dict[str, float] = {}

    def write(self, offset: int, content: bytes) -> None:
        os.pwrite(self._file, content if self.keeps else bytes([content[0] ^ 1]) + content[1:], offset)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._file, size, offset)

    def in_pass(self, phase: str) -> Iterator[tuple[int, int]]:
        """Yield offset and size of each chunk; reports the progress of the pass."""
        start = time.monotonic()
        for offset in range(0, self.total, CHUNK):
            if self._link.is_parent_gone():
                sys.exit(0)
            size = min(CHUNK, self.total - offset)
            yield offset, size
            self._link.send({"phase": phase, "done_bytes": offset + size, "total_bytes": self.total})
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start


def _erase(memory: _Memory, order: Message) -> Message:
    residue = cleared = failed = 0
    if order["audit"]:
        residue = sum(size - memory.read(offset, size).count(0) for offset, size in memory.in_pass("audit"))
    for value in (b"\xa5", b"\0") if order["pattern"] else (b"\0",):
        for offset, size in memory.in_pass("clear" if value == b"\0" else "pattern"):
            memory.write(offset, value * size)
            cleared += size if value == b"\0" else 0
    for offset, size in memory.in_pass("verify"):
        failed += size - memory.read(offset, size).count(0)
    return {
        "total_bytes": memory.total,
        "cleared_bytes": cleared,
        "verified_bytes": memory.total - failed,
        "residue_bytes": residue,
        "failed_bytes": failed,
        "seconds_by_phase": [list(row) for row in memory.seconds.items()],
    }


def _diagnose(memory: _Memory, seconds: float) -> Message:
    pattern = CheckTally("memory-pattern", "bytes", time.monotonic)
    product = CheckTally("matrix-product", "operations", time.monotonic)
    transfers = [CheckTally(name, "bytes", time.monotonic) for name in ("host-to-device", "device-to-host")]
    end = time.monotonic() + seconds / 2
    while not pattern.amount or time.monotonic() < end:
        for offset, size in memory.in_pass("pattern"):
            with pattern.measure_time():
                memory.write(offset, b"\x5a" * size)
                pattern.errors += size - memory.read(offset, size).count(0x5A)
            pattern.amount += size
    with product.measure_time():
        assert sum(number * number for number in range(10_000)) == 333_283_335_000
    product.amount += 10_000
    for each in transfers:
        with each.measure_time():
            memory.read(0, CHUNK)
        each.amount += CHUNK
    _erase(memory, {"audit": False, "pattern": False})
    return {"checks": [each.to_message() for each in (pattern, product, *transfers)]}


def main() -> None:
    link = child.connect_to_parent()
    order = link.receive()
    if order is None:
        return
    try:
        if not locks.acquire_lock(str(order["lock"])):
            raise Fault("held", "Another child works on the device.")
        memory, seconds = _Memory(link, str(order["memory"])), order.get("seconds")
        answer = _diagnose(memory, seconds) if isinstance(seconds, float) else _erase(memory, order)
        link.send({"ok": answer})
    except Fault as fault:
        link.send({"fault": fault.code, "message": fault.message})


def make(directory: Path) -> Path:
    """Create a node with two toys."""
    for name in ("toy-a", "toy-b"):
        place = directory / name
        place.mkdir(parents=True)
        (place / "memory").write_bytes(bytes(1024 * 1024))
        ToyNode(directory).apply(Device(name, "", "", 0), DEFAULTS)
    (directory / "driver").write_text("toys-1")
    return directory


# --- the service ---


def serve(directory: Path, arguments: list[str]) -> None:
    """Run ``scrubber ARGUMENTS`` with one more row in the registry; exits as the command does."""
    # The child that clears imports none of this.
    from scrubber import backends
    from scrubber.cli.main import main as scrubber

    row = backends.Backend(
        name="toy",
        summary="toys",
        simulated=True,
        signal_table=lambda: TOY_SIGNALS,
        check_settings=lambda _: None,
        open=lambda _: toy_backend(directory, Children()),
    )
    vars(backends)["BACKENDS"] = {**backends.BACKENDS, row.name: row}
    scrubber(arguments)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:]) if sys.argv[2:3] == ["serve"] else main()
