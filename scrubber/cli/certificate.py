"""``scrubber certificate``: which certificates there are, what one says, and whether it is the node that says so.

Promise: what is shown of a certificate is what was signed, byte for byte; ``verify`` says yes to nothing but that, and
with ``--key`` it asks nobody. Of an envelope that does not hold, nothing is shown: nobody stands for what it says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.asking import run
from scrubber.cli.certified import Signed, shape, shown, standing, stated, verdict_rows
from scrubber.cli.exits import Exit
from scrubber.cli.naming import find
from scrubber.cli.options import OutputOption, SocketOption, device_name, new_app
from scrubber.cli.output import Answer, Column, Output, complain, emit, note, tell
from scrubber.domain.errors import Away, InvalidRequest
from scrubber.domain.quantities import utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["app"]

app = new_app("Show, export and verify what was proved about devices. Certificates are signed with the node's key.")

_LONGEST_KEY = 64 * 1024

CertificateArgument = Annotated[
    str | None,
    typer.Argument(metavar="CERT", help="Its whole id, as certificate list and history show it.", show_default=False),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        parser=device_name,
        help="Instead of an id: the certificate of this device, or the one that its newest pod started on.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class _Found:
    """A certificate of the service's, its key, and the device as an index where that is known."""

    signed: pb.SignedCertificate
    public_key: str = ""
    index: str = ""


@app.command("list")
def list_(socket: SocketOption = Path("/run/scrubber"), output: OutputOption = Output.TABLE) -> None:
    """List the certificates that devices have. And those that pods which are not over yet were started on."""

    async def ask() -> tuple[list[_Found], list[str]]:
        from scrubber.api.client import ReadClient

        found, notes = [], []
        async with ReadClient(socket) as client:
            for device in (await client.devices()).devices:
                for id_ in _ids(device):
                    try:
                        found.append(_Found(await client.certificate(id_), index=device.index))
                    except InvalidRequest:
                        notes.append(f"{id_} of device {device.index} is not in the ledger any more.")
        return found, notes

    found, notes = run(ask())
    emit(
        Answer(
            data=[shape(each.signed, None) for each in found],
            names=[each.signed.certificate.id for each in found],
            header=(
                Column("INDEX"),
                Column("DEVICE", ids=True),
                Column("CERTIFICATE"),
                Column("PATH"),
                Column("ISSUED", drop=1),
                Column("STANDING"),
                Column("KEY", drop=2),
            ),
            rows=[_row(each) for each in found],
            empty="No device has a certificate, and no pod was started on one. scrubber scrub DEVICE makes one.",
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
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what a certificate says and what became of it. Exits with 0 only if the node's key signed it."""
    found = _one(certificate, device, socket)
    verdict = _checked(found)
    emit(
        Answer(
            data=shape(found.signed, verdict),
            names=[found.signed.certificate.id],
            header=(),
            rows=list(shown(found.signed, verdict)),
            kind="Certificate",
        ),
        output,
    )
    raise typer.Exit(Exit.OK if verdict is Signed.VALID else Exit.NEGATIVE)


@app.command()
def export(
    certificate: CertificateArgument = None,
    device: DeviceOption = None,
    socket: SocketOption = Path("/run/scrubber"),
) -> None:
    """Write a certificate as a DSSE envelope. That is one JSON document, which can be verified anywhere."""
    from scrubber.adapters.signing.envelope import write_envelope

    found = _one(certificate, device, socket).signed
    if not found.certificate.signature:
        complain(
            f"{found.certificate.id} has no signature, and every certificate is issued with one: the ledger may have been "
            "changed. Run: scrubber audit verify"
        )
        raise typer.Exit(Exit.NEGATIVE)
    written = write_envelope(found.payload, found.certificate.key_id, found.certificate.signature)
    emit(_document(written), Output.TABLE)


@app.command()
def key(socket: SocketOption = Path("/run/scrubber")) -> None:
    """Print the node's public key. Whoever verifies elsewhere needs it, by a way that he trusts."""

    async def ask() -> pb.ServiceInfo:
        return await _info(socket)

    info = run(ask())
    tell(f"The key of node {info.node} is {info.key_id}.")
    emit(_document(info.public_key), Output.TABLE)


@app.command()
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What certificate export wrote; - reads standard input.")],
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="The node's public key, as certificate key prints it. Then nobody is asked.",
            show_default="the key that the service on this node has now",
        ),
    ] = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Say whether a node certified this. Exits with 0 if it did, 1 if not, 2 if the file cannot be read."""
    from scrubber.adapters.signing.envelope import LONGEST, read_envelope

    envelope = read_envelope(_read(file, LONGEST))
    public_key = _known_key(key_file) if key_file is not None else run(_asked_key(socket))

    from scrubber.adapters.signing.verdict import judge

    verdict = judge(envelope, public_key)
    said = verdict.certificate
    emit(
        Answer(
            data={
                "valid": said is not None,
                "reason": verdict.reason or None,
                "key_id": verdict.key_id,
                "signed_by": [each.key_id for each in envelope.signatures],
                "certificate": None if said is None else stated(said),
            },
            names=[] if said is None else [said.id],
            header=(),
            rows=list(verdict_rows(verdict)),
            kind="CertificateVerdict",
        ),
        output,
    )
    raise typer.Exit(Exit.NEGATIVE if said is None else Exit.OK)


def _ids(device: pb.Device) -> Iterator[str]:
    """Of the device's unused certificate, then of those that its pods were started on, the newest first."""
    ids = [device.certificate.id] if device.HasField("certificate") else []
    ids += [each.certificate for each in reversed(device.tenancies) if each.certificate]
    yield from dict.fromkeys(ids)


