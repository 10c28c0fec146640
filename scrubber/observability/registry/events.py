"""The events of both daemons: every name that a log line or a row of the audit log can have.

An event that both daemons write with different fields has a declaration for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from logging import ERROR, INFO, WARNING
from types import MappingProxyType
from typing import Final

__all__ = ["EVENTS", "EVENTS_BY_SECTION", "Component", "EventDeclaration", "EventField", "EventSection"]


class Component(StrEnum):
    """A daemon, as the key ``component`` of its log lines names it."""

    SERVICE = "service"
    PLUGIN = "plugin"


class EventSection(StrEnum):
    """A table of ``docs/logs.md``."""

    HANDOVERS = "handovers"
    SCRUBS = "scrubs"
    USERS = "users"
    HEALTH = "health"
    OPERATORS = "operators"
    SERVICE = "service"
    PLUGIN = "plugin"
    UPSTREAM = "upstream"
    DRA = "dra"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class EventField:
    """A field of an event, with a remark on its values where the name does not explain them."""

    name: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class EventDeclaration:
    """An event of one daemon, or of both where it is the same.

    Attributes:
        name: ``noun.verb``, in lower case.
        components: the daemons that write it.
        levels: its levels as in :mod:`logging`, the usual one first; empty where any level is possible.
        fields: every field that it can have, besides those of every line.
        description: what happened, and what to do if that is not obvious; Markdown.
        audited: whether it is a row of the audit log.
    """

    name: str
    components: tuple[Component, ...]
    levels: tuple[int, ...]
    fields: tuple[EventField, ...]
    description: str
    audited: bool = False


_Field = str | EventField


def _fields(fields: tuple[_Field, ...]) -> tuple[EventField, ...]:
    return tuple(EventField(each) if isinstance(each, str) else each for each in fields)


def _audited(name: str, level: int | tuple[int, ...], fields: tuple[_Field, ...], description: str) -> EventDeclaration:
    """Declare an event of the service that is a row of the audit log."""
    levels = level if isinstance(level, tuple) else (level,)
    return EventDeclaration(name, (Component.SERVICE,), levels, _fields(fields), description, audited=True)


def _service(name: str, level: int, fields: tuple[_Field, ...], description: str) -> EventDeclaration:
    """Declare an event of the service that is not in the audit log."""
    return EventDeclaration(name, (Component.SERVICE,), (level,), _fields(fields), description)


def _plugin(name: str, level: int, fields: tuple[_Field, ...], description: str) -> EventDeclaration:
    """Declare an event of the plugin."""
    return EventDeclaration(name, (Component.PLUGIN,), (level,), _fields(fields), description)


def _both(name: str, level: int | None, fields: tuple[_Field, ...], description: str) -> EventDeclaration:
    """Declare an event of both daemons; ``level`` is None where any level is possible."""
    return EventDeclaration(name, tuple(Component), () if level is None else (level,), _fields(fields), description)


_OF_A_REFUSAL: Final = ("method", "resource", "devices", "code", "message", "public_message")
_OF_A_CLAIM: Final = (EventField("claim", "namespace and name"), "claim_uid")
_JOB: Final = EventField("job", "manager and ID, such as `slurm/4711`")
_OF_A_HEALTH_CHANGE: Final = ("device", "scrub_id", "cause", "message", "recovery_method", "tenant")

_HANDOVERS: Final = (
    _audited(
        "handover.granted",
        INFO,
        (
            *("device", "scrub_id", "kind", "path", "grant", "certificate", "base_certificate", "exception"),
            *("tenant", "pod", "container", *_OF_A_CLAIM, _JOB, "duration_seconds"),
        ),
        "The device was granted to its tenant. `scrub_id` is the check of this hand-over. `base_certificate` is the last "
        "scrub's certificate; it is `null` where an operator or `observe` permitted the start. `exception` is the policy's "
        "exception, where no certificate was required.",
    ),
    _plugin(
        "handover.granted",
        INFO,
        ("resource", "devices", "paths", "certificates", "duration_seconds"),
        "The same from the kubelet's side: one line for each container start.",
    ),
    _audited(
        "claim.unprepare-requested",
        INFO,
        ("device", "tenant", "pod", *_OF_A_CLAIM),
        "The kubelet asked the DRA driver to unprepare the claim, or an operator ordered a scrub after all its pods were gone, "
        "or the service released a claim that the kubelet has forgotten, or whose pod has not started (actor `service`), for another request. The device is scrubbed as soon as the claim's pods have ended.",
    ),
    _audited(
        "job.end-reported",
        INFO,
        ("device", "tenant", "pod", _JOB),
        "The manager of the job reported its end: by its epilog, or because it gave the device to another job. The device is "
        "released once no process of the job is left.",
    ),
    _audited(
        "claim.pods-changed",
        INFO,
        ("device", "tenant", *_OF_A_CLAIM, EventField("pods", "how many")),
        "The pods that may use the device by the claim are others than before, by the driver's word or the kubelet's list.",
    ),
    _audited(
        "claim.shared-against-policy",
        WARNING,
        ("device", "tenant", *_OF_A_CLAIM, "pods", "message"),
        "A further pod uses a claim although the policy says `sharing: never`; the kubelet starts it without a call. The device "
        "is withheld until that has ended. Use a claim for each pod.",
    ),
    _audited(
        "claim.admin-access",
        INFO,
        ("device", "tenant", *_OF_A_CLAIM),
        "A claim got admin access to the device, which is not granted and not scrubbed for it.",
    ),
    _service(
        "handover.refused",
        WARNING,
        ("device", "code", "message", "duration_seconds"),
        "A start has to wait, or is impossible. The kubelet tries again by itself; if it continues, look up `code` in "
        "[codes](codes.md).",
    ),
    _plugin("handover.refused", WARNING, _OF_A_REFUSAL, "The same; `public_message` is the text in the pod's status."),
    _plugin(
        "handover.device-mismatch",
        ERROR,
        ("resource", "devices", "granted_devices", "message"),
        "The service maps the ids to other devices than the plugin does. The plugin reports the mapping again at once; if "
        "this persists, restart the plugin.",
    ),
    _plugin(
        "allocation.granted",
        INFO,
        ("method", "resource", "devices", EventField("ids", "the vendor's, in front of a vendor's plugin")),
        "The kubelet's `Allocate` was answered.",
    ),
    _plugin(
        "allocation.refused",
        WARNING,
        _OF_A_REFUSAL,
        "The device is out of service, or is not ours. The pod has failed, because the kubelet does not try again.",
    ),
    _plugin(
        "allocation.unreported",
        WARNING,
        ("resource", "devices", "message"),
        "The call was answered although the service did not respond. The hand-over reports the allocation later. Find out "
        "why the service is slow.",
    ),
    _plugin(
        "preferred-allocation.refused",
        WARNING,
        ("method", "resource", "code", "message", "public_message"),
        "The kubelet's request for the preferred devices could not be answered; the kubelet chooses without an answer.",
    ),
    _audited(
        "device.appeared",
        INFO,
        ("device",),
        "The device was not present when the service started. It is dirty until it is scrubbed.",
    ),
    _audited("device.released", INFO, ("device", "tenant"), "The pod is over. The device is dirty from now on."),
    _audited(
        "device.adopted",
        INFO,
        ("device", "tenant", "pod", *_OF_A_CLAIM, _JOB),
        "A pod used the device before the service started to watch it. The device is left alone until the pod is over.",
    ),
    _audited(
        "device.marked-dirty",
        WARNING,
        ("device",),
        "The certificate of a clean device became void: a process held the device although no pod was granted it "
        "(`unauthorized.use.detected` identifies the process), or another device was reset together with it.",
    ),
    _service(
        "device.not-advertised",
        WARNING,
        ("device", "message"),
        "The backend leaves the device out of what it advertises; `message` has the reason.",
    ),
    _plugin(
        "device.healthy",
        INFO,
        ("device", EventField("verdict", "`advertised`"), "message"),
        "The device is reported to the kubelet as healthy.",
    ),
    _plugin(
        "device.unhealthy",
        WARNING,
        ("device", "verdict", "message"),
        "The device is reported to the kubelet as unhealthy, and `message` has the reason. `verdict` is `withheld` (out of "
        "service, gone from the node, or no service is available), `held` (a process without a grant has held it for a "
        "minute, or its driver has just reported a fault and it is being checked) or `unknown` (no service that is ready has reported the device's state yet).",
    ),
    _audited(
        "grant.identified",
        INFO,
        ("device", "grant", "tenant", "pod", "container"),
        "The pod of a grant, or the container that started on it, became known after the grant.",
    ),
    _audited("certificate.issued", INFO, ("device", "scrub_id", "certificate", "path"), "The device was proved clean."),
    _audited(
        "certificate.voided",
        WARNING,
        ("device", EventField("reason", "`watch-gap`, `kubelet-restart`"), "message"),
        "What was proved about the device is no longer certain: nothing watched its users for a time, or a restarted kubelet "
        "may have started containers without a hand-over. The device is scrubbed before it is granted again. If `watch-gap` "
        "is frequent, the node is overloaded.",
    ),
)

_SCRUBS: Final = (
    _audited(
        "scrub.started",
        INFO,
        ("device", "scrub_id", "path", "trigger", "tenant"),
        "The slow path begins; `tenant` used the device last.",
    ),
    _audited(
        "scrub.finished",
        INFO,
        (
            *("device", "scrub_id", "path", "trigger", "outcome", "duration_seconds", "residue_bytes", "cleared_bytes"),
            *("leftovers_killed", "tenant", "message"),
        ),
        "The outcome of the scrub. `blocked` is retried automatically; `failed` is followed by `health.quarantined`. `abandoned`: the scrub "
        "was stopped, or the service ended during it; in the second case `duration_seconds` is null.",
    ),
    _audited(
        "leftover.process.killed",
        WARNING,
        ("device", "scrub_id", "pid"),
        "A process of a pod that was over still ran, and was killed. Its command is not recorded. Where its pod is certain, "
        "`tenant` of `scrub.finished` is the pod's tenant.",
    ),
    _audited(
        "leftover.pod.killed",
        WARNING,
        ("device", "scrub_id", "pod_uid", "tenant"),
        "All processes of such a pod were killed together. If this is frequent for one tenant, find out what its pods leave "
        "behind.",
    ),
    _audited(
        "eraser.orphan.found",
        WARNING,
        ("device", "scrub_id", "pid", "killed"),
        "An eraser of a service that was killed still held the device. `killed: false`: see `health.quarantined`.",
    ),
    _audited(
        "reset.finished",
        INFO,
        ("device", "scrub_id", EventField("outcome", "`ok`, or the [code](codes.md) of the finding that prevented it")),
        "The reset of a scrub was made, or could not be made.",
    ),
    _audited(
        "residue.unexplained",
        ERROR,
        ("device", "scrub_id", "residue_bytes", "certificate", "message"),
        "Data was found on a device that had been proved clean and was granted to no pod since. Runbook "
        "`ScrubberResidueAfterCertificate`.",
    ),
)

_USERS: Final = (
    _audited(
        "unauthorized.use.detected",
        WARNING,
        ("device", "use", "pid", "command", "pod_uid", "state", "resource", "message"),
        "A process uses a device without a grant, or another plugin assigned the device to a pod. Runbook "
        "`ScrubberUnauthorizedUse`. [Tenancy](tenancy.md) describes the possible users, and the actions of the policy.",
    ),
    _audited(
        "validation.use.detected",
        WARNING,
        ("device", EventField("use", "`validation`"), "pid", "command", "pod_uid", "state", "message"),
        "A process of the node's infrastructure has a context on a device, such as a validator of the GPU Operator. The "
        "device is scrubbed before its next grant; the process is never killed, and the device never quarantined for it.",
    ),
    _audited(
        "unauthorized.process.killed",
        WARNING,
        ("device", "scrub_id", "pid", "pod_uid", EventField("tenant", "`null`: not a pod that had the device")),
        "A process that used the device without a grant was killed, as the policy requires.",
    ),
    _audited(
        "uninspected.process.found",
        WARNING,
        (
            *("device", "scrub_id", EventField("pid", "0: a control group whose processes come and go"), "pod_uid"),
            *("processes", "walks", "blocks", "message", EventField("tenant", "`null`")),
        ),
        "Several walks over `/proc` did not finish inspecting these processes. `blocks`: the device is not scrubbed because "
        "of them. Find out why the pod has so many descriptors open; the policy's `uninspectedProcesses` can kill such processes of pods.",
    ),
    _audited(
        "uninspected.process.killed",
        WARNING,
        ("device", "scrub_id", "pid", "pod_uid", EventField("tenant", "`null`")),
        "Such a process of a pod was killed, as the policy requires.",
    ),
    _audited(
        "tenant.flagged",
        ERROR,
        ("device", "tenant", "quarantines", "message"),
        "Devices go out of service again and again while one tenant uses them. Runbook `ScrubberTenantCausesQuarantines`.",
    ),
)

_HEALTH: Final = (
    _audited(
        "health.errors-reported",
        (WARNING, INFO),
        ("device", "code", "class", "new", "total", "tenant", "message"),
        "The driver reported XIDs of one code. Info where their class in the policy means that the device is not at fault.",
    ),
    _audited("health.suspect", WARNING, _OF_A_HEALTH_CHANGE, "The device has a warning and is still handed out."),
    _audited(
        "health.quarantined",
        ERROR,
        _OF_A_HEALTH_CHANGE,
        "The device is out of service. `recovery_method: operator`: an operator has to inspect it. The alert that fires "
        "names the runbook.",
    ),
    _audited("health.recovering", INFO, _OF_A_HEALTH_CHANGE, "The service tries to return the device to service."),
    _audited(
        "health.recovery-failed",
        WARNING,
        _OF_A_HEALTH_CHANGE,
        "The attempt failed; the service tries again until the attempts are used up.",
    ),
    _audited(
        "health.probation",
        INFO,
        _OF_A_HEALTH_CHANGE,
        "The device returns to service after as many clean scrubs as the policy requires (`probationScrubs`).",
    ),
    _audited("health.healthy", INFO, _OF_A_HEALTH_CHANGE, "The device is back in service, or no longer suspect."),
    _audited(
        "health.condemned",
        ERROR,
        _OF_A_HEALTH_CHANGE,
        "The service makes no further attempts. Runbook `ScrubberDeviceCondemned`.",
    ),
    _audited(
        "breaker.opened",
        ERROR,
        ("breaker", "message"),
        "Too many automatic actions on the node at once: recoveries make no resets, or soft signals take no further devices "
        "out of service. Look for a common cause. Runbook `ScrubberBreakerOpen`.",
    ),
    _audited("breaker.closed", INFO, ("breaker", "message"), "These actions are made again."),
    _audited(
        "baseline.recorded",
        INFO,
        ("device", "model", "serial", "vbios", "inforom"),
        "The expected values of the device from now on: those that its driver reports when the device is first seen, and "
        "later those that it reports for the first time.",
    ),
    _audited(
        "baseline.accepted",
        WARNING,
        ("device", "reason"),
        "An operator accepted the device's present values. `previous_…` and `current_…` are the expected values before and "
        "after it.",
    ),
    _service(
        "driver.unavailable",
        WARNING,
        ("message",),
        "The driver does not answer while the service starts; the service waits for it.",
    ),
)

_OPERATORS: Final = (
    _audited("operator.quarantined", WARNING, ("device", "reason"), "`actor` took the device out of service."),
    _audited("operator.released", INFO, ("device", "reason"), "`actor` released the device from quarantine."),
    _audited(
        "operator.reset",
        WARNING,
        ("device", "scrub_id", "reason"),
        "`actor` ordered a reset; `reset.finished` of the same scrub has the result.",
    ),
    _audited(
        "break-glass.started",
        ERROR,
        ("device", "reason", "duration_seconds", "expires_at", "state"),
        "An operator started a break-glass override: the device is handed out regardless of its state. Runbook "
        "`ScrubberBreakGlassActive`.",
    ),
    _audited("break-glass.ended", WARNING, ("device", "message"), "The override has ended; `message` has the reason."),
)

_SERVICE: Final = (
    _audited(
        "service.started",
        INFO,
        ("devices", "abandoned_scrubs", "key_id"),
        "The ledger was read; next, the devices are inspected.",
    ),
    _service(
        "service.ready",
        INFO,
        ("devices", "policy", "version", "key_id", "audit_head"),
        "From now on hand-overs are answered.",
    ),
    _service("service.stopping", INFO, (), "The service was asked to stop."),
    _service(
        "plugin.version-differs",
        INFO,
        ("plugin_version", "version"),
        "A plugin of another version is connected, as in the middle of an [upgrade](upgrading.md). Logged once for each "
        "version.",
    ),
    _service(
        "plugin.version-refused",
        ERROR,
        ("plugin_version", "version", "message"),
        "A plugin is more than one minor version apart, and its calls are refused: pods wait. "
        "[Upgrade](upgrading.md) one of the two. Logged once for each version.",
    ),
    _service(
        "work-gate.changed",
        INFO,
        ("accepting",),
        "GPUs in a confidential-computing mode accept work from now on, or no longer; see decision 0042.",
    ),
    _service(
        "work-gate.failed",
        ERROR,
        ("accepting", "message"),
        "The GPUs could not be made to accept work, or to refuse it. Starts are refused until it can; this is retried "
        "every few seconds.",
    ),
    _audited(
        "node.yield-requested",
        WARNING,
        ("requester", "reason"),
        "`actor` requested that the node be yielded: from now on every device is withheld, and the driver is closed.",
    ),
    _audited(
        "node.yielded",
        WARNING,
        ("message", "remaining_pids"),
        "No process of the service uses the driver, except `remaining_pids`: processes that could not be killed.",
    ),
    _audited(
        "node.yield-ended",
        INFO,
        ("requester", "reason"),
        "The request was withdrawn; without another one the driver is opened again, and every device is dirty.",
    ),
    _audited(
        "agents.pause-started",
        INFO,
        ("device", "pause", "way"),
        "Agents that have the device open are to be paused for its reset; nothing has been changed yet.",
    ),
    _audited(
        "agents.pause-planned",
        INFO,
        ("pause", "way", "changes"),
        "The plugin is about to change these labels of the node; each with its earlier value.",
    ),
    _audited(
        "agents.pause-failed",
        WARNING,
        ("device", "pause", "way", "message"),
        "Agents cannot be paused this way, or do not release `device`; what was changed is restored. The reset goes on with the "
        "next way, or is blocked.",
    ),
    _audited(
        "agents.pause-interrupted",
        WARNING,
        ("pause", "way"),
        "An earlier service ended during a pause of agents. They are restored now.",
    ),
    _audited(
        "agents.restored",
        INFO,
        ("pause", "way", "message", "duration_seconds"),
        "The pause is over, and everything is as before, except what `message` names. `duration_seconds` is since it began.",
    ),
    _audited(
        "external-reset.started",
        INFO,
        ("device", "pause", "devices"),
        "Another service of the cluster is to reset these devices, which agents hold. The node is yielded for that.",
    ),
    _audited(
        "external-reset.succeeded",
        INFO,
        ("device", "pause", "message"),
        "Another service says that it has reset the device, which is scrubbed again. This service did not observe it.",
    ),
    _audited(
        "external-reset.failed",
        WARNING,
        ("device", "pause", "message"),
        "Another service did not reset the device, or not in time. The device is scrubbed again, with a reset if it needs one.",
    ),
    _audited(
        "external-reset.ended",
        INFO,
        ("pause", "message", "duration_seconds"),
        "The request to the other service is gone, and the node is no longer yielded for it.",
    ),
    _service(
        "agents.restore-failed",
        WARNING,
        ("pause", "way", "message"),
        "Agents are still paused; it is tried again every 10 s. See [the runbook](runbooks/ScrubberAgentsPaused.md).",
    ),
    _service("service.stopped", INFO, (), "The service has ended in an orderly way."),
    _service(
        "service.stop-timed-out",
        ERROR,
        ("duration_seconds",),
        "Something hung while the service ended, so it ended at once, and its children with it. The next service treats "
        "every device that no pod has as dirty.",
    ),
    _service(
        "service.failed",
        ERROR,
        ("traceback",),
        "A defect in this program ended the service. The supervisor starts it again, and every device that no pod has is "
        "scrubbed. Please report it.",
    ),
    _service("api.serving", INFO, ("directory",), "The sockets accept calls."),
    _service("api.refused", INFO, ("method", "error", "code", "message", "caller"), "A caller was refused."),
    _both(
        "api.failed",
        ERROR,
        ("method", "traceback"),
        "A call failed because of a defect in this program; the caller received no details. Please report it.",
    ),
    _service(
        "admin.caller-refused", WARNING, ("uid", "pid"), "A user who is not an operator called on the admin socket."
    ),
    _service(
        "admin.too-many-connections",
        WARNING,
        ("uid", "pid", "connections"),
        "A caller was refused because too many connections are open: find out which process opens them, and why.",
    ),
    _service("admin.connection-closed", INFO, ("uid",), "A silent connection was closed to make room."),
    _service(
        "admin.relay-failed",
        ERROR,
        ("message",),
        "A connection could not be passed on. Check whether the node is out of file descriptors or memory.",
    ),
    _audited(
        "policy.accepted",
        INFO,
        ("policy", "digest", "changed", "message"),
        "The policy was read again; `message` names the settings that take effect at the next start only.",
    ),
    _audited(
        "policy.rejected",
        ERROR,
        ("message",),
        "The policy file is invalid, and the previous policy stays in force. Runbook `ScrubberPolicyRejected`.",
    ),
    _service(
        "policy.xids-disabled",
        WARNING,
        ("message",),
        "`DP_DISABLE_HEALTHCHECKS` is set, so XIDs are ignored. Prefer to set this in the policy.",
    ),
    _service("key.loaded", INFO, ("key_id",), "The key that signs certificates was read."),
    _audited(
        "ledger.converted",
        WARNING,
        ("from_version", "from_schema", "to_schema", "copy", "omitted", "quarantined"),
        "Another version wrote the ledger, and this one converted it; the earlier file is `copy`. Only the copy has "
        "`omitted` entries of the history. The record of the devices in `quarantined` cannot be read; they stay out of "
        "service until an operator releases them. See [upgrading.md](upgrading.md).",
    ),
    _audited(
        "key.created",
        WARNING,
        ("key_id",),
        "There was no key, so one was created. Everyone who verifies this node's certificates needs the new one.",
    ),
    _service(
        "audit.head-published",
        INFO,
        ("head",),
        "The head of the audit log, at most once a minute, to be kept outside the node ([audit](audit.md)).",
    ),
    _service("audit.broken", ERROR, ("message",), "The audit log was changed. Runbook `ScrubberAuditBroken`."),
    _service(
        "audit.unverified",
        WARNING,
        ("message",),
        "The audit log could not be verified; this is tried again in a minute.",
    ),
    _service(
        "kubelet.untrusted",
        WARNING,
        ("trust", "message"),
        "The service is not certain which pod has which device. Runbook `ScrubberKubeletUntrusted`.",
    ),
    _service("kubelet.trusted", INFO, (), "It is certain again."),
    _service(
        "kubelet.none",
        INFO,
        (),
        "The service runs without a kubelet (`--no-kubelet`), so the node has no pods: devices are handed over to jobs only.",
    ),
    _service(
        "pods.watch-failed",
        WARNING,
        ("message",),
        "The kernel does not report the ends of some pods: a limit of inotify is reached, or a cgroup cannot be read. Their "
        "devices are released one to two seconds later, by the kubelet's list. Tried again every 10 seconds; `scrubber "
        "doctor` names the limit.",
    ),
    _service("pods.watched", INFO, (), "The ends of all pods are reported again."),
    _service(
        "reset.not-announced",
        WARNING,
        ("device", "message"),
        "The device was reset, but the journal did not take the line for NVSentinel (`--nvsentinel-reset-journal`), which "
        "may report the device's earlier XIDs until it restarts.",
    ),
    _both("metrics.serving", INFO, ("address", "encrypted"), "The address that Prometheus may scrape."),
    _both(
        "metrics.unavailable",
        WARNING,
        ("message",),
        "The default address of the metrics is in use, so there are no metrics. Set `--metrics-address`; then an address in "
        "use is an error.",
    ),
    _both("probes.serving", INFO, ("address",), "The address of the probes `/livez` and `/readyz`."),
    _both("metrics.scrape-failed", WARNING, ("message",), "A scrape failed."),
    _both("traces.exporting", INFO, ("endpoint", "encrypted", "sampler"), "Traces are sent ([tracing](tracing.md))."),
    _both(
        "traces.lost",
        WARNING,
        ("lost_spans", "message"),
        "The number of spans that could not be sent since the last such line; nothing waits for them. At most once a minute, "
        "and at the stop for the remaining ones.",
    ),
    _both(
        "library.logged",
        None,
        ("logger", "message", "traceback"),
        "A library's own message at its own level, from warnings on.",
    ),
)

_PLUGIN: Final = (
    _plugin(
        "plugin.started", INFO, ("version", "kubelet", "service"), "The plugin started; it uses these directories."
    ),
    _plugin("plugin.serving", INFO, ("resource", "socket"), "The plugin serves a socket for the kubelet."),
    _plugin(
        "plugin.standby",
        INFO,
        ("resource",),
        "Another instance of the plugin is registered. This one takes over when the other has ended.",
    ),
    _plugin(
        "plugin.stopping",
        INFO,
        (),
        "The plugin was asked to stop. The kubelet's streams end now, so no pod is placed on these devices.",
    ),
    _plugin("plugin.stopped", INFO, (), "The plugin has ended in an orderly way."),
    _plugin(
        "plugin.failed",
        ERROR,
        ("traceback",),
        "A defect in this program ended the plugin; the supervisor starts it again. Please report it.",
    ),
    _plugin("plugin.sockets-removed", INFO, ("paths",), "Sockets that a killed plugin had left behind were removed."),
    _plugin(
        "plugin.disable-healthchecks-ignored",
        WARNING,
        ("message",),
        "`DP_DISABLE_HEALTHCHECKS` and `DP_ENABLE_HEALTHCHECKS` have no effect on the plugin: set the first for the service "
        "or, preferably, configure XIDs in the policy.",
    ),
    _plugin(
        "plugin.devices-by-index",
        WARNING,
        ("message",),
        "Containers get device indices, which may refer to other GPUs later. Choose UUIDs.",
    ),
    _plugin(
        "devices.none-selected",
        WARNING,
        ("devices", "message"),
        "No device of the node matches `--devices`, so that the daemon offers none. `devices` lists those of the node, each as "
        "`INDEX=UUID`.",
    ),
    _plugin(
        "settings.reloaded",
        INFO,
        ("root",),
        "The plugin serves with new settings: its configuration file changed, or the driver is in another place (`root`).",
    ),
    _plugin(
        "settings.ignored",
        WARNING,
        ("message",),
        "A setting for NVIDIA's plugin has no effect here: a flag's value or a key of the configuration file.",
    ),
    _plugin("settings.unchanged", INFO, (), "SIGHUP arrived, and the settings are the same as before."),
    _plugin(
        "settings.rejected",
        ERROR,
        ("message",),
        "The changed settings cannot work; the earlier ones stay in force. Correct what `message` names.",
    ),
    _plugin(
        "driver.location-unknown",
        WARNING,
        ("message", "waited_seconds"),
        "The plugin waits until it is known where NVIDIA's driver is, and logs this every half minute.",
    ),
    _plugin(
        "driver.location-known", INFO, ("root", "waited_seconds"), "NVIDIA's driver is installed in `root` on the host."
    ),
    _plugin(
        "kubelet.unavailable",
        WARNING,
        ("resource", "message", "waited_seconds"),
        "The plugin waits for the kubelet, and logs this every half minute. Runbook `ScrubberPluginNotRegistered`.",
    ),
    _plugin("kubelet.available", INFO, ("resource", "waited_seconds"), "The kubelet is back."),
    _plugin(
        "kubelet.registered", INFO, ("resource", "mode", "socket"), "The kubelet receives the plugin's device list."
    ),
    _plugin(
        "kubelet.registration-lost",
        WARNING,
        ("resource", "reason", "mode", "message"),
        "The kubelet no longer receives it. Normal when the kubelet restarts.",
    ),
    _plugin(
        "kubelet.registration-refused",
        ERROR,
        ("resource", "message"),
        "The kubelet refuses the plugin, which tries again automatically. Check whether another plugin has the same "
        "resource.",
    ),
    _plugin(
        "service.unavailable",
        WARNING,
        ("message", "waited_seconds"),
        "The service does not answer; the plugin keeps trying. Runbook `ScrubberServiceDown`.",
    ),
    _plugin(
        "service.grace-period-expired",
        ERROR,
        ("message",),
        "The service has not answered for too long: every device is reported to the kubelet as unhealthy.",
    ),
    _plugin("service.available", INFO, ("epoch", "ready", "waited_seconds"), "The service is back."),
    _plugin(
        "service.instance-changed",
        INFO,
        ("epoch", "devices", "service_version"),
        "The plugin is connected to a run of the service that it did not know before.",
    ),
    _plugin(
        "resource-mapping.failed",
        WARNING,
        ("resource", "message"),
        "The meaning of the kubelet's ids could not be reported to the service; the plugin tries again.",
    ),
    _plugin(
        "resource-mapping.refused",
        ERROR,
        ("resource", "message"),
        "The service refused the meaning of the kubelet's ids; `message` has the reason.",
    ),
    _plugin(
        "policy.envvar-refused",
        ERROR,
        ("message", "remedy"),
        "The policy does not allow devices to be announced by an environment variable, so no GPU is handed out. Do what "
        "`remedy` says.",
    ),
    _plugin("node.not-advertised", ERROR, ("message",), "The node does not match the plugin's configuration."),
    _plugin("node.advertised", INFO, (), "The node matches the plugin's configuration again."),
    _plugin("node.partially-advertised", WARNING, ("message",), "Some devices are not advertised."),
    _plugin(
        "cdi.written",
        INFO,
        ("path", "devices", "driver", "source"),
        "The CDI specification for container runtimes was written. `source`: `toolkit` if NVIDIA's own specification "
        "determines the driver's files, otherwise `plugin`.",
    ),
    _plugin(
        "cdi.failed",
        ERROR,
        ("message",),
        "The CDI specification cannot be written; the devices that it does not have yet are not handed out.",
    ),
    _plugin(
        "cdi.toolkit-spec-unused",
        INFO,
        ("path", "message"),
        "NVIDIA's own CDI specification is not used, for example because it is for another driver version; the plugin "
        "finds the driver's files itself.",
    ),
    _plugin(
        "injection.unchecked",
        WARNING,
        ("message",),
        "It is unknown whether the container runtime gives containers their GPUs, or `--runtime-check=warn` is set and it "
        "does not. `message` says what to configure or to make visible for the plugin.",
    ),
    _plugin(
        "cdi.feature-missing",
        WARNING,
        ("message", "remedy"),
        "GPUDirect Storage, GDRCopy or MOFED is requested, and the node has no device node for it.",
    ),
    _plugin("cdi.hook-missing", WARNING, ("message", "remedy"), "Install NVIDIA's container toolkit."),
)

_UPSTREAM: Final = (
    _plugin("upstream-registry.serving", INFO, ("socket",), "Vendors' plugins may register here."),
    _plugin(
        "upstream-registry.socket-rotated",
        WARNING,
        ("message",),
        "The socket is created again, so that the vendors' plugins register again.",
    ),
    _plugin(
        "upstream-registry.waiting",
        WARNING,
        ("directory", "waited_seconds"),
        "Another instance of our plugin uses the directory. Check whether an old one still runs.",
    ),
    _plugin("upstream-registry.acquired", INFO, ("directory", "waited_seconds"), "This instance uses it now."),
    _plugin("upstream.registered", INFO, ("resource", "socket"), "A vendor's plugin has registered."),
    _plugin(
        "upstream.registration-refused",
        WARNING,
        ("resource", "endpoint", "message"),
        "The registration of a vendor's plugin was refused.",
    ),
    _plugin(
        "upstream.disconnected",
        WARNING,
        ("resource", "message"),
        "The connection to the vendor's plugin is lost; that plugin's log has the reason.",
    ),
    _plugin(
        "upstream.device-healthy",
        INFO,
        ("resource", EventField("device", "the id that the vendor's plugin lists")),
        "The device is reported to the kubelet as healthy.",
    ),
    _plugin(
        "upstream.device-unhealthy",
        INFO,
        ("resource", "device", "message"),
        "The device is reported to the kubelet as unhealthy, and `message` has the reason.",
    ),
    _plugin(
        "upstream.device-refused",
        ERROR,
        ("resource", "device", "message"),
        "The device is not handed out: the meaning of the vendor's id is unknown or contradicts its earlier meaning.",
    ),
    _plugin(
        "upstream.paused",
        ERROR,
        ("resource", "message"),
        "The vendor's plugin did not answer a call, and is not called for a minute.",
    ),
    _plugin(
        "upstream.rejected",
        ERROR,
        ("resource", "message"),
        "The vendor's plugin gave an unusable answer, such as one with a device that was not requested. It is not used until "
        "it registers again.",
    ),
    _plugin(
        "upstream.call-refused",
        WARNING,
        ("method", "resource", "devices", "message"),
        "The vendor's plugin refused a call; its message is passed on to the kubelet.",
    ),
    _plugin(
        "upstream.preference-ignored",
        WARNING,
        ("method", "resource", "message"),
        "The vendor's plugin returned no usable preference; ours was used.",
    ),
)

_CLUSTER: Final = (
    _plugin(
        "node.yield-label-changed",
        INFO,
        ("message",),
        "A label of `--yield-labels` changed: `message` is why the node is to be yielded now, `null` if it is not.",
    ),
    _plugin(
        "node.yield-request-failed",
        WARNING,
        ("message", "waited_seconds"),
        "The service did not accept that; the plugin repeats it.",
    ),
    _plugin("node.yield-request-sent", INFO, ("message", "waited_seconds"), "The service has accepted it after all."),
    _plugin(
        "cluster.label-watch-failed",
        WARNING,
        ("message", "waited_seconds"),
        "The labels of the node cannot be followed; the last ones remain valid until the watch succeeds again.",
    ),
    _plugin("cluster.labels-watched", INFO, ("message", "waited_seconds"), "The labels are followed again."),
    _plugin(
        "cluster.updated",
        INFO,
        ("node", "credentials"),
        "The plugin writes events, condition and labels to the API server from now on ([cluster](cluster.md)).",
    ),
    _plugin("cluster.not-updated", INFO, ("message",), "It does not; `message` has the reason."),
    _plugin(
        "cluster.standby",
        INFO,
        ("node",),
        "Another instance of the plugin writes. This one takes over when the other has ended.",
    ),
    _plugin(
        "cluster.write-failed",
        WARNING,
        ("kind", "message", "waited_seconds"),
        "`kind` could not be written, which is tried again. Check the permissions of the role.",
    ),
    _plugin("cluster.write-succeeded", INFO, ("kind", "waited_seconds"), "`kind` can be written again."),
    _plugin(
        "cluster.failed",
        ERROR,
        ("traceback",),
        "A defect in this program interrupted the reporting, which starts again. Please report it.",
    ),
    _plugin(
        "cluster.shutdown-update-failed",
        INFO,
        ("message",),
        "The condition could not be updated when the plugin stopped.",
    ),
    _plugin(
        "agents.pause-planned",
        INFO,
        ("pause", "labels"),
        "The service has recorded the changes in `labels`, by which agents are to be paused for a reset.",
    ),
    _plugin(
        "agents.paused",
        INFO,
        ("pause", "labels"),
        "The labels of the node are changed, so that agents end which have GPUs open. They are restored after the reset.",
    ),
    _plugin(
        "agents.restored",
        INFO,
        ("pause", "labels"),
        "The labels have the values again that they had before, which are in `labels`.",
    ),
    _plugin(
        "agents.label-left",
        WARNING,
        ("pause", "label", "value"),
        "Another client has given `label` another value during the pause, `null` where it was removed. It stays.",
    ),
    _plugin(
        "agents.pause-waiting",
        WARNING,
        ("pause", "message", "waited_seconds"),
        "The pause, or its end, is not possible yet for the reason in `message`. It is tried again.",
    ),
    _plugin("agents.pause-proceeds", INFO, ("pause", "waited_seconds"), "The wait is over."),
    _plugin(
        "agents.pause-failed",
        WARNING,
        ("pause", "message"),
        "The agents cannot be paused, so the reset does not take place. Changes that were made are restored.",
    ),
    _plugin(
        "agents.pause-abandoned",
        WARNING,
        ("pause",),
        "The service has been away for 15 minutes, so its reset cannot be in progress any more: the labels are restored.",
    ),
    _plugin("gpu-reset.offered", INFO, (), "The cluster has NVSentinel's GPUReset: the service may let it reset GPUs."),
    _plugin(
        "gpu-reset.withdrawn", INFO, (), "The cluster has no GPUReset any more, or the plugin's role does not allow it."
    ),
    _plugin(
        "gpu-reset.requested", INFO, ("pause", "gpus"), "NVSentinel is to reset the GPUs, by the GPUReset `pause`."
    ),
    _plugin("gpu-reset.succeeded", INFO, ("pause", "message"), "NVSentinel reports that it has reset the GPUs."),
    _plugin(
        "gpu-reset.left-over",
        WARNING,
        ("name",),
        "A GPUReset of this node that no pause exists for was deleted, perhaps because a request of an instance that died "
        "arrived late.",
    ),
    _plugin(
        "gpu-reset.not-removed",
        WARNING,
        ("pause", "message"),
        "The plugin's role does not allow it to delete its GPUReset: delete it if it exists.",
    ),
    _plugin(
        "agents.pause-orphaned",
        ERROR,
        ("pause", "labels"),
        "The node has the label of a pause that the service does not know, perhaps because its ledger was deleted. Check "
        "the node's `labels`, set those to `true` again whose agents are to run, and remove `scrubber.dev/agent-pause`.",
    ),
    _plugin(
        "agents.lease-not-renewed",
        INFO,
        ("message",),
        "The Lease that limits pauses to one node at a time was not renewed or released. It expires after 60 s.",
    ),
    _plugin(
        "agents.lease-lost",
        WARNING,
        ("holder",),
        "The Lease expired, and `holder` has it now: the agents of two nodes are paused at the same time.",
    ),
    _plugin(
        "agents.standby",
        INFO,
        (),
        "Another instance of the plugin pauses agents. This one takes over when the other has ended.",
    ),
    _plugin(
        "agents.failed",
        ERROR,
        ("traceback",),
        "A defect in this program interrupted the pausing of agents, which starts again. Please report it.",
    ),
    _plugin(
        "nvsentinel.reporting",
        INFO,
        ("node", "socket", "strategy"),
        "The plugin sends health events to NVSentinel from now on ([cluster](cluster.md#nvsentinel)).",
    ),
    _plugin(
        "nvsentinel.send-failed",
        WARNING,
        ("socket", "message", "waited_seconds"),
        "NVSentinel did not accept the health events, which is tried again. Check that its platform connector runs on the "
        "node and that the plugin has its socket mounted.",
    ),
    _plugin("nvsentinel.send-succeeded", INFO, ("socket", "waited_seconds"), "It accepts them again."),
    _plugin(
        "nvsentinel.failed",
        ERROR,
        ("traceback",),
        "A defect in this program interrupted the health events, which start again. Please report it.",
    ),
    _plugin("cluster.event-refused", WARNING, ("about", "kind", "message"), "The API server refused one event."),
    _plugin("pod.evicted", WARNING, ("tenant", "pod", "message"), "The pod was evicted, as the policy requires."),
    _plugin(
        "eviction.refused",
        WARNING,
        ("tenant", "pod", "message"),
        "The API server refused the eviction, which is tried again later.",
    ),
    _plugin("eviction.delayed", INFO, ("tenant", "pod", "message"), "A disruption budget delays the eviction."),
    _plugin(
        "eviction.withdrawn",
        WARNING,
        ("tenant", "pod", "message"),
        "The request was cancelled; it may have reached the API server all the same.",
    ),
)


_DRA: Final = (
    _plugin("driver.started", INFO, ("version", "driver", "node"), "The driver started, with this name on this node."),
    _plugin(
        "claim.prepared",
        INFO,
        (*_OF_A_CLAIM, "devices", "certificates", "duration_seconds"),
        "The claim's devices were granted to its pods.",
    ),
    _plugin(
        "claim.refused",
        WARNING,
        (*_OF_A_CLAIM, "code", "message", "public_message"),
        "The claim was not prepared, so its pod waits; `public_message` is the text in the pod's events. The kubelet tries "
        "again.",
    ),
    _plugin(
        "claim.class-unreadable",
        WARNING,
        (EventField("claim", "namespace and name"), "message"),
        "A device class of a claim for extended resources cannot be read, for the reason in `message`, such as a missing "
        "permission. Whether the device plugin advertises the same resource is not checked; the claim is prepared all the same.",
    ),
    _plugin(
        "claim.released", INFO, (*_OF_A_CLAIM, "duration_seconds"), "The claim was released: its devices are clean."
    ),
    _plugin(
        "claim.restored",
        WARNING,
        _OF_A_CLAIM,
        "The claim was handed over again without a call of the kubelet, which had dropped its release because another pod joined "
        "it. That pod can start now.",
    ),
    _plugin(
        "claim.release-pending",
        INFO,
        (*_OF_A_CLAIM, "code", "message"),
        "The claim is not released yet, so its pod stays in Terminating. The kubelet tries again.",
    ),
    _plugin(
        "claim.devices-withheld",
        WARNING,
        (*_OF_A_CLAIM, "devices", "causes", EventField("withdrawn", "whether the scheduler knows already")),
        "Devices of a released claim are out of service, by their causes.",
    ),
    _plugin(
        "claim.watch-failed",
        WARNING,
        (EventField("claim", "namespace and name"), "message", "waited_seconds"),
        "The driver cannot see at the API server which pods share the claim, or the service cannot record them, for the reason "
        "in `message`. The driver tries again; until then the service learns of them from the kubelet only.",
    ),
    _plugin("claim.watched-again", INFO, ("waited_seconds",), "Claims can be watched again."),
    _plugin(
        "claims.not-listed",
        WARNING,
        ("message", "waited_seconds"),
        "The service does not tell the driver which claims are prepared, for the reason in `message`. The driver tries again; "
        "until then it removes no CDI specification and does not watch claims that were prepared before it started.",
    ),
    _plugin("claims.listed", INFO, ("waited_seconds",), "The service lists the prepared claims again."),
    _plugin(
        "claim.report-refused",
        WARNING,
        (EventField("claim", "namespace and name"), "message", "waited_seconds"),
        "The API server refused the status of a claim or an event; `message` names the permissions that are needed. The claim "
        "is prepared all the same.",
    ),
    _plugin(
        "claim.report-failed",
        WARNING,
        ("message", "waited_seconds"),
        "The status of a claim cannot be written; the driver tries again.",
    ),
    _plugin("claim.reported-again", INFO, ("waited_seconds",), "The status of claims can be written again."),
    _plugin(
        "claim.binding-allowed",
        INFO,
        (*_OF_A_CLAIM, "device"),
        "A device that was being cleaned when the scheduler placed a pod on it is clean: as far as it is concerned, the pod can "
        "be bound. `device` is its name in the ResourceSlice.",
    ),
    _plugin(
        "claim.binding-refused",
        WARNING,
        (*_OF_A_CLAIM, "device", "reason", "message", EventField("withdrawn", "whether the scheduler knows already")),
        "A device that was being cleaned when the scheduler placed a pod on it is out of service, or gone: the scheduler "
        "chooses another one for the pod.",
    ),
    _plugin(
        "claim.binding-delayed",
        WARNING,
        ("message", "waited_seconds"),
        "The driver cannot watch claims, or cannot set their binding conditions, for the reason in `message`, such as a "
        "missing permission. Pods that were placed on a device that was being cleaned wait, at most for the scheduler's "
        "limit of 600 s.",
    ),
    _plugin("claim.binding-resumed", INFO, ("waited_seconds",), "Binding conditions are set again."),
    _plugin(
        "cdi.claim-not-removed",
        WARNING,
        ("path", "message"),
        "A file in the CDI directory that no claim needs any more could not be removed. Containers cannot get a device by it.",
    ),
    _plugin(
        "cdi.claim-removed",
        INFO,
        ("claim_uid",),
        "A file in the CDI directory was removed at the start, because its claim is not prepared any more.",
    ),
    _plugin(
        "cdi.claim-restored",
        INFO,
        ("claim_uid",),
        "A file in the CDI directory that a prepared claim needs was missing, or different, at the start, and was written "
        "again: otherwise no container of the claim could have restarted.",
    ),
    _plugin(
        "cdi.claim-not-restored",
        WARNING,
        ("claim_uid", "message"),
        "The CDI specification of a prepared claim was not checked at the start, because the claim or a device of it is gone.",
    ),
    _plugin(
        "cdi.claims-not-restored",
        WARNING,
        (EventField("claims", "how many"), "message", "waited_seconds"),
        "The CDI specifications of prepared claims cannot be checked yet after the driver's start; it tries again. If one is "
        "missing, no container of that claim can restart until then.",
    ),
    _plugin(
        "cdi.claims-restored",
        INFO,
        ("waited_seconds",),
        "The CDI specifications of all prepared claims are in place.",
    ),
    _plugin(
        "slices.published",
        INFO,
        ("devices", "slices", "generation"),
        "The node's ResourceSlices at the API server were changed: the scheduler sees these devices.",
    ),
    _plugin(
        "slices.write-failed",
        WARNING,
        ("message", "waited_seconds"),
        "The ResourceSlices cannot be written; `message` names the permission that is missing, if one is. The scheduler "
        "works with the last ones meanwhile, and the driver tries again.",
    ),
    _plugin("slices.written-again", INFO, ("waited_seconds",), "The ResourceSlices can be written again."),
    _plugin(
        "slices.watch-interrupted",
        INFO,
        ("message",),
        "The driver does not see changes of the ResourceSlices by others until the watch is open again.",
    ),
    _plugin(
        "slices.feature-off",
        WARNING,
        ("feature", "message"),
        "The API server drops a part of the ResourceSlices, because a feature gate is off.",
    ),
    _plugin(
        "slices.without-owner",
        WARNING,
        ("message",),
        "The node cannot be read, so its ResourceSlices do not name it as their owner.",
    ),
    _plugin(
        "slices.contested",
        ERROR,
        ("message",),
        "Another client undoes changes of the ResourceSlices; the driver repairs them less often.",
    ),
)

EVENTS_BY_SECTION: Final[Mapping[EventSection, tuple[EventDeclaration, ...]]] = MappingProxyType(
    {
        EventSection.HANDOVERS: _HANDOVERS,
        EventSection.SCRUBS: _SCRUBS,
        EventSection.USERS: _USERS,
        EventSection.HEALTH: _HEALTH,
        EventSection.OPERATORS: _OPERATORS,
        EventSection.SERVICE: _SERVICE,
        EventSection.PLUGIN: _PLUGIN,
        EventSection.UPSTREAM: _UPSTREAM,
        EventSection.DRA: _DRA,
        EventSection.CLUSTER: _CLUSTER,
    }
)
"""Every event, in the order of the page."""

EVENTS: Final = tuple(chain.from_iterable(EVENTS_BY_SECTION.values()))
