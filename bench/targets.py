"""Targets compared with the measurements, with causes for missed ones.

Causes are written by hand after profiling. A cause is printed only while its target is missed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bench.figures import Amount, TargetResult, Timing, growth_exponent
from scrubber.stop_deadline import STOP_SECONDS

__all__ = ["CAUSES", "LOADED_GRPC", "evaluate_targets"]

LOADED_GRPC = "import grpc.aio"
"""The reference of everything that starts."""

_FAST_PATH = (
    "profiled on two cores, medians of 178 restarts with 16 devices and 16 pods, 13.0 ms in total: 2.3 ms between kubelet and "
    "plugin, 1.9 ms between plugin and service, 3.0 ms for the service's request to the kubelet (its List 1.7 ms), 1.5 ms for "
    "the decision and checks (the driver's child 1.0 ms), 3.3 ms for the grant (the durable commit 2.2 ms, the signature "
    "0.17 ms, log and metrics 0.22 ms), and the rest for tasks and locks. Three gRPC calls, a disk and a child take 6 echoes "
    "before any decision. The disk and the processor cause the tail: p99 of the commit 13 ms, of List 11 ms. The echo is "
    "measured warm, right after a hand-over; after the same pause it takes 1.2 times as long"
)

_RELEASE = (
    "the time follows the wait for a processor. In two runs of 32 releases on two cores beside other load, p99 was 42 ms where the "
    "echo's p99 was 4 ms, and 142 ms where it was 11 ms; in the quieter one the medians were 2.3 ms from the end of the pod "
    "to the decision that it is over, 13.1 ms to the start of the scrub (the durable commit of the release, the kubelet's list, "
    "the driver's child), and 4.2 ms to its first step (the durable commit of the start). Each of these steps waits for another "
    "thread or process. Where the kernel has shown the end of the pod, the list is not requested any more: 8.4 ms instead of "
    "13.1 ms"
)
_DOCTOR = (
    "profiled beside other load: 350 ms of processor time, of which loading gRPC takes 105 ms. The dataclasses of the domain, the "
    "adapters and the checks take 70 ms, Typer 40 ms, the rest of our modules 50 ms, protobuf and our messages 16 ms, the "
    "packages' versions 15 ms, both requests, the policy and all checks 85 ms."
)

CAUSES: Mapping[str, str] = {
    "hand-over.same-container": f"{_FAST_PATH}.",
    "hand-over.certificate": (
        f"as for the restart of a container ({_FAST_PATH}). A first start writes one more certificate and looks up the "
        "pod's sandbox; between two first starts the kubelet starts processes, so the caches of both sides are cold."
    ),
    "command.policy-check": (
        "profiled: 190 ms of processor time beside other load, 80 ms of it for version. The modules of a policy's rules take "
        "60 ms, most of it for their dataclasses, the YAML parser 15 ms, the schema of a policy file 20 ms."
    ),
    "command.doctor": (
        f"{_DOCTOR} It waits for the responses of service and kubelet, and 10 ms for the kernel's list of locks. Nearly all of "
        "the time is the loading of modules, which uses one core, regardless of the number of cores."
    ),
    "start-up.doctor": _DOCTOR,
    "start-up.devices": (
        "profiled: 130 ms of processor time beside other load, of which loading gRPC takes 105 ms, loading protobuf and our "
        "messages 16 ms. The request and the table take the rest, without Typer."
    ),
    "start-up.service": (
        "profiled beside other load: 630 ms of processor time, of which loading gRPC takes 105 ms. The creation of 216 "
        "dataclasses takes 150 ms (0.7 ms for a frozen one), the rest of our modules 100 ms, Typer 40 ms, other libraries "
        "90 ms; the policy, the ledger, the servers and the first checks of 16 devices take 130 ms."
    ),
    "release.to-scrub": f"{_RELEASE}.",
    "release.to-clean": (
        f"as until the scrub begins ({_RELEASE}). From the end of the scrub until a client sees the device clean it takes 7 ms "
        "(p99 18 ms): the durable commit of the certificate and the message to the client."
    ),
    "waiting.to-scrub": (
        f"as for a release ({_RELEASE}). Here the start that waits does the same, and three others wait beside it."
    ),
    "take-over": (
        "simulated devices are cleared by the CPUs, in the host's memory: eight need eight times the processor time of one. "
        "Devices with memory of their own are all cleared at once."
    ),
    "idle.cpu": (
        "profiled beside other load, 1.1 % in total: gRPC threads that poll after every request take 0.3 % in both daemons, the "
        "checks of the devices' users 0.25 %, the service's request to the kubelet and its evaluation 0.2 %, the rest of the "
        "service's event loop 0.2 %, the driver's child 0.1 %, and the plugin's event loop 0.07 %."
    ),
    "in-use.cpu": (
        "profiled beside other load, with 64 devices: the checks of the devices' users take 28 % of the service's time (the "
        "simulated backend opens two files per device for each, and reads its control file), the checks of health 20 %, the "
        "pods' processes 9 %, the kubelet's list 8 %, publishing the state 5 %, and tasks and locks the rest. All of it is per "
        "device and second."
    ),
}
"""By the name of the target."""

_NOT_INVESTIGATED = "Not investigated yet."
_START_UP: Mapping[str, tuple[str, str, float]] = {
    "devices": ("command.devices", "scrubber devices", 1.3),
    "policy-check": ("command.policy-check", "scrubber policy check", 2.0),
    "doctor": ("command.doctor", "scrubber doctor", 2.5),
    "service": ("start.service", "start of the service until it is ready", 4.0),
}
"""Timing, words and limit, in loads of gRPC."""
_COMMAND_LIMIT_MS = 250.0
"""Limit of a command from exec to exit, in milliseconds."""
_IN_USE = re.compile(r"in-use\.devices-\d+\.cpu")
_SAME, _CERTIFICATE = "hand-over.same-container", "hand-over.certificate"
_SCRAPED = f"{_SAME}.scraped-"


def evaluate_targets(timings: Sequence[Timing], amounts: Sequence[Amount]) -> tuple[TargetResult, ...]:
    """Return every target whose measurements exist."""
    times = {each.name: each for each in timings}
    values = {each.name: each.value for each in amounts}
    found: list[TargetResult] = []

    def add(name: str, message: str, limit: float, measured: float, unit: str) -> None:
        cause = "" if measured <= limit else CAUSES.get(name, _NOT_INVESTIGATED)
        found.append(TargetResult(name, message, limit, measured, unit, cause))

    # All restarts count, in all variants, except those with scrapers, which have a separate target. First starts with
    # other processes are too few for a separate p99.
    for kind, rows, words in ((_SAME, "", "restart of a container"), (_CERTIFICATE, "pods-", "first start of a pod")):
        candidates = [
            each for each in timings if each.name.startswith(f"{kind}.{rows}") and not each.name.startswith(_SCRAPED)
        ]
        tails = [each.ratio_p99 for each in candidates if each.ratio_p99 is not None]
        medians = [each.ratio_p50 for each in candidates if each.ratio_p50 is not None]
        if tails and medians:
            # Other load on the machine raises the echo's p99 most, so a good ratio of the p99s alone may be luck.
            message = f"hand-over, {words}: p99 at up to 16 pods, in echoes' p99 (medians: {max(medians):.1f} times)"
            add(kind, message, 5.0, max(tails), "times")

    sizes = _sizes(times, f"{_SAME}.devices-")
    if len(sizes) > 1:
        durations = [times[f"{_SAME}.devices-{size}"].measured.p50 for size in sizes]
        add(
            "growth.devices",
            f"hand-over, growth with {_listed(sizes)} devices",
            1.0,
            _growth(sizes, durations),
            "power",
        )
    for kind, words in ((_SAME, "restart"), (_CERTIFICATE, "first start")):
        crowd = [values.get(f"{kind}.processes-{when}") for when in ("before", "beside")]
        few, many = crowd
        pair = [times.get(f"{kind}.pods-16"), times.get(f"{kind}.crowd")]
        alone, crowded = pair
        if few and many and alone and crowded:
            message = f"hand-over, {words}: growth from {few:.0f} to {many:.0f} processes"
            measured = _growth((few, many), (alone.measured.p50, crowded.measured.p50))
            add(f"growth.processes.{kind.rpartition('.')[2]}", message, 1.0, measured, "power")

    if (loaded := times.get("allocate.every-device-scrubbed")) and loaded.ratio_p99 is not None:
        message = "Allocate while every device is scrubbed: p99, in p99 of the echo under the same load"
        add("allocate", message, 5.0, loaded.ratio_p99, "times")
    for name in ("release.to-scrub", "waiting.to-scrub"):
        if name in times:
            begins = times[name]
            message = f"{begins.title}: p99 (p50: {1000 * begins.measured.p50:.0f} ms)"
            add(name, message, 50.0, 1000 * begins.measured.p99, "ms")
    if "release.besides-scrub" in times:
        rest = times["release.besides-scrub"]
        message = f"{rest.title}: p99 (p50: {1000 * rest.measured.p50:.0f} ms)"
        add("release.to-clean", message, 100.0, 1000 * rest.measured.p99, "ms")
    faults = [each for each in timings if each.name.startswith("fault.")]
    if faults:
        slowest = max(each.measured.p99 for each in faults)
        add("fault", "fault → ListAndWatch: p99", 100.0, 1000 * slowest, "ms")
    if "xid.list-and-watch" in times:
        message = "XID → ListAndWatch, stand-in for NVIDIA's driver: p99"
        add("xid", message, 20.0, 1000 * times["xid.list-and-watch"].measured.p99, "ms")
    own = {"command.policy-check": "scrubber policy check", "command.doctor": "scrubber doctor"}
    tainted = _sizes(times, "taint.devices-")
    if tainted:
        message = "fault → taint in the ResourceSlice: p99"
        add("taint", message, 100.0, 1000 * times[f"taint.devices-{tainted[-1]}"].measured.p99, "ms")
    if "claim-idle.requests" in values:
        message = "requests of the DRA driver to the API server at rest, besides watches"
        add("claim-idle.requests", message, 0.0, values["claim-idle.requests"], "a minute")
    commands = [each for each in timings if each.name.startswith("command.") and each.name not in own]
    if commands:
        slowest = max(each.measured.p99 for each in commands)
        add(
            "command",
            "a command that queries the service, from exec to exit: p99 of the slowest",
            _COMMAND_LIMIT_MS,
            1000 * slowest,
            "ms",
        )
    for name, words in own.items():
        if name in times:
            add(name, f"{words}, from exec to exit: p99", _COMMAND_LIMIT_MS, 1000 * times[name].measured.p99, "ms")
    for name, (timing, words, limit) in _START_UP.items():
        if timing in times and times[timing].reference_name == LOADED_GRPC:
            add(f"start-up.{name}", f"{words}, in loads of gRPC: p50", limit, times[timing].ratio_p50 or 0.0, "times")
    if "start.plugin" in times:
        start = times["start.plugin"]
        message = f"plugin, from exec to registered: p50, in loads of gRPC {start.ratio_p50 or 0:.1f} times"
        add("start.plugin", message, 300.0, 1000 * start.measured.p50, "ms")
    for name, words in (
        ("eraser.clear", "clear, in durations of memset"),
        ("eraser.verify", "verify, in durations of memcmp"),
    ):
        if (compared := times.get(name)) and compared.ratio_p50 is not None:
            message = f"simulated eraser, written memory: {words} (1.11: 90 % of its speed), p50"
            add(name, message, 1.11, compared.ratio_p50, "times")
    if "stop.driver-closed" in times:
        stop = times["stop.driver-closed"]
        message = f"SIGTERM → driver closed: the longest, in starts of an interpreter {stop.ratio_p50 or 0:.1f} times"
        add("stop.driver-closed", message, STOP_SECONDS, stop.measured.worst, "s")
    if "rolling-update" in times:
        message = "rolling update of the plugin, without one for the kubelet: the longest"
        add("rolling-update", message, 50.0, 1000 * times["rolling-update"].measured.worst, "ms")
    if "take-over.ratio" in values:
        message = "eight devices of one hand-over, from the end of the last pod to the grant, in times of one (medians)"
        add("take-over", message, 1.2, values["take-over.ratio"], "times")
    scraped = _sizes(times, "scrape.devices-")
    if scraped:
        most = times[f"scrape.devices-{scraped[-1]}"]
        message = f"scrape of the service's metrics, {scraped[-1]} devices, from the request to the last byte: p50"
        add("scrape", message, 20.0, 1000 * most.measured.p50, "ms")
    pair = [times.get(f"{_SAME}.others-{each}") for each in ("calm", "storm")]
    if (grown := _relative_growth(*pair)) is not None:
        tails_grown, medians_grown = grown
        message = (
            "1,000 XIDs a second on one device, hand-over of the others: p99 in echoes' medians, to that without "
            f"(medians: {medians_grown:.2f} times)"
        )
        add("storm", message, 1.5, tails_grown, "times")
    scraped_by = [times.get(f"{_SCRAPED}{each}") for each in ("by-none", "by-a-crowd")]
    if (grown := _relative_growth(*scraped_by)) is not None:
        tails_grown, medians_grown = grown
        message = (
            "thirty scrapers that never pause, hand-over: p99 in echoes' medians, to that without "
            f"(medians: {medians_grown:.2f} times)"
        )
        add("scrape.crowd", message, 3.0, tails_grown, "times")
    if "storm.rows.bound" in values:
        add("storm.rows", "the same: rows in the ledger, by code and minute", 1.0, values["storm.rows.bound"], "rows")
    if "idle.cpu" in values:
        add("idle.cpu", "processor time at rest, 16 devices", 0.5, values["idle.cpu"], "% of a core")
        add("idle.pss", "memory at rest (PSS), 16 devices", 150.0, values["idle.pss"], "MB")
    in_use = sorted(int(name.split("-")[-1].removesuffix(".cpu")) for name in values if _IN_USE.fullmatch(name))
    if in_use:
        message = f"processor time with {in_use[-1]} devices in use"
        add("in-use.cpu", message, 3.0, values[f"in-use.devices-{in_use[-1]}.cpu"], "% of a core")
    return tuple(found)


def _growth(sizes: Sequence[float], durations: Sequence[float]) -> float:
    return max(0.0, growth_exponent(sizes, durations))


def _relative_growth(before: Timing | None, after: Timing | None) -> tuple[float, float] | None:
    """Return the growth from ``before`` to ``after``, each relative to the median of its own echo: p99, median.

    The echo's own p99 depends on the three worst of some hundred samples. Between two rows it would dominate the
    result.
    """
    if before is None or after is None or before.reference is None or after.reference is None:
        return None
    machine = after.reference.p50 / before.reference.p50
    return after.measured.p99 / before.measured.p99 / machine, after.measured.p50 / before.measured.p50 / machine


def _sizes(times: Mapping[str, Timing], prefix: str) -> list[int]:
    return sorted(int(name.removeprefix(prefix)) for name in times if name.startswith(prefix))


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(str(size) for size in sizes)
