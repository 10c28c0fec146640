"""Publishing ResourceSlices: at once, again after every loss, and never more often than needed."""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from plugin.cluster.errors import ApiBusy, ApiForbidden, ApiInvalidRequest, ApiNotFound, ApiUnavailable, ClusterError
from plugin.dra.claim_service import DeviceOutOfService
from plugin.dra.slice_controller import SliceController, SliceTimes
from plugin.dra.slices import DeviceTaint, Readiness, SliceDevice
from plugin.instance_lock import WriterLock
from plugin.logs import create_logger
from tests.ahead import advance_until
from tests.dra_slices import FakeSliceApi, SliceStore, settled
from tests.plugin_collaborators import DEADLINE

DRIVER = "gpu.scrubber.dev"
TOKENS = map(str, itertools.count(1000))


def device(number: int, readiness: Readiness = Readiness.CLEAN, *taints: str, **facts: Any) -> SliceDevice:
    return SliceDevice(
        f"GPU-{number:04d}", str(number), readiness, taints=tuple(DeviceTaint(each) for each in taints), **facts
    )


class Observer:
    def __init__(self) -> None:
        self.writes: list[tuple[str, bool]] = []

    def on_cluster_write(self, kind: str, ok: bool) -> None:
        self.writes.append((kind, ok))


@dataclass
class Here:
    api: FakeSliceApi
    controller: SliceController
    log: io.StringIO
    observer: Observer

    @property
    def store(self) -> SliceStore:
        return self.api.store

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [each for each in lines if each["event"] == name]

    def waited_for(self) -> bool:
        """Whether the scheduler waits for the only device."""
        return [bool(each.get("bindingConditions")) for each in self.store.devices()] == [True]

    async def until_published(self, *numbers: int) -> None:
        names = [f"gpu-{number:04d}" for number in numbers]
        await self.api.until(lambda: self.store.names() == names and self.api.watching == 1)


@asynccontextmanager
async def controller(
    store: SliceStore | None = None,
    *,
    lock: WriterLock | None = None,
    times: SliceTimes | None = None,
    binding_conditions: bool = False,
) -> AsyncIterator[Here]:
    log, api, observer = io.StringIO(), FakeSliceApi(store or SliceStore()), Observer()
    loop = asyncio.get_running_loop()

    def clock() -> float:
        return loop.time()  # looked up on every call: a test may advance it

    made = SliceController(
        DRIVER,
        "node-1",
        api=api,
        watch=api,
        times=times or SliceTimes(),
        log=create_logger("json", "info", log),
        clock=clock,
        jitter=lambda: 1.0,
        token=lambda: next(TOKENS),
        lock=lock,
        observer=observer,
        binding_conditions=binding_conditions,
    )
    task: asyncio.Task[Any] = asyncio.create_task(made.run())
    try:
        yield Here(api, made, log, observer)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_devices_are_published_and_nothing_is_requested_without_a_change() -> None:
    async with controller() as here:
        await settled()
        assert here.api.requests == []  # before the devices are known
        await here.controller.update([device(1), device(2)])
        await here.until_published(1, 2)
        await here.controller.update([device(1), device(2)])
        await settled()
        assert here.api.requests == ["get node", "list", "create", "watch"]
        assert [each["devices"] for each in here.events("slices.published")] == [2]


async def test_slices_of_an_earlier_instance_are_adopted_without_a_write() -> None:
    store = SliceStore()
    async with controller(store) as first:
        await first.controller.update([device(1)])
        await first.until_published(1)
    async with controller(store) as here:
        await here.controller.update([device(1)])
        await here.until_published(1)
        await settled()
        assert here.api.requests == ["get node", "list", "watch"]


async def test_slices_that_the_kubelet_deleted_return_at_once_with_the_times_of_their_taints() -> None:
    async with controller() as here:
        await here.controller.update([device(1, Readiness.WITHHELD, "xid")])
        await here.until_published(1)
        before = here.store.devices()
        here.store.delete(next(iter(here.store.slices)))
        await here.until_published(1)
        assert here.store.devices() == before
        assert next(iter(here.store.slices.values()))["spec"]["pool"]["generation"] == 2


async def test_empty_pool_that_was_deleted_returns() -> None:
    async with controller() as here:
        await here.controller.update([])
        await here.api.until(lambda: len(here.store.slices) == 1 and here.api.watching == 1)
        here.store.delete(next(iter(here.store.slices)))
        await here.api.until(lambda: len(here.store.slices) == 1)


async def test_slice_that_another_client_changed_is_repaired() -> None:
    async with controller() as here:
        await here.controller.update([device(1)])
        await here.until_published(1)
        changed = copy.deepcopy(next(iter(here.store.slices.values())))
        changed["spec"]["devices"] = []
        here.store.write(changed)
        await here.until_published(1)


