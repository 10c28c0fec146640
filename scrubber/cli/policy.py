"""``scrubber policy``: is this file a policy, what is in force under it, and what would it decide.

Nothing here asks the service: a policy is judged before a node has it, by the very functions that judge it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.cli.exits import Exit
from scrubber.cli.options import OutputOption, new_app
from scrubber.cli.output import Answer, Output, complain, emit
from scrubber.config.units import write_seconds
from scrubber.domain import evidence
from scrubber.domain.assignment import Assignment, Pod
from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.device import NodeIdentity
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.handover import Checks, Decision, HandoverFacts, HandoverVerdict, decide
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import News, Override, Policy
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.signal_table import ERROR_CLASSES, ErrorClass
from scrubber.domain.signals import way_back

if TYPE_CHECKING:
    from scrubber.config.xid_file import XidRow

__all__ = ["app"]

app = new_app("Judge a policy before a node has it.")

PolicyArgument = Annotated[
    str,
    typer.Argument(metavar="POLICY", help="A policy's file, or the name of one that ships: default, strict, trusted."),
]


@app.command()
def check(
    policies: Annotated[
        list[str], typer.Argument(metavar="POLICY", help="Policies' files, or names of those that ship.")
    ],
    output: OutputOption = Output.TABLE,
) -> None:
    """Say whether files are policies. Exits with 2 if one is not, after a line with file, line and hint for each fault."""
    from scrubber.config.policy_file import load_policy

    good: list[tuple[str, Policy]] = []
    faults = False
    for written in policies:
        try:
            good.append((written, load_policy(written)))
        except BadConfiguration as error:
            complain(str(error))
            faults = True
    data = [{"file": written, "name": policy.name, "digest": policy.digest} for written, policy in good]
    rows = [(written, policy.name, policy.digest[:16]) for written, policy in good]
    if good:
        names = [policy.name for _, policy in good]
        emit(Answer(data, names, ("POLICY", "NAME", "DIGEST"), rows, kind="PolicyCheck"), output)
    raise typer.Exit(Exit.USAGE if faults else Exit.OK)


@app.command()
def show(
    policy: PolicyArgument = "default",
    all_xids: Annotated[
        bool,
        typer.Option(
            "--all-xids",
            help="Write every XID out, and not only those whose class is not the shipped table's.",
        ),
    ] = False,
    output: OutputOption = Output.YAML,
) -> None:
    """Write a policy out as it is in force. The values that its file leaves out are written, too."""
    from scrubber.config.policy_file import load_policy
    from scrubber.config.policy_format import written
    from scrubber.config.xid_file import load_xids
    from scrubber.config.yaml_lines import as_yaml

    found = load_policy(policy)
    table = {} if all_xids else {code: row.kind for code, row in load_xids().items()}
    values = written(found, table)
    if output is Output.YAML:
        digests = [f"# digest of {each.name}: {each.digest}" for each in (found, *_overriding(found))]
        lines = [*digests, *as_yaml(values).splitlines()]
        emit(Answer(None, (), (), [(line,) for line in lines]), Output.TABLE)
        return
    overrides = zip(values["overrides"], _overriding(found), strict=True)
    values["overrides"] = [{**each, "digest": of.digest} for each, of in overrides]
    values["digest"] = found.digest
    emit(Answer(values, [found.name], (), list(_flat(values)), kind="Policy"), output)


def _overriding(policy: Policy) -> list[Policy]:
    return [each.policy for each in policy.overrides]


@app.command()
def xids(policy: PolicyArgument = "default", output: OutputOption = Output.TABLE) -> None:
    """List what each XID means under a policy. Says where that comes from; a code that is not listed is unknown."""
    from scrubber.config.policy_file import load_policy
    from scrubber.config.xid_file import load_xids

    found, table = load_policy(policy).with_signals(NVIDIA_SIGNALS), load_xids()
    data = [_xid(code, found, table) for code in sorted(found.error_classes)]
    rows = [(str(each["code"]), each["class"], each["source"], each["note"] or "-") for each in data]
    names = [str(each["code"]) for each in data]
    emit(Answer(data, names, ("CODE", "CLASS", "SOURCE", "NOTE"), rows, kind="Xid"), output)


@app.command()
def explain(
    policy: PolicyArgument = "default",
    kind: Annotated[
        HandOver,
        typer.Option("--kind", help="How the next assignment relates to the previous one."),
    ] = (HandOver.SAME_CONTAINER),
    hygiene: Annotated[
        Hygiene,
        typer.Option(
            "--hygiene",
            help="What is known of the device's bytes. clean: with a certificate.",
        ),
    ] = Hygiene.IN_USE,
    health: Annotated[Health, typer.Option("--health", help="Whether the device may be trusted to work.")] = (
        Health.HEALTHY
    ),
    watched: Annotated[
        bool,
        typer.Option(
            "--watched/--unwatched",
            help="Whether the last pod was seen to run, and nobody else can have had the device since it was clean.",
        ),
    ] = True,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME",
            help="The device's model, which may have an override.",
            show_default=False,
        ),
    ] = "",
    resource: Annotated[
        str,
        typer.Option(
            "--resource",
            metavar="NAME",
            help="The resource that it is handed out under, which may have an override: nvidia.com/gpu.",
            show_default=False,
        ),
    ] = "",
    node_name: Annotated[
        str,
        typer.Option(
            "--node-name",
            envvar="SCRUBBER_NODE_NAME",
            metavar="NAME",
            help="The node's name, for overrides that name nodes.",
        ),
    ] = "",
    xid: Annotated[
        int | None,
        typer.Option(
            "--xid",
            metavar="CODE",
            min=1,
            help="Say what follows when the device reports this XID.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say which path a hand-over takes under a policy, and why. Says what follows from faults, too, and the way back."""
    from scrubber.config.policy_file import load_policy
    from scrubber.config.policy_format import short_name
    from scrubber.config.xid_file import load_xids

    file = load_policy(policy).with_signals(NVIDIA_SIGNALS)
    node = file.on(node_name)
    resources = [resource] if resource else []
    override = next((each for each in node.overrides if each.fits(model, resources)), None)
    found = node.of(model, resources)
    facts = HandoverFacts(
        record=_record(found, hygiene, health, watched),
        kind=kind,
        policy=found,
        identity=_NODE,
        ran=watched,
        earlier=frozenset(),
        checks=Checks(passed=True),
    )
    decision = decide(facts)
    answer = _answer(decision)
    of_xid = None if xid is None else _xid(xid, found, load_xids())
    rows = [
        *_fitting(node, override),
        *_elsewhere(file, node),
        *_explained(found, kind, decision),
        *_health(found),
        *_of_xid(of_xid),
    ]
    data = {
        "policy": found.name,
        "digest": found.digest,
        "override": None if override is None else short_name(override),
        "hand_over": kind.value,
        "hygiene": hygiene.value,
        "health": health.value,
        "watched": watched,
        "answer": answer,
        "reason": decision.reason,
        "exception": _exception(decision),
        "sentence": _SENTENCES[answer],
        "sustained": {code: found.health.sustained.get(code) for code in sorted(found.signals.soft)},
        "xid": of_xid,
    }
    emit(Answer(data, [answer], (), rows, kind="PolicyExplanation"), output)


