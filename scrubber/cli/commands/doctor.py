"""``scrubber doctor``: checks whether this node's setup upholds the guarantees of the service.

Most of the setup is outside the service: a container toolkit that lets any pod choose its GPU undoes every hand-over.
So this command inspects the node itself, works without the service and without root, changes nothing, and names a
remedy for each problem. What it cannot inspect it never reports as ok. If the service responds, it provides its paths,
so that the user need not specify them.

The checks are in :mod:`scrubber.doctor`, what becomes of them in :mod:`scrubber.cli.diagnosis`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scrubber.cli.completers import complete_policy
from scrubber.cli.diagnosis import KUBELET_DIR, POD_LOGS, STATE_DIR, diagnose
from scrubber.cli.options import NoHeadersOption, OutputOption, SocketOption
from scrubber.cli.render.output import OutputFormat

__all__ = ["add_commands"]

StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="SCRUBBER_STATE_DIR",
        metavar="DIR",
        help="State directory of the service.",
        show_default=f"as reported by the service, otherwise {STATE_DIR}",
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
        show_default=f"as reported by the service, otherwise {KUBELET_DIR}",
    ),
]
PodLogsDirOption = Annotated[
    Path | None,
    typer.Option(
        "--pod-logs-dir",
        envvar="SCRUBBER_POD_LOGS_DIR",
        metavar="DIR",
        help="Directory of the kubelet's pod logs.",
        show_default=f"as reported by the service, otherwise {POD_LOGS}",
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
    raise typer.Exit(
        diagnose(
            socket,
            state_dir,
            policy,
            toolkit_config,
            kubelet_dir,
            pod_logs_dir,
            node_root,
            output,
            no_headers,
        )
    )
