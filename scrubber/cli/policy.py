"""``scrubber policy``: is this file a policy, what is in force under it, and what would it decide.

Nothing here asks the service: a policy is judged before a node has it, by the very functions that judge it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from scrubber.cli.exits import Exit
from scrubber.cli.options import OutputOption, new_app
from scrubber.cli.output import Answer, Output, complain, emit
from scrubber.domain import evidence
from scrubber.domain.admission import Answer as Verdict
from scrubber.domain.admission import Decision, may_be_handed_over
from scrubber.domain.assignment import Assignment, Pod
from scrubber.domain.device import NodeIdentity
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.handover import HandOver
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Policy
from scrubber.domain.record import DeviceRecord, Grant

__all__ = ["app"]

app = new_app("Judge a policy before a node has it.")

PolicyArgument = Annotated[
    str,
    typer.Argument(metavar="POLICY", help="A policy's file, or the name of one that ships: default, strict, trusted."),
]


@app.command()
def check(
    policies: Annotated[
        list[str], typer.Argument(metavar="POLICY...", help="Policies' files, or names of those that ship.")
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
        emit(Answer(data, [policy.name for _, policy in good], ("POLICY", "NAME", "DIGEST"), rows), output)
    raise typer.Exit(Exit.USAGE if faults else Exit.OK)


@app.command()
def show(policy: PolicyArgument = "default", output: OutputOption = Output.YAML) -> None:
    """Show every value that is in force under a policy, those included that its file leaves out."""
    from scrubber.config.policy_file import load_policy

    found = load_policy(policy)
    values = _plain(dataclasses.asdict(found))
    emit(Answer(values, [found.name], (), list(_flat(values))), output)


@app.command()
def explain(
    policy: PolicyArgument = "default",
    kind: Annotated[
        HandOver,
        typer.Option("--kind", envvar="SCRUBBER_KIND", help="How the next assignment relates to the previous one."),
    ] = (HandOver.SAME_CONTAINER),
    hygiene: Annotated[
        Hygiene,
        typer.Option(
            "--hygiene",
            envvar="SCRUBBER_HYGIENE",
            help="What is known of the device's bytes. clean: with a certificate.",
        ),
    ] = Hygiene.IN_USE,
    health: Annotated[
        Health, typer.Option("--health", envvar="SCRUBBER_HEALTH", help="Whether the device may be trusted to work.")
    ] = (Health.HEALTHY),
    watched: Annotated[
        bool,
        typer.Option(
            "--watched/--unwatched",
            envvar="SCRUBBER_WATCHED",
            help="Whether the last pod was seen to run, and nobody else can have had the device since it was clean.",
        ),
    ] = True,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say which path a hand-over takes under a policy, and why."""
    from scrubber.config.policy_file import load_policy

    found = load_policy(policy)
    decision = may_be_handed_over(_record(found, hygiene, health, watched), kind, found, _NODE, ran=watched)
    rows = list(_explained(found, kind, decision))
    data = {
        "policy": found.name,
        "digest": found.digest,
        "kind": kind.value,
        "hygiene": hygiene.value,
        "health": health.value,
        "watched": watched,
        "answer": decision.answer.value,
        "reason": decision.reason,
        "exception": decision.exception,
        "sentence": _SENTENCES[decision.answer],
    }
    emit(Answer(data, [decision.answer.value], (), rows), output)


_NODE = NodeIdentity("node", "boot", "driver")

_SENTENCES: Mapping[Verdict, str] = {
    Verdict.GO_ON_CERTIFICATE: "starts on the fast path, and uses the certificate up",
    Verdict.GO_BY_EXCEPTION: "starts on the fast path by the policy's exception; its memory is not cleared",
    Verdict.WAIT_FOR_SCRUB: "waits for the scrub that is under way",
    Verdict.SCRUB: "takes the slow path first, and starts on its certificate",
    Verdict.REFUSE: "is refused until the device is back in service",
}


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


def _explained(policy: Policy, kind: HandOver, decision: Decision) -> Iterator[tuple[str, str]]:
    yield ("policy", f"{policy.name} ({policy.digest[:16]})")
    yield ("hand-over", f"{kind.value} must rest on: {policy.proof_for(kind).value}")
    yield ("the start", _SENTENCES[decision.answer])
    yield ("because", decision.reason + (f" (exception {decision.exception})" if decision.exception else ""))
    for path in evidence.Path:
        plan = policy.plan(path, evidence.Occasion.START)
        yield (f"{path.value} path", " → ".join(step.value for step in plan.steps))
    yield ("anything off", "the slow path; a fault of the device takes it out of service")
    if policy.enforcement.value == "observe":
        yield ("observing", "nothing is refused and nobody is ended; what would have been is recorded")


def _plain(value: Any) -> Any:
    """What JSON and YAML can carry, keys as a policy's file spells them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {_key(each): _plain(below) for each, below in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(_plain(each) for each in value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, StrEnum) else value


def _key(key: object) -> Any:
    return key if isinstance(key, int) else str(key).replace("_", "-")


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield (f"{above}{name}", "" if value is None else str(value))
