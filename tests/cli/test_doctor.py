"""``scrubber doctor`` as a command: its output, its exit codes, required privileges, and what cannot block it."""

import errno
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.commands.doctor import doctor
from scrubber.doctor.checks import CHECKS, check_node, run_checks
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, DeviceReport, ServiceReport
from scrubber.doctor.queries import query_kubelet, query_service
from tests.cli.stage import CLEAN
from tests.cli.stage import serving as served
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal
from tests.doctor.stage import (
    CONTAINERD,
    ENVVAR,
    KUBELET,
    SERVED,
    STATE,
    TOOLKIT,
    every_check_name,
    found,
    healthy,
    run,
    run_unprivileged,
    write,
)

ROOT = os.geteuid() == 0
INFO = pb.ServiceInfo(
    version=SERVED.version,
    backend="sim",
    policy="default",
    policy_digest=SERVED.policy_digest,
    enforcement="enforce",
    ledger_status="ok",
    key_id=SERVED.key_id,
    audit_head=pb.AuditHead(sequence=7, hash="cd" * 32),
    kubelet_status="ok",
    pid=os.getpid(),
)


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


@pytest.fixture
def sockets(short_tmp: Path) -> Path:
    """Return the directory in which a test serves a service."""
    (short_tmp / "s").mkdir()
    return short_tmp / "s"


# --- overall findings


def test_well_configured_node_has_no_remedies(node: CheckContext) -> None:
    checks = check_node(node)
    assert [check for check in checks if check.level is not CheckLevel.OK or check.remedy] == []
    assert [check.name for check in checks] == [
        *("service", "version", "enforcement", "devices", "holders", "reset-blockers", "breaker"),
        *("break-glass", "yield", "agent-pause", "policy"),
        *("infrastructure-agents", "infrastructure-namespaces", "permissions", "sockets"),
        *("capabilities", "state-dir", "ledger-disk", "ledger-lock", "signing-key", "signing-key-id", "audit-head"),
        *(
            "toolkit-envvar",
            "toolkit-volume-mounts",
            "cdi-annotations",
            "nri-annotations",
            "driver",
            "driver-libraries",
            "driver-bindings",
        ),
        *(
            "dependencies",
            "device-nodes",
            "unauthorized-use",
            "scrub-on-free",
            "persistenced",
            "confidential-computing",
            "kubelet",
            "device-plugins",
        ),
        *("pod-resources", "pid-namespace", "cgroups", "kernel", "clock", "platform", "recommendation"),
    ]


@pytest.mark.parametrize(("root", "of_init"), [("/", Path("/proc/1/root")), ("/elsewhere", None)])
def test_root_directory_is_compared_with_that_of_pid_1_unless_the_user_named_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: str, of_init: Path | None
) -> None:
    checked: list[CheckContext] = []

    def check(node: CheckContext) -> tuple[CheckResult, ...]:
        checked.append(node)
        return ()

    monkeypatch.setattr("scrubber.cli.diagnosis.check_node", check)
    with pytest.raises(typer.Exit):
        doctor(socket=tmp_path / "nothing", node_root=Path(root))
    assert [each.root_of_init for each in checked] == [of_init]


