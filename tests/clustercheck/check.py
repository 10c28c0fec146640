"""Runs the scenarios: the first tenant's pod writes a secret and ends, the next tenant's pod searches the same device.

Promise: only objects of the check's own namespaces are created or deleted, and these are deleted at the end, also after
an error or a signal. What a crash of the check left behind, the next run with the same prefix deletes.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tests.clustercheck.api import ApiError, ApiServer, Forbidden, NotFound, Unreachable
from tests.clustercheck.manifests import PREFIX_LABEL, PodSettings, namespace, pod, pull_secret, template
from tests.clustercheck.placement import RESOURCE_API, Path
from tests.clustercheck.report import HandOver, Report, Result, ScenarioReport
from tests.clustercheck.scenarios import Deletion, Scenario

__all__ = ["ClusterCheck", "Waiting", "delete_leftovers", "of_hand_over"]

Json = dict[str, Any]
_NAMESPACES = "/api/v1/namespaces"
_TENANTS = ("a", "b")
_REPORT_WAIT = 10.0
"""Seconds within which a DRA driver writes the status of a claim's devices; not every driver does."""

_OTHER_WARNINGS = frozenset(
    {"DNSConfigForming", "FailedScheduling", "FailedToRetrieveImagePullSecret", "MissingClusterDNS"}
)
"""Reasons of warnings that say nothing of a hand-over. The scheduler reports each pod whose claim does not exist yet."""


class _Incomplete(Exception):
    """A scenario cannot be completed; the message says why."""


