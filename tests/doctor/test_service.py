"""``scrubber doctor`` on what the service says, on its policy, and on who may use it."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scrubber.doctor.examination import examine
from scrubber.doctor.finding import Check, DeviceSaid, Level, Node, Places
from tests.doctor.stage import found, healthy, levels, serving, write

NOBODY = {"refusal": "Nobody answers."}
ROOT = os.geteuid() == 0


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    with healthy(short_tmp) as node:
        yield node


def named(node: Node, name: str) -> list[Check]:
    return [check for check in examine(node) if check.name == name]


# --- what it says


@pytest.mark.parametrize(
    ("changed", "name", "level", "words", "remedy"),
    [
        (
            {"ledger": "The disk is full."},
            "service",
            Level.ERROR,
            "hands nothing over: The disk is full.",
            "journalctl",
        ),
        ({"ledger": ""}, "service", Level.ERROR, "does not say how its ledger is", "journalctl"),
        ({"version": "0.0.1"}, "version", Level.WARNING, "the service 0.0.1", "systemctl restart"),
        ({"version": ""}, "version", Level.WARNING, "an unknown one", "systemctl restart"),
        ({"enforcement": "observe"}, "enforcement", Level.WARNING, "only observes", "enforcement: enforce"),
        ({"enforcement": ""}, "enforcement", Level.WARNING, "does not say", "systemctl restart"),
        ({"resets": "8 resets."}, "breaker", Level.WARNING, "8 resets.", "scrubber reset DEVICE"),
        (
            {"soft": "2 are out.", "soft_spared": 3},
            "breaker",
            Level.WARNING,
            "2 are out. 3 would go out now.",
            "cooling",
        ),
        ({"devices": ()}, "devices", Level.WARNING, "no device at all", "nvidia-smi -L"),
        (
            {"devices": None, "devices_refusal": "No."},
            "devices",
            Level.WARNING,
            "does not list its devices: No.",
            "journal",
        ),
        ({"key": ""}, "key", Level.WARNING, "cannot be verified elsewhere", "systemctl restart"),
        ({"head": ""}, "audit-head", Level.WARNING, "could not be noticed", "systemctl restart"),
    ],
)
def test_what_the_service_says_is_told_with_what_to_do(
    node: Node, changed: dict[str, Any], name: str, level: Level, words: str, remedy: str
) -> None:
    check = found(serving(node, **changed), name)
    assert (check.level, words in check.sentence, remedy in check.remedy) == (level, True, True), check


@pytest.mark.parametrize(
    ("changed", "name", "level"),
    [
        (NOBODY, "service", Level.ERROR),
        ({"ledger": "The disk is full."}, "service", Level.ERROR),
        ({"enforcement": "observe"}, "enforcement", Level.WARNING),
        ({"devices": (DeviceSaid("GPU-a", "0", enforcement="observe"),)}, "enforcement", Level.WARNING),
        ({"devices": (DeviceSaid("GPU-a", "0", glass_until=0.0),)}, "break-glass", Level.WARNING),
    ],
)
def test_a_service_that_would_let_a_dirty_device_pass_is_told(
    node: Node, changed: dict[str, Any], name: str, level: Level
) -> None:
    assert named(serving(node, **changed), name)[0].level is level


def test_the_head_and_the_key_are_there_to_be_noted(node: Node) -> None:
    assert node.service.head in found(node, "audit-head").sentence
    assert node.service.key in found(node, "key").sentence


def test_resets_that_wait_say_until_when_and_both_halves_of_the_breaker_are_told(node: Node) -> None:
    stopped = serving(node, resets="8 resets.", resets_until=60.0, resets_waiting=2, soft="2 are out.")
    resets, soft = named(stopped, "breaker")
    assert resets.sentence == "8 resets. The next one may be at 1970-01-01T00:01:00Z. 2 wait for one now."
    assert soft.sentence == "2 are out."


def test_a_broken_glass_is_told_for_each_device_with_how_to_end_it(node: Node) -> None:
    broken = [
        DeviceSaid("GPU-a", "0", glass_until=60.0, glass="uid:7 broke the glass (a deadline)"),
        DeviceSaid("GPU-b", "1"),
        DeviceSaid("GPU-c", "", glass_until=90.0, glass="uid:0 broke the glass (x)"),
    ]
    first, second = named(serving(node, devices=tuple(broken)), "break-glass")
    assert first.level is second.level is Level.WARNING
    assert first.sentence == (
        "Until 1970-01-01T00:01:00Z nothing is refused for device 0 (GPU-a), whatever is known of it: "
        "uid:7 broke the glass (a deadline)."
    )
    assert first.remedy.startswith("scrubber break-glass 0 --end --reason")
    assert second.remedy.startswith("scrubber break-glass GPU-c --end")


def test_devices_that_are_out_and_devices_that_are_only_observed_are_named(node: Node) -> None:
    devices = tuple(DeviceSaid(f"GPU-{n}", str(n), "quarantined", offered=False) for n in range(5))
    check = found(serving(node, devices=(*devices, DeviceSaid("GPU-9", "9"))), "devices")
    assert check.sentence.startswith("5 of 6 devices are out of service (quarantined): device 0 (GPU-0), ")
    assert check.sentence.endswith(" and 2 more.")
    assert "scrubber device 0" in check.remedy
    observed = found(serving(node, devices=(DeviceSaid("GPU-a", "0", enforcement="observe"),)), "enforcement")
    assert (observed.level, "device 0 (GPU-a)" in observed.sentence) == (Level.WARNING, True)


def test_devices_with_processes_that_no_walk_gets_through_are_named(node: Node) -> None:
    devices = tuple(replace(each, uninspected=1) for each in node.service.devices or ())
    check = named(replace(node, service=replace(node.service, devices=devices)), "devices")[0]
    assert check.level is Level.WARNING
    assert check.sentence.startswith("Walks over /proc do not get through some processes")
    assert "uninspectable: end" in check.remedy


def test_without_the_service_nothing_is_said_of_what_only_it_knows(node: Node) -> None:
    said = named(serving(node, **NOBODY), "service")
    assert [check.level for check in said] == [Level.ERROR, Level.WARNING]
    assert "nothing was seen" in said[1].sentence
    hidden = {"version", "enforcement", "devices", "breaker", "break-glass", "key", "audit-head"}
    assert hidden.isdisjoint(levels(serving(node, **NOBODY)))


def test_a_library_that_does_not_load_is_no_service_that_is_away(node: Node) -> None:
    said = named(serving(node, broken="VersionError: too old"), "service")
    assert (said[0].level, "VersionError: too old" in said[0].sentence) == (Level.ERROR, True)


# --- its policy


def test_a_file_that_says_otherwise_than_what_is_in_force_is_told(node: Node) -> None:
    file = write(node.root, "policy.yaml", "name: default\nenforcement: observe\n")
    check = found(replace(node, policy=str(file)), "policy")
    assert (check.level, f"{file} says otherwise (default, observe," in check.sentence) == (Level.WARNING, True)
    assert "systemctl reload scrubber.service" in check.remedy


@pytest.mark.parametrize("said", [{}, NOBODY])
def test_a_file_that_is_no_policy_is_an_error_before_it_keeps_the_service_down(
    node: Node, said: dict[str, str]
) -> None:
    file = write(node.root, "policy.yaml", "name: x\nnonsense: 1\nmore: 2\n")
    check = found(serving(replace(node, policy=str(file)), **said), "policy")
    assert (check.level, f"{file}:2:" in check.sentence, "(1 more)" in check.sentence) == (Level.ERROR, True, True)
    assert f"scrubber policy check {file}" in check.remedy


@pytest.mark.parametrize("kind", ["missing", "pipe", "directory", "huge", "circle"])
def test_a_file_that_cannot_be_a_policy_is_never_waited_for(node: Node, kind: str) -> None:
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
    assert found(replace(node, policy=str(file)), "policy").level is Level.ERROR


def test_a_policy_that_the_service_refused_is_an_error_though_the_old_one_holds(node: Node) -> None:
    check = found(serving(node, policy_refused="FILE:3: no such key."), "policy")
    assert (check.level, check.sentence.startswith("FILE:3: no such key.")) == (Level.ERROR, True)


def test_a_file_that_only_the_service_sees_is_as_good_as_the_service_says(node: Node) -> None:
    """It is in the service's pod; or it is here, and then it is looked at."""
    theirs = serving(replace(node, policy=""), places=Places(policy=Path("/etc/scrubber/policy.yaml")))
    check = found(theirs, "policy")
    assert check == Check(
        "policy",
        Level.OK,
        f"default is in force, and the service finds nothing wrong with {node.root}/etc/scrubber/policy.yaml.",
    )
    assert found(serving(theirs, policy_refused="No."), "policy").level is Level.ERROR
    write(node.root, "etc/scrubber/policy.yaml", "name: other\n")
    assert "says otherwise (other," in found(theirs, "policy").sentence


