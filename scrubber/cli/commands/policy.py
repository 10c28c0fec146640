"""``scrubber policy``: validate policy files, show their effective values, and explain their decisions.

No request is sent to the service: a policy is evaluated before it is deployed, by the same functions as on the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.cli.app import App
from scrubber.cli.completers import complete_policy
from scrubber.cli.options import NoHeadersOption, OutputOption
from scrubber.cli.render.output import CommandResult, OutputFormat, print_note, print_result
from scrubber.config.units import format_seconds
from scrubber.domain import evidence
from scrubber.domain.assignment import Assignment, Pod
from scrubber.domain.device import NodeIdentity
from scrubber.domain.handover import FastPathChecks, HandoverDecision, HandoverFacts, HandoverVerdict, decide
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.health.signal_table import ERROR_CLASSES, ErrorClass
from scrubber.domain.health.signals import recovery_method
from scrubber.domain.policy import Policy, PolicyOverride, QuarantineTiming
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod

if TYPE_CHECKING:
    from scrubber.config.xid_file import XidRow

__all__ = ["app"]

app = App("Validate, show and explain policies.")

PolicyArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="POLICY",
        autocompletion=complete_policy,
        help="Policy file, or the name of a bundled policy: default, strict, trusted. For the policy in force on this node, "
        "pass the file that scrubber doctor names.",
        show_default="the bundled policy default, which need not be in force",
    ),
]


@app.command()
def check(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY", autocompletion=complete_policy, help="Policy files, or names of bundled policies."
        ),
    ],
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Validate policies.

    Exits with 2 if one is invalid, after a message with file, line and hint for each error.
    """
    from scrubber.cli.policy_check import check_policies

    raise typer.Exit(check_policies(policies, output, no_headers=no_headers))


@app.command()
def show(
    policy: PolicyArgument = None,
    all_xids: Annotated[
        bool,
        typer.Option(
            "--all-xids",
            help="Include every XID, not only those whose class differs from the bundled table.",
        ),
    ] = False,
    output: OutputOption = OutputFormat.YAML,
) -> None:
    """Show a policy with all effective values.

    The output includes the defaults of settings that the file leaves out.
    """
    from scrubber.config.policy_file import load_policy
    from scrubber.config.policy_format import dump_policy
    from scrubber.config.xid_file import load_xid_table
    from scrubber.config.yaml_document import dump_yaml

    found = load_policy(_name_or_default(policy))
    table = {} if all_xids else {code: row.error_class for code, row in load_xid_table().items()}
    values = dump_policy(found, table)
    if output is OutputFormat.YAML:
        digests = [f"# digest of {each.name}: {each.digest}" for each in (found, *_override_policies(found))]
        lines = [*digests, *dump_yaml(values).splitlines()]
        print_result(CommandResult(None, (), (), [(line,) for line in lines]), OutputFormat.TABLE)
        return
    overrides = zip(values["overrides"], _override_policies(found), strict=True)
    values["overrides"] = [{**each, "digest": of.digest} for each, of in overrides]
    values["digest"] = found.digest
    print_result(CommandResult(values, [found.name], (), list(_flat(values)), kind="Policy"), output)


def _name_or_default(policy: str | None) -> str:
    """Return the policy to evaluate; without one, the bundled default, and a note that it may not be in force."""
    if policy is not None:
        return policy
    print_note(
        "No POLICY was given, so this is the bundled policy default. The service on this node may use another one: "
        "`scrubber doctor` names the file of the policy in force."
    )
    return "default"


def _override_policies(policy: Policy) -> list[Policy]:
    return [each.policy for each in policy.overrides]


