"""``scrubber serve``: run the scrub service.

The command only collects the settings and passes them to the daemon, which is imported only when it runs, so that
``--help`` need not wait for a gRPC server to load.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from socket import gethostname
from typing import Annotated

import typer

from scrubber.backends import BACKENDS, choose_backend
from scrubber.cli.completers import complete_backend, complete_policy
from scrubber.cli.daemon_options import (
    SERVICE_METRICS_ADDRESS,
    KubeletDirOption,
    LogFormatOption,
    LogLevelOption,
    ServiceMetricsAddressOption,
    ServiceMetricsCertOption,
    ServiceMetricsClientCaOption,
    ServiceMetricsKeyOption,
    ServiceProbeAddressOption,
    TracesOption,
)
from scrubber.cli.options import SocketOption, seconds
from scrubber.cli.startup import load_structlog_without_rich, restore_gc, silence_grpc_logs
from scrubber.config.settings import (
    FROM_KUBELET_DIR,
    Address,
    ContainerIdentity,
    DisabledHealthchecks,
    LogFormat,
    LogLevel,
    MetricsTls,
    ServiceSettings,
    TraceExport,
)

__all__ = ["add_commands"]

_DEFAULT_BACKEND = next(iter(BACKENDS))


def add_commands(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SCRUBBER_BACKEND",
            metavar="NAME",
            autocompletion=complete_backend,
            help="; ".join(f"{each.name}: {each.summary}" for each in BACKENDS.values())
            + ". Repeat it, or separate names by commas, to manage the devices of several backends.",
            show_default=_DEFAULT_BACKEND,
        ),
    ] = None,
    sim_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_SIM_DIR",
            metavar="DIR",
            help="Directory of the simulated node (created by scrubber sim create).",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_CONFIG",
            metavar="FILE",
            help="Configuration file of the command backend: program, deadlines, environment.",
        ),
    ] = None,
    state_dir: Annotated[
        Path,
        typer.Option(
            envvar="SCRUBBER_STATE_DIR", metavar="DIR", help="Directory of the ledger; on a local disk, mode 0700."
        ),
    ] = Path("/var/lib/scrubber"),
    socket: SocketOption = Path("/run/scrubber"),
    policy: Annotated[
        str,
        typer.Option(
            envvar="SCRUBBER_POLICY",
            metavar="POLICY",
            autocompletion=complete_policy,
            help="Policy file, or the name of a bundled policy.",
        ),
    ] = "default",
    kubelet: Annotated[
        bool,
        typer.Option(
            envvar="SCRUBBER_KUBELET",
            help="Whether the node has a kubelet. With --no-kubelet, devices are handed over to jobs only: by scrubber prolog and "
            "scrubber run.",
        ),
    ] = True,
    kubelet_dir: KubeletDirOption = Path("/var/lib/kubelet"),
    pod_resources_socket: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_POD_RESOURCES_SOCKET",
            metavar="PATH",
            help="PodResources socket of the kubelet.",
            show_default="pod-resources/kubelet.sock in the kubelet's directory",
        ),
    ] = None,
    pod_logs_dir: Annotated[
        Path, typer.Option(envvar="SCRUBBER_POD_LOGS_DIR", metavar="DIR", help="Directory of the kubelet's pod logs.")
    ] = Path("/var/log/pods"),
    metrics_address: ServiceMetricsAddressOption = None,
    metrics_cert: ServiceMetricsCertOption = None,
    metrics_key: ServiceMetricsKeyOption = None,
    metrics_client_ca: ServiceMetricsClientCaOption = None,
    probe_address: ServiceProbeAddressOption = "",
    nvsentinel_reset_journal: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_NVSENTINEL_RESET_JOURNAL",
            metavar="PATH",
            help="Report each successful reset to this socket of the journal, usually /run/systemd/journal/socket, in the "
            "form that NVSentinel reads.",
            show_default="none",
        ),
    ] = None,
    traces: TracesOption = TraceExport.OFF,
    node_name: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_NODE_NAME",
            metavar="NAME",
            help="Name of the node in certificates.",
            show_default="the host name",
        ),
    ] = None,
    cgroup_root: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_CGROUP_ROOT",
            metavar="DIR",
            help="Mount point of the cgroup hierarchy.",
            show_default="detected",
        ),
    ] = None,
    container_identity: Annotated[
        ContainerIdentity,
        typer.Option(
            envvar="SCRUBBER_CONTAINER_IDENTITY",
            help="How processes are mapped to pods: by cgroup, or by the marker of the kubelet emulator's "
            "containers. auto: by marker if the backend is sim and the kubelet is emulated or "
            "absent, otherwise by cgroup.",
        ),
    ] = ContainerIdentity.AUTO,
    log_format: LogFormatOption = LogFormat.AUTO,
    log_level: LogLevelOption = LogLevel.INFO,
    grpc_reflection: Annotated[
        bool, typer.Option(envvar="SCRUBBER_GRPC_REFLECTION", help="Enable gRPC reflection, for tools such as grpcurl.")
    ] = False,
    admin_group: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_ADMIN_GROUP",
            metavar="GROUP",
            help="Group whose members may read and operate.",
            show_default="root only",
        ),
    ] = None,
    read_group: Annotated[
        str | None,
        typer.Option(
            envvar="SCRUBBER_READ_GROUP",
            metavar="GROUP",
            help="Group whose members may only read. Operators must be members of it, too, in order to read.",
            show_default="the admin group",
        ),
    ] = None,
    poll_interval: Annotated[
        float,
        typer.Option(
            envvar="SCRUBBER_POLL_INTERVAL",
            metavar="TIME",
            parser=seconds,
            help="Interval between checks for holders. Checks for unauthorized use are separate: at random "
            "times, at most 1s apart.",
            show_default="1s",
        ),
    ] = 1.0,
    list_stabilization_window: Annotated[
        float,
        typer.Option(
            envvar="SCRUBBER_LIST_STABILIZATION_WINDOW",
            metavar="TIME",
            parser=seconds,
            help="How long a kubelet that has just started may return an incomplete list of pods.",
            show_default="60s",
        ),
    ] = 60.0,
    nvidia_driver_root: Annotated[
        Path,
        typer.Option(
            envvar="NVIDIA_DRIVER_ROOT",
            metavar="DIR",
            help="Root directory of the NVIDIA driver, as seen by this process.",
        ),
    ] = Path("/"),
    amd_root: Annotated[
        Path,
        typer.Option(
            envvar="SCRUBBER_AMD_ROOT",
            metavar="DIR",
            help="Directory that contains sys, dev and opt/rocm, for the AMD backend.",
        ),
    ] = Path("/"),
    dcgmi: Annotated[
        Path | None,
        typer.Option(
            envvar="SCRUBBER_DCGMI",
            metavar="PATH",
            help="Let DCGM (4.5 or newer) release the driver for a reset, by this dcgmi.",
            show_default="none",
        ),
    ] = None,
    dcgm_address: Annotated[
        str,
        typer.Option(
            envvar="SCRUBBER_DCGM_ADDRESS",
            metavar="HOST[:PORT]",
            help="Address of DCGM's host engine, for --dcgmi.",
            show_default="dcgmi's own",
        ),
    ] = "",
    fail_on_init_error: Annotated[
        bool,
        typer.Option(
            envvar="FAIL_ON_INIT_ERROR",
            help="Exit if the driver is missing at the start; otherwise wait for it.",
        ),
    ] = True,
    disable_healthchecks: Annotated[
        str,
        typer.Option(
            envvar="DP_DISABLE_HEALTHCHECKS",
            metavar="XIDS",
            help="XIDs to ignore: all, xids, or comma-separated numbers. Prefer xids.ignore in the policy.",
            show_default="none",
        ),
    ] = "",
) -> None:
    """Run the scrub service.

    It tracks the state of every device, scrubs and certifies devices, and quarantines those that it cannot prove clean.
    """
    names = [name.strip() for each in backend or (_DEFAULT_BACKEND,) for name in each.split(",")]
    chosen = choose_backend(names)
    settings = ServiceSettings(
        backend=chosen,
        sim_dir=sim_dir,
        config=config,
        state_dir=state_dir,
        socket_dir=socket,
        policy=policy,
        kubelet=kubelet,
        kubelet_dir=kubelet_dir,
        pod_logs_dir=pod_logs_dir,
        metrics_address=Address.parse(metrics_address or SERVICE_METRICS_ADDRESS),
        metrics_required=metrics_address is not None,
        metrics_tls=MetricsTls.from_flags(metrics_cert, metrics_key, metrics_client_ca),
        probe_address=Address.parse(probe_address),
        reset_journal=nvsentinel_reset_journal,
        traces=traces,
        cgroup_root=cgroup_root,
        container_identity=container_identity,
        log_format=log_format,
        log_level=log_level,
        reflection=grpc_reflection,
        admin_group=admin_group,
        read_group=read_group,
        poll_interval=poll_interval,
        list_stabilize_seconds=list_stabilization_window,
        node_name=node_name or gethostname(),
        pod_resources_socket=pod_resources_socket or FROM_KUBELET_DIR,
        nvidia_driver_root=nvidia_driver_root,
        amd_root=amd_root,
        dcgmi=dcgmi,
        dcgm_address=dcgm_address,
        fail_on_init_error=fail_on_init_error and not chosen.simulated,
        disabled_healthchecks=DisabledHealthchecks.parse(disable_healthchecks),
    )
    silence_grpc_logs()
    load_structlog_without_rich()
    from scrubber import daemon

    restore_gc()
    raise typer.Exit(asyncio.run(daemon.run(settings)))
