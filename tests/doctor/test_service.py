"""``scrubber doctor`` on the service's status, on its policy, and on access to it."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import scrubber
from scrubber.doctor.checks import check_node
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, DeviceReport, ServicePaths
from tests.doctor.stage import found, healthy, levels, serving, write

NO_ANSWER = {"error": "No answer."}
ROOT = os.geteuid() == 0


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


def named(node: CheckContext, name: str) -> list[CheckResult]:
    return [check for check in check_node(node) if check.name == name]


# --- its status


@pytest.mark.parametrize(
    ("changed", "name", "level", "words", "remedy"),
    [
        (
            {"ledger_status": "The disk is full."},
            "service",
            CheckLevel.ERROR,
            "grants no device: The disk is full.",
            "journalctl",
        ),
        ({"ledger_status": ""}, "service", CheckLevel.ERROR, "does not report the state of its ledger", "journalctl"),
        ({"version": "0.0.1"}, "version", CheckLevel.WARNING, "the service 0.0.1", "systemctl restart"),
        ({"version": ""}, "version", CheckLevel.WARNING, "the service unknown", "systemctl restart"),
        ({"enforcement": "observe"}, "enforcement", CheckLevel.WARNING, "is in observe mode", "enforcement: enforce"),
        ({"enforcement": ""}, "enforcement", CheckLevel.WARNING, "does not report whether", "systemctl restart"),
        ({"reset_stop_reason": "8 resets."}, "breaker", CheckLevel.WARNING, "8 resets.", "scrubber reset DEVICE"),
        (
            {"quarantine_stop_reason": "2 are out.", "quarantines_spared": 3},
            "breaker",
            CheckLevel.WARNING,
            "2 are out. 3 would be quarantined now.",
            "cooling",
        ),
        ({"devices": ()}, "devices", CheckLevel.WARNING, "no device at all", "nvidia-smi -L"),
        (
            {"devices": None, "devices_error": "No."},
            "devices",
            CheckLevel.WARNING,
            "does not list its devices: No.",
            "journal",
        ),
        ({"key_id": ""}, "signing-key-id", CheckLevel.WARNING, "cannot be verified elsewhere", "systemctl restart"),
        (
            {"yield_reasons": ("uid:0: driver upgrade",), "yield_remaining": (4711,)},
            "yield",
            CheckLevel.WARNING,
            "uid:0: driver upgrade. The driver is still in use by processes of the service that cannot be killed: PID 4711",
            "scrubber resume",
        ),
        (
            {"agent_pause": "by labels since 10:00 with a=false", "is_agent_pause_ending": True},
            "agent-pause",
            CheckLevel.WARNING,
            "are not restored yet: by labels since 10:00 with a=false",
            "undo the changes yourself",
        ),
        ({"audit_head": ""}, "audit-head", CheckLevel.WARNING, "could not be detected", "systemctl restart"),
    ],
)
def test_problem_reported_by_the_service_is_a_finding_with_a_remedy(
    node: CheckContext, changed: dict[str, Any], name: str, level: CheckLevel, words: str, remedy: str
) -> None:
    check = found(serving(node, **changed), name)
    assert (check.level, words in check.message, remedy in check.remedy) == (level, True, True), check


@pytest.mark.parametrize(
    ("changed", "name", "level"),
    [
        (NO_ANSWER, "service", CheckLevel.ERROR),
        ({"ledger_status": "The disk is full."}, "service", CheckLevel.ERROR),
        ({"enforcement": "observe"}, "enforcement", CheckLevel.WARNING),
        ({"devices": (DeviceReport("GPU-a", "0", enforcement="observe"),)}, "enforcement", CheckLevel.WARNING),
        ({"devices": (DeviceReport("GPU-a", "0", break_glass_until=0.0),)}, "break-glass", CheckLevel.WARNING),
    ],
)
def test_service_policy_that_permits_dirty_devices_is_reported(
    node: CheckContext, changed: dict[str, Any], name: str, level: CheckLevel
) -> None:
    assert named(serving(node, **changed), name)[0].level is level


def test_plugin_of_another_version_is_reported(node: CheckContext) -> None:
    own, plugin = named(serving(node, plugin_versions=(scrubber.__version__, "0.0.7")), "version")
    assert own.level is CheckLevel.OK
    assert (plugin.level, "has version 0.0.7, the service" in plugin.message) == (CheckLevel.WARNING, True)
    assert "docs/upgrading.md" in plugin.remedy


def test_audit_head_and_signing_key_are_reported_for_safekeeping(node: CheckContext) -> None:
    assert node.service.audit_head in found(node, "audit-head").message
    assert node.service.key_id in found(node, "signing-key-id").message


def test_open_breaker_is_reported_for_resets_and_quarantines_with_its_end_time(node: CheckContext) -> None:
    stopped = serving(
        node, reset_stop_reason="8 resets.", resets_until=60.0, resets_waiting=2, quarantine_stop_reason="2 are out."
    )
    resets, soft = named(stopped, "breaker")
    assert resets.message == "8 resets. The next one is possible at 1970-01-01T00:01:00Z. 2 are waiting for one now."
    assert soft.message == "2 are out."


def test_break_glass_override_is_reported_per_device_with_the_command_to_end_the_override(node: CheckContext) -> None:
    broken = [
        DeviceReport("GPU-a", "0", break_glass_until=60.0, break_glass="uid:7 set a break-glass override (a deadline)"),
        DeviceReport("GPU-b", "1"),
        DeviceReport("GPU-c", "", break_glass_until=90.0, break_glass="uid:0 set a break-glass override (x)"),
    ]
    first, second = named(serving(node, devices=tuple(broken)), "break-glass")
    assert first.level is second.level is CheckLevel.WARNING
    assert first.message == (
        "Until 1970-01-01T00:01:00Z no start on device 0 (GPU-a) is refused, whatever its checks find: uid:7 set a break-glass override (a deadline)."
    )
    assert first.remedy.startswith("scrubber break-glass 0 --end --reason")
    assert second.remedy.startswith("scrubber break-glass GPU-c --end")


def test_node_without_any_device_in_service_names_the_effect_on_autoscalers(node: CheckContext) -> None:
    check = found(serving(node, devices=(DeviceReport("GPU-a", "0", "quarantined", advertised=False),)), "devices")
    assert "no allocatable GPU: an autoscaler may count it as not ready (docs/cluster.md)" in check.message


def test_devices_out_of_service_and_devices_in_observe_mode_are_named(node: CheckContext) -> None:
    devices = tuple(DeviceReport(f"GPU-{n}", str(n), "quarantined", advertised=False) for n in range(5))
    check = found(serving(node, devices=(*devices, DeviceReport("GPU-9", "9"))), "devices")
    assert check.message.startswith("5 of 6 devices are out of service (quarantined): device 0 (GPU-0), ")
    assert "no allocatable GPU" not in check.message
    assert check.message.endswith(" and 2 more.")
    assert "scrubber device 0" in check.remedy
    observed = found(serving(node, devices=(DeviceReport("GPU-a", "0", enforcement="observe"),)), "enforcement")
    assert (observed.level, "device 0 (GPU-a)" in observed.message) == (CheckLevel.WARNING, True)


def test_devices_with_uninspected_processes_are_named(node: CheckContext) -> None:
    devices = tuple(replace(each, uninspected_processes=1) for each in node.service.devices or ())
    check = named(replace(node, service=replace(node.service, devices=devices)), "devices")[0]
    assert check.level is CheckLevel.WARNING
    assert check.message.startswith("Walks over /proc could not fully inspect some processes")
    assert "uninspectedProcesses: kill" in check.remedy


def test_service_only_checks_are_omitted_without_the_service(node: CheckContext) -> None:
    results = named(serving(node, **NO_ANSWER), "service")
    assert [check.level for check in results] == [CheckLevel.ERROR, CheckLevel.WARNING]
    assert "Everything that only the service knows is unknown" in results[1].message
    hidden = {"version", "enforcement", "devices", "breaker", "break-glass", "signing-key-id", "audit-head"}
    assert hidden.isdisjoint(levels(serving(node, **NO_ANSWER)))


def test_client_import_error_is_distinguished_from_an_unavailable_service(node: CheckContext) -> None:
    results = named(serving(node, import_error="VersionError: too old"), "service")
    assert (results[0].level, "VersionError: too old" in results[0].message) == (CheckLevel.ERROR, True)


# --- its policy


def test_policy_file_that_differs_from_the_active_policy_is_reported(node: CheckContext) -> None:
    file = write(node.root, "policy.yaml", "name: default\nenforcement: observe\n")
    check = found(replace(node, policy=str(file)), "policy")
    assert (check.level, f"{file} differs (default, observe," in check.message) == (CheckLevel.WARNING, True)
    assert "systemctl reload scrubber.service" in check.remedy


@pytest.mark.parametrize("expected", [{}, NO_ANSWER])
def test_invalid_policy_file_is_an_error_before_the_service_restarts(
    node: CheckContext, expected: dict[str, str]
) -> None:
    file = write(node.root, "policy.yaml", "name: x\nnonsense: 1\nmore: 2\n")
    check = found(serving(replace(node, policy=str(file)), **expected), "policy")
    assert (check.level, f"{file}:2:" in check.message, "(1 more)" in check.message) == (CheckLevel.ERROR, True, True)
    assert f"scrubber policy check {file}" in check.remedy


@pytest.mark.parametrize("kind", ["missing", "pipe", "directory", "huge", "circle"])
def test_policy_file_that_is_no_regular_file_does_not_block(node: CheckContext, kind: str) -> None:
    file = node.root / "policy.yaml"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "directory":
            file.mkdir()
        case "circle":
            file.symlink_to(file)
        case "huge":
            with file.open("wb") as hole:
                hole.truncate(1 << 40)
    assert found(replace(node, policy=str(file)), "policy").level is CheckLevel.ERROR


def test_policy_rejected_by_the_service_is_an_error_although_the_old_one_is_active(node: CheckContext) -> None:
    check = found(serving(node, policy_error="FILE:3: no such key."), "policy")
    assert (check.level, check.message.startswith("FILE:3: no such key.")) == (CheckLevel.ERROR, True)


def test_policy_file_visible_only_to_the_service_is_judged_by_the_service(node: CheckContext) -> None:
    """The file is in the service's pod; if it also exists here, it is read."""
    theirs = serving(replace(node, policy=""), paths=ServicePaths(policy=Path("/etc/scrubber/policy.yaml")))
    check = found(theirs, "policy")
    assert check == CheckResult(
        "policy",
        CheckLevel.OK,
        f"default is in force, and the service reports no error in {node.root}/etc/scrubber/policy.yaml.",
    )
    assert found(serving(theirs, policy_error="No."), "policy").level is CheckLevel.ERROR
    write(node.root, "etc/scrubber/policy.yaml", "name: other\n")
    assert "differs (other," in found(theirs, "policy").message