def test_a_policy_that_ships_is_known_by_its_name_and_others_are_not(node: Node) -> None:
    assert found(replace(node, policy=""), "policy").sentence.startswith("default is in force")
    check = found(serving(replace(node, policy=""), policy="mine"), "policy")
    assert (check.level, "--policy FILE" in check.remedy) == (Level.WARNING, True)


def test_without_the_service_a_policy_is_looked_at_where_somebody_names_one(node: Node) -> None:
    assert "policy" not in levels(serving(replace(node, policy=""), **NOBODY))
    check = found(serving(node, **NOBODY), "policy")
    assert (check.level, "whether it is was not seen" in check.sentence) == (Level.OK, True)


# --- who may use it


def test_sockets_that_everybody_may_use_are_named_by_what_they_are_for(node: Node) -> None:
    node.root.chmod(0o755)
    node.sockets.chmod(0o755)
    for purpose in ("admin", "read"):
        (node.sockets / purpose).chmod(0o755)
        (node.sockets / purpose / f"{purpose}.sock").chmod(0o666)
    look, act = sorted(named(node, "sockets"), key=lambda check: check.sentence, reverse=True)
    assert (look.level, look.sentence.startswith("Every local user may look:")) == (Level.ERROR, True)
    assert (act.level, act.remedy) == (Level.ERROR, f"chmod o-rwx {node.sockets}/admin")