def _one(certificate: str | None, device: str | None, socket: Path) -> _Found:
    """The certificate that was asked for, with the service's key."""
    if certificate and device:
        raise typer.BadParameter("give either the id of a certificate or --device.", param_hint="--device")
    if not certificate and not device:
        raise typer.BadParameter("give the id of a certificate, or a device by --device.", param_hint="CERT")

    async def ask() -> _Found | str:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            id_ = certificate
            if not id_:
                asked = find((await client.devices()).devices, device or "")
                id_ = next(_ids(asked), None)
                if id_ is None:
                    return f"Device {asked.index} ({asked.id}) has no certificate now: it is {asked.state}."
            return _Found(await client.certificate(id_), (await client.info()).public_key)

    found = run(ask())
    if isinstance(found, str):
        complain(found)
        raise typer.Exit(Exit.NEGATIVE)
    return found


async def _info(socket: Path) -> pb.ServiceInfo:
    from scrubber.api.client import ReadClient

    async with ReadClient(socket) as client:
        info = await client.info()
    if not info.public_key:
        raise Away("The scrub service on this node is an older one: it has no key, and signs no certificates.")
    return info


async def _asked_key(socket: Path) -> str:
    info = await _info(socket)
    note(
        f"No --key was given, so the service on this node was asked for its own: {info.key_id}. That shows whether this "
        "node certified it, as far as this node can be believed."
    )
    return info.public_key


def _known_key(path: Path) -> str:
    try:
        return _read(str(path), _LONGEST_KEY, standard_input=False).decode("ascii")
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"{path} is no public key in PEM form: scrubber certificate key prints the node's."
        ) from None


def _read(name: str, longest: int, *, standard_input: bool = True) -> bytes:
    """What is in a file, or comes on standard input; never more than ``longest`` bytes and one.

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


def _checked(found: _Found) -> Signed:
    from scrubber.adapters.signing import ed25519

    signed = found.signed
    if not signed.certificate.signature:
        return Signed.INVALID
    if not found.public_key:
        return Signed.OTHER_KEY
    # Whose it says that it is decides nothing: whoever could change the ledger could change that as well.
    if ed25519.verify(found.public_key, signed.payload, signed.certificate.signature):
        return Signed.VALID
    ours = ed25519.key_id(found.public_key) == signed.certificate.key_id
    return Signed.INVALID if ours else Signed.OTHER_KEY


def _row(found: _Found) -> Sequence[str]:
    about = found.signed.certificate
    return (
        found.index,
        about.device,
        about.id,
        about.path,
        utc(about.issued_at),
        standing(found.signed),
        about.key_id[:19] or "-",
    )


def _document(text: str) -> Answer:
    """What is written in somebody else's format, and so as it is."""
    return Answer(None, (), (), [(line,) for line in text.splitlines()])
