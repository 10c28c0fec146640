"""The commands' JSON output and its documentation: both have the same keys.

A new kind needs a row in ``docs/cli-json.md`` for each key, and a command line in :data:`WRITTEN_BY` that shows them
all.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from scrubber.adapters.signing.ed25519 import EphemeralKey
from scrubber.adapters.signing.envelope import write_envelope
from scrubber.adapters.sim import shape
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.status import status_from_error
from scrubber.cli.render import json_objects
from scrubber.domain.errors import DeviceBusy
from scrubber.domain.statement import statement
from tests.adapters.command_rig import SAMPLE
from tests.cli.audit_stage import grow, reading
from tests.cli.stage import Service, run, serving
from tests.cli.test_certificate import SLOW, signed
from tests.cli_samples import CERTIFICATE, DEVICE, ENTRY, SCRUB

ROOT = Path(__file__).parents[2]
KEY = EphemeralKey()

WRITTEN_BY: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "Device": (("device", "3"), ("devices",), ("quarantine", "3", "--reason", "why")),
    "HistoryEntryList": (("history",), ("history", "--limit", "1")),
    "HistoryEntry": (("history",),),
    "ScrubResult": (("scrub", "3"), ("scrub", "3", "4")),
    "QuarantineResult": (("quarantine", "3", "4", "--reason", "why"),),
    "ResetPlan": (("reset-plan", "3"),),
    "Baseline": (("baseline", "show"), ("baseline", "show", "3")),
    "Certificate": (("certificate", "show", SLOW.id), ("certificate", "list")),
    "CertificateVerdict": (
        ("certificate", "verify", "{dir}/good.json", "--key", "{dir}/key.pem"),
        ("certificate", "verify", "{dir}/bad.json", "--key", "{dir}/key.pem"),
    ),
    "AuditReport": (("audit", "verify", "--head", f"1:{'a' * 64}"),),
    "AuditHead": (("audit", "head"),),
    "AuditLog": (("audit", "export"),),
    "AuditRow": (("audit", "export"),),
    "NodeYield": (("resume", "--reason", "why"),),
    "DoctorReport": (
        ("doctor", "--node-root", "{dir}"),
        ("doctor", "--node-root", "{dir}/operator", "--socket-dir", "{dir}/nothing"),
    ),
    "BackendCheck": (("backend", "check", "--config", "{dir}/command.yaml"),),
    "PolicyCheck": (("policy", "check", "default"),),
    "Policy": (("policy", "show", "{dir}/policy.yaml"),),
    "PolicyExplanation": (
        ("policy", "explain", "--xid", "95"),
        ("policy", "explain", "{dir}/policy.yaml", "--model", "NVIDIA L4"),
    ),
    "Xid": (("policy", "xids"),),
    "SimDevice": (("sim", "create", "--dir", "{dir}/sim"), ("sim", "split", "--dir", "{dir}/sim", "--device", "0")),
    "Version": (("version", "--service"),),
}
OLDER = pb.HistoryEntry(sequence=40, hash="cd" * 32, event="service.started", timestamp=1.0, actor="service")
NEVER_FILLED = {"AuditRow": {"scrubID"}}
BARE = pb.Device(
    id="GPU-4", index="4", model="m", state="dirty", hygiene="dirty", health="healthy", open_grants=DEVICE.open_grants
)
"""A released device with all other fields unset."""
OTHER_FORMATS = {"audit export"}
"""Commands that write JSON without ``-o json``."""


@dataclass
class Everything(Service):
    """A service with every field set."""

    devices: list[pb.Device] = field(default_factory=lambda: [DEVICE, BARE])
    entries: list[pb.HistoryEntry] = field(default_factory=lambda: [ENTRY, OLDER])

    async def Scrub(self, request: Any, context: Any) -> AsyncIterator[pb.ScrubUpdate]:
        if request.device not in ("3", DEVICE.id):
            status = status_from_error(DeviceBusy("It is in use."), public=False)
            await context.abort(status.code, status.details, status.metadata)
        yield pb.ScrubUpdate(
            result=pb.ScrubResult(scrub=SCRUB, certificate=CERTIFICATE, device=DEVICE, unexplained_residue="12 bytes.")
        )

    async def Quarantine(self, request: Any, context: Any) -> pb.DeviceResponse:
        if request.device not in ("3", DEVICE.id):
            status = status_from_error(DeviceBusy("It is in use."), public=False)
            await context.abort(status.code, status.details, status.metadata)
        return pb.DeviceResponse(device=DEVICE, previous_cause=DEVICE.cause)

    async def ResumeNode(self, request: Any, context: Any) -> pb.NodeYield:
        return self.info.node_yield

    async def GetResetPlan(self, request: Any, context: Any) -> pb.ResetPlan:
        return pb.ResetPlan(
            device_id=DEVICE.id,
            method="m",
            actions=["a"],
            unavailable_reason="No.",
            blockers=["b"],
            also_reset_ids=["GPU-4"],
            agents=["c"],
            pause_ways=[pb.PauseOffer(way="labels", actions=["d"])],
        )

    async def GetCertificate(self, request: Any, context: Any) -> pb.SignedCertificate:
        found = signed(SLOW, "consumed", KEY)
        found.certificate.next_grant = 4
        found.certificate.base_certificate_id = "cert-1"
        return found


@pytest.fixture
async def sockets(short_tmp: Path) -> AsyncIterator[Path]:
    everything = Everything()
    request = pb.YieldRequest(requester="plugin", reason="label is paused", actor="plugin", since=1000.0)
    everything.info = pb.ServiceInfo(
        version="0.1.0",
        node_name="node-1",
        key_id=KEY.key_id,
        public_key=KEY.public_key,
        node_yield=pb.NodeYield(requests=[request], remaining_pids=[4711]),
    )
    async with serving(short_tmp, everything):
        yield short_tmp


@pytest.fixture
async def audit_log(short_tmp: Path) -> AsyncIterator[Path]:
    """Provide the sockets of a service whose audit log was pruned."""
    directory = short_tmp / "audit log"
    directory.mkdir()
    async with reading(directory) as node:
        await grow(node.ledger, 700)
        yield directory


@pytest.fixture
def files(tmp_path: Path) -> Path:
    payload = statement(SLOW)
    (tmp_path / "key.pem").write_text(KEY.public_key)
    (tmp_path / "good.json").write_text(write_envelope(payload, KEY.key_id, KEY.sign(payload)))
    (tmp_path / "bad.json").write_text(write_envelope(payload, KEY.key_id, KEY.sign(b"something else")))
    (tmp_path / "policy.yaml").write_text(
        "name: mine\nsettings: {power_limit_watts: 300}\nerrors: {reset: [7]}\nxids: {reset: [94]}\noverrides:\n- name: small\n  models: [NVIDIA L4]\n  sharing: never\n"
    )
    shape.create(tmp_path / "managed", devices=1, memory=shape.MIB, node_name="node-1")
    (tmp_path / "command.yaml").write_text(f"program: {SAMPLE}\nenvironment: {{SIMULATED_NODE: {tmp_path}/managed}}\n")
    # A node of the GPU Operator in a namespace of its own, of an unknown version, with NVSentinel.
    for pod in ("gpus_nvidia-operator-validator-x_uid-1", "nvsentinel_platform-connectors-x_uid-2"):
        (tmp_path / "operator/var/log/pods" / pod).mkdir(parents=True)
    (tmp_path / "operator/run/nvidia/validations").mkdir(parents=True)
    (tmp_path / "operator/run/nvidia/validations/toolkit-ready").touch()
    return tmp_path


# -- the documentation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    type: str
    meaning: str

    @property
    def nullable(self) -> bool:
        return self.type.endswith(" or null")

    @property
    def link(self) -> str | None:
        """The section that documents the value, if another one does."""
        found = re.search(r"\]\(#([a-z-]+)\)", self.type)
        return None if found is None else found[1]


def page() -> Mapping[str, Mapping[str, Row]]:
    """Return the rows of each table by key, by heading as a link names it."""
    sections: dict[str, dict[str, Row]] = {}
    rows: dict[str, Row] = {}
    for line in (ROOT / "docs/cli-json.md").read_text().splitlines():
        if line.startswith("#"):
            rows = sections.setdefault(line.lstrip("# ").lower().replace(" ", "-"), {})
        elif found := re.fullmatch(r"\| `([^`]+)` \| (.+?) \| (.*?) ?\|", line):
            assert found[1] not in rows, f"{found[1]} is there twice"
            rows[found[1]] = Row(found[2], found[3])
    return sections


PAGE = page()
SIMPLE: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "time": (str,),
    "whole number": (int,),
    "number": (int, float),
    "true or false": (bool,),
    "map": (dict,),
    "object": (dict,),
    "list of text": (list,),
    "list of whole numbers": (list,),
    "list of objects": (list,),
    "list of maps": (list,),
}


@dataclass
class Compared:
    """What was found of a section in the output."""

    section: str
    seen: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def compare(self, value: Mapping[str, Any], *, also: str | None = None) -> None:
        rows = {**PAGE[self.section], **(PAGE[also] if also is not None else {})}
        self._object(value, rows, "")

    def _object(self, value: Mapping[str, Any], rows: Mapping[str, Row], path: str) -> None:
        depth = path.count(".")
        here = {key for key in rows if key.startswith(path) and key.count(".") == depth}
        self.wrong += [f"{path}{name} is not in the page" for name in value if f"{path}{name}" not in rows]
        self.wrong += [
            f"{key} is in the page and not there"
            for key in here
            if key.removeprefix(path) not in value and not rows[key].meaning.startswith("only in")
        ]
        for name, each in value.items():
            if f"{path}{name}" in rows:
                self._value(each, f"{path}{name}", rows)

    def _value(self, value: Any, key: str, rows: Mapping[str, Row]) -> None:
        row = rows[key]
        self.seen.add(key)
        if value is None:
            if not row.nullable:
                self.wrong.append(f"{key} is null")
            return
        if value not in ([], {}):
            self.filled.add(key)
        if value == "" and self.section not in ("auditlog", "auditrow"):
            self.wrong.append(f"{key} is an empty text")
        if row.link is not None:
            for each in value if isinstance(value, list) else [value]:
                inner = Compared(row.link)
                inner.compare(each)
                self.wrong += [f"{key}: {what}" for what in inner.wrong]
            return
        self._simple(value, key, row.type.removesuffix(" or null"), rows)

    def _simple(self, value: Any, key: str, type_: str, rows: Mapping[str, Row]) -> None:
        is_number = type_ in ("whole number", "number")
        expected: Any = SIMPLE[type_]
        if (
            not isinstance(value, expected)
            or (is_number and isinstance(value, bool))
            or not is_written_as(value, type_)
        ):
            self.wrong.append(f"{key} is {value!r}, no {type_}")
        elif type_ == "object":
            self._object(value, rows, f"{key}.")
        elif type_ == "list of objects":
            for each in value:
                self._object(each, rows, f"{key}[].")


def is_written_as(value: object, type_: str) -> bool:
    """Whether a time is one of RFC 3339, in UTC to the microsecond; everything else is."""
    return type_ != "time" or bool(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", str(value)))


def documents(out: str) -> Iterator[Mapping[str, Any]]:
    """Yield the documents in ``out``: one, or one a line."""
    try:
        yield json.loads(out)
    except ValueError:
        yield from (json.loads(line) for line in out.splitlines())


async def written(kind: str, sockets: Path, files: Path) -> list[Mapping[str, Any]]:
    """Return every document of ``kind`` that the commands write."""
    found: list[Mapping[str, Any]] = []
    for words in WRITTEN_BY[kind]:
        as_json = () if " ".join(words) in OTHER_FORMATS else ("-o", "json")
        ended = await run(sockets, *(each.format(dir=files) for each in words), *as_json)
        for document in documents(ended.out):
            assert document["apiVersion"] == "cli.scrubber.dev/v1"
            if document["kind"] == kind:
                found.append({name: document[name] for name in document if name not in ("apiVersion", "kind")})
            elif document["kind"] == f"{kind}List":
                assert set(document) == {
                    "apiVersion",
                    "kind",
                    "items",
                    *(key for key in PAGE.get(document["kind"].lower(), ()) if "." not in key),
                }
                found.extend(document["items"])
            else:
                assert len(WRITTEN_BY[kind]) == 1, f"{words} wrote {document['kind']}"
    return found


@pytest.mark.parametrize("kind", WRITTEN_BY)
async def test_written_json_keys_equal_the_documented_keys(
    kind: str, sockets: Path, audit_log: Path, files: Path
) -> None:
    compared = Compared(kind.lower())
    for each in await written(kind, audit_log if kind.startswith("Audit") else sockets, files):
        compared.compare(each, also="a-certificate" if kind == "Certificate" else None)
    assert compared.wrong == []
    assert compared.seen >= set(PAGE[kind.lower()]), "in the page, and never written"
    assert compared.filled | NEVER_FILLED.get(kind, set()) >= set(PAGE[kind.lower()]), (
        "never seen with anything in it: show it in WRITTEN_BY"
    )


@pytest.mark.parametrize(
    ("part", "value"),
    [("a-certificate", json_objects.certificate(CERTIFICATE)), ("a-scrub", json_objects.scrub(SCRUB))],
)
def test_keys_of_a_nested_object_equal_the_documented_keys(part: str, value: Mapping[str, Any]) -> None:
    compared = Compared(part)
    compared.compare(value)
    assert (compared.wrong, compared.filled) == ([], set(PAGE[part]))


def test_every_json_kind_is_tested_and_documented() -> None:
    named = set()
    for file in (ROOT / "scrubber/cli").rglob("*.py"):
        named |= set(re.findall(r'(?:\bkind=|_KIND = )"([A-Z]\w+)"', file.read_text()))
    assert named == set(WRITTEN_BY) - {"HistoryEntry"}, "which is only written in its list"
    assert {kind.lower() for kind in named} <= set(PAGE)


# -- completeness ------------------------------------------------------------------------------------------------------


def paths(message: Message, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every set field in ``message``; of a list, only the first element counts."""
    for each in message.DESCRIPTOR.fields:
        yield (*at, each.name)
        inner = getattr(message, each.name)
        if each.type == each.TYPE_MESSAGE and not isinstance(inner, Message | Mapping):
            inner = inner[0]
        if isinstance(inner, Message):
            yield from paths(inner, (*at, each.name))


@pytest.mark.parametrize(
    ("shape", "sample"),
    [
        (json_objects.device, DEVICE),
        (json_objects.certificate, CERTIFICATE),
        (json_objects.scrub, SCRUB),
        (json_objects.history_entry, ENTRY),
        (json_objects.baseline, DEVICE.baseline),
    ],
)
def test_every_message_field_appears_in_the_json_output(shape: Any, sample: Message) -> None:
    whole = json.dumps(shape(sample))
    for path in paths(sample):
        changed = type(sample)()
        changed.CopyFrom(sample)
        inner: Any = changed
        for name in path[:-1]:
            inner = getattr(inner, name)
            inner = inner if isinstance(inner, Message) else inner[0]
        inner.ClearField(path[-1])
        # A finding repeats the name of its step.
        assert json.dumps(shape(changed)) != whole or path[-2:] == ("findings", "step"), path