_NODE = NodeIdentity("node", "boot", "driver")

_SENTENCES: Mapping[str, str] = {
    "go-on-certificate": "starts on the fast path, and uses the certificate up",
    "go-by-exception": "starts on the fast path by the policy's exception; its memory is not cleared",
    "wait-for-scrub": "waits for the scrub that is under way",
    "scrub": "takes the slow path first, and starts on its certificate",
    "refuse": "is refused until the device is back in service",
}


def _answer(decision: Decision) -> str:
    if decision.verdict is HandoverVerdict.GRANT:
        return "go-on-certificate" if decision.basis is Basis.CERTIFICATE else "go-by-exception"
    return {HandoverVerdict.JOIN: "wait-for-scrub", HandoverVerdict.REFUSE: "refuse"}.get(decision.verdict, "scrub")


def _record(policy: Policy, hygiene: Hygiene, health: Health, watched: bool) -> DeviceRecord:
    """A device that was granted once, and is now as it is said to be; a clean one has a certificate that counts."""
    pod = Pod("tenant", "pod", "uid")
    last = Grant(1, Assignment(pod, "main", frozenset({"device"})), HandOver.UNKNOWN, 0.0, _NODE.boot)
    cause = None if health is Health.HEALTHY else Cause("example", "An example.", WayBack.RESET, 0.0)
    certificate = evidence.Certificate(
        id="certificate",
        node=_NODE.node,
        boot=_NODE.boot,
        driver=_NODE.driver,
        device="device",
        sequence=1,
        previous_grant=last.sequence,
        path=evidence.Path.SLOW,
        scrub="scrub",
        covered=(),
        not_covered=(),
        policy=policy.name,
        policy_digest=policy.digest,
        issued_at=0.0,
    )
    return DeviceRecord(
        "device",
        certificate=certificate if hygiene is Hygiene.CLEAN else None,
        hygiene=hygiene,
        health=health,
        cause=cause,
        last_grant=last,
        open_grants=(last,) if hygiene is Hygiene.IN_USE else (),
        watched=watched,
        boot=_NODE.boot,
    )


