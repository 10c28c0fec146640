"""The fleet: is tenants' data safe everywhere, are devices available, does anybody wait, and where to look next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.boards.glance import (
    ANSWERS,
    DEVICES,
    GRANTED,
    SLOW_WAIT,
    alerts,
    devices,
    fast_share,
    out_of_service,
    wait,
    waiting,
)
from dashboards.frame import TO_DEVICE, TO_NODE, Board, Row, board
from dashboards.meaning import STATE_COLOURS, Colour, State, health, mapping, said, severities, yes_or_no
from dashboards.panels import Column, Query, graph, listing, number
from dashboards.queries import count, fold, of, or_zero, per_minute, rate, ratio, times

__all__ = ["fleet"]

_NONE_IS_GOOD: Final = ((None, Colour.CLEAN), (1.0, Colour.QUARANTINED))
_NONE_IS_USUAL: Final = ((None, Colour.CLEAN), (1.0, Colour.SCRUBBING))
_WAITS: Final = ((None, Colour.CLEAN), (10.0, Colour.SCRUBBING), (SLOW_WAIT, Colour.QUARANTINED))
_NODE: Final = Column("instance", "Node", width=150, link=TO_NODE)
_DEVICE: Final = Column("device", "Device", link=TO_DEVICE)


def fleet() -> model.Dashboard:
    """All nodes that the variables pick."""
    return board(
        Board.FLEET,
        "GPU scrubber / Fleet",
        "Are GPUs clean when they change hands, are they available, and where is something off?",
        [
            Row(None, [*_glance(), alerts(24, 7)]),
            Row("Devices", _devices()),
            Row("Hand-overs", _handovers()),
            Row("What was found", _found()),
            Row("Rules and record", _rules()),
        ],
        since="now-6h",
        refresh="1m",
    )


def _glance() -> list[model.Panel]:
    answering = f"count ({count('scrubber_build_info', by=('instance',))})"
    # Seen within the time range, and not up now: with every job picked, "up" alone counts what is none of ours.
    known = f"last_over_time({of('scrubber_build_info')}[$__range])"
    known_plugins = f"last_over_time({of('scrubber_plugin_build_info')}[$__range])"
    away = f"count ({of('up')} == 0 and on (job, instance) ({known} or {known_plugins}))"
    return [
        number("Nodes", "On how many nodes does the service answer?", answering, unit="none"),
        number(
            "Daemons away",
            "How many services and plugins that should answer Prometheus do not?",
            or_zero(away, count("scrubber_build_info")),
            unit="none",
            steps=_NONE_IS_GOOD,
        ),
        devices(4),
        out_of_service(4),
        waiting(4),
        wait(4),
        fast_share(4),
        number(
            "Unexplained residue",
            "How many bytes were found where nobody had been since the device was proved clean? Any is an incident.",
            times("scrubber_unexplained_residue_bytes_total"),
            unit="bytes",
            steps=_NONE_IS_GOOD,
        ),
        number(
            "Ungranted uses",
            "How often was a device used by somebody to whom it was not granted, within the time range?",
            times("scrubber_ungranted_uses_total"),
            unit="none",
            decimals=0,
            steps=_NONE_IS_GOOD,
        ),
        number(
            "Break-glass open",
            "How many devices are handed out on a person's word, whatever is known of them?",
            or_zero(fold("sum", "scrubber_break_glass"), count(DEVICES)),
            unit="none",
            steps=_NONE_IS_GOOD,
        ),
        number(
            "Devices only observed",
            "How many devices are judged but never refused, because their policy observes?",
            fold("sum", "scrubber_enforcement", 'mode="observe"'),
            unit="none",
            steps=_NONE_IS_USUAL,
        ),
        number(
            "Audit trails broken",
            "On how many nodes does the audit trail not add up?",
            or_zero(f"count ({of('scrubber_audit_intact')} == 0)", count("scrubber_audit_intact")),
            unit="none",
            steps=_NONE_IS_GOOD,
        ),
    ]


def _devices() -> list[model.Panel]:
    since = of("scrubber_quarantine_start_timestamp_seconds")
    quarantined = f"time() - ({since} * on (job, instance, device) group_left (health) {of(DEVICES)})"
    return [
        graph(
            "Devices by state",
            "What are the devices doing, and how does that change?",
            *(
                Query(fold("sum", "instance:scrubber_devices:by_state", f'state="{state}"'), said(state))
                for state in STATE_COLOURS
            ),
            unit="none",
            stacked=True,
            colours={said(state): colour for state, colour in STATE_COLOURS.items()},
        ),
        listing(
            "Devices out of service",
            "Which devices are out of service, since when, why, and what brings each of them back? (Which XID it was is on "
            "the device's board.)",
            f"max by (instance, device, health, cause_class, way_back) ({quarantined})",
            columns=[
                _NODE,
                _DEVICE,
                Column("health", "State", width=110, mappings=[health()], filled=True),
                Column("cause_class", "Cause", width=170),
                Column("Value", "For", unit="s", width=110),
                Column("way_back", "Way back", width=90),
            ],
            span=16,
            height=7,
            sort="For",
            nothing="No device is out of service",
        ),
        listing(
            "Each node now",
            "Which node needs somebody? Click on one to see it.",
            count(DEVICES, by=("instance",)),
            or_zero(count(DEVICES, 'hygiene="in-use"', by=("instance",)), count(DEVICES, by=("instance",))),
            fold("max", "instance:scrubber_devices_out:ratio", by=("instance",)),
            fold("sum", "scrubber_handovers_waiting", by=("instance",)),
            fold("max", ANSWERS, by=("instance",)),
            fold("min", "instance:scrubber_handovers:fast_ratio5m", by=("instance",)),
            fold("min", "scrubber_ledger_ok", by=("instance",)),
            fold("min", "scrubber_plugin_registered", by=("instance",)),
            columns=[
                Column("instance", "Node", link=TO_NODE),
                Column("Value #A", "Devices", unit="none"),
                Column("Value #B", "In use", unit="none"),
                Column(
                    "Value #C",
                    "Out of service",
                    unit="percentunit",
                    decimals=0,
                    steps=((None, Colour.CLEAN), (0.001, Colour.SCRUBBING), (0.25, Colour.QUARANTINED)),
                ),
                Column("Value #D", "Starts that wait", unit="none"),
                Column(
                    "Value #E",
                    "Answers, p99 of 5 min",
                    unit="s",
                    steps=_WAITS,
                ),
                Column("Value #F", "Fast-path share, 5 min", unit="percentunit", decimals=0),
                Column("Value #G", "Ledger", unit="none", mappings=[yes_or_no("stores", "does not store")]),
                Column("Value #H", "Plugin", unit="none", mappings=[yes_or_no("registered", "not registered")]),
            ],
            height=8,
            sort="Out of service",
        ),
    ]


def _handovers() -> list[model.Panel]:
    refused = 'outcome!="granted"'
    return [
        graph(
            "Hand-overs per minute",
            "How many starts got their device, by which path, and how many were refused?",
            Query(per_minute("scrubber_handovers_total", GRANTED, by=("path",)), "{{path}} path"),
            Query(per_minute("scrubber_handovers_total", refused), "refused"),
            unit="short",
            stacked=True,
        ),
        graph(
            "Fast-path share, over time",
            "Are devices proved clean before somebody asks for them, and on which share of the grants not?",
            Query(_fast_share(), "fleet"),
            Query(f"min ({_fast_share(by=('instance',))})", "lowest node"),
            rare=True,
            unit="percentunit",
            top=1,
            colours={"fleet": Colour.IN_USE, "lowest node": Colour.DIRTY},
            nothing="No hand-over in this range",
        ),
        graph(
            "Hand-over wait on the slowest node",
            "How long did starts of the last five minutes wait for their device, and how long for any answer, a refusal too? "
            "(The alert speaks when all answers stay above 20 s; a dashed line is there, once waits come near it.)",
            Query(fold("max", ANSWERS), "all answers, p99 of 5 min"),
            Query(fold("max", "instance:scrubber_handover_wait:p99_5m"), "granted, p99 of 5 min"),
            Query(fold("max", "instance:scrubber_handover_wait:p50_5m"), "granted, median of 5 min"),
            rare=True,
            unit="s",
            steps=((None, "transparent"), (SLOW_WAIT, Colour.QUARANTINED)),
            colours={
                "all answers, p99 of 5 min": Colour.PLAIN,
                "granted, p99 of 5 min": Colour.IN_USE,
                "granted, median of 5 min": Colour.CLEAN,
            },
            nothing="No hand-over in this range",
        ),
    ]


def _fast_share(*, by: Sequence[str] = ()) -> str:
    name = "scrubber_handovers_total"
    return ratio(rate(name, GRANTED, 'path="fast"', by=by), rate(name, GRANTED, by=by))


def _found() -> list[model.Panel]:
    return [
        graph(
            "Residue",
            "How much of earlier tenants' data do scrubs meet, and is any of it where nobody should have been?",
            Query(rate("scrubber_residue_bytes_total"), "found and cleared"),
            Query(
                rate("scrubber_unexplained_residue_bytes_total"),
                "unexplained",
            ),
            unit="binBps",
            colours={"found and cleared": Colour.CALM, "unexplained": Colour.QUARANTINED},
        ),
        graph(
            "Scrubs per minute",
            "How do scrubs end?",
            Query(per_minute("scrubber_scrubs_total", by=("outcome",)), "{{outcome}}"),
            unit="short",
            stacked=True,
            nothing="No scrub in this range",
        ),
        listing(
            "Why devices went out of service",
            "For which reasons were devices taken out within the time range, and how often? (Which XID is on the board of each "
            "device.)",
            f"{times('scrubber_quarantines_total', by=('cause_class',))} > 0",
            columns=[Column("cause_class", "Cause"), Column("Value", "Times", unit="none", decimals=0, width=100)],
            span=8,
            height=7,
            sort="Times",
            nothing="No device went out of service in this range",
        ),
        listing(
            "Findings",
            "What did scrubs and checks find within the time range? (On which device: in the log, and in its history.)",
            f"{times('scrubber_findings_total', by=('severity', 'step', 'code'))} > 0",
            columns=[
                Column("severity", "Severity", width=110, mappings=[severities()]),
                Column("step", "Step", width=120),
                Column("code", "Code"),
                Column("Value", "Times", unit="none", decimals=0, width=100),
            ],
            span=12,
            height=8,
            sort="Times",
            nothing="Nothing was found in this range",
        ),
        listing(
            "Tenants whose devices went out",
            "In whose hands did devices go out of service within the time range, and how often?",
            f"{times('scrubber_tenant_quarantines_total', by=('tenant_namespace',))} > 0",
            columns=[
                Column("tenant_namespace", "Tenant's namespace"),
                Column("Value", "Times", unit="none", decimals=0, width=80),
            ],
            span=6,
            height=8,
            sort="Times",
            nothing="No tenant in this range",
        ),
        listing(
            "Ungranted uses, by node",
            "On which nodes were devices used without a grant within the time range, and how?",
            f"{times('scrubber_ungranted_uses_total', by=('instance', 'use'))} > 0",
            columns=[
                Column("instance", "Node", link=TO_NODE),
                Column("use", "Use", width=150),
                Column("Value", "Times", unit="none", decimals=0, width=80),
            ],
            span=6,
            height=8,
            sort="Times",
            nothing="None in this range",
        ),
    ]


def _rules() -> list[model.Panel]:
    ends = f"max by (instance, device) ({of('scrubber_break_glass_end_timestamp_seconds')}) - time()"
    return [
        listing(
            "Break-glass",
            "Which devices are handed out on a person's word, and for how long still?",
            ends,
            columns=[_NODE, _DEVICE, Column("Value", "Ends in", unit="s", width=130)],
            span=12,
            height=6,
            nothing="No glass is broken",
        ),
        listing(
            "Breakers",
            "Which nodes recover no more devices by themselves, because too many went out at once?",
            f"max by (instance, what) ({of('scrubber_breaker_open')}) == 1",
            columns=[
                Column("instance", "Node", link=TO_NODE),
                Column("what", "Stopped", width=120),
                Column(
                    "Value", "Breaker", unit="none", width=100, mappings=[mapping((State(1, "open", Colour.DIRTY),))]
                ),
            ],
            span=6,
            height=6,
            nothing="No breaker is open",
        ),
        graph(
            "Devices by enforcement",
            "Are hand-overs refused where they have to be, or only observed?",
            Query(fold("sum", "scrubber_enforcement", by=("mode",)), "{{mode}}"),
            unit="none",
            span=6,
            height=6,
            stacked=True,
            colours={"enforce": Colour.CLEAN, "observe": Colour.SCRUBBING},
        ),
        listing(
            "Policies",
            "Which policies are in force, on how many nodes, and where was a newer one rejected?",
            count("scrubber_policy_info", by=("policy", "digest")),
            f"sum by (policy, digest) ({of('scrubber_policy_rejected')} "
            f"* on (job, instance) group_right () {of('scrubber_policy_info')})",
            columns=[
                Column("policy", "Policy"),
                Column("digest", "Digest", width=140),
                Column("Value #A", "Nodes", unit="none", width=80),
                Column("Value #B", "Rejected a newer one", unit="none", width=180, steps=_NONE_IS_USUAL),
            ],
            span=12,
            height=5,
        ),
        listing(
            "Versions",
            "What runs on how many nodes?",
            count("scrubber_build_info", by=("version", "backend", "driver")),
            columns=[
                Column("version", "Version"),
                Column("backend", "Backend"),
                Column("driver", "Driver"),
                Column("Value", "Nodes", unit="none", width=80),
            ],
            span=12,
            height=5,
            sort="Nodes",
        ),
        listing(
            "Audit",
            "Does each node's audit trail add up, when was that last looked at, and how far does it reach?",
            fold("min", "scrubber_audit_intact", by=("instance",)),
            f"time() - max by (instance) ({of('scrubber_audit_verified_timestamp_seconds')})",
            fold("max", "scrubber_audit_head_sequence", by=("instance",)),
            fold("max", "scrubber_audit_head_hash", 'part="0"', by=("instance",)),
            fold(
                "max",
                "scrubber_signing_key_info",
                by=("instance", "key_id"),
            ),
            columns=[
                _NODE,
                Column("Value #A", "Trail", unit="none", width=100, mappings=[yes_or_no("intact", "broken")]),
                Column("Value #B", "Last look, ago", unit="s", width=130),
                Column("Value #C", "Rows", unit="locale", width=120),
                Column("Value #D", "Hash of the last row, first 32 bits", unit="hex", width=210),
                Column("key_id", "Signing key"),
            ],
            height=7,
            sort="Last look, ago",
        ),
    ]
