"""Flags for the metrics of both daemons.

The environment variables differ, because both daemons may run with one environment file on one node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "PLUGIN_DEFAULT_ADDRESS",
    "SERVICE_DEFAULT_ADDRESS",
    "PluginAddressOption",
    "PluginCertOption",
    "PluginClientCaOption",
    "PluginKeyOption",
    "ServiceAddressOption",
    "ServiceCertOption",
    "ServiceClientCaOption",
    "ServiceKeyOption",
]

SERVICE_VARIABLES, PLUGIN_VARIABLES = "SCRUBBER_METRICS", "SCRUBBER_PLUGIN_METRICS"
SERVICE_DEFAULT_ADDRESS, PLUGIN_DEFAULT_ADDRESS = "127.0.0.1:9464", "127.0.0.1:9465"
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


CERT_HELP = "Scrapes are encrypted (TLS 1.2 or newer) under this certificate, in PEM."
KEY_HELP = "The certificate's private key, in PEM and without a passphrase."
CLIENT_CA_HELP = "Who scrapes must show a certificate that one of these has signed, in PEM."

ServiceAddressOption = Annotated[str | None, _address(SERVICE_VARIABLES, SERVICE_DEFAULT_ADDRESS)]
ServiceCertOption = Annotated[Path | None, _file("cert", SERVICE_VARIABLES, CERT_HELP)]
ServiceKeyOption = Annotated[Path | None, _file("key", SERVICE_VARIABLES, KEY_HELP)]
ServiceClientCaOption = Annotated[Path | None, _file("client-ca", SERVICE_VARIABLES, CLIENT_CA_HELP)]

PluginAddressOption = Annotated[str | None, _address(PLUGIN_VARIABLES, PLUGIN_DEFAULT_ADDRESS)]
PluginCertOption = Annotated[Path | None, _file("cert", PLUGIN_VARIABLES, CERT_HELP)]
PluginKeyOption = Annotated[Path | None, _file("key", PLUGIN_VARIABLES, KEY_HELP)]
PluginClientCaOption = Annotated[Path | None, _file("client-ca", PLUGIN_VARIABLES, CLIENT_CA_HELP)]
