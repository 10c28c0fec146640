"""The diagnosis of this node: the work of ``scrubber doctor``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scrubber.cli.client_run import run
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.render.output import CommandResult, OutputColumn, OutputFormat, print_result
from scrubber.doctor.checks import check_node
from scrubber.doctor.deployment import find_drivers
from scrubber.doctor.kubelet import pod_resources_socket
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, ClusterReport, Recommendation
from scrubber.doctor.queries import query_cluster, query_kubelet, query_service

__all__ = ["KUBELET_DIR", "POD_LOGS", "STATE_DIR", "diagnose", "report"]

KUBELET_DIR = Path("/var/lib/kubelet")
POD_LOGS = Path("/var/log/pods")
STATE_DIR = Path("/var/lib/scrubber")
_ROOT_OF_INIT = Path("/proc/1/root")


def diagnose(
    socket: Path,
    state_dir: Path | None,
    policy: str,
    toolkit_config: Path | None,
    kubelet_dir: Path | None,
    pod_logs_dir: Path | None,
    node_root: Path,
    output: OutputFormat,
    no_headers: bool,
) -> ExitCode:
    """Check the node, and print the results; return the exit code. The parameters are the flags of ``scrubber doctor``."""
    node = run(_gather_node(socket, state_dir, policy, toolkit_config, kubelet_dir, pod_logs_dir, node_root.absolute()))
    checks = check_node(node)
    print_result(_answer(checks), output, no_headers=no_headers)
    return _exit_for(checks)


async def _gather_node(
    socket: Path,
    state_dir: Path | None,
    policy: str,
    toolkit_config: Path | None,
    kubelet_dir: Path | None,
    pod_logs_dir: Path | None,
    root: Path,
) -> CheckContext:
    """Return the context of the checks, with the responses of the service and of the kubelet."""
    service = await query_service(socket.absolute())
    paths = service.paths
    node = CheckContext(
        service=service,
        root=root,
        root_of_init=_ROOT_OF_INIT if root == Path("/") else None,
        socket_dir=socket.absolute(),
    )
    node = replace(
        node,
        kubelet_dir=(kubelet_dir or paths.kubelet or KUBELET_DIR).absolute(),
        pod_logs=node.path((pod_logs_dir or paths.pod_logs or POD_LOGS).absolute()),
        toolkit_configs=() if toolkit_config is None else (toolkit_config.absolute(),),
        state_dir=node.path(paths.state or STATE_DIR) if state_dir is None else state_dir.absolute(),
        state_dir_known=state_dir is not None or paths.state is not None,
        policy=policy,
    )
    kubelet = await query_kubelet(
        pod_resources_socket(node),
        kubelet_dir=node.path(node.kubelet_dir),
        pod_logs=node.pod_logs,
        cgroups=node.path("/sys/fs/cgroup"),
        device_ids=[each.id for each in service.devices or ()],
    )
    return replace(node, kubelet=kubelet, cluster=await _query_cluster(node))


async def _query_cluster(node: CheckContext) -> ClusterReport | None:
    """Return the API server's reply to our DRA driver; None where none runs, or its process cannot be read."""
    try:
        drivers = find_drivers(node)
    except OSError:  # the check dra-driver reports it
        return None
    return await query_cluster(drivers[0]) if drivers else None


def _worst(checks: Sequence[CheckResult]) -> CheckLevel:
    levels = {check.level for check in checks}
    return next((level for level in (CheckLevel.ERROR, CheckLevel.WARNING) if level in levels), CheckLevel.OK)


def _exit_for(checks: Sequence[CheckResult]) -> ExitCode:
    return {CheckLevel.OK: ExitCode.OK, CheckLevel.WARNING: ExitCode.WARNINGS, CheckLevel.ERROR: ExitCode.FAILED}[
        _worst(checks)
    ]


def _answer(checks: Sequence[CheckResult]) -> CommandResult:
    return CommandResult(
        data=report(checks),
        names=[check.name for check in checks if check.level is not CheckLevel.OK],
        header=(OutputColumn("LEVEL"), OutputColumn("CHECK"), OutputColumn("MESSAGE", min_width=40)),
        rows=[row for check in checks for row in _rows(check)],
        notes=(_summary(checks),),
        kind="DoctorReport",
    )


def report(checks: Sequence[CheckResult]) -> dict[str, Any]:
    """Return a ``DoctorReport``, as docs/cli-json.md describes it."""
    return {
        "verdict": _worst(checks).value,
        "checks": [
            {"name": each.name, "level": each.level.value, "message": each.message, "remedy": each.remedy or None}
            for each in checks
        ],
        "recommended": next((_recommended(each.recommendation) for each in checks if each.recommendation), None),
    }


def _recommended(found: Recommendation) -> dict[str, Any]:
    return {
        "environment": found.environment,
        "resources": list(found.resources),
        "components": list(found.components),
        "componentChoices": list(found.choices),
        "chartValues": dict(found.chart_values),
        "pluginEnvironment": dict(found.plugin_environment),
        "clusterPolicy": dict(found.cluster_policy),
        "toolkitEnvironment": dict(found.toolkit_environment),
        "policy": list(found.policy),
        "notes": list(found.notes),
    }


def _rows(check: CheckResult) -> Iterator[tuple[str, str, str]]:
    yield (check.level.value, check.name, check.message)
    if check.remedy:
        yield ("", "", f"Remedy: {check.remedy}")


def _summary(checks: Sequence[CheckResult]) -> str:
    counted = Counter(check.level for check in checks)
    words = {CheckLevel.ERROR: ("error", "errors"), CheckLevel.WARNING: ("warning", "warnings")}
    wrong = " and ".join(f"{counted[level]} {words[level][counted[level] != 1]}" for level in words if counted[level])
    return f"{wrong or 'No problems'}; {counted[CheckLevel.OK]} of {len(checks)} checks passed."
