"""The shape of the command's JSON. Scripts depend on it: keys are added, never renamed or removed.

Keys are camelCase, times RFC 3339 texts in UTC. A missing value is null, never an empty text.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf.message import Message

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.render.device_facts import is_in_use
from scrubber.domain.formatting import rfc3339

__all__ = ["baseline", "cause", "certificate", "device", "history_entry", "parse_embedded_json", "scrub"]


def certificate(message: pb.Certificate) -> dict[str, Any]:
    """Return one certificate. It is consumed when ``nextGrant`` is not null."""
    return {
        "metadata": {"name": message.id},
        "deviceID": message.device_id,
        "sequence": message.sequence,
        "path": message.path,
        "scrubID": message.scrub_id,
        "issuedAt": rfc3339(message.issued_at),
        "previousGrant": message.previous_grant,
        "nextGrant": message.next_grant if message.HasField("next_grant") else None,
        "covered": list(message.covered),
        "notCovered": list(message.not_covered),
        "policy": message.policy,
        "policyDigest": message.policy_digest,
        "baseCertificateID": message.base_certificate_id or None,
        "nodeName": message.node_name,
        "bootID": message.boot_id,
        "driverVersion": message.driver_version,
        "attestation": {"digest": message.attestation.digest, "nonce": message.attestation.nonce}
        if message.HasField("attestation")
        else None,
        "keyID": message.key_id or None,
        "signature": base64.b64encode(message.signature).decode("ascii") if message.signature else None,
    }


def device(message: pb.Device) -> dict[str, Any]:
    """Return one device. ``state`` combines ``hygiene`` and ``health``; ``advertised`` is what the kubelet was sent."""
    return {
        "metadata": {"name": message.id},
        "index": message.index,
        "model": message.model,
        "memoryBytes": message.memory_bytes,
        "state": message.state,
        "hygiene": message.hygiene,
        "health": message.health,
        "cause": cause(message.cause) if message.HasField("cause") else None,
        "nextAttemptAt": _time(message.next_attempt_at),
        "certificate": _optional_certificate(message),
        "assignedTo": _assignment(message) if is_in_use(message) else None,
        "lastHandOverKind": message.last_hand_over_kind or None,
        "grantCount": message.grant_count,
        "activeScrubID": message.active_scrub_id or None,
        "parent": message.parent or None,
        "numaNode": message.numa_node if message.HasField("numa_node") else None,
        "profile": message.profile or None,
        "peers": list(message.peers),
        "attributes": dict(sorted(message.attributes.items())),
        "advertised": message.advertised,
        "policy": message.policy or None,
        "enforcement": message.enforcement or None,
        "breakGlass": _break_glass(message.break_glass) if message.HasField("break_glass") else None,
        "failedRecoveries": message.failed_recoveries,
        "recoveryBlocker": message.recovery_blocker or None,
        "unauthorizedUsers": list(message.unauthorized_users),
        "uninspectedProcesses": list(message.uninspected_processes),
        "holders": [_holder(each) for each in message.holders],
        "openGrants": [_open_grant(each) for each in message.open_grants],
        "adminClaims": [_claim(each) for each in message.admin_claims],
        "conditions": [{"code": each.code, "since": rfc3339(each.since)} for each in message.conditions],
        "lifetimeCounters": dict(sorted(message.lifetime_counters.items())),
        "resetPending": message.reset_pending,
        "probationScrubsPassed": message.probation_scrubs_passed,
        "probationScrubsRequired": message.probation_scrubs_required,
        "quarantines": [
            {"timestamp": rfc3339(each.timestamp), "code": each.code, "tenant": each.tenant or None}
            for each in message.quarantines
        ],
        "recoveryAttempts": [
            {"timestamp": rfc3339(each.timestamp), "reset": each.reset, "byOperator": each.by_operator}
            for each in message.recovery_attempts
        ],
        "baseline": baseline(message.baseline) if message.HasField("baseline") else None,
    }


def baseline(message: pb.Baseline) -> dict[str, Any]:
    """Return what a device should be. A fact matches where ``expected`` and ``actual`` are equal."""
    return {
        "recordedAt": rfc3339(message.recorded_at),
        "actor": message.actor or None,
        "reason": message.reason or None,
        "facts": [_fact(each) for each in message.facts],
        "acceptedConditions": [_fact(each) for each in message.accepted_conditions],
    }


def scrub(message: pb.Scrub) -> dict[str, Any]:
    """Return one scrub. ``finishedAt`` and ``outcome`` are null while it runs."""
    return {
        "metadata": {"name": message.id},
        "deviceID": message.device_id,
        "path": message.path or None,
        "trigger": message.trigger or None,
        "startedAt": _time(message.started_at),
        "finishedAt": _time(message.finished_at),
        "outcome": message.outcome or None,
        "certificateID": message.certificate_id or None,
        "actor": message.actor or None,
        "steps": [_step(each) for each in message.steps],
    }


def history_entry(message: pb.HistoryEntry) -> dict[str, Any]:
    """Return one row of the audit log, with the scrub and the certificate that it refers to."""
    return {
        "sequence": message.sequence,
        "timestamp": rfc3339(message.timestamp),
        "event": message.event,
        "deviceID": message.device_id or None,
        "scrubID": message.scrub_id or None,
        "actor": message.actor,
        "fields": parse_embedded_json(message.fields_json),
        "scrub": scrub(message.scrub) if message.HasField("scrub") else None,
        "certificate": _optional_certificate(message),
        "hash": message.hash,
    }


def _time(seconds: float) -> str | None:
    return rfc3339(seconds) if seconds else None


def _fact(message: pb.Fact) -> dict[str, Any]:
    return {"name": message.name, "expected": message.expected or None, "actual": message.actual or None}


def _assignment(message: pb.Device) -> dict[str, Any]:
    return {
        "tenant": message.tenant or None,
        "pod": message.pod or None,
        "container": message.container or None,
        "claim": _claim(message.claim) if message.HasField("claim") else None,
        "job": _job(message.job) if message.HasField("job") else None,
    }


def _job(message: pb.Job) -> dict[str, Any]:
    return {"manager": message.manager, "id": message.id, "user": message.user, "userID": message.user_id}


def _claim(message: pb.Claim | pb.ClaimPod) -> dict[str, Any]:
    """Return the names of a claim or of one of its pods."""
    return {"namespace": message.namespace, "name": message.name, "uid": message.uid}


def _holder(message: pb.DeviceHolder) -> dict[str, Any]:
    return {
        "pid": message.pid or None,
        "command": message.command or None,
        "kind": message.kind,
        "code": message.code,
        "namespace": message.namespace or None,
        "pod": message.pod or None,
        "podUID": message.pod_uid or None,
        "unit": message.unit or None,
        "since": rfc3339(message.since),
        "blocking": message.blocking,
        "memoryBytes": message.memory_bytes,
    }


def _open_grant(message: pb.OpenGrant) -> dict[str, Any]:
    return {
        "sequence": message.sequence,
        "tenant": message.tenant or None,
        "pod": message.pod or None,
        "podUID": message.pod_uid or None,
        "container": message.container or None,
        "handOverKind": message.hand_over_kind or None,
        "grantedAt": rfc3339(message.granted_at),
        "certificateID": message.certificate_id or None,
        "exception": message.exception or None,
        "claim": _claim(message.claim) if message.HasField("claim") else None,
        "claimPods": [_claim(each) for each in message.claim_pods],
        "claimReleasing": message.claim_releasing,
        "job": _job(message.job) if message.HasField("job") else None,
        "jobEnded": message.job_ended,
    }


def cause(message: pb.Cause) -> dict[str, Any]:
    """Return why a device is out of service, or was."""
    return {
        "code": message.code,
        "message": message.message,
        "recoveryMethod": message.recovery_method,
        "since": rfc3339(message.since),
        "actor": message.actor,
    }


def _break_glass(message: pb.BreakGlass) -> dict[str, Any]:
    return {"expiresAt": rfc3339(message.expires_at), "reason": message.reason, "actor": message.actor}


def _step(message: pb.StepResult) -> dict[str, Any]:
    return {
        "step": message.step,
        "verdict": message.verdict,
        "durationSeconds": message.duration_seconds,
        "measurements": parse_embedded_json(message.measurements_json),
        "notCovered": list(message.not_covered),
        "findings": [
            {
                "code": each.code,
                "severity": each.severity,
                "message": each.message,
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
    """Return the value of a JSON text inside a message; invalid JSON as text, so that history stays readable."""
    if not text:
        return {}
    try:
        return json.loads(text)
    except ValueError:
        return text
