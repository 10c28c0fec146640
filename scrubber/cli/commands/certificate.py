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

from scrubber.cli.client_run import resolve_device, run
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import OutputOption, SocketOption, device_name, new_app
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

app = new_app("Show, export and verify certificates. Certificates are signed with the node's key.")

_MAX_KEY_BYTES = 64 * 1024

CertificateArgument = Annotated[
    str | None,
    typer.Argument(metavar="CERT", help="Complete id, as shown by certificate list and history.", show_default=False),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        parser=device_name,
        help="Instead of an id: the certificate of this device, or the one that its newest pod consumed.",
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
def list_(socket: SocketOption = Path("/run/scrubber"), output: OutputOption = OutputFormat.TABLE) -> None:
    """List the certificates that devices have. And those that pods which are not over yet were started on."""

    async def ask() -> tuple[list[_FetchedCertificate], list[str]]:
        from scrubber.api.client import ReadClient

        found, notes = [], []
        async with ReadClient(socket) as client:
            for device in (await client.devices()).devices:
                for id_ in _certificate_ids(device):
                    try:
                        found.append(_FetchedCertificate(await client.certificate(id_), index=device.index))
                    except InvalidRequest:
                        notes.append(f"{id_} of device {device.index} is not in the ledger any more.")
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
                OutputColumn("ISSUED", drop_priority=1),
                OutputColumn("STATUS"),
                OutputColumn("KEY", drop_priority=2),
            ),
            rows=[_row(each) for each in found],
            empty_message="No device has a certificate, and no pod was started on one. scrubber scrub DEVICE makes one.",
            notes=notes,
            kind="Certificate",
        ),
        output,
    )


@app.command()
def show(
    certificate: CertificateArgument = None,
    device: DeviceOption = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show what a certificate says and what became of it. Exits with 0 only if the node's key signed it."""
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
    """Write a certificate as a DSSE envelope. That is one JSON document, which can be verified anywhere."""
    from scrubber.adapters.signing.envelope import write_envelope

    found = _fetch_certificate(certificate, device, socket).signed
    if not found.certificate.signature:
        print_error(
            f"{found.certificate.id} has no signature, and every certificate is issued with one: the ledger may have been "
            "changed. Run: scrubber audit verify"
        )
        raise typer.Exit(ExitCode.FAILED)
    written = write_envelope(found.payload, found.certificate.key_id, found.certificate.signature)
    print_result(_verbatim(written), OutputFormat.TABLE)


@app.command()
def key(socket: SocketOption = Path("/run/scrubber")) -> None:
    """Print the node's public key. Whoever verifies elsewhere needs it, by a way that he trusts."""

    async def ask() -> pb.ServiceInfo:
        return await _fetch_service_info(socket)

    info = run(ask())
    print_message(f"The key of node {info.node_name} is {info.key_id}.")
    print_result(_verbatim(info.public_key), OutputFormat.TABLE)


@app.command()
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Output of certificate export; - reads standard input.")],
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Public key of the node, as printed by certificate key. The service is then not queried.",
            show_default="the current key of the service on this node",
        ),
    ] = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Say whether a node certified this. Exits with 0 if it did, 1 if not, 2 if the file cannot be read."""
    from scrubber.adapters.signing.envelope import MAX_ENVELOPE_BYTES, read_envelope

    envelope = read_envelope(_read_limited(file, MAX_ENVELOPE_BYTES))
    public_key = _read_key_file(key_file) if key_file is not None else run(_fetch_service_key(socket))

    from scrubber.adapters.signing.verification import verify_envelope

    verdict = verify_envelope(envelope, public_key)
    said = verdict.certificate
    print_result(
        CommandResult(
            data={
                "valid": said is not None,
                "reason": verdict.reason or None,
                "keyID": verdict.key_id,
                "signatureKeyIDs": [each.key_id for each in envelope.signatures],
                "certificate": None if said is None else claim_json(said),
            },
            names=[] if said is None else [said.id],
            header=(),
            rows=list(verdict_rows(verdict)),
            kind="CertificateVerdict",
        ),
        output,
    )
    raise typer.Exit(ExitCode.FAILED if said is None else ExitCode.OK)


def _certificate_ids(device: pb.Device) -> Iterator[str]:
    """Yield the ids of the device's unused certificate and of those that its pods started on, the newest first."""
    ids = [device.certificate.id] if device.HasField("certificate") else []
    ids += [each.certificate_id for each in reversed(device.open_grants) if each.certificate_id]
    yield from dict.fromkeys(ids)


def _fetch_certificate(certificate: str | None, device: str | None, socket: Path) -> _FetchedCertificate:
    """Return the requested certificate, with the service's key."""
    if certificate and device:
        raise typer.BadParameter("give either the id of a certificate or --device.", param_hint="--device")
    if not certificate and not device:
        raise typer.BadParameter("give the id of a certificate, or a device by --device.", param_hint="CERT")

    async def ask() -> _FetchedCertificate | str:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            id_ = certificate
            if not id_:
                asked = resolve_device((await client.devices()).devices, device or "")
                id_ = next(_certificate_ids(asked), None)
                if id_ is None:
                    return f"Device {asked.index} ({asked.id}) has no certificate now: it is {asked.state}."
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
        raise Unavailable("The scrub service on this node is an older one: it has no key, and signs no certificates.")
    return info


async def _fetch_service_key(socket: Path) -> str:
    info = await _fetch_service_info(socket)
    print_note(
        f"No --key was given, so the service on this node was asked for its own: {info.key_id}. That shows whether this "
        "node certified it, as far as this node can be believed."
    )
    return info.public_key


def _read_key_file(path: Path) -> str:
    try:
        return _read_limited(str(path), _MAX_KEY_BYTES, standard_input=False).decode("ascii")
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"{path} is no public key in PEM form: scrubber certificate key prints the node's."
        ) from None


def _read_limited(name: str, longest: int, *, standard_input: bool = True) -> bytes:
    """Read a file or standard input, at most ``longest`` bytes and one.

    Raises:
        InvalidRequest: it cannot be read, or is longer.
    """
    called = "Standard input" if name == "-" and standard_input else name
    try:
        if called != name:
            found = sys.stdin.buffer.read(longest + 1) if sys.stdin is not None else b""
        else:
            with Path(name).open("rb") as file:
                found = file.read(longest + 1)
    except OSError as error:
        raise InvalidRequest(f"{called} cannot be read: {error.strerror}.") from None
    if len(found) > longest:
        raise InvalidRequest(f"{called} is longer than {longest} bytes, so it is not what belongs there.")
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