async def test_taint_is_written_before_a_withdrawal_returns() -> None:
    async with controller() as here:
        await here.controller.update([device(1), device(2)])
        await here.until_published(1, 2)
        withheld = [DeviceOutOfService("GPU-0001", "scrub-failed")]
        assert await here.controller.withdraw(withheld, DEADLINE)
        assert here.store.taints() == {"gpu-0001": [f"{DRIVER}/scrub-failed"]}
        await here.controller.update([device(1), device(2)])  # a snapshot from before the release
        await settled()
        assert here.store.taints() == {"gpu-0001": [f"{DRIVER}/scrub-failed"]}


async def test_device_that_is_withdrawn_already_is_not_waited_for() -> None:
    async with controller(times=SliceTimes(reorder=3600.0)) as here:
        await here.controller.update([device(1, Readiness.WITHHELD, "xid"), device(2)])
        await here.until_published(2, 1)
        await here.controller.update([device(1, Readiness.WITHHELD, "xid"), device(2, Readiness.DIRTY)])
        assert await here.controller.withdraw([DeviceOutOfService("GPU-0001", "xid")], DEADLINE)
        assert here.api.requests.count("update") == 0


async def test_taint_is_removed_when_the_device_is_back() -> None:
    async with controller() as here:
        await here.controller.update([device(1, Readiness.WITHHELD, "xid")])
        await here.until_published(1)
        await here.controller.update([device(1)])
        await here.api.until(lambda: here.store.taints() == {})


async def test_taint_that_returns_has_the_time_of_its_return() -> None:
    def times() -> list[str]:
        return [taint["timeAdded"] for each in here.store.devices() for taint in each.get("taints", [])]

    async with controller() as here:
        await here.controller.update([device(1, Readiness.WITHHELD, "xid")])
        await here.until_published(1)
        before = times()
        await here.controller.update([device(1)])
        await here.api.until(lambda: here.store.taints() == {})
        await settled()
        await here.controller.update([device(1, Readiness.WITHHELD, "xid")])
        await here.api.until(lambda: here.store.taints() != {})
        assert len(before) == 1
        assert times() > before


async def test_taint_that_returns_during_the_write_of_its_end_has_the_time_of_its_return() -> None:
    async def returns(verb: str) -> None:
        if verb == "update" and here.api.requests.count("update") == 1:
            await here.controller.update([device(1, Readiness.WITHHELD, "xid")])

    async with controller() as here:
        await here.controller.update([device(1, Readiness.WITHHELD, "xid")])
        await here.until_published(1)
        (before,) = here.store.devices()[0]["taints"]
        here.api.fault = returns
        await here.controller.update([device(1)])
        await here.api.until(lambda: here.api.requests.count("update") == 2 and here.store.taints() != {})
        assert here.store.devices()[0]["taints"][0]["timeAdded"] > before["timeAdded"]


async def test_withdrawal_is_queued_while_the_api_server_is_away() -> None:
    away = True

    async def fault(verb: str) -> None:
        if away and verb == "update":
            raise ApiUnavailable("connection refused")

    async with controller(times=SliceTimes(withheld=3600.0)) as here:
        here.api.fault = fault
        await here.controller.update([device(1)])
        await here.until_published(1)
        withheld = [DeviceOutOfService("GPU-0001", "scrub-failed")]
        waiting = asyncio.ensure_future(here.controller.withdraw(withheld, 5.0))
        await here.api.until(lambda: "update" in here.api.requests)
        await advance_until(waiting.done)
        assert waiting.result() is False
        away = False
        await advance_until(lambda: here.store.taints() == {"gpu-0001": [f"{DRIVER}/scrub-failed"]})
        assert here.events("slices.written-again")


async def test_device_is_not_published_where_the_api_server_drops_its_taint() -> None:
    async with controller(SliceStore(dropped=frozenset({"taints"}))) as here:
        await here.controller.update([device(1, Readiness.WITHHELD, "xid"), device(2)])
        await here.until_published(2)
        assert "DRADeviceTaints" in here.events("slices.feature-off")[0]["message"]
        await here.controller.update([device(1), device(2)])
        await here.until_published(1, 2)


async def test_devices_have_binding_conditions_while_they_are_being_cleaned() -> None:
    async with controller(binding_conditions=True) as here:
        await here.controller.update([device(1, Readiness.DIRTY, being_cleaned=True)])
        await here.api.until(here.waited_for)
        await here.controller.update([device(1, Readiness.DIRTY)])
        await here.api.until(lambda: not here.waited_for())