def test_bundled_policy_is_recognized_by_its_name(node: CheckContext) -> None:
    assert found(replace(node, policy=""), "policy").message.startswith("default is in force")
    check = found(serving(replace(node, policy=""), policy="mine"), "policy")
    assert (check.level, "--policy FILE" in check.remedy) == (CheckLevel.WARNING, True)


def test_policy_is_checked_without_the_service_only_where_one_is_named(node: CheckContext) -> None:
    assert "policy" not in levels(serving(replace(node, policy=""), **NO_ANSWER))
    check = found(serving(node, **NO_ANSWER), "policy")
    assert (check.level, "whether it is in force is unknown" in check.message) == (CheckLevel.OK, True)


# --- access


def test_world_accessible_sockets_are_reported_with_their_purpose(node: CheckContext) -> None:
    node.root.chmod(0o755)
    node.socket_dir.chmod(0o755)
    for purpose in ("admin", "read"):
        (node.socket_dir / purpose).chmod(0o755)
        (node.socket_dir / purpose / f"{purpose}.sock").chmod(0o666)
    look, act = sorted(named(node, "sockets"), key=lambda check: check.message, reverse=True)
    assert (look.level, look.message.startswith("Every local user may read:")) == (CheckLevel.ERROR, True)
    assert (act.level, act.remedy) == (CheckLevel.ERROR, f"chmod o-rwx {node.socket_dir}/admin")