@dataclass(frozen=True, slots=True)
class _PodId:
    namespace: str
    name: str

    @property
    def path(self) -> str:
        return f"{_NAMESPACES}/{self.namespace}/pods/{self.name}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long the check waits, in seconds.

    Attributes:
        timeout: for one step of a pod: until it has written, ended, started and searched, or is gone.
        poll: between two requests.
    """

    timeout: float
    poll: float


def delete_leftovers(api: ApiServer, prefix: str, waiting: Waiting) -> Sequence[str]:
    """Delete the namespaces of earlier runs with this prefix; return their names.

    Raises:
        ApiError: the API server refused a request.
        TimeoutError: they still exist after the timeout.
    """
    found = api.items(_NAMESPACES, labelSelector=f"{PREFIX_LABEL}={prefix}")
    names = [str(each["metadata"]["name"]) for each in found]
    _delete_namespaces(api, names, waiting)
    return names


def _delete_namespaces(api: ApiServer, names: Sequence[str], waiting: Waiting) -> None:
    for name in names:
        api.delete(f"{_NAMESPACES}/{name}")
    deadline = time.monotonic() + waiting.timeout
    left = list(names)
    while left := [each for each in left if api.find(f"{_NAMESPACES}/{each}") is not None]:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{', '.join(left)} still exist {waiting.timeout:g} s after their deletion")
        time.sleep(waiting.poll)


class ClusterCheck:
    """One run: :meth:`create`, :meth:`run` for each scenario, and :meth:`clean_up` in any case."""

    def __init__(
        self,
        api: ApiServer,
        settings: PodSettings,
        report: Report,
        *,
        prefix: str,
        waiting: Waiting,
        progress: Callable[[str], None],
    ) -> None:
        self._api = api
        self._settings = settings
        self._report = report
        self._prefix = prefix
        self._waiting = waiting
        self._progress = progress
        self._namespaces = {f"{prefix}-{report.run}-{each}": each for each in _TENANTS}
        self._created: list[str] = []
        self._pods: list[_PodId] = []
        self._templates: set[int] = set()
        self._number = 0

    @property
    def namespaces(self) -> Sequence[str]:
        """Names of the two tenants' namespaces."""
        return list(self._namespaces)

    def create(self) -> None:
        """Create the namespaces, with the credentials for the image.

        Raises:
            ApiError: the API server refused a request.
        """
        for name, tenant in self._namespaces.items():
            self._created.append(name)  # before the request: one without an answer may have been carried out
            try:
                self._api.create(_NAMESPACES, namespace(self._prefix, self._report.run, tenant))
            except Forbidden:
                self._created.remove(name)
                raise
            if self._settings.pull_secret:
                self._api.create(f"{_NAMESPACES}/{name}/secrets", pull_secret(self._settings.pull_secret))

    def clean_up(self) -> None:
        """Delete the namespaces with all that is in them; what remains is named in the report."""
        self._report.remaining = tuple(self._created)
        try:
            _delete_namespaces(self._api, self._created, self._waiting)
        except (ApiError, TimeoutError) as error:
            self._progress(f"A namespace could not be deleted: {error}.")
        else:
            self._report.remaining = ()

    def run(self, scenario: Scenario) -> ScenarioReport:
        """Run one scenario; its result is also in the report.

        Raises:
            Forbidden: a permission is missing.
        """
        made = ScenarioReport(scenario.name)
        self._report.scenarios.append(made)
        self._progress(f"{scenario.name} …")
        try:
            self._run(scenario, made)
        except Forbidden as error:
            made.reason = str(error)
            raise
        except (_Incomplete, TimeoutError, ApiError) as error:
            counts = made.found_bytes and not scenario.same_container
            made.result = Result.FOUND if counts else Result.INCOMPLETE
            made.reason = str(error)
        self._delete_pods()
        return made

    # One scenario

    def _run(self, scenario: Scenario, made: ScenarioReport) -> None:
        placement = self._settings.placement
        if scenario.all_devices and placement.devices < 2:
            made.result, made.reason = Result.NOT_COVERED, "the node has one device only"
            return
        count = placement.devices if scenario.all_devices else 1
        secret = secrets.token_bytes(8)
        if scenario.same_container:
            self._restart_within_pod(made, secret)
            return
        writer = self._start(self.namespaces[0], "write", secret, count, scenario.end)
        self._await_written(writer, made)
        ended = self._await_end(writer, scenario, made)
        made.ended_at = datetime.now(UTC)
        excuse = self._messages(writer).get("not-covered")
        self._search(made, secret, count, ended)
        if made.result is not Result.CLEAN:
            return
        if excuse is not None:
            made.result, made.reason = Result.NOT_COVERED, str(excuse["message"])
        elif scenario.deletion is Deletion.NONE and made.exit_code not in (None, scenario.exit_code):
            made.result = Result.INCOMPLETE
            made.reason = f"the first pod ended with exit code {made.exit_code} instead of {scenario.exit_code}"

    def _await_written(self, writer: _PodId, made: ScenarioReport) -> None:
        wrote = self._await_message(writer, "wrote")
        devices = wrote["devices"]
        made.devices = [each["name"] for each in devices]
        made.memory_bytes = sum(each["memoryBytes"] for each in devices)
        made.written_bytes = sum(each["writtenBytes"] for each in devices)
        made.own_found_bytes = sum(each["foundBytes"] for each in devices)
        self._report.driver = self._report.driver or wrote["driver"]
        if made.own_found_bytes != made.written_bytes or not made.written_bytes:
            raise _Incomplete(
                f"the search does not work: the first pod found {made.own_found_bytes} of the {made.written_bytes} bytes "
                "that it had just written"
            )

    def _search(self, made: ScenarioReport, secret: bytes, count: int, ended: float) -> None:
        """Start pods of the next tenant, each beside the last, until one has the devices of the first pod."""
        missing = set(made.devices)
        for attempt in range(self._settings.placement.devices):
            searcher, started = self._start_searcher(secret, count)
            seconds, started_at = started - ended, datetime.now(UTC)
            found = self._await_message(searcher, "searched")
            made.attempts = attempt + 1
            self._check_proof(found)
            for each in found["devices"]:
                made.found_bytes += each["foundBytes"]
                if each["name"] in missing:
                    made.searched_bytes += each["searchedBytes"]
            missing -= {each["name"] for each in found["devices"]}
            if not missing:
                made.seconds, made.started_at = seconds, started_at
                made.hand_over = self._hand_over(searcher)
                made.result = Result.FOUND if made.found_bytes else Result.CLEAN
                return
        made.result = Result.FOUND if made.found_bytes else Result.INCOMPLETE
        made.reason = (
            f"no pod of the next tenant had {', '.join(sorted(missing))}; other pods may use devices of the node"
        )

    def _start_searcher(self, secret: bytes, count: int) -> tuple[_PodId, float]:
        """Return a pod of the next tenant and when it started, on the monotonic clock.

        Kubernetes counts the devices of a pod that has just ended as free before the kubelet does. A pod that arrives in
        between is refused for good, as every user sees it, so another one is started.
        """
        deadline = time.monotonic() + self._waiting.timeout
        while True:
            searcher = self._start(self.namespaces[1], "search", secret, count, "hold")
            item = self._await(searcher, lambda each: _is_over(each) or _state(each, "running") is not None, "start")
            refused = ((item or {}).get("status") or {}).get("reason") == "UnexpectedAdmissionError"
            if not refused or time.monotonic() >= deadline:
                return searcher, time.monotonic()
            self._api.delete(searcher.path)
            time.sleep(self._waiting.poll)

    def _check_proof(self, found: Mapping[str, Any]) -> None:
        for each in found["devices"]:
            if each["ownFoundBytes"] != each["ownWrittenBytes"] or not each["ownWrittenBytes"]:
                raise _Incomplete(
                    f"the search does not work: the next pod found {each['ownFoundBytes']} of the "
                    f"{each['ownWrittenBytes']} bytes that it had written to {each['name']}"
                )

    def _restart_within_pod(self, made: ScenarioReport, secret: bytes) -> None:
        """Let a container fail, and search in its next run: for the service, that is the same tenant."""
        tenant = self._start(self.namespaces[0], "restart", secret, 1, "exit")
        self._await(tenant, lambda item: _restarts(item) > 0, "restart of the container")
        found = self._await_message(tenant, "searched")
        self._check_proof(found)
        made.attempts = 1
        made.devices = [each["name"] for each in found["devices"]]
        made.memory_bytes = sum(each["memoryBytes"] for each in found["devices"])
        made.searched_bytes = sum(each["searchedBytes"] for each in found["devices"])
        made.found_bytes = sum(each["foundBytes"] for each in found["devices"])
        made.hand_over = self._hand_over(tenant)
        if self._settings.placement.path is not Path.DEVICE_PLUGIN:
            made.result = Result.NOT_COVERED
            made.reason = "the kubelet calls no DRA driver when a container restarts within a pod"
        elif made.found_bytes:
            made.result = Result.NOT_COVERED
            made.reason = (
                "a container that restarts finds what it left itself; the policy's handOver.sameContainer decides"
            )
        else:
            made.result = Result.CLEAN

    # Pods

    def _start(self, place: str, role: str, secret: bytes, count: int, end: str) -> _PodId:
        self._number += 1
        made = _PodId(place, f"{role}-{self._number}")
        if self._settings.placement.path is Path.CLAIM and count not in self._templates:
            for each in self.namespaces:
                path = f"{RESOURCE_API}/namespaces/{each}/resourceclaimtemplates"
                self._api.create(path, template(self._settings.placement, count))
            self._templates.add(count)
        options = {"role": role, "secret": secret.hex(), "end": end}
        self._pods.append(made)
        self._api.create(f"{_NAMESPACES}/{place}/pods", pod(made.name, self._settings, options, count=count))
        return made

    def _await_end(self, writer: _PodId, scenario: Scenario, made: ScenarioReport) -> float:
        """Delete the pod if requested; return when its container had ended, on the monotonic clock."""
        if scenario.deletion is Deletion.FORCED:
            self._api.delete(writer.path, gracePeriodSeconds=0)
            return time.monotonic()
        if scenario.deletion is Deletion.GRACEFUL:
            self._api.delete(writer.path)
        item = self._await(writer, _is_over, "end")
        made.exit_code = (_state(item, "terminated") or {}).get("exitCode")
        return time.monotonic()

    def _await_message(self, which: _PodId, event: str) -> Json:
        """Return what a pod reports.

        Raises:
            _Incomplete: it failed, ended without the report, or did not report in time.
        """
        found: list[Json] = []

        def reported(item: Json | None) -> bool:
            # The status first: a container that has ended prints nothing more.
            over = _is_over(item)
            messages = self._messages(which)
            if event in messages:
                found.append(messages[event])
                return True
            if "failed" in messages:
                raise _Incomplete(f"pod {which.name} failed: {messages['failed']['message']}")
            if over:
                log = " ".join(self._api.log(which.namespace, which.name).split())[-300:]
                raise _Incomplete(f"pod {which.name} ended without a result: {self._describe(item)} {log}".rstrip())
            return False

        self._await(which, reported, f"report ({event})")
        return found[0]

    def _messages(self, which: _PodId) -> dict[str, Json]:
        """Return what a pod has reported, by event."""
        found: dict[str, Json] = {}
        for line in self._api.log(which.namespace, which.name).splitlines():
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict) and isinstance(message.get("event"), str):
                found[message["event"]] = message
        return found

    def _await(self, which: _PodId, holds: Callable[[Json | None], bool], what: str) -> Json | None:
        """Wait until ``holds`` is true of a pod, or of None when it is gone; return it.

        Raises:
            TimeoutError: the message has the pod's own reason.
        """
        deadline = time.monotonic() + self._waiting.timeout
        item: Json | None = None
        while True:
            try:
                item = self._api.find(which.path)
                if holds(item):
                    return item
            except Unreachable:
                if time.monotonic() >= deadline:
                    raise
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"no {what} of pod {which.name} within {self._waiting.timeout:g} s: {self._describe(item)}"
                )
            time.sleep(self._waiting.poll)

    def _describe(self, item: Mapping[str, Any] | None) -> str:
        """Return why a pod is where it is, in the words of its status and its last warning."""
        if item is None:
            return "the pod is gone"
        status = item.get("status") or {}
        parts = [status.get("phase", ""), status.get("reason", ""), status.get("message", "")]
        for each in status.get("conditions") or []:
            if each.get("type") == "PodScheduled" and each.get("status") != "True":
                parts.append(each.get("message", ""))
        for kind in ("waiting", "terminated"):
            state = _state(item, kind) or {}
            parts += [state.get("reason", ""), state.get("message", "")]
        warnings = self._warnings(item["metadata"]["namespace"], item["metadata"]["name"])
        parts += [f"({each['reason']}: {each['message']})" for each in warnings[-1:]]
        return " ".join(dict.fromkeys(str(each).strip() for each in parts if each))

    def _delete_pods(self) -> None:
        """Delete the pods of a scenario, and wait until they are gone: the next scenario needs their devices."""
        pods, self._pods = self._pods, []
        try:
            for each in pods:
                self._api.delete(each.path, gracePeriodSeconds=1)
            for each in pods:
                self._await(each, lambda item: item is None, "end")
        except (ApiError, TimeoutError) as error:
            self._progress(f"A pod could not be deleted: {error}")

    # What is visible of the hand-over

    def _hand_over(self, searcher: _PodId) -> HandOver:
        certificates: list[Mapping[str, Any]] = []
        if self._settings.placement.path.has_claims:
            # A driver reports a claim's devices after it has prepared the claim, and the pod may be faster.
            deadline = time.monotonic() + min(_REPORT_WAIT, self._waiting.timeout)
            while not (certificates := self._certificates(searcher)) and time.monotonic() < deadline:
                time.sleep(self._waiting.poll)
        return HandOver(certificates, of_hand_over(self._warnings(searcher.namespace, searcher.name)))

    def _certificates(self, searcher: _PodId) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for claim in self._api.items(f"{RESOURCE_API}/namespaces/{searcher.namespace}/resourceclaims"):
            status = claim.get("status") or {}
            if not any(each.get("name") == searcher.name for each in status.get("reservedFor") or []):
                continue
            for device in status.get("devices") or []:
                data = device.get("data")
                certificate = data.get("certificate") if isinstance(data, dict) else None
                if isinstance(certificate, dict):
                    found.append(certificate)
        return found

    def _warnings(self, place: str, name: str) -> list[Json]:
        try:
            events = self._api.items(
                f"{_NAMESPACES}/{place}/events", fieldSelector=f"involvedObject.name={name},involvedObject.kind=Pod"
            )
        except NotFound:
            return []
        return [
            {"reason": each.get("reason", ""), "message": each.get("message", ""), "count": each.get("count") or 1}
            for each in events
            if each.get("type") == "Warning"
        ]


def of_hand_over(warnings: Iterable[Json]) -> list[Json]:
    """Return the warnings about a pod that can concern its devices."""
    return [each for each in warnings if each["reason"] not in _OTHER_WARNINGS]


def _status(item: Mapping[str, Any] | None) -> Mapping[str, Any]:
    statuses = ((item or {}).get("status") or {}).get("containerStatuses") or [{}]
    return statuses[0] if isinstance(statuses[0], Mapping) else {}


def _state(item: Mapping[str, Any] | None, kind: str) -> Mapping[str, Any] | None:
    state: Mapping[str, Any] | None = (_status(item).get("state") or {}).get(kind)
    return state


def _restarts(item: Mapping[str, Any] | None) -> int:
    return int(_status(item).get("restartCount") or 0)


def _is_over(item: Mapping[str, Any] | None) -> bool:
    """Whether the pod is gone, or its container has ended for good."""
    if item is None or (item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return True
    restarts = (item.get("spec") or {}).get("restartPolicy", "Always") != "Never"
    return not restarts and _state(item, "terminated") is not None
