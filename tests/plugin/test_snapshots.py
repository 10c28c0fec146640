"""How the plugin reads a snapshot of the service, and that the service sends every field that it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plugin.kubelet.devices import Availability, ServiceVerdict
from plugin.service_client import advertised_devices
from scrubber.api import messages
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import BindingState, TaintReason
from scrubber.engine.views import DeviceView, NodeView
from tests.api.service import device
from tests.gpus import gpu, instance, seen
from tests.plugin_collaborators import device as simulated


def snapshot(*devices: pb.SnapshotDevice, envvar_refused: bool = False) -> pb.Snapshot:
    return pb.Snapshot(version=1, devices=devices, ready=True, epoch="one", envvar_refused=envvar_refused)


def test_mig_instance_is_read_with_its_parent_and_its_profile() -> None:
    (found,) = advertised_devices(snapshot(seen(instance(0, 1, "1g.10gb+me"))))
    assert (found.parent, found.profile) == (gpu(0).id, "1g.10gb+me")


def test_service_reports_the_pci_address_of_a_gpu() -> None:
    part = replace(device(0), traits=(("pci_address", "0000:3b:00.0"),))
    view = NodeView(1, (DeviceView(part, DeviceRecord(part.id)),), ready=True, epoch="one")
    (found,) = advertised_devices(messages.snapshot_message(view))
    assert found.pci_address == "0000:3b:00.0"


def test_reasons_of_taints_arrive_as_the_service_decided() -> None:
    part, taints = device(0), (TaintReason("xid-79", evicts=True), TaintReason("held"))
    view = NodeView(1, (DeviceView(part, DeviceRecord(part.id), taints=taints),), ready=True, epoch="one")
    (found,) = advertised_devices(messages.snapshot_message(view))
    assert found.taints == taints


@pytest.mark.parametrize("state", BindingState)
def test_word_on_binding_arrives_as_the_service_decided(state: BindingState) -> None:
    part = device(0)
    view = NodeView(1, (DeviceView(part, DeviceRecord(part.id), binding=state),), ready=True, epoch="one")
    (found,) = advertised_devices(messages.snapshot_message(view))
    assert found.binding is state


def test_word_on_binding_of_a_newer_or_older_service_is_not_known() -> None:
    newer, older = advertised_devices(snapshot(simulated(0, binding="later"), simulated(1)))
    assert (newer.binding, older.binding) == (None, None)


def test_no_pod_is_bound_to_a_device_that_this_plugin_cannot_pass_to_a_container() -> None:
    unknown = simulated(0, binding="ready")
    unknown.access.add(kind="later")
    (found,) = advertised_devices(snapshot(unknown))
    assert found.binding is BindingState.OUT_OF_SERVICE


def test_device_access_arrives_as_the_backend_defined_it() -> None:
    access = tuple(Access(kind, f"/host/{kind}", f"/container/{kind}") for kind in AccessKind)
    other = replace(device(0), access=access)
    view = NodeView(1, (DeviceView(other, DeviceRecord(other.id)),), ready=True, epoch="one")
    (found,) = advertised_devices(messages.snapshot_message(view))
    assert (found.access, found.refusal) == (access, "")


@pytest.mark.parametrize(("by_envvar", "refused"), [(False, False), (False, True), (True, False), (True, True)])
def test_gpu_is_withheld_only_if_the_policy_forbids_the_plugins_strategy(by_envvar: bool, refused: bool) -> None:
    shown = snapshot(seen(gpu(0)), simulated(0), envvar_refused=refused)
    found, other = advertised_devices(shown, uses_envvar=by_envvar)
    assert (found.verdict is ServiceVerdict.ADVERTISED) is not (by_envvar and refused)
    assert ("environment variable" in found.refusal) is (by_envvar and refused)
    assert other.verdict is ServiceVerdict.ADVERTISED


def test_device_out_of_service_keeps_the_services_refusal_message() -> None:
    sick = seen(gpu(0), advertised=False)
    sick.refusal = "Device GPU-00000000 is quarantined (xid-79)."
    (found,) = advertised_devices(snapshot(sick, envvar_refused=True), uses_envvar=True)
    assert found.refusal == sick.refusal


def test_service_reports_mig_profile_and_forbidden_envvar_strategy() -> None:
    part = replace(device(0), parent="GPU-p", profile="3g.40gb")
    view = NodeView(1, (DeviceView(part, DeviceRecord(part.id)),), ready=True, epoch="one", refuses_envvar=True)
    message = messages.snapshot_message(view)
    assert (message.devices[0].profile, message.devices[0].parent, message.envvar_refused) == ("3g.40gb", "GPU-p", True)
    assert messages.snapshot_key(view) != messages.snapshot_key(replace(view, refuses_envvar=False))
    assert (
        messages.snapshot_message(replace(view, devices=(DeviceView(device(0), DeviceRecord("GPU-a0")),)))
        .devices[0]
        .profile
        == ""
    )


def test_device_held_by_a_process_without_a_grant_is_unhealthy_and_its_verdict_says_so() -> None:
    held = simulated(0, advertised=False, withheld=True, refusal="Device sim-0 is held.")
    (found,) = advertised_devices(snapshot(held))
    assert (found.verdict, found.refusal) == (ServiceVerdict.HELD, "Device sim-0 is held.")
    ready = Availability(10.0).on_snapshot((found,), epoch="one", version=1, ready=True, now=0.0)
    assert [each.healthy for each in ready.devices(0.0)] == [False]
    odd = simulated(0, advertised=False, withheld=True)
    odd.access[0].kind = "teleport"
    (found,) = advertised_devices(snapshot(odd))
    assert found.verdict is ServiceVerdict.WITHHELD


def test_withheld_device_has_a_refusal_message_and_an_advertised_device_has_none() -> None:
    silent = simulated(0, advertised=False)
    talkative = simulated(1, refusal="It was quarantined a while ago.")
    withheld, offered = advertised_devices(snapshot(silent, talkative))
    assert (withheld.verdict, withheld.refusal) == (ServiceVerdict.WITHHELD, "Device sim-0 is out of service.")
    assert (offered.verdict, offered.refusal) == (ServiceVerdict.ADVERTISED, "")
