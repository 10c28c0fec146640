"""What the product keeps on a disk: how it is written, what was answered meanwhile, and what must survive a power cut.

A scenario's ``live`` runs in a recorded process (``host.py``) and reports each answer as a mark. ``check`` gets a
directory that a power cut may have left and the marks before it, and raises an ``AssertionError`` for a broken promise.
It uses the product's own code to read, as the next start does.
"""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

from plugin.dra.cdi import ClaimCdiSpecs, _Staged
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.logs import create_logger
from plugin.nvidia.cdi import SPEC_FILE_NAME, CdiPublisher
from plugin.nvidia.driver_files import DriverRoot
from plugin.nvidia.injection import ListStrategy, NvidiaInjection
from scrubber.adapters.cuda.fence import ComputeModeFence, GpuControl
from scrubber.adapters.ledger import sqlite as ledger_module
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.signing.node_key import NodeKey
from scrubber.domain.device import Access, AccessKind, Device
from scrubber.ports.record import HistoryQuery, LedgerChange, LedgerState
from tests.gpus import gpu, install_driver
from tests.ledger_samples import GPU, certificate, event, fill, grant, record, scrub
from tests.ledger_versions import make_newer

__all__ = ["SCENARIOS", "Scenario"]

Mark = Callable[[str], None]


class Scenario(ABC):
    """Something durable of the product, in the directory ``root``, which exists and is durable."""

    @abstractmethod
    def prepare(self, root: Path) -> None:
        """Write what is there, durably, before the record begins."""

    @abstractmethod
    def live(self, root: Path, mark: Mark) -> None:
        """Start, work and end, as a process of the product does; the next life finds what the last one left."""

    @abstractmethod
    def check(self, root: Path, marks: Sequence[str]) -> None:
        """Start on what a power cut has left."""


def _last(marks: Sequence[str], word: str, default: str) -> str:
    return next((mark.partition(" ")[2] for mark in reversed(marks) if mark.partition(" ")[0] == word), default)


def _change(version: int) -> LedgerChange:
    """A change that names its version in each of its parts; ``_check_ledger`` reads them."""
    granted = grant(version, f"C-{version}")
    return LedgerChange(
        records=(record(version, failures=version, last_grant=granted),),
        grants=((GPU, granted),),
        certificates=(certificate(f"C-{version}", next_grant=version),),
        scrubs=(scrub(f"S-{version}", finished=False), scrub(f"S-{version - 1}")),
        events=(event("scrub.started", number=version), event(number=version, certificate=f"C-{version}")),
    )


def _check_version(state: LedgerState, version: int) -> None:
    stored = state.records[GPU]
    assert stored.failures == version
    assert stored.last_grant == grant(version, f"C-{version}")
    assert state.unfinished_scrubs == (scrub(f"S-{version}", finished=False),)


async def _check_ledger(directory: Path, marks: Sequence[str], before: int = 0) -> None:
    """Load the ledger: it holds what was answered, nothing in part, and goes on."""
    answered, tried = int(_last(marks, "stored", str(before))), int(_last(marks, "commit", str(before)))
    ledger = _ledger(directory)
    try:
        state = await ledger.load()
        version = state.records[GPU].version if GPU in state.records else 0
        assert answered <= version <= tried, f"version {version}; {answered} was answered, {tried} requested"
        if version > before:
            _check_version(state, version)
            newest = await ledger.history(HistoryQuery(limit=2))
            assert [entry.event.fields["number"] for entry in newest] == [version, version]
            assert newest[0].certificate == certificate(f"C-{version}", next_grant=version)
        await ledger.commit(_change(version + 1))
    finally:
        await ledger.close()
    ledger = _ledger(directory)
    try:
        _check_version(await ledger.load(), version + 1)
    finally:
        await ledger.close()


def _ledger(directory: Path) -> SqliteLedger:
    return SqliteLedger(directory, max_audit_rows=12, reserve_bytes=0)


