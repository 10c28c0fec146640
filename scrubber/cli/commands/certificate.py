"""``scrubber certificate``: list, show, export and verify certificates.

Invariants: the output about a certificate is what was signed, byte for byte. ``verify`` accepts only that, and with
``--key`` it sends no request. The content of an invalid envelope is not shown, because it is not vouched for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.app import App
from scrubber.cli.client_run import resolve_device, run
from scrubber.cli.completers import complete_certificate, complete_device
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import NoHeadersOption, OutputOption, SocketOption, device_name
from scrubber.cli.render.certificate import (
    SignatureCheck,
    certificate_json,
    certificate_rows,
    certificate_status,
    claim_json,
    verdict_rows,
)
from scrubber.cli.render.output import (
    CommandResult,
    OutputColumn,
    OutputFormat,
    print_error,
    print_message,
    print_note,
    print_result,
)
from scrubber.domain.errors import InvalidRequest, Unavailable
from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["app"]

app = App("Show, export and verify certificates.\n\nCertificates are signed with the node's key.")

_MAX_KEY_BYTES = 64 * 1024

CertificateArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CERTIFICATE",
        autocompletion=complete_certificate,
        help="Complete id of the certificate, as shown by certificate list and history.",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        parser=device_name,
        autocompletion=complete_device,
        help="Use the certificate of this device: its unused one, otherwise the one that its newest pod consumed.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class _FetchedCertificate:
    """A certificate from the service, its key, and the index of the device where that is known."""

    signed: pb.SignedCertificate
    public_key: str = ""
    index: str = ""


@app.command("list")
def list_(
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """List the certificates of devices and of their current pods.

    These are the unused certificate of each device, and those with which pods that have not ended were started.
    """

    async def ask() -> tuple[list[_FetchedCertificate], list[str]]:
        from scrubber.api.client import ReadClient

        found, notes = [], []
        async with ReadClient(socket) as client:
            for device in (await client.devices()).devices:
                for id_ in _certificate_ids(device):
                    try:
                        found.append(_FetchedCertificate(await client.certificate(id_), index=device.index))
                    except InvalidRequest:
                        notes.append(f"Certificate {id_} of device {device.index} is no longer in the ledger.")
        return found, notes

    found, notes = run(ask())
    print_result(
        CommandResult(
            data=[certificate_json(each.signed, None) for each in found],
            names=[each.signed.certificate.id for each in found],
            header=(
                OutputColumn("INDEX"),
                OutputColumn("DEVICE", holds_ids=True),
                OutputColumn("CERTIFICATE"),
                OutputColumn("PATH"),
                OutputColumn("ISSUED", wide=True),
                OutputColumn("STATUS"),
                OutputColumn("KEY", wide=True),
            ),
            rows=[_row(each) for each in found],
            empty_message="No device has a certificate, and no pod was started with one. To get one, run `scrubber scrub DEVICE`.",
            notes=notes,
            kind="Certificate",
        ),
        output,
        no_headers=no_headers,
    )


@app.command()
def show(
    certificate: CertificateArgument = None,
    device: DeviceOption = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show a certificate and its status.

    Exits with 0 only if the node's current key signed it.
    """
    found = _fetch_certificate(certificate, device, socket)
    verdict = _check_signature(found)
    print_result(
        CommandResult(
            data=certificate_json(found.signed, verdict),
            names=[found.signed.certificate.id],
            header=(),
            rows=list(certificate_rows(found.signed, verdict)),
            kind="Certificate",
        ),
        output,
    )
    raise typer.Exit(ExitCode.OK if verdict is SignatureCheck.VALID else ExitCode.FAILED)


@app.command()
def export(
    certificate: CertificateArgument = None,
    device: DeviceOption = None,
    socket: SocketOption = Path("/run/scrubber"),
) -> None:
    """Write a certificate as a DSSE envelope.

    The envelope is one JSON document that can be verified anywhere.
    """
    from scrubber.adapters.signing.envelope import write_envelope

    found = _fetch_certificate(certificate, device, socket).signed
    if not found.certificate.signature:
        print_error(
            f"Certificate {found.certificate.id} has no signature, although every certificate is signed when it is issued: "
            "the ledger may have been changed. Run `scrubber audit verify` to check it."
        )
        raise typer.Exit(ExitCode.FAILED)
    written = write_envelope(found.payload, found.certificate.key_id, found.certificate.signature)
    print_result(_verbatim(written), OutputFormat.TABLE)


@app.command()
def key(socket: SocketOption = Path("/run/scrubber")) -> None:
    """Print the node's public key.

    To verify certificates elsewhere, copy the key there over a channel that you trust.
    """

    async def ask() -> pb.ServiceInfo:
        return await _fetch_service_info(socket)

    info = run(ask())
    print_message(f"The key of node {info.node_name} is {info.key_id}.")
    print_result(_verbatim(info.public_key), OutputFormat.TABLE)