def _exception(decision: Decision) -> str | None:
    return None if decision.basis is None else decision.basis.exception


def _explained(policy: Policy, kind: HandOver, decision: Decision) -> Iterator[tuple[str, str]]:
    yield ("policy", f"{policy.name} ({policy.digest[:16]})")
    yield ("hand-over", f"{kind.value} must rest on: {policy.proof_for(kind).value}")
    yield ("the start", _SENTENCES[_answer(decision)])
    yield ("because", decision.reason + (f" (exception {_exception(decision)})" if _exception(decision) else ""))
    for path in evidence.Path:
        plan = policy.plan(path, evidence.Occasion.START)
        yield (f"{path.value} path", " → ".join(step.value for step in plan.steps))
    yield ("anything off", "the slow path; a fault of the device takes it out of service")
    if policy.enforcement.value == "observe":
        yield ("observing", "nothing is refused and nobody is ended; what would have been is recorded")


def _fitting(node: Policy, override: Override | None) -> Iterator[tuple[str, str]]:
    from scrubber.config.policy_format import short_name

    if override is not None:
        patterns = [*override.nodes, *override.models, *override.resources]
        yield ("override", f"{short_name(override)} is the first that fits ({', '.join(patterns)})")
    elif node.overrides:
        yield ("override", f"none of {', '.join(short_name(each) for each in node.overrides)} fits")


def _elsewhere(file: Policy, node: Policy) -> Iterator[tuple[str, str]]:
    from scrubber.config.policy_format import short_name

    for override in file.overrides:
        if override not in node.overrides:
            named = ", ".join(override.nodes)
            yield (
                "elsewhere",
                f"{short_name(override)} is for other nodes ({named}); --node-name says which one this is",
            )


def _health(policy: Policy) -> Iterator[tuple[str, str]]:
    rule = policy.health
    yield (
        "a soft condition",
        f"makes the device suspect at once: it starts by certificate only; over when not seen for {write_seconds(rule.calm)}",
    )
    for seconds in sorted(set(rule.sustained.values())):
        codes = sorted(code for code, each in rule.sustained.items() if each == seconds)
        yield (f"lasting {write_seconds(seconds)}", f"takes the device out of service: {', '.join(codes)}")
    never = sorted(policy.signals.soft - rule.sustained.keys())
    if never:
        yield ("for however long", f"leaves the device suspect: {', '.join(never)}")
    hears = "at once" if rule.news is News.AT_ONCE else "once the pod that has the device has given it back"
    yield ("the kubelet hears", f"that a device is out of service {hears}")


def _xid(code: int, policy: Policy, table: Mapping[int, XidRow]) -> dict[str, Any]:
    """What an XID means under a policy: where the policy says so, ``policy`` is the source, else what the table names."""
    kind, row = policy.error_class(code), table.get(code)
    source = (
        row.source if row is not None and row.kind is kind else "policy" if code in policy.error_classes else "none"
    )
    found: dict[str, Any] = {"code": code, "class": kind.value, "source": source, "note": row.note if row else None}
    severity = ERROR_CLASSES[kind].severity
    if severity is evidence.Severity.FAULT:
        back = way_back(policy.signals.errors.code(code), policy)
        sentence = Cause("example", "", back, 0.0).return_sentence
        return {**found, "follows": "the device is out of service", "way_back": back.value, "sentence": sentence}
    warns = severity is evidence.Severity.WARNING
    follows = "the device is suspect when the code is new" if warns else "nothing: it is recorded"
    return {**found, "follows": follows, "way_back": None, "sentence": None}


def _of_xid(found: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if found is None:
        return
    note = f": {found['note']}" if found["note"] else ""
    yield (f"xid {found['code']}", f"{found['class']} (source: {found['source']}){note}")
    said = "where the driver itself asks for something, that decides"
    if found["class"] == ErrorClass.CONTEXT.value:
        said = "where the driver says itself what the device needs, even if that is nothing, the code is only recorded"
    yield ("what follows", f"{found['follows']}; {said}")
    if found["way_back"] is not None:
        yield ("way back", f"{found['way_back']}: {found['sentence']}")


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Names with dots, each with its value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        elif name == "overrides":
            for each in value:
                yield from _flat(each, f"{name}.{each['name']}.")
        else:
            yield (f"{above}{name}", _cell(value))


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return "/".join(map(str, value.values()))
    if isinstance(value, list):
        return ", ".join(_cell(each) for each in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
