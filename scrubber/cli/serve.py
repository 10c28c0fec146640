"""The commands that run until they are told to stop: ``serve``, ``plugin`` and ``demo``.

Each one only gathers its settings and hands them to the daemon, which is imported when it is to run: nobody who asks
for ``--help`` waits for a gRPC server to load.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from socket import gethostname
from typing import Annotated

import typer

from scrubber.cli.options import KubeletDirOption, LogFormatOption, LogLevelOption, SocketOption, seconds
from scrubber.config.settings import (
    FROM_KUBELET_DIR,
    Address,
    Backend,
    ContainerIdentity,
    LogFormat,
    LogLevel,
    ServiceSettings,
)

__all__ = ["add_commands"]


class Registration(StrEnum):
    AUTO = "auto"
    WATCHER = "watcher"
    CLASSIC = "classic"


def add_commands(app: typer.Typer) -> None:
    app.command()(serve)
    app.command()(plugin)
    app.command()(demo)


def serve(
    backend: Annotated[
        Backend, typer.Option(envvar="SCRUBBER_BACKEND", help="sim: the simulated node; nvidia: NVIDIA's driver.")
    ] = Backend.SIM,
    sim_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_SIM_DIR", metavar="DIR", help="The simulated node (scrubber sim create makes one)."
        ),
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(envvar="SCRUBBER_STATE_DIR", metavar="DIR", help="The ledger; on a local disk, mode 0700.")
    ] = Path("/var/lib/scrubber"),
    socket: SocketOption = Path("/run/scrubber"),
    policy: Annotated[
        str,
        typer.Option(envvar="SCRUBBER_POLICY", metavar="FILE", help="A policy file, or the name of a shipped policy."),
    ] = "default",
    kubelet_dir: KubeletDirOption = Path("/var/lib/kubelet"),
    pod_resources_socket: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_POD_RESOURCES_SOCKET",
            metavar="PATH",
            help="The kubelet's PodResources socket.",
            show_default="pod-resources/kubelet.sock in the kubelet's directory",
        ),
    ] = None,
    pod_logs_dir: Annotated[
        Path, typer.Option(envvar="SCRUBBER_POD_LOGS_DIR", metavar="DIR", help="The kubelet's pod log directories.")
    ] = Path("/var/log/pods"),
    metrics_address: Annotated[
        str,
        typer.Option(
            envvar="SCRUBBER_METRICS_ADDRESS", metavar="HOST:PORT", help="Where Prometheus scrapes; off: nowhere."
        ),
    ] = "127.0.0.1:9464",
    node_name: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_NODE_NAME",
            metavar="NAME",
            help="Goes into every certificate.",
            show_default="the host name",
        ),
    ] = None,
    cgroup_root: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_CGROUP_ROOT", metavar="DIR", help="Where cgroups are mounted.", show_default="found"
        ),
    ] = None,
    containers: Annotated[
        ContainerIdentity,
        typer.Option(
            envvar="SCRUBBER_CONTAINERS",
            help="How a process is known to belong to a pod: by cgroup, or by the marker that the simulated node's "
            "containers carry. auto: by marker with the sim backend unless --cgroup-root is given, else by cgroup.",
        ),
    ] = ContainerIdentity.AUTO,
    log_format: LogFormatOption = LogFormat.AUTO,
    log_level: LogLevelOption = LogLevel.INFO,
    reflection: Annotated[
        bool, typer.Option(envvar="SCRUBBER_REFLECTION", help="Answer gRPC reflection, for grpcurl and the like.")
    ] = False,
    admin_group: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_ADMIN_GROUP",
            metavar="GROUP",
            help="Its members may read and act.",
            show_default="root only",
        ),
    ] = None,
    watch_interval: Annotated[
        float,
        typer.Option(
            envvar="SCRUBBER_WATCH_INTERVAL",
            metavar="TIME",
            parser=seconds,
            help="Pause between two looks at who holds what.",
            show_default="1s",
        ),
    ] = 1.0,
    list_settle: Annotated[
        float,
        typer.Option(
            envvar="SCRUBBER_LIST_SETTLE",
            metavar="TIME",
            parser=seconds,
            help="How long a kubelet that has just started may list no pods for no reason.",
            show_default="60s",
        ),
    ] = 60.0,
) -> None:
    """Run the scrub service. It knows every device's state, scrubs, certifies, and quarantines what it cannot prove."""
    settings = ServiceSettings(
        backend=backend,
        sim_dir=sim_dir,
        state_dir=state_dir,
        socket=socket,
        policy=policy,
        kubelet_dir=kubelet_dir,
        pod_logs_dir=pod_logs_dir,
        metrics_address=Address.parse(metrics_address),
        cgroup_root=cgroup_root,
        containers=containers,
        log_format=log_format,
        log_level=log_level,
        reflection=reflection,
        admin_group=admin_group,
        watch_interval=watch_interval,
        list_settle=list_settle,
        node_name=node_name or gethostname(),
        pod_resources_socket=pod_resources_socket or FROM_KUBELET_DIR,
    )
    from scrubber import daemon

    raise typer.Exit(asyncio.run(daemon.run(settings)))


def plugin(
    kubelet_dir: KubeletDirOption = Path("/var/lib/kubelet"),
    socket: SocketOption = Path("/run/scrubber"),
    resource_name: Annotated[
        str,
        typer.Option(
            envvar="SCRUBBER_RESOURCE_NAME", metavar="NAME", help="What pods ask for; nvidia.com/gpu on NVIDIA."
        ),
    ] = "scrubber.dev/gpu",
    registration: Annotated[
        Registration,
        typer.Option(
            envvar="SCRUBBER_REGISTRATION",
            help="watcher: the kubelet finds us in plugins_registry; classic: we call it; auto: watcher, then classic.",
        ),
    ] = Registration.AUTO,
    log_format: LogFormatOption = LogFormat.AUTO,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Run the device plugin. It lets the kubelet hand devices over only as the scrub service allows."""
    from plugin.main import PluginSettings, run

    settings = PluginSettings(
        kubelet_dir=kubelet_dir.absolute(),
        socket=socket.absolute(),
        resource_name=resource_name,
        registration=registration.value,
        log_format=log_format.value,
        log_level=log_level.value,
    )
    raise typer.Exit(asyncio.run(run(settings)))


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", envvar="SCRUBBER_DEMO_KEEP", help="Keep the node's directory and logs.")
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", envvar="SCRUBBER_DEMO_DIR", metavar="DIR", help="Where the node is made.", show_default="a new one"
        ),
    ] = None,
) -> None:
    """Tell the story of a hand-over. It runs on a simulated node of its own, and exits with 0 if every expectation held."""
    from plugin.emulator.story import main

    raise typer.Exit(main(keep=keep, directory=directory))