@app.command()
def xids(
    policy: PolicyArgument = None,
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """List the class of each XID under a policy, and its source.

    An XID that is not listed is unknown.
    """
    from scrubber.config.policy_file import load_policy
    from scrubber.config.xid_file import load_xid_table

    found, table = load_policy(_name_or_default(policy)).with_signals(NVIDIA_SIGNALS), load_xid_table()
    data = [_xid_data(code, found, table) for code in sorted(found.error_classes)]
    rows = [(str(each["code"]), each["class"], each["source"], each["note"] or "-") for each in data]
    names = [str(each["code"]) for each in data]
    result = CommandResult(data, names, ("CODE", "CLASS", "SOURCE", "NOTE"), rows, kind="Xid")
    print_result(result, output, no_headers=no_headers)


@app.command()
def explain(
    policy: PolicyArgument = None,
    kind: Annotated[
        HandOverKind,
        typer.Option("--hand-over", help="Kind of hand-over: how the next assignment relates to the previous one."),
    ] = (HandOverKind.SAME_CONTAINER),
    hygiene: Annotated[
        Hygiene,
        typer.Option(
            "--hygiene",
            help="Hygiene of the device. clean: with a certificate.",
        ),
    ] = Hygiene.IN_USE,
    health: Annotated[Health, typer.Option("--health", help="Health of the device.")] = (Health.HEALTHY),
    watched: Annotated[
        bool,
        typer.Option(
            "--watched/--unwatched",
            help="Whether the last pod was seen running and no other process can have used the device "
            "since it was clean.",
        ),
    ] = True,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Model of the device, for overrides by model.",
            show_default=False,
        ),
    ] = "",
    resource: Annotated[
        str,
        typer.Option(
            "--resource",
            metavar="NAME",
            help="Resource of the device, for overrides by resource: nvidia.com/gpu.",
            show_default=False,
        ),
    ] = "",
    node_name: Annotated[
        str,
        typer.Option(
            "--node-name",
            envvar="SCRUBBER_NODE_NAME",
            metavar="NAME",
            help="Name of the node, for overrides by node.",
        ),
    ] = "",
    xid: Annotated[
        int | None,
        typer.Option(
            "--xid",
            metavar="CODE",
            min=1,
            help="Also explain the consequence of this XID.",
        ),
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Explain which path a hand-over takes under a policy, and why.

    Also explains the consequences of faults, and the recovery from them.
    """
    from scrubber.config.policy_file import load_policy
    from scrubber.config.policy_format import override_name
    from scrubber.config.xid_file import load_xid_table

    file = load_policy(_name_or_default(policy)).with_signals(NVIDIA_SIGNALS)
    node = file.for_node(node_name)
    resources = [resource] if resource else []
    override = next((each for each in node.overrides if each.matches(model, resources)), None)
    found = node.for_device(model, resources)
    facts = HandoverFacts(
        record=_example_record(found, hygiene, health, watched),
        kind=kind,
        policy=found,
        identity=_NODE,
        last_pod_ran=watched,
        earlier_pods=frozenset(),
        checks=FastPathChecks(passed=True),
    )
    decision = decide(facts)
    answer = _decision_name(decision)
    of_xid = None if xid is None else _xid_data(xid, found, load_xid_table())
    rows = [
        *_override_rows(node, override),
        *_other_node_rows(file, node),
        *_decision_rows(found, kind, decision),
        *_health_rows(found),
        *_xid_rows(of_xid),
    ]
    data = {
        "policy": found.name,
        "digest": found.digest,
        "override": None if override is None else override_name(override),
        "handOverKind": kind.value,
        "hygiene": hygiene.value,
        "health": health.value,
        "watched": watched,
        "decision": answer,
        "reason": decision.reason,
        "exception": _exception(decision),
        "message": _ANSWER_MESSAGES[answer],
        "quarantineAfterSeconds": {
            code: found.health.quarantine_after.get(code) for code in sorted(found.signals.soft)
        },
        "xid": of_xid,
    }
    print_result(CommandResult(data, [answer], (), rows, kind="PolicyExplanation"), output)


_NODE = NodeIdentity("node", "boot", "driver")

_ANSWER_MESSAGES: Mapping[str, str] = {
    "start-with-certificate": "starts on the fast path, and consumes the certificate",
    "start-by-exception": "starts on the fast path by an exception of the policy; the memory is not cleared",
    "wait-for-scrub": "waits for the running scrub",
    "scrub-first": "takes the slow path first, and starts with its certificate",
    "refuse": "is refused until the device is back in service",
}


def _decision_name(decision: HandoverDecision) -> str:
    if decision.verdict is HandoverVerdict.GRANT:
        return "start-with-certificate" if decision.basis is Basis.CERTIFICATE else "start-by-exception"
    return {HandoverVerdict.JOIN: "wait-for-scrub", HandoverVerdict.REFUSE: "refuse"}.get(
        decision.verdict, "scrub-first"
    )


def _example_record(policy: Policy, hygiene: Hygiene, health: Health, watched: bool) -> DeviceRecord:
    """Return an example device with one grant and the given state; a clean one has a valid certificate."""
    pod = Pod("tenant", "pod", "uid")
    last = Grant(1, Assignment(pod, "main", frozenset({"device"})), HandOverKind.UNKNOWN, 0.0, _NODE.boot)
    cause = None if health is Health.HEALTHY else Cause("example", "An example.", RecoveryMethod.RESET, 0.0)
    certificate = evidence.Certificate(
        id="certificate",
        node=_NODE.node,
        boot=_NODE.boot,
        driver=_NODE.driver,
        device="device",
        sequence=1,
        previous_grant=last.sequence,
        path=evidence.PathKind.SLOW,
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
        exclusive_use=watched,
        boot=_NODE.boot,
    )


def _exception(decision: HandoverDecision) -> str | None:
    return None if decision.basis is None else decision.basis.exception


def _decision_rows(policy: Policy, kind: HandOverKind, decision: HandoverDecision) -> Iterator[tuple[str, str]]:
    yield ("policy", f"{policy.name} ({policy.digest[:16]})")
    yield ("hand-over", f"{kind.value} requires: {policy.required_proof(kind).value}")
    yield ("decision", _ANSWER_MESSAGES[_decision_name(decision)])
    yield ("reason", decision.reason + (f" (exception {_exception(decision)})" if _exception(decision) else ""))
    for path in evidence.PathKind:
        plan = policy.plan(path, evidence.ScrubTrigger.CONTAINER_START)
        yield (f"{path.value} path", " → ".join(step.value for step in plan.steps))
    yield ("if a check fails", "the slow path; a device fault takes the device out of service")
    if policy.enforcement.value == "observe":
        yield (
            "enforcement",
            "observe: nothing is refused and no process is killed; what would have happened is recorded",
        )


def _override_rows(node: Policy, override: PolicyOverride | None) -> Iterator[tuple[str, str]]:
    from scrubber.config.policy_format import override_name

    if override is not None:
        patterns = [*override.nodes, *override.models, *override.resources]
        yield ("override", f"{override_name(override)} is the first that matches ({', '.join(patterns)})")
    elif node.overrides:
        yield ("override", f"none of {', '.join(override_name(each) for each in node.overrides)} matches")


def _other_node_rows(file: Policy, node: Policy) -> Iterator[tuple[str, str]]:
    from scrubber.config.policy_format import override_name

    for override in file.overrides:
        if override not in node.overrides:
            named = ", ".join(override.nodes)
            yield (
                "other nodes",
                f"{override_name(override)} applies to other nodes ({named}); pass --node-name to select a node",
            )


def _health_rows(policy: Policy) -> Iterator[tuple[str, str]]:
    rule = policy.health
    yield (
        "a soft condition",
        f"makes the device suspect at once: starts need a certificate; ends when not seen for {format_seconds(rule.quiet_period)}",
    )
    for seconds in sorted(set(rule.quarantine_after.values())):
        codes = sorted(code for code, each in rule.quarantine_after.items() if each == seconds)
        yield (f"lasting {format_seconds(seconds)}", f"takes the device out of service: {', '.join(codes)}")
    never = sorted(policy.signals.soft - rule.quarantine_after.keys())
    if never:
        yield ("of any duration", f"leaves the device suspect: {', '.join(never)}")
    detection = rule.quarantine_at is QuarantineTiming.DETECTION
    when = "at once" if detection else "when its pod has returned it"
    yield ("out of service", f"the kubelet sees the device as Unhealthy {when}")


def _xid_data(code: int, policy: Policy, table: Mapping[int, XidRow]) -> dict[str, Any]:
    """Return the meaning of an XID under a policy; the source is ``policy`` if the policy sets it, else the table's."""
    kind, row = policy.error_class(code), table.get(code)
    source = (
        row.source
        if row is not None and row.error_class is kind
        else "policy"
        if code in policy.error_classes
        else "none"
    )
    found: dict[str, Any] = {"code": code, "class": kind.value, "source": source, "note": row.note if row else None}
    severity = ERROR_CLASSES[kind].severity
    if severity is evidence.Severity.FAULT:
        back = recovery_method(policy.signals.errors.format(code), policy)
        message = Cause("example", "", back, 0.0).recovery_message
        return {
            **found,
            "consequence": "the device is out of service",
            "recoveryMethod": back.value,
            "recoveryMessage": message,
        }
    warns = severity is evidence.Severity.WARNING
    follows = "the device is suspect when the code is new" if warns else "none; the code is only recorded"
    return {**found, "consequence": follows, "recoveryMethod": None, "recoveryMessage": None}


def _xid_rows(found: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if found is None:
        return
    about = f": {found['note']}" if found["note"] else ""
    yield (f"xid {found['code']}", f"{found['class']} (source: {found['source']}){about}")
    note = "a recovery action that the driver itself requests takes precedence"
    if found["class"] == ErrorClass.CONTEXT.value:
        note = "where the driver reports its own recovery action, even none, the code is only recorded"
    yield ("consequence", f"{found['consequence']}; {note}")
    if found["recoveryMethod"] is not None:
        yield ("recovery", f"{found['recoveryMethod']}: {found['recoveryMessage']}")


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names with their values."""
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
