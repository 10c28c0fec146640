"""``scrubber doctor``: checks whether this node's setup upholds the guarantees of the service.

Most of the setup is outside the service: a container toolkit that lets any pod choose its GPU undoes every hand-over.
So this command inspects the node itself, works without the service and without root, changes nothing, and names a
remedy for each problem. What it cannot inspect it never reports as ok. If the service responds, it provides its paths,
so that the user need not specify them.

The checks are in :mod:`scrubber.doctor`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scrubber.cli.client_run import run
from scrubber.cli.completers import complete_policy
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import NoHeadersOption, OutputOption, SocketOption
from scrubber.cli.render.output import CommandResult, OutputColumn, OutputFormat, print_result
from scrubber.doctor.checks import check_node
from scrubber.doctor.deployment import find_drivers
from scrubber.doctor.kubelet import pod_resources_socket
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, ClusterReport, Recommendation
from scrubber.doctor.queries import query_cluster, query_kubelet, query_service

__all__ = ["add_commands", "report"]

_KUBELET_DIR = Path("/var/lib/kubelet")
_POD_LOGS = Path("/var/log/pods")
_STATE_DIR = Path("/var/lib/scrubber")
_ROOT_OF_INIT = Path("/proc/1/root")

StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="SCRUBBER_STATE_DIR",
        metavar="DIR",
        help="State directory of the service.",
        show_default=f"as reported by the service, otherwise {_STATE_DIR}",
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        envvar="SCRUBBER_POLICY",
        metavar="POLICY",
        autocompletion=complete_policy,
        help="Policy of the service: a file, or the name of a bundled policy.",
        show_default="as reported by the service",
    ),
]
KubeletDirOption = Annotated[
    Path | None,
    typer.Option(
        "--kubelet-dir",
        envvar="SCRUBBER_KUBELET_DIR",
        metavar="DIR",
        help="Directory of the kubelet.",
        show_default=f"as reported by the service, otherwise {_KUBELET_DIR}",
    ),
]
PodLogsDirOption = Annotated[
    Path | None,
    typer.Option(
        "--pod-logs-dir",
        envvar="SCRUBBER_POD_LOGS_DIR",
        metavar="DIR",
        help="Directory of the kubelet's pod logs.",
        show_default=f"as reported by the service, otherwise {_POD_LOGS}",
    ),
]
ToolkitConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--toolkit-config",
        envvar="SCRUBBER_TOOLKIT_CONFIG",
        metavar="FILE",
        help="Configuration file of the NVIDIA container toolkit.",
        show_default="the paths of its packages and of the GPU Operator",
    ),
]
NodeRootOption = Annotated[
    Path,
    typer.Option(
        "--node-root",
        envvar="SCRUBBER_NODE_ROOT",
        metavar="DIR",
        help="Root directory of the node as seen from here; prefixed to every path except "
        "--socket-dir, --state-dir and --policy.",
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    socket: SocketOption = Path("/run/scrubber"),
    state_dir: StateDirOption = None,
    policy: PolicyOption = "",
    toolkit_config: ToolkitConfigOption = None,
    kubelet_dir: KubeletDirOption = None,
    pod_logs_dir: PodLogsDirOption = None,
    node_root: NodeRootOption = Path("/"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Check the node for problems.

    Needs neither the service nor root, and changes nothing. What cannot be checked is a warning.

    Exits with 0 if there are no problems, 1 on errors, 5 on warnings only.
    """
    node = run(_gather_node(socket, state_dir, policy, toolkit_config, kubelet_dir, pod_logs_dir, node_root.absolute()))
    checks = check_node(node)
    print_result(_answer(checks), output, no_headers=no_headers)
    raise typer.Exit(_exit_for(checks))


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
    from dataclasses import replace

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
        kubelet_dir=(kubelet_dir or paths.kubelet or _KUBELET_DIR).absolute(),
        pod_logs=node.path((pod_logs_dir or paths.pod_logs or _POD_LOGS).absolute()),
        toolkit_configs=() if toolkit_config is None else (toolkit_config.absolute(),),
        state_dir=node.path(paths.state or _STATE_DIR) if state_dir is None else state_dir.absolute(),
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