def test_a_directory_that_everybody_may_write_is_anybodys(node: Node) -> None:
    node.sockets.chmod(0o777)
    check = found(node, "sockets")
    assert (check.level, check.remedy) == (Level.ERROR, f"chmod o-w {node.sockets}")
    node.sockets.chmod(0o1777)
    assert found(node, "sockets").level is Level.OK


@pytest.mark.parametrize(("purpose", "level"), [("plugin", Level.ERROR), ("admin", Level.OK), ("read", Level.OK)])
def test_a_group_may_look_and_act_but_never_stand_in_for_the_plugin(node: Node, purpose: str, level: Level) -> None:
    group = 54321 if ROOT else os.getegid()  # for root: one that has no name
    node.sockets.chmod(0o711)
    for each in (node.sockets / purpose, node.sockets / purpose / f"{purpose}.sock"):
        os.chown(each, -1, group)
    (node.sockets / purpose).chmod(0o750)
    check = found(node, "sockets")
    assert check.level is level
    words = {"plugin": "may ask for hand-overs", "admin": "may act", "read": "may look"}
    assert f"the group {54321 if ROOT else ''}" in check.sentence
    assert words[purpose] in check.sentence


def test_a_group_that_cannot_enter_the_directory_above_may_do_nothing(node: Node) -> None:
    group = 54321 if ROOT else os.getegid()
    for each in (node.sockets / "admin", node.sockets / "admin/admin.sock"):
        os.chown(each, -1, group)
    (node.sockets / "admin").chmod(0o750)
    node.sockets.chmod(0o700)
    assert found(node, "sockets").sentence.endswith("nobody may look, and nobody may act.")


def test_capabilities_that_the_service_lacks_are_named(node: Node) -> None:
    write(node.root, f"proc/{os.getpid()}/status", "Uid:\t0\t0\t0\t0\nCapEff:\t0000000000200000\n")
    check = found(node, "capabilities")
    assert check.level is Level.ERROR
    assert (
        f"(PID {os.getpid()}) runs as root (uid 0) and lacks CAP_DAC_OVERRIDE, CAP_KILL, CAP_SYS_PTRACE"
        in check.sentence
    )
    assert "privileged: true" in check.remedy
    assert found(serving(node, backend=""), "capabilities").level is Level.WARNING
    assert found(serving(node, backend="sim"), "capabilities").level is Level.OK


@pytest.mark.parametrize("text", ["", "Uid:\t0\t0\nCapEff:\tzz\n", "CapEff:\t0\n"])
def test_a_status_that_says_nothing_proves_no_capability(node: Node, text: str) -> None:
    write(node.root, f"proc/{os.getpid()}/status", text)
    check = found(node, "capabilities")
    assert (check.level, "does not say" in check.sentence) == (Level.WARNING, True)


def test_a_service_whose_process_is_not_seen_has_no_capabilities_that_are(node: Node) -> None:
    write(node.root, "proc/locks", "")
    check = found(node, "capabilities")
    assert (check.level, "is not seen from here" in check.sentence) == (Level.WARNING, True)
    assert "capabilities" not in levels(serving(node, **NOBODY))


def test_the_policys_file_is_named_where_the_service_names_it(node: Node) -> None:
    observing = serving(node, enforcement="observe", places=Places(policy=Path("/etc/p.yaml")))
    assert "in /etc/p.yaml" in found(observing, "enforcement").remedy