async def test_devices_are_published_without_binding_conditions_where_the_api_server_drops_them() -> None:
    dropped = frozenset({"bindingConditions", "bindingFailureConditions"})
    async with controller(SliceStore(dropped=dropped), binding_conditions=True) as here:
        await here.controller.update([device(1, Readiness.DIRTY, being_cleaned=True)])
        await here.until_published(1)
        await settled()
        assert here.api.requests == ["get node", "list", "create", "watch"]
        assert "DRADeviceBindingConditions" in here.events("slices.feature-off")[0]["message"]


async def test_instances_are_published_where_the_api_server_drops_counters() -> None:
    dropped = frozenset({"sharedCounters", "consumesCounters"})
    async with controller(SliceStore(dropped=dropped)) as here:
        await here.controller.update([device(2, memory_bytes=1 << 30, parent="GPU-0001")])
        await here.until_published(2)
        await here.api.until(lambda: len(here.store.slices) == 1)
        assert [each["feature"] for each in here.events("slices.feature-off")] == ["counters"]


async def test_change_of_the_order_waits_and_a_taint_does_not() -> None:
    async with controller(times=SliceTimes(reorder=3600.0)) as here:
        await here.controller.update([device(1), device(2)])
        await here.until_published(1, 2)
        await here.controller.update([device(1, Readiness.DIRTY), device(2)])
        await settled()
        assert here.api.requests.count("update") == 0
        await here.controller.update([device(1, Readiness.WITHHELD, "xid"), device(2)])
        await here.api.until(lambda: bool(here.store.taints()))
        assert here.store.names() == ["gpu-0001", "gpu-0002"]
        await advance_until(lambda: here.store.names() == ["gpu-0002", "gpu-0001"])


async def test_taint_of_one_device_is_a_change_of_one_slice() -> None:
    async with controller(times=SliceTimes(reorder=3600.0)) as here:
        devices = [device(number) for number in range(200)]
        await here.controller.update(devices)
        await here.until_published(*range(200))
        devices[5] = device(5, Readiness.WITHHELD, "xid")
        await here.controller.update(devices)
        await here.api.until(lambda: bool(here.store.taints()))
        await settled()
        assert here.api.requests.count("update") == 1


@pytest.mark.parametrize(
    "error",
    [
        ApiUnavailable("connection refused"),
        ApiBusy("The API server returned 429: slowly", retry_after=7.0),
        ApiForbidden("The API server returned 403: cannot create resourceslices"),
        ApiInvalidRequest("The API server returned 422: denied by policy"),
        ApiUnavailable("The API server returned 401: Unauthorized"),
    ],
    ids=["away", "busy", "forbidden", "invalid", "unauthorized"],
)
async def test_failed_write_is_repeated_after_a_pause_and_names_the_permission(error: ClusterError) -> None:
    failing = True

    async def fault(verb: str) -> None:
        if failing and verb == "create":
            raise error

    async with controller() as here:
        here.api.fault = fault
        await here.controller.update([device(1)])
        await here.api.until(lambda: "create" in here.api.requests)
        await settled()
        assert here.api.requests.count("create") == 1
        (event,) = here.events("slices.write-failed")
        says_permission = "The driver's role must allow it" in event["message"]
        assert says_permission == any(code in str(error) for code in ("401", "403", "422"))
        failing = False
        await advance_until(lambda: here.store.names() == ["gpu-0001"])


async def test_cluster_without_resource_slices_is_queried_again_after_a_pause() -> None:
    async with controller() as here:

        async def fault(verb: str) -> None:
            if verb == "list":
                raise ApiNotFound("The API server returned 404: the server could not find the requested resource")

        here.api.fault = fault
        await here.controller.update([device(1)])
        await here.api.until(lambda: "list" in here.api.requests)
        await settled()
        assert here.api.requests.count("list") == 1
        assert len(here.events("slices.write-failed")) == 1


async def test_conflict_is_resolved_by_listing_the_slices_again() -> None:
    async with controller() as here:
        await here.controller.update([device(1)])
        await here.until_published(1)

        async def conflict(verb: str) -> None:
            if verb == "update" and here.api.requests.count("update") == 1:
                changed = copy.deepcopy(next(iter(here.store.slices.values())))
                here.store.write(changed)

        here.api.fault = conflict
        await here.controller.update([device(1, model="other")])
        await advance_until(lambda: here.store.devices()[0]["attributes"].get("productName") == {"string": "other"})


async def test_watch_that_expired_leads_to_a_new_list() -> None:
    async with controller() as here:
        here.api.expired = True
        await here.controller.update([device(1)])
        await advance_until(lambda: here.api.requests.count("list") == 2 and here.api.watching == 1)
        here.store.delete(next(iter(here.store.slices)))
        await here.until_published(1)