def test_world_writable_socket_directory_is_an_error(node: CheckContext) -> None:
    node.socket_dir.chmod(0o777)
    check = found(node, "sockets")
    assert (check.level, check.remedy) == (CheckLevel.ERROR, f"chmod o-w {node.socket_dir}")
    node.socket_dir.chmod(0o1777)
    assert found(node, "sockets").level is CheckLevel.OK


@pytest.mark.parametrize(
    ("purpose", "level"), [("plugin", CheckLevel.ERROR), ("admin", CheckLevel.OK), ("read", CheckLevel.OK)]
)
def test_group_access_is_accepted_for_read_and_admin_but_not_for_the_plugin_socket(
    node: CheckContext, purpose: str, level: CheckLevel
) -> None:
    group = 54321 if ROOT else os.getegid()  # for root: a group without a name
    node.socket_dir.chmod(0o711)
    for each in (node.socket_dir / purpose, node.socket_dir / purpose / f"{purpose}.sock"):
        os.chown(each, -1, group)
    (node.socket_dir / purpose).chmod(0o750)
    check = found(node, "sockets")
    assert check.level is level
    words = {"plugin": "may request hand-overs", "admin": "may act", "read": "may read"}
    assert f"the group {54321 if ROOT else ''}" in check.message
    assert words[purpose] in check.message


