"""The flags that say how a daemon's metrics are scraped, the same for both; the variables differ, because both may run
with one file of variables on one node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "PLUGIN_ADDRESS",
    "SERVICE_ADDRESS",
    "PluginAddressOption",
    "PluginCertOption",
    "PluginClientCaOption",
    "PluginKeyOption",
    "ServiceAddressOption",
    "ServiceCertOption",
    "ServiceClientCaOption",
    "ServiceKeyOption",
]

SERVICE, PLUGIN = "SCRUBBER_METRICS", "SCRUBBER_PLUGIN_METRICS"
SERVICE_ADDRESS, PLUGIN_ADDRESS = "127.0.0.1:9464", "127.0.0.1:9465"
"""Where they are served when nothing is said."""


def _address(variables: str, default: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        "--metrics-address",
        envvar=f"{variables}_ADDRESS",
        metavar="HOST:PORT",
        help="Where Prometheus scrapes; off: nowhere. The default is done without when it is taken.",
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


CERT = "Scrapes are encrypted (TLS 1.2 or newer) under this certificate, in PEM."
KEY = "The certificate's private key, in PEM and without a passphrase."
CLIENT_CA = "Who scrapes must show a certificate that one of these has signed, in PEM."

ServiceAddressOption = Annotated[str | None, _address(SERVICE, SERVICE_ADDRESS)]
ServiceCertOption = Annotated[Path | None, _file("cert", SERVICE, CERT)]
ServiceKeyOption = Annotated[Path | None, _file("key", SERVICE, KEY)]
ServiceClientCaOption = Annotated[Path | None, _file("client-ca", SERVICE, CLIENT_CA)]

PluginAddressOption = Annotated[str | None, _address(PLUGIN, PLUGIN_ADDRESS)]
PluginCertOption = Annotated[Path | None, _file("cert", PLUGIN, CERT)]
PluginKeyOption = Annotated[Path | None, _file("key", PLUGIN, KEY)]
PluginClientCaOption = Annotated[Path | None, _file("client-ca", PLUGIN, CLIENT_CA)]
