"""Flags that several of the daemons ``serve``, ``plugin`` and ``dra`` have: directories, logs, traces, metrics, probes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scrubber.config.settings import LogFormat, LogLevel, TraceExport

__all__ = [
    "DRIVER_METRICS_ADDRESS",
    "PLUGIN_METRICS_ADDRESS",
    "SERVICE_METRICS_ADDRESS",
    "DriverDevicesOption",
    "DriverMetricsAddressOption",
    "DriverMetricsCertOption",
    "DriverMetricsClientCaOption",
    "DriverMetricsKeyOption",
    "DriverProbeAddressOption",
    "KubeletDirOption",
    "LogFormatOption",
    "LogLevelOption",
    "PluginDevicesOption",
    "PluginMetricsAddressOption",
    "PluginMetricsCertOption",
    "PluginMetricsClientCaOption",
    "PluginMetricsKeyOption",
    "PluginProbeAddressOption",
    "ServiceMetricsAddressOption",
    "ServiceMetricsCertOption",
    "ServiceMetricsClientCaOption",
    "ServiceMetricsKeyOption",
    "ServiceProbeAddressOption",
    "TracesOption",
]

KubeletDirOption = Annotated[
    Path, typer.Option("--kubelet-dir", envvar="SCRUBBER_KUBELET_DIR", metavar="DIR", help="Directory of the kubelet.")
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format", envvar="SCRUBBER_LOG_FORMAT", help="auto: console on a terminal, otherwise JSON lines."
    ),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", envvar="SCRUBBER_LOG_LEVEL", help="Lowest level that is logged.")
]
TracesOption = Annotated[
    TraceExport,
    typer.Option(
        "--traces",
        envvar="SCRUBBER_TRACES",
        help="otlp: send traces to OTEL_EXPORTER_OTLP_ENDPOINT; requires the extra otel.",
    ),
]

_SERVICE, _PLUGIN, _DRIVER = "SCRUBBER_METRICS", "SCRUBBER_PLUGIN_METRICS", "SCRUBBER_DRA_METRICS"
"""Beginnings of the environment variables, which differ: all daemons may run with one environment file on one node."""
SERVICE_METRICS_ADDRESS, PLUGIN_METRICS_ADDRESS = "127.0.0.1:9464", "127.0.0.1:9465"
DRIVER_METRICS_ADDRESS = "127.0.0.1:9466"
"""Default addresses."""


def _address(variables: str, default: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        "--metrics-address",
        envvar=f"{variables}_ADDRESS",
        metavar="HOST:PORT",
        help="Address for Prometheus scrapes; off disables it. If the default address is in use, the "
        "daemon runs without metrics.",
        show_default=default,
    )
    return option


def _file(word: str, variables: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--metrics-{word}",
        envvar=f"{variables}_{word.upper().replace('-', '_')}",
        metavar="FILE",
        help=text,
        show_default="none",
    )
    return option


def _probes(variable: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        "--probe-address",
        envvar=variable,
        metavar="HOST:PORT",
        help="Address of the HTTP probes /livez and /readyz for the kubelet.",
        show_default="off",
    )
    return option


def _devices(variable: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        "--devices",
        envvar=variable,
        metavar="ENTRY,…",
        help="Devices of this node to offer: indexes (0, 0:1), UUIDs or patterns of them (GPU-4a*), gpu, instance, "
        "model=PATTERN, profile=PATTERN; !ENTRY excludes. A GPU includes its instances.",
        show_default="all",
    )
    return option


_CERT_HELP = "Certificate for metrics, in PEM; scrapes are then encrypted (TLS 1.2 or newer)."
_KEY_HELP = "Private key of the certificate, in PEM, without a passphrase."
_CLIENT_CA_HELP = "CA certificates, in PEM; scrapers must present a certificate that one of them signed."

ServiceMetricsAddressOption = Annotated[str | None, _address(_SERVICE, SERVICE_METRICS_ADDRESS)]
ServiceMetricsCertOption = Annotated[Path | None, _file("cert", _SERVICE, _CERT_HELP)]
ServiceMetricsKeyOption = Annotated[Path | None, _file("key", _SERVICE, _KEY_HELP)]
ServiceMetricsClientCaOption = Annotated[Path | None, _file("client-ca", _SERVICE, _CLIENT_CA_HELP)]

PluginMetricsAddressOption = Annotated[str | None, _address(_PLUGIN, PLUGIN_METRICS_ADDRESS)]
PluginMetricsCertOption = Annotated[Path | None, _file("cert", _PLUGIN, _CERT_HELP)]
PluginMetricsKeyOption = Annotated[Path | None, _file("key", _PLUGIN, _KEY_HELP)]
PluginMetricsClientCaOption = Annotated[Path | None, _file("client-ca", _PLUGIN, _CLIENT_CA_HELP)]

DriverMetricsAddressOption = Annotated[str | None, _address(_DRIVER, DRIVER_METRICS_ADDRESS)]
DriverMetricsCertOption = Annotated[Path | None, _file("cert", _DRIVER, _CERT_HELP)]
DriverMetricsKeyOption = Annotated[Path | None, _file("key", _DRIVER, _KEY_HELP)]
DriverMetricsClientCaOption = Annotated[Path | None, _file("client-ca", _DRIVER, _CLIENT_CA_HELP)]

PluginDevicesOption = Annotated[str, _devices("SCRUBBER_PLUGIN_DEVICES")]
DriverDevicesOption = Annotated[str, _devices("SCRUBBER_DRA_DEVICES")]

ServiceProbeAddressOption = Annotated[str, _probes("SCRUBBER_PROBE_ADDRESS")]
PluginProbeAddressOption = Annotated[str, _probes("SCRUBBER_PLUGIN_PROBE_ADDRESS")]
DriverProbeAddressOption = Annotated[str, _probes("SCRUBBER_DRA_PROBE_ADDRESS")]
