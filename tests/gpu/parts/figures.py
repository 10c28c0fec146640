"""The cost of a scrub, each figure compared with the best that the same GPU can do in the same run."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from statistics import median

from bench.figures import Quantiles
from bench.gpu.paths import SlowPath, fast_path, rates, slow_path
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.adapters.nvidia.driver_requests import pci_address_of
from scrubber.adapters.nvidia.event_watch import EVENTS_MODULE, event_request, event_zygote
from scrubber.domain.errors import DeviceFault
from tests.gpu.nvidia_smi import QueryUnsupported, Smi
from tests.gpu.outcome import Log
from tests.gpu.programs import running
from tests.gpu.stand import Stand

__all__ = ["diagnostics", "questions", "starting", "throughput"]


async def throughput(stand: Stand, log: Log) -> None:
    """Measure the limits of the run, each pass against them, and the whole slow path by its parts."""
    extent = stand.extent
    arguments = (str(extent.limit_bytes), str(extent.limit_repeats))
    async with running("bench.gpu.limits", *arguments, environment=stand.cuda_environment(stand.device)) as program:
        found = await program.line()
    read = float(found["read16_bytes_per_second"])
    write = max(float(found[f"{each}_bytes_per_second"]) for each in ("write16", "memset"))
    fill = float(found["fill_zero_bytes_per_second"])
    log.passed(
        "bench.limits",
        f"Read {read / 1e9:.0f} GB/s, write {write / 1e9:.0f} GB/s, copy {float(found['copy16_bytes_per_second']) / 1e9:.0f} "
        f"GB/s; a context takes {float(found['context_seconds']):.3f} s.",
        **found,
    )
    log.passed(
        "bench.memset",
        f"memsetAsync {float(found['memset_bytes_per_second']) / 1e9:.0f} GB/s beside our fill's {fill / 1e9:.0f} GB/s.",
        memset_bytes_per_second=found["memset_bytes_per_second"],
        fill_zero_bytes_per_second=fill,
    )
    plain = [await slow_path(stand.ports, stand.device, stand.defaults) for _ in range(extent.scrubs)]
    shares = rates(_typical(plain), {"read": read, "write": write})
    log.passed(
        "bench.passes",
        ", ".join(
            f"{name.removesuffix('_share')} {100 * share:.1f} %" for name, share in shares.items() if "share" in name
        )
        + " of the run's limit.",
        **shares,
    )
    _report_path(log, "bench.slow-path", plain)
    patterned = [await slow_path(stand.ports, stand.device, stand.defaults, pattern=True) for _ in range(extent.scrubs)]
    _report_path(log, "bench.slow-path-with-pattern", patterned)


def _typical(paths: list[SlowPath]) -> SlowPath:
    """Return the median run."""
    return sorted(paths, key=lambda path: path.seconds)[len(paths) // 2]


def _report_path(log: Log, name: str, paths: list[SlowPath]) -> None:
    """Report the median run, by its parts."""
    typical = _typical(paths)
    parts, passes = (
        ", ".join(f"{part} {1000 * seconds:.0f} ms" for part, seconds in some.items())
        for some in (typical.parts, typical.passes)
    )
    left_out = "" if "settings" in typical.parts else "; settings were not brought back, which --allow-settings adds"
    log.passed(
        name,
        f"{typical.seconds:.3f} s: {parts}; of the memory: {passes}{left_out}.",
        seconds=typical.seconds,
        all_seconds=[path.seconds for path in paths],
        parts=dict(typical.parts),
        passes=dict(typical.passes),
        unreleased_bytes=typical.report.unreleased_bytes,
    )


async def starting(stand: Stand, log: Log) -> None:
    """Measure the cost of a child: the eraser's fork, NVML's events, the first answer to a request."""
    (loading,) = await _timed(1, stand.warm)
    log.passed("bench.zygote", f"CuPy is loaded after {loading:.2f} s, once a service.", seconds=loading)
    forks = await _timed(stand.extent.starts, stand.fork_and_end)
    log.passed("bench.fork", f"A forked child is ready after {1000 * median(forks):.1f} ms.", seconds=forks)

    zygote = event_zygote(stand.children, stand.places)
    await zygote.warm_up()

    async def registered() -> None:
        child = await zygote.fork(EVENTS_MODULE)
        try:
            await child.send(event_request(stand.places, pci_address_of(stand.device)))
            answer = await child.receive()
        finally:
            await child.kill()
        parse_answer({"ok": {}} if "registered" in answer else answer)

    try:
        events = await _timed(stand.extent.starts, registered)
    except DeviceFault as fault:
        log.unavailable("bench.events", str(fault))
    else:
        log.passed("bench.events", f"Events are watched after {1000 * median(events):.0f} ms.", seconds=events)
    finally:
        await zygote.close()


async def questions(stand: Stand, smi: Smi, log: Log) -> None:
    """Measure the fast path's queries, alternating with those of a script that polls ``nvidia-smi``."""
    reason = ""

    async def beside() -> str | None:
        nonlocal reason
        try:
            return await smi.health(stand.device.parent or stand.device.id)
        except QueryUnsupported as error:
            reason = str(error)
            return None

    ours, theirs = await fast_path(stand.ports, stand.device, stand.extent.questions, beside)
    log.passed("bench.fast-path", _latency("The fast path's two questions", ours), **_figures(ours))
    if theirs is None:
        log.unavailable("bench.nvidia-smi", reason)
    else:
        log.passed("bench.nvidia-smi", _latency("One query of nvidia-smi", theirs), **_figures(theirs))


async def diagnostics(stand: Stand, log: Log) -> None:
    """Run every level for which there is time; on a healthy GPU all checks pass, and their rates suggest floors."""
    for level in stand.extent.diagnostics:
        start = time.perf_counter()
        checks = await stand.diagnostics.diagnose(stand.device, level, 3 * level.seconds + 30.0)
        seconds = time.perf_counter() - start
        errors = sum(check.errors for check in checks)
        log.judged(
            f"diagnostics.{level}",
            errors == 0 and bool(checks),
            f"{len(checks)} checks, {errors} wrong results, {seconds:.2f} s of {level.seconds:g} s.",
            seconds=seconds,
            errors=errors,
            checks={check.name: dict(check.measured) for check in checks},
        )


async def _timed(count: int, work: Callable[[], Awaitable[object]]) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - start)
    return seconds


def _latency(what: str, found: Quantiles) -> str:
    return f"{what}: {1000 * found.p50:.2f} ms, p99 {1000 * found.p99:.2f} ms."


def _figures(found: Quantiles) -> dict[str, object]:
    return {"p50_seconds": found.p50, "p99_seconds": found.p99, "worst_seconds": found.worst, "samples": found.samples}