def test_every_check_runs_on_an_empty_node(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    node = CheckContext(
        service=ServiceReport(error="The scrub service is not reachable."),
        root=tmp_path,
        socket_dir=nothing,
        state_dir=nothing,
    )
    checks = [(check.name, check.level) for check in check_node(node) if check.name != "dependencies"]
    assert checks == [
        ("service", CheckLevel.ERROR),
        ("service", CheckLevel.WARNING),
        ("state-dir", CheckLevel.WARNING),
        ("toolkit-envvar", CheckLevel.OK),
        ("nri-annotations", CheckLevel.WARNING),
        ("driver", CheckLevel.WARNING),
        ("kubelet", CheckLevel.WARNING),
        ("pid-namespace", CheckLevel.WARNING),
        ("cgroups", CheckLevel.WARNING),
        ("kernel", CheckLevel.OK),
        ("clock", CheckLevel.WARNING),
        ("platform", CheckLevel.OK),
        ("recommendation", CheckLevel.OK),
    ]


def test_every_finding_that_is_not_ok_has_a_remedy(tmp_path: Path, node: CheckContext) -> None:
    bad = replace(
        SERVED,
        enforcement="observe",
        reset_stop_reason="8 resets.",
        quarantine_stop_reason="2 are out.",
        key_id="",
        audit_head="",
        devices=(),
        version="0.0",
    )
    nothing = CheckContext(
        service=ServiceReport(error="Away."), root=tmp_path, state_dir=tmp_path / "no", socket_dir=tmp_path / "no"
    )
    results = [
        *check_node(nothing),
        *check_node(replace(nothing, service=bad)),
        *check_node(replace(node, service=bad)),
    ]
    assert {check.level for check in results} == set(CheckLevel)
    assert [check for check in results if check.level is not CheckLevel.OK and not check.remedy] == []


def test_every_check_has_a_description() -> None:
    assert all(check.__doc__ for check in CHECKS)


def test_doctor_page_describes_every_check(short_tmp: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/node-setup.md").read_text()
    table = page[page.index("| check | what it is for") :].partition("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`([a-z-]+)`", line.split("|")[1])]
    assert named == list(every_check_name(short_tmp))


# --- what cannot block it


def test_hanging_check_is_reported_and_delays_no_other_check(node: CheckContext) -> None:
    over = threading.Event()

    def waits_for_a_file_system(_: CheckContext) -> Iterator[CheckResult]:
        over.wait()
        yield CheckResult("never", CheckLevel.OK, "Never.")

    def answers(_: CheckContext) -> Iterator[CheckResult]:
        yield CheckResult("answers", CheckLevel.OK, "Well.")

    try:
        hung, well = run_checks((waits_for_a_file_system, answers), node, timeout=3.0)
    finally:
        over.set()
    assert (hung.name, hung.level, well.level) == ("waits-for-a-file-system", CheckLevel.WARNING, CheckLevel.OK)
    assert "The check did not finish" in hung.message
    assert "dmesg" in hung.remedy


def test_failing_check_is_a_finding_and_never_ok(node: CheckContext) -> None:
    def forbidden(_: CheckContext) -> Iterator[CheckResult]:
        raise PermissionError(errno.EACCES, "Permission denied", "/etc/x")

    def wrong(_: CheckContext) -> Iterator[CheckResult]:
        raise ValueError("not so")

    barred, bug = run_checks((forbidden, wrong), node)
    assert (barred.level, "/etc/x: Permission denied" in barred.message) == (CheckLevel.WARNING, True)
    assert (bug.level, "ValueError: not so" in bug.message) == (CheckLevel.ERROR, True)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        (TOOLKIT, "toolkit-envvar"),
        (CONTAINERD, "cdi-annotations"),
        ("proc/driver/nvidia/version", "driver"),
        ("proc/driver/nvidia/params", "scrub-on-free"),
        ("run/nvidia-persistenced/nvidia-persistenced.pid", "persistenced"),
        ("proc/locks", "capabilities"),
        ("proc/locks", "ledger-lock"),
        (f"proc/{os.getpid()}/status", "capabilities"),
        ("proc/self/mountinfo", "cgroups"),
        ("proc/sys/kernel/random/boot_id", "clock"),
        (f"{STATE}/ledger.reserve", "ledger-disk"),
        (f"{STATE}/signing.key", "signing-key"),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "endless", "directory", "circle"])
def test_fifo_endless_file_or_directory_does_not_block_a_check_and_is_never_ok(
    node: CheckContext, name: str, check: str, kind: str
) -> None:
    path = write(node.root, name)
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case _:
            path.symlink_to(path)
    one = found(node, check)
    assert (one.level is CheckLevel.OK, bool(one.remedy)) == (False, True), one


def test_huge_file_is_not_read(node: CheckContext) -> None:
    with write(node.root, TOOLKIT, f"{ENVVAR} = false\n").open("r+b") as file:
        file.truncate(1 << 40)
    assert "has more than" in found(node, "toolkit-envvar").message


async def test_service_that_accepts_and_never_answers_is_not_waited_for(short_tmp: Path) -> None:
    (short_tmp / "read").mkdir()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(short_tmp / "read/read.sock"))
        silent.listen()
        answer = await query_service(short_tmp, seconds=0.3)
    assert "did not answer within 0.3 s" in answer.error
    assert not answer.is_available