class _Service(Scenario):
    """A new state directory: ledger with pruning and checkpoints, and the signing key."""

    commits = 7

    def prepare(self, root: Path) -> None:
        pass

    def live(self, root: Path, mark: Mark) -> None:
        ledger_module._CHECKPOINT_EVERY = 3  # the product's number takes hundreds of commits
        asyncio.run(self._live(root / "lib/scrubber", mark))

    async def _live(self, directory: Path, mark: Mark) -> None:
        ledger = _ledger(directory)
        state = await ledger.load()
        mark(f"key {NodeKey.open(directory)[0].key_id}")
        first = state.records[GPU].version + 1 if GPU in state.records else 1
        for version in range(first, first + self.commits):
            mark(f"commit {version}")
            await ledger.commit(_change(version))
            mark(f"stored {version}")
        await ledger.close()

    def check(self, root: Path, marks: Sequence[str]) -> None:
        directory = root / "lib/scrubber"
        asyncio.run(_check_ledger(directory, marks))
        key, created = NodeKey.open(directory)
        answered = _last(marks, "key", "")
        assert not answered or (key.key_id, created) == (answered, False)
        assert NodeKey.open(directory)[0].key_id == key.key_id


class _Conversion(Scenario):
    """A ledger that a newer version wrote, and that this one converts at its start."""

    before = 4

    def prepare(self, root: Path) -> None:
        asyncio.run(fill(root, self.before))
        make_newer(root)
        (root / "ledger.reserve").unlink()  # large, and of no interest here
        # Its log is not empty, as after a kill.
        with closing(sqlite3.connect(root / "ledger.db", isolation_level=None)) as connection:
            connection.execute("INSERT INTO topology VALUES (hex(zeroblob(6000)))")
            log = (root / "ledger.db-wal").read_bytes()
        (root / "ledger.db-wal").write_bytes(log)

    def live(self, root: Path, mark: Mark) -> None:
        asyncio.run(self._live(root, mark))

    async def _live(self, directory: Path, mark: Mark) -> None:
        ledger = _ledger(directory)
        state = await ledger.load()
        version = state.records[GPU].version + 1
        mark(f"commit {version}")
        await ledger.commit(_change(version))
        mark(f"stored {version}")
        await ledger.close()

    def check(self, root: Path, marks: Sequence[str]) -> None:
        asyncio.run(_check_ledger(root, marks, self.before))


class _ClaimSpecifications(Scenario):
    """CDI specifications of claims, in a directory that the driver creates."""

    driver = "gpu.scrubber.dev"
    first, second = "11111111-2222-3333-4444-555555555555", "99999999-2222-3333-4444-555555555555"

    def prepare(self, root: Path) -> None:
        pass

    def live(self, root: Path, mark: Mark) -> None:
        specs = self._specs(root)
        specs.check()
        for claim, numbers in ((self.first, (0,)), (self.second, (1,)), (self.first, (0, 2))):
            names = ",".join(map(str, numbers))
            mark(f"stage {claim} {names}")
            self._stage(specs, claim, numbers).publish()
            mark(f"published {claim} {names}")
        mark(f"published {self.second} -")
        specs.remove(self.second)

    def _specs(self, root: Path) -> ClaimCdiSpecs:
        return ClaimCdiSpecs(root / "cdi", self.driver, log=create_logger("json", "info", io.StringIO()))

    def _stage(self, specs: ClaimCdiSpecs, claim: str, numbers: tuple[int, ...]) -> _Staged:
        return specs.stage(claim, self._devices(numbers), {"main": [f"dev-{number}" for number in numbers]})

    def _devices(self, numbers: Sequence[int]) -> Mapping[str, AdvertisedDevice]:
        return {
            f"dev-{number}": AdvertisedDevice(
                id=f"dev-{number}",
                index=str(number),
                verdict=ServiceVerdict.ADVERTISED,
                access=(Access(AccessKind.DEVICE_NODE, f"/dev/{'long' * 300}{number}", f"/dev/accel{number}"),),
            )
            for number in numbers
        }

    def check(self, root: Path, marks: Sequence[str]) -> None:
        specs = self._specs(root)
        specs.check()
        promised: dict[str, set[str]] = {}
        for mark in marks:
            word, claim, text = mark.split(" ")
            if word == "stage":
                promised.setdefault(claim, {"-"}).add(text)  # from now on either may be there
            else:
                promised[claim] = {text} if text != "-" else {*promised[claim], "-"}
        for claim in (self.first, self.second):
            content = _read(root / "cdi" / f"{self.driver}-claim_{claim}.json")
            names = "-" if content is None else _numbers(json.loads(content))
            assert names in promised.get(claim, {"-"}), f"{claim} has {names}; promised: {promised.get(claim)}"
        self._stage(specs, self.second, (1,)).publish()
        specs.remove_left_behind(time.time() + 3600)
        assert {path.suffix for path in (root / "cdi").iterdir()} == {".json"}


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _numbers(spec: dict[str, list[dict[str, str]]]) -> str:
    return ",".join(sorted(each["name"].rpartition("-")[2] for each in spec["devices"] if "dev-" in each["name"]))


