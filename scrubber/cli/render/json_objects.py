"""The shape of the command's JSON. Scripts depend on it: keys are added, never renamed or removed.

Times are seconds since the epoch. What is not there is null, never an empty text.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf.message import Message

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.tenancy import current_tenancies, is_in_use, previous_tenancies

__all__ = ["baseline", "certificate", "device", "history_entry", "parse_embedded_json", "scrub"]


def certificate(message: pb.Certificate) -> dict[str, Any]:
    """One certificate, used up when ``next_grant`` is not null."""
    return {
        "id": message.id,
        "device": message.device,
        "sequence": message.sequence,
        "path": message.path,
        "scrub": message.scrub,
        "issued_at": message.issued_at,
        "previous_grant": message.previous_grant,
        "next_grant": message.next_grant if message.HasField("next_grant") else None,
        "covered": list(message.covered),
        "not_covered": list(message.not_covered),
        "policy": message.policy,
        "policy_digest": message.policy_digest,
        "rests_on": message.rests_on or None,
        "node": message.node,
        "boot": message.boot,
        "driver": message.driver,
        "key_id": message.key_id or None,
        "signature": base64.b64encode(message.signature).decode("ascii") if message.signature else None,
    }


def device(message: pb.Device) -> dict[str, Any]:
    """One device. ``state`` sums ``hygiene`` and ``health`` up in one word; ``offered`` is what the kubelet is told."""
    had = is_in_use(message)
    return {
        "id": message.id,
        "index": message.index,
        "model": message.model,
        "memory_bytes": message.memory_bytes,
        "state": message.state,
        "hygiene": message.hygiene,
        "health": message.health,
        "cause": _cause(message.cause) if message.HasField("cause") else None,
        "retry_at": message.retry_at or None,
        "certificate": _optional_certificate(message),
        "tenant_namespace": (message.tenant_namespace or None) if had else None,
        "pod": (message.pod or None) if had else None,
        "container": (message.container or None) if had else None,
        "hand_over": message.kind or None,
        "grants": message.grants,
        "scrub": message.scrub or None,
        "parent": message.parent or None,
        "numa_node": message.numa_node if message.HasField("numa_node") else None,
        "profile": message.profile or None,
        "peers": list(message.peers),
        "traits": dict(sorted(message.traits.items())),
        "offered": message.offered,
        "policy": message.policy or None,
        "enforcement": message.enforcement or None,
        "glass": _break_glass(message.glass) if message.HasField("glass") else None,
        "failures": message.failures,
        "waits": message.waits or None,
        "strangers": list(message.strangers),
        "uninspected": list(message.uninspected),
        "tenancies": [_tenancy(each) for each in current_tenancies(message)],
        "had_last": [_tenancy(each) for each in previous_tenancies(message)],
        "lasting": [{"code": each.code, "since": each.since} for each in message.lasting],
        "lifetime": dict(sorted(message.lifetime.items())),
        "must_reset": message.must_reset,
        "clean_scrubs": message.clean_scrubs,
        "strikes": [
            {"at": each.at, "code": each.code, "tenant_namespace": each.tenant_namespace or None}
            for each in message.strikes
        ],
        "attempts": [{"at": each.at, "reset": each.reset, "ordered": each.ordered} for each in message.attempts],
        "baseline": baseline(message.baseline) if message.HasField("baseline") else None,
    }


def baseline(message: pb.Baseline) -> dict[str, Any]:
    """What a device should be; a fact is as it should be where ``expected`` and ``found`` are the same."""
    return {
        "at": message.at,
        "actor": message.actor or None,
        "reason": message.reason or None,
        "facts": [_fact(each) for each in message.facts],
        "conditions": [_fact(each) for each in message.conditions],
    }


def scrub(message: pb.Scrub) -> dict[str, Any]:
    """One scrub; ``ended`` and ``outcome`` are null while it is under way."""
    return {
        "id": message.id,
        "device": message.device,
        "path": message.path or None,
        "occasion": message.occasion or None,
        "started": message.started or None,
        "ended": message.ended or None,
        "outcome": message.outcome or None,
        "certificate": message.certificate or None,
        "actor": message.actor or None,
        "steps": [_step(each) for each in message.steps],
    }


def history_entry(message: pb.HistoryEntry) -> dict[str, Any]:
    """One row of the audit chain, with the scrub and the certificate that it speaks of."""
    return {
        "sequence": message.sequence,
        "at": message.at,
        "name": message.name,
        "device": message.device or None,
        "scrub_id": message.scrub_id or None,
        "actor": message.actor,
        "fields": parse_embedded_json(message.fields_json),
        "scrub": scrub(message.scrub) if message.HasField("scrub") else None,
        "certificate": _optional_certificate(message),
        "hash": message.hash,
    }


def _fact(message: pb.Fact) -> dict[str, Any]:
    return {"name": message.name, "expected": message.expected or None, "found": message.found or None}


def _tenancy(message: pb.Tenancy) -> dict[str, Any]:
    return {
        "grant": message.grant,
        "tenant_namespace": message.tenant_namespace or None,
        "pod": message.pod or None,
        "uid": message.uid or None,
        "container": message.container or None,
        "hand_over": message.kind or None,
        "at": message.at,
        "certificate": message.certificate or None,
        "exception": message.exception or None,
    }


def _cause(message: pb.Cause) -> dict[str, Any]:
    return {
        "code": message.code,
        "sentence": message.sentence,
        "way_back": message.way_back,
        "since": message.since,
        "actor": message.actor,
    }


def _break_glass(message: pb.Glass) -> dict[str, Any]:
    return {"until": message.until, "reason": message.reason, "actor": message.actor}


def _step(message: pb.StepResult) -> dict[str, Any]:
    return {
        "step": message.step,
        "verdict": message.verdict,
        "seconds": message.seconds,
        "measured": parse_embedded_json(message.measured_json),
        "not_covered": list(message.not_covered),
        "findings": [
            {
                "code": each.code,
                "severity": each.severity,
                "sentence": each.sentence,
                "evidence": parse_embedded_json(each.evidence_json),
            }
            for each in message.findings
        ],
    }


def _optional_certificate(message: pb.Device | pb.HistoryEntry) -> dict[str, Any] | None:
    return certificate(message.certificate) if _has(message, "certificate") else None


def _has(message: Message, name: str) -> bool:
    return bool(message.HasField(name))


def parse_embedded_json(text: str) -> Any:
    """A JSON text inside a message. One that does not parse is shown as it is: history is not the place to fail."""
    if not text:
        return {}
    try:
        return json.loads(text)
    except ValueError:
        return text