async def test_kubelet_that_accepts_and_never_answers_is_not_waited_for(short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        answer = await query_kubelet(
            path, kubelet_dir=short_tmp, pod_logs=short_tmp, cgroups=short_tmp, device_ids=(), seconds=0.3
        )
    assert (answer.was_queried, answer.is_trusted) == (True, False)
    assert str(path) in answer.message


# --- the command


def words(node: CheckContext, sockets: Path) -> list[str | Path]:
    return ["--socket-dir", sockets, "--node-root", node.root, "--state-dir", node.state_dir]


async def test_doctor_exits_with_five_on_warnings_and_json_has_all_checks(node: CheckContext, sockets: Path) -> None:
    """Not everything can be OK: the state directory of a test has no separate disk."""
    async with served(sockets) as service:
        service.info, service.devices = INFO, [CLEAN]
        ended = await run(*words(node, sockets), "-o", "json")
    assert (ended.code, ended.err) == (5, "")
    report = ended.report
    assert report["recommended"] is None, "a simulated node needs no configuration"
    assert (report["apiVersion"], report["kind"], report["verdict"]) == (
        "cli.scrubber.dev/v1",
        "DoctorReport",
        "warning",
    )
    assert report["checks"][0] == {
        "name": "service",
        "level": "ok",
        "message": f"Version {SERVED.version} serves the sim backend under the policy default.",
        "remedy": None,
    }
    assert {"ledger-disk": "warning", "signing-key-id": "ok", "audit-head": "ok"}.items() <= ended.levels.items()
    assert ended.check("signing-key-id")["message"].endswith(f"{SERVED.key_id}.")
    assert SERVED.audit_head in ended.check("audit-head")["message"]


async def test_recommended_configuration_is_part_of_the_report(node: CheckContext, short_tmp: Path) -> None:
    ended = await run(*words(node, short_tmp / "nowhere"), "-o", "json")
    found = ended.report["recommended"]
    assert found["resources"] == ["gpu-scrubber/deploy/kubernetes/cdi"]
    assert found["chartValues"] == {"deviceListStrategy": "cdi-cri", "admission.enabled": "true"}
    assert found["resources"][0] in ended.check("recommendation")["message"]


async def test_paths_are_taken_from_the_service(node: CheckContext, sockets: Path) -> None:
    """The service reports its paths; below the node's root, they exist."""
    write(node.root, "etc/scrubber/policy.yaml", "name: mine\n")
    (node.root / KUBELET).rename(node.root / "k")
    places = {"state": f"/{STATE}", "policy": "/etc/scrubber/policy.yaml", "kubelet": "/k", "nonsense": "/x"}
    async with served(sockets) as service:
        service.info = pb.ServiceInfo()
        service.info.CopyFrom(INFO)
        service.info.paths.update(places)
        ended = await run("--socket-dir", sockets, "--node-root", node.root, "-o", "json")
    assert ended.check("state-dir")["message"].startswith(f"{node.root}/{STATE} is ")
    assert ended.check("policy")["message"].startswith(f"{node.root}/etc/scrubber/policy.yaml differs (mine,")
    assert ended.check("kubelet")["message"] == f"The kubelet listens in {node.root}/k."


async def test_invalid_paths_from_the_service_are_not_followed(short_tmp: Path) -> None:
    async with served(short_tmp) as service:
        service.info = pb.ServiceInfo(paths={"state": "relative", "kubelet": "", "policy": "/with\0zero"})
        answer = await query_service(short_tmp)
    assert (answer.paths.state, answer.paths.kubelet, answer.paths.policy) == (None, None, None)


async def test_service_that_does_not_list_its_devices_is_reported(short_tmp: Path) -> None:
    async with served(short_tmp) as service:
        service.info = INFO
        service.devices = [
            pb.Device(id="GPU-a", index="0", break_glass=pb.BreakGlass(expires_at=60.0, reason="why", actor="uid:7"))
        ]
        answer = await query_service(short_tmp)
    assert answer.devices == (
        DeviceReport(
            "GPU-a",
            "0",
            "",
            False,
            "",
            "",
            break_glass_until=60.0,
            break_glass="uid:7 set a break-glass override (why)",
        ),
    )


async def test_holders_of_free_devices_and_agents_on_any_device_are_distinguished(short_tmp: Path) -> None:
    monitor = pb.DeviceHolder(pid=7, kind="infrastructure", namespace="gpu-operator", pod="nvidia-dcgm-x")
    leftover = pb.DeviceHolder(pid=8, kind="process", blocking=True)
    async with served(short_tmp) as service:
        service.info = INFO
        service.devices = [
            pb.Device(id="GPU-a", hygiene="dirty", holders=[monitor, leftover]),
            pb.Device(id="GPU-b", hygiene="in-use", holders=[monitor, leftover]),
        ]
        answer = await query_service(short_tmp)
    found = [([each.pid for each in one.holders], [each.pid for each in one.agents]) for one in answer.devices or ()]
    assert found == [([8], [7]), ([], [7])]


async def test_checks_independent_of_the_service_run_without_the_service(node: CheckContext, short_tmp: Path) -> None:
    ended = await run(*words(node, short_tmp / "nowhere"), "-o", "json")
    assert (ended.code, ended.report["verdict"]) == (1, "error")
    wrong = [check for check in ended.report["checks"] if check["level"] == "error"]
    assert [check["name"] for check in wrong] == ["service"]
    assert "scrubber serve" in wrong[0]["message"]
    assert {"toolkit-envvar": "ok", "kubelet": "ok", "signing-key": "ok"}.items() <= ended.levels.items()


async def test_terminal_output_shows_remedies_and_a_summary(node: CheckContext, short_tmp: Path) -> None:
    write(node.root, TOOLKIT, "")
    ended = await run(*words(node, short_tmp / "nowhere"))
    assert (ended.code, ended.out.splitlines()[0].split()) == (1, ["LEVEL", "CHECK", "MESSAGE"])
    assert f"Remedy: Set {ENVVAR} = false" in ended.out
    assert ended.err.startswith("Note: 2 errors and ")
    names = (await run(*words(node, short_tmp / "nowhere"), "-o", "name")).out.splitlines()
    assert names[0] == "service"
    assert "toolkit-envvar" in names
    assert "kubelet" not in names


_SAME_EVERYWHERE = frozenset(
    {
        *("service", "toolkit-envvar", "toolkit-volume-mounts", "cdi-annotations", "driver", "driver-libraries"),
        *("device-nodes", "scrub-on-free", "persistenced", "kubelet", "device-plugins", "cgroups", "kernel", "clock"),
    }
)
"""Findings without any name, number or version of the machine that runs the test."""


def same_everywhere(screen: str, root: Path) -> str:
    """Return the table's header and those findings, with a fixed name for the root."""
    kept, keep = [], True
    for line in screen.splitlines()[:-1]:
        words = line.split()
        if words[0] in set(CheckLevel) and line.startswith(words[0]):
            keep = words[1] in _SAME_EVERYWHERE
        if keep:
            kept.append(line)
    return "\n".join(kept).replace(str(root), "/tmp/gs-12345678") + "\n"


@pytest.mark.parametrize("columns", WIDTHS)
async def test_doctor_output_fits_the_terminal(node: CheckContext, columns: int) -> None:
    write(node.root, TOOLKIT, "")
    (node.root / "run/nvidia-persistenced/nvidia-persistenced.pid").unlink()
    result = await at_terminal("doctor", *map(str, words(node, node.root / "nowhere")), columns=columns)
    assert result.code == 1
    assert result.text.splitlines()[-1].startswith("Note: 2 errors and ")
    agrees_with(f"doctor-{columns}", same_everywhere(result.text, node.root))


async def test_control_characters_are_escaped(node: CheckContext) -> None:
    write(node.root, "etc/containerd/config.toml", '[x]\npod_annotations = ["cdi.k8s.io/\\u001b[31m*"]\n')
    result = await at_terminal("doctor", *map(str, words(node, node.root / "nowhere")), columns=200)
    assert b"\x1b[31m*" not in result.raw
    assert "\N{REPLACEMENT CHARACTER}[31m*" in result.text


# --- unprivileged users


async def test_unprivileged_user_is_informed_and_unverified_checks_are_never_ok(node: CheckContext) -> None:
    node.root.chmod(0o755)
    closed = [
        "run/scrubber",
        STATE,
        KUBELET,
        "etc/containerd",
        "etc/nvidia-container-runtime",
        "run/nvidia-persistenced",
    ]
    for name in closed:
        (node.root / name).chmod(0o000)
    try:
        ended = await run_unprivileged(*words(node, node.socket_dir), "-o", "json")
    finally:
        for name in closed:
            (node.root / name).chmod(0o755)
    unseen = {
        *("permissions", "sockets", "capabilities", "ledger-disk", "ledger-lock", "signing-key", "toolkit-envvar"),
        *("cdi-annotations", "persistenced", "kubelet", "device-plugins"),
    }
    assert {name: ended.levels.get(name) for name in unseen} == dict.fromkeys(unseen, "warning")
    assert ended.code == 1
    findings = [check for check in ended.report["checks"] if check["level"] != "ok"]
    assert all(check["remedy"] for check in findings)
    assert "sudo scrubber doctor" in ended.check("kubelet")["remedy"]