class _GpuSpecification(Scenario):
    """The CDI specification of the node's GPUs."""

    def prepare(self, root: Path) -> None:
        pass

    def live(self, root: Path, mark: Mark) -> None:
        driver = root.parent / "driver"
        install_driver(driver)
        publisher = CdiPublisher(
            root / "cdi",
            root=DriverRoot(local_path=driver),
            hook=None,
            injection=NvidiaInjection((ListStrategy.CDI_CRI,)),
            log=create_logger("json", "error", io.StringIO()),
            disabled_hooks=("all",),
        )
        publisher.check()
        for devices in ([gpu(0)], [gpu(0), gpu(1)], [replace(gpu(0), gone=True), gpu(1)]):
            names = ",".join(each.id for each in devices if not each.gone)
            mark(f"publish {names}")
            assert publisher.publish(devices, "one") == {}
            mark(f"published {names}")

    def check(self, root: Path, marks: Sequence[str]) -> None:
        allowed = {"-"}
        for mark in marks:
            word, names = mark.split(" ")
            allowed = {names} if word == "published" else {*allowed, names}
        content = _read(root / "cdi" / SPEC_FILE_NAME)
        found = "-" if content is None else ",".join(each["name"] for each in json.loads(content)["devices"])
        assert found in allowed, f"{found}; promised: {allowed}"


class _Gpu:
    """A GPU in exclusive mode from the moment of the mark ``fenced`` to ``unfenced``."""

    def __init__(self, mark: Mark, mode: str) -> None:
        self._mark = mark
        self._mode = mode

    async def compute_mode(self, device: Device) -> str | None:
        return self._mode

    async def fence(self, device: Device) -> None:
        self._mode = "exclusive-process"
        self._mark("fenced")

    async def unfence(self, device: Device, compute_mode: str) -> None:
        assert compute_mode == "prohibited"
        self._mode = compute_mode
        self._mark("unfenced")


class _Fence(Scenario):
    """The record of the mode that a GPU had before its fence."""

    device = Device("GPU-a", "0", "model", 1 << 30)

    def prepare(self, root: Path) -> None:
        pass

    def live(self, root: Path, mark: Mark) -> None:
        asyncio.run(self._live(self._fence(root, mark, "prohibited")))

    def _fence(self, root: Path, mark: Mark, mode: str) -> ComputeModeFence:
        return ComputeModeFence(cast(GpuControl, _Gpu(mark, mode)), root)

    async def _live(self, fence: ComputeModeFence) -> None:
        await fence.disable(self.device)  # of a life that was killed
        for _ in range(2):
            assert await fence.enable(self.device)
            await fence.disable(self.device)

    def check(self, root: Path, marks: Sequence[str]) -> None:
        restored: list[str] = []
        asyncio.run(self._fence(root, restored.append, "exclusive-process").disable(self.device))
        fenced = [mark for mark in marks if mark in ("fenced", "unfenced")][-1:] == ["fenced"]
        assert restored or not fenced, "the device stays fenced: its record was lost"


SCENARIOS: Mapping[str, Scenario] = {
    "service": _Service(),
    "conversion": _Conversion(),
    "claim-specifications": _ClaimSpecifications(),
    "gpu-specification": _GpuSpecification(),
    "fence": _Fence(),
}