@app.command()
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Output of certificate export, or - for standard input.")],
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Public key of the node, as printed by certificate key. No service is needed then.",
            show_default="the current key of the service on this node",
        ),
    ] = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Verify an exported certificate.

    Exits with 0 if the node's key signed it, 1 if not, 2 if the file cannot be read.
    """
    from scrubber.adapters.signing.envelope import MAX_ENVELOPE_BYTES, read_envelope

    envelope = read_envelope(_read_limited(file, MAX_ENVELOPE_BYTES))
    public_key = _read_key_file(key_file) if key_file is not None else run(_fetch_service_key(socket))

    from scrubber.adapters.signing.verification import verify_envelope

    verdict = verify_envelope(envelope, public_key)
    certificate = verdict.certificate
    print_result(
        CommandResult(
            data={
                "valid": certificate is not None,
                "reason": verdict.reason or None,
                "keyID": verdict.key_id,
                "signatureKeyIDs": [each.key_id for each in envelope.signatures],
                "certificate": None if certificate is None else claim_json(certificate),
            },
            names=[] if certificate is None else [certificate.id],
            header=(),
            rows=list(verdict_rows(verdict)),
            kind="CertificateVerdict",
        ),
        output,
    )
    raise typer.Exit(ExitCode.FAILED if certificate is None else ExitCode.OK)


def _certificate_ids(device: pb.Device) -> Iterator[str]:
    """Yield the ids of the device's unused certificate and of those that its pods started on, the newest first."""
    ids = [device.certificate.id] if device.HasField("certificate") else []
    ids += [each.certificate_id for each in reversed(device.open_grants) if each.certificate_id]
    yield from dict.fromkeys(ids)


def _fetch_certificate(certificate: str | None, device: str | None, socket: Path) -> _FetchedCertificate:
    """Return the requested certificate, with the service's key."""
    if certificate and device:
        raise typer.BadParameter("cannot be combined with CERTIFICATE; pass one of the two.", param_hint="--device")
    if not certificate and not device:
        raise typer.BadParameter(
            "is missing; pass the id of a certificate, or a device with --device.", param_hint="CERTIFICATE"
        )

    async def ask() -> _FetchedCertificate | str:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            id_ = certificate
            if not id_:
                chosen = resolve_device((await client.devices()).devices, device or "")
                id_ = next(_certificate_ids(chosen), None)
                if id_ is None:
                    return f"Device {chosen.index} ({chosen.id}) has no certificate; its state is {chosen.state}."
            return _FetchedCertificate(await client.certificate(id_), (await client.service_info()).public_key)

    found = run(ask())
    if isinstance(found, str):
        print_error(found)
        raise typer.Exit(ExitCode.FAILED)
    return found


async def _fetch_service_info(socket: Path) -> pb.ServiceInfo:
    from scrubber.api.client import ReadClient

    async with ReadClient(socket) as client:
        info = await client.service_info()
    if not info.public_key:
        raise Unavailable(
            "The scrub service on this node is an older version without a signing key; update and restart it."
        )
    return info


async def _fetch_service_key(socket: Path) -> str:
    try:
        info = await _fetch_service_info(socket)
    except Unavailable as error:
        raise Unavailable(
            f"{error} To verify the certificate without the service, pass the public key of its node with --key."
        ) from error
    print_note(
        f"Using the key of the service on this node ({info.key_id}), because no --key was given. The result is only as "
        "trustworthy as this node."
    )
    return info.public_key


def _read_key_file(path: Path) -> str:
    try:
        return _read_limited(str(path), _MAX_KEY_BYTES, standard_input=False).decode("ascii")
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"{path} is not a public key in PEM format. Run `scrubber certificate key` on the node to get its key."
        ) from None


def _read_limited(name: str, longest: int, *, standard_input: bool = True) -> bytes:
    """Read a file or standard input, at most ``longest`` bytes and one.

    Raises:
        InvalidRequest: it cannot be read, or is longer.
    """
    called = "standard input" if name == "-" and standard_input else name
    try:
        if called != name:
            found = sys.stdin.buffer.read(longest + 1) if sys.stdin is not None else b""
        else:
            with Path(name).open("rb") as file:
                found = file.read(longest + 1)
    except OSError as error:
        raise InvalidRequest(f"Cannot read {called}: {error.strerror}.") from None
    if len(found) > longest:
        raise InvalidRequest(f"Cannot read {called}: it is longer than {longest} bytes.")
    return found


def _check_signature(found: _FetchedCertificate) -> SignatureCheck:
    from scrubber.adapters.signing import ed25519

    signed = found.signed
    if not signed.certificate.signature:
        return SignatureCheck.INVALID
    if not found.public_key:
        return SignatureCheck.OTHER_KEY
    # The key id in the certificate proves nothing: an attacker who can change the ledger could change it as well.
    if ed25519.verify_signature(found.public_key, signed.payload, signed.certificate.signature):
        return SignatureCheck.VALID
    ours = ed25519.key_id(found.public_key) == signed.certificate.key_id
    return SignatureCheck.INVALID if ours else SignatureCheck.OTHER_KEY


def _row(found: _FetchedCertificate) -> Sequence[str]:
    about = found.signed.certificate
    return (
        found.index,
        about.device_id,
        about.id,
        about.path,
        format_utc(about.issued_at),
        certificate_status(found.signed),
        about.key_id[:19] or "-",
    )


def _verbatim(text: str) -> CommandResult:
    """Return text in a third-party format, which is printed unchanged."""
    return CommandResult(None, (), (), [(line,) for line in text.splitlines()])