def test_group_that_cannot_enter_the_base_directory_has_no_access(node: CheckContext) -> None:
    group = 54321 if ROOT else os.getegid()
    for each in (node.socket_dir / "admin", node.socket_dir / "admin/admin.sock"):
        os.chown(each, -1, group)
    (node.socket_dir / "admin").chmod(0o750)
    node.socket_dir.chmod(0o700)
    assert found(node, "sockets").message.endswith("no group may read, and no group may act.")


def test_missing_capabilities_of_the_service_are_named(node: CheckContext) -> None:
    write(node.root, f"proc/{os.getpid()}/status", "Uid:\t0\t0\t0\t0\nCapEff:\t0000000000200000\n")
    check = found(node, "capabilities")
    assert check.level is CheckLevel.ERROR
    assert (
        f"(PID {os.getpid()}) runs as root (uid 0) and lacks CAP_DAC_OVERRIDE, CAP_KILL, CAP_SYS_PTRACE"
        in check.message
    )
    assert "privileged: true" in check.remedy
    assert found(serving(node, backend=""), "capabilities").level is CheckLevel.WARNING
    assert found(serving(node, backend="sim"), "capabilities").level is CheckLevel.OK


@pytest.mark.parametrize("text", ["", "Uid:\t0\t0\nCapEff:\tzz\n", "CapEff:\t0\n"])
def test_malformed_process_status_leaves_the_capabilities_unverified(node: CheckContext, text: str) -> None:
    write(node.root, f"proc/{os.getpid()}/status", text)
    check = found(node, "capabilities")
    assert (check.level, "does not contain" in check.message) == (CheckLevel.WARNING, True)


def test_service_process_not_visible_leaves_the_capabilities_unverified(node: CheckContext) -> None:
    write(node.root, "proc/locks", "")
    check = found(node, "capabilities")
    assert (check.level, "is not visible from here" in check.message) == (CheckLevel.WARNING, True)
    assert "capabilities" not in levels(serving(node, **NO_ANSWER))


def test_policy_file_is_named_where_the_service_reports_one(node: CheckContext) -> None:
    observing = serving(node, enforcement="observe", paths=ServicePaths(policy=Path("/etc/p.yaml")))
    assert "in /etc/p.yaml" in found(observing, "enforcement").remedy