async def test_watch_that_is_interrupted_is_opened_again_where_it_ended() -> None:
    async def interrupted(verb: str) -> None:
        if verb == "watch" and here.api.requests.count("watch") == 1:
            raise ApiUnavailable("connection reset")

    async with controller() as here:
        here.api.fault = interrupted
        await here.controller.update([device(1)])
        await advance_until(lambda: here.api.watching == 1)
        assert here.api.requests.count("list") == 1
        assert here.events("slices.watch-interrupted")


async def test_node_that_may_not_be_read_gives_slices_without_an_owner() -> None:
    async def forbidden(verb: str) -> None:
        if verb == "get node":
            raise ApiForbidden("The API server returned 403: cannot get nodes.")

    async with controller() as here:
        here.api.fault = forbidden
        await here.controller.update([device(1)])
        await here.until_published(1)
        assert "ownerReferences" not in next(iter(here.store.slices.values()))["metadata"]
        assert "cannot get nodes" in here.events("slices.without-owner")[0]["message"]


async def test_client_that_undoes_every_repair_slows_the_repairs_down() -> None:
    async with controller(times=SliceTimes(contested_after=2, contested_pause=3600.0)) as here:
        await here.controller.update([device(1)])
        await here.until_published(1)
        for _ in range(3):
            here.store.delete(next(iter(here.store.slices)))
            await here.until_published(1)
        here.store.delete(next(iter(here.store.slices)))
        await settled()
        assert here.store.slices == {}
        assert "only one driver has this name" in here.events("slices.contested")[0]["message"]
        await advance_until(lambda: here.store.names() == ["gpu-0001"])


async def test_writes_of_slices_are_counted() -> None:
    async def fault(verb: str) -> None:
        if verb == "create" and here.api.requests.count("create") == 1:
            raise ApiUnavailable("connection refused")

    async with controller() as here:
        here.api.fault = fault
        await here.controller.update([device(1)])
        await advance_until(lambda: here.store.names() == ["gpu-0001"])
        await settled()
        assert here.observer.writes == [("resource-slice", False), ("resource-slice", True)]


async def test_slices_that_the_api_server_always_changes_are_not_written_for_ever() -> None:
    async with controller(SliceStore(dropped=frozenset({"capacity"}))) as here:
        await here.controller.update([device(1, memory_bytes=1 << 30)])
        await here.api.until(lambda: bool(here.events("slices.write-failed")))
        await settled()
        assert len([each for each in here.api.requests if each in ("create", "update")]) <= 5
        assert "role" not in here.events("slices.write-failed")[0]["message"]


def shuffled(number: int) -> list[SliceDevice]:
    """Return devices whose order depends on ``number``."""
    return [device(1), device(2, Readiness(number % 2)), device(3, Readiness((number + 1) % 2))]


def described(number: int) -> list[SliceDevice]:
    return [device(1, model=f"model {number}")]


@pytest.mark.parametrize("changed", [shuffled, described])
async def test_changes_during_each_write_do_not_make_publishing_fail(
    changed: Callable[[int], list[SliceDevice]],
) -> None:
    numbers = itertools.count(1)

    async def change(verb: str) -> None:
        if verb in ("create", "update") and (number := next(numbers)) <= 10:
            await here.controller.update(changed(number))

    async with controller() as here:
        here.api.fault = change
        await here.controller.update(changed(0))
        assert await here.controller.withdraw([DeviceOutOfService("GPU-0001", "xid")], DEADLINE)
        assert here.store.taints() == {"gpu-0001": [f"{DRIVER}/xid"]}
        assert here.events("slices.write-failed") == []


@pytest.mark.parametrize("verb", ["update", "delete"])
async def test_slice_of_another_client_with_the_same_name_is_neither_replaced_nor_deleted(verb: str) -> None:
    async def replaced(current: str) -> None:
        if current == verb and here.api.requests.count(verb) == 1:
            (name,) = (each for each in here.store.slices if each.startswith("00" if verb == "update" else "01"))
            foreign = copy.deepcopy(here.store.slices[name])
            here.store.delete(name)
            assert here.store.write(foreign)["metadata"]["uid"] != foreign["metadata"]["uid"]

    async with controller() as here:
        here.api.fault = replaced
        await here.controller.update([device(number) for number in range(65)])
        await here.until_published(*range(65))
        await here.controller.update([device(number, model="other") for number in range(64)])
        await advance_until(lambda: here.store.names() == [f"gpu-{number:04d}" for number in range(64)])
        assert here.api.requests.count("list") >= 2


async def test_only_one_instance_writes_until_it_ends(short_tmp: Any) -> None:
    store = SliceStore()
    first, second = WriterLock(short_tmp), WriterLock(short_tmp)
    assert first.try_acquire()
    async with controller(store, lock=second) as here:
        await here.controller.update([device(1)])
        await settled()
        assert here.api.requests == []
        first.release()
        await advance_until(lambda: here.store.names() == ["gpu-0001"])
