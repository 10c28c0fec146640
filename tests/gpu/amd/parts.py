"""The parts of the check of an AMD GPU: what each tests, and what counts as passed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from secrets import randbits
from statistics import median

from bench.gpu.paths import fast_path, slow_path
from scrubber.domain.errors import DeviceFault, Unavailable
from scrubber.domain.policy import MemoryRule
from scrubber.domain.telemetry import HolderKind
from scrubber.ports.device import EraseProgress, EraseRequest
from tests.gpu.amd.stand import AmdStand
from tests.gpu.outcome import Log
from tests.gpu.programs import running

__all__ = ["PARTS"]

_TENANT = "tests.gpu.amd.tenant"
_DEADLINE = 120.0
_SETTLING = 20.0
_RESET_SECONDS = 90.0
_QUERY_SECONDS = 30.0
_LOOKED_SHARE = 0.9


async def inventory(stand: AmdStand, log: Log) -> None:
    """Report devices, and compare the whole GPUs with those that AMD's own tool lists."""
    for device in stand.devices:
        log.passed(
            f"inventory.{device.index}",
            f"{device.model}, {device.memory_bytes} bytes, {device.profile or 'without partition modes'}.",
            memory_bytes=device.memory_bytes,
            numa_node=device.numa_node,
            peers=len(device.peers),
            traits={name: value for name, value in device.traits if name != "serial"},
        )
    for address, reason in stand.backend.not_advertised().items():
        log.passed(f"inventory.not-advertised.{address}", reason)
    ours = {dict(device.traits)["pci_address"] for device in stand.devices} | stand.backend.not_advertised().keys()
    try:
        theirs = await _tool_addresses(stand)
    except Unavailable as error:
        log.unavailable("inventory.amd-smi", str(error))
    else:
        log.judged("inventory.amd-smi", theirs <= ours, f"We see {sorted(ours)}; amd-smi sees {sorted(theirs)}.")


async def _tool_addresses(stand: AmdStand) -> set[str]:
    """Return the PCI addresses that ``amd-smi`` lists.

    Raises:
        Unavailable: it is not installed, or its output is not understood.
    """
    program = stand.options.root / "opt/rocm/bin/amd-smi"
    if not program.exists():
        raise Unavailable("amd-smi is not installed below /opt/rocm.")
    process = await asyncio.create_subprocess_exec(
        str(program), "list", "--json", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_QUERY_SECONDS):
            output, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    try:
        return {f"{str(each['bdf']).lower().rpartition('.')[0]}.0" for each in json.loads(output)}
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"The output of amd-smi is not understood: {error!r}.") from error


async def health(stand: AmdStand, log: Log) -> None:
    """Report what the driver says about the health of the device, and whether its hardware error records are readable."""
    snapshot = await stand.backend.telemetry.snapshot(stand.device)
    log.judged(
        "health",
        not snapshot.conditions and not snapshot.errors,
        f"Conditions: {dict(snapshot.conditions) or 'none'}; errors since the driver was loaded: {dict(snapshot.errors) or 'none'}.",
        counters=dict(snapshot.counters),
        temperature_celsius=snapshot.temperature_celsius,
    )
    if "cper_fatal" in snapshot.counters:
        log.passed("health.records", "The driver's hardware error records (CPER) are read from debugfs.")
    else:
        log.unavailable(
            "health.records", "There are no hardware error records: debugfs is not mounted, or the driver has none."
        )


async def settings(stand: AmdStand, log: Log) -> None:
    """Report the settings; write them only if a flag requests it."""
    snapshot = await stand.backend.telemetry.snapshot(stand.device)
    log.passed(
        "settings.read", f"{dict(snapshot.settings) or 'The device has none'}.", settings=dict(snapshot.settings)
    )
    if not stand.options.allow_settings:
        log.unavailable("settings.restored", "Not requested: pass --allow-settings.")
        return
    found = await stand.backend.settings.restore(stand.device, snapshot.defaults)
    log.judged(
        "settings.restored",
        found == snapshot.defaults,
        f"They are {dict(found)}; the defaults are {dict(snapshot.defaults)}.",
    )


async def holders(stand: AmdStand, log: Log) -> None:
    """Check that a process with a context is found in each way, and in none of them once it is gone."""
    above = await stand.wait_until_idle(_SETTLING)
    log.judged("holders.idle", above == 0, f"{above} bytes above what counts as idle are in use.", above_bytes=above)
    before = _used(stand)
    async with running(_TENANT, *stand.tenant("hold"), environment=stand.environment()) as tenant:
        held = int((await tenant.line())["held_bytes"])
        listed = {user.pid for user in await stand.holders.list_users(stand.device)}
        log.judged(
            "holders.listed",
            tenant.pid in listed,
            f"KFD lists {len(listed)} processes; the tenant is PID {tenant.pid}.",
        )
        found = {each.pid: each.kind for each in (await stand.holders.list_holders(stand.device)).holders}
        log.judged(
            "holders.report",
            found.get(tenant.pid) is HolderKind.PROCESS,
            f"The report holds it as {found.get(tenant.pid)}, beside {len(found) - (tenant.pid in found)} others.",
        )
        used = _used(stand)
        if before is None or used is None:
            log.unavailable("holders.used-memory", "The driver counts only the memory of the whole GPU.")
        else:
            log.judged(
                "holders.used-memory",
                used - before >= held,
                f"{used - before} bytes more are in use; the process requested {held}.",
                context_bytes=used - before - held,
            )
        await tenant.kill()
    start = time.perf_counter()
    with suppress(TimeoutError):
        await _settle(stand)
    above = await stand.wait_until_idle(_SETTLING)
    gone = not await stand.holders.is_held(stand.device)
    log.judged(
        "holders.gone",
        gone and above == 0,
        f"Killed, it is {'gone' if gone else 'still seen'}; {above} bytes are above the idle level.",
        unreleased_bytes=above,
        seconds=time.perf_counter() - start,
    )


def _used(stand: AmdStand) -> int | None:
    """Return the bytes in use, as the driver counts them for a whole GPU."""
    if stand.device.parent is not None:
        return None
    address = dict(stand.device.traits)["pci_address"]
    return int((stand.options.root / "sys/bus/pci/devices" / address / "mem_info_vram_used").read_text())


async def coverage(stand: AmdStand, log: Log) -> None:
    """Check that every byte is either written and read back, or counted as not covered, as the default policy requires."""
    request = EraseRequest("coverage", audit=True, pattern=True, deadline=_DEADLINE)
    report = await stand.backend.eraser.erase(stand.device, request, lambda _: None)
    verified, allowed = report.verified_bytes or 0, MemoryRule().max_uncovered
    log.judged(
        "coverage",
        report.failed_bytes == report.unreleased_bytes == 0
        and report.cleared_bytes == verified > 0
        and verified + report.not_covered_bytes == report.total_bytes
        and report.not_covered_bytes <= allowed
        and not report.fence_broken,
        f"{verified} of {report.total_bytes} bytes were cleared and verified; {report.failed_bytes} did not read back as "
        f"zeros, {report.not_covered_bytes} were unreachable (at most {allowed} may), {report.unreleased_bytes} stay in "
        f"use. Not covered: {'; '.join(report.not_covered)}.",
        share=verified / report.total_bytes,
        total_bytes=report.total_bytes,
        not_covered_bytes=report.not_covered_bytes,
        residue_bytes=report.residue_bytes,
        unreleased_bytes=report.unreleased_bytes,
        seconds_by_phase=dict(report.seconds_by_phase),
    )


async def attack(stand: AmdStand, log: Log) -> None:
    """Let a tenant leave a secret, and the next one search for it before a scrub and after."""
    await _attack(stand, log, "global-memory", "global")
    claimed = await _attack(stand, log, "local-memory", "local")
    if not claimed:
        log.unavailable(
            "attack.local-memory.after", "The driver did not run its cleaner shader, so nothing was to clear it."
        )


async def _attack(stand: AmdStand, log: Log, name: str, place: str) -> bool:
    """Attack one place; return whether something was to clear it, and the result was judged."""
    before, after, left, looked, claimed = 0, 0, 0, 0, True
    request = EraseRequest(f"attack-{name}", audit=True, pattern=False, deadline=_DEADLINE)
    for _ in range(stand.extent.attacks):
        secret = randbits(64) | 1
        left += await _leave(stand, place, secret)
        before += (await _look(stand, place, secret))[0]
        await _leave(stand, place, secret)
        report = await stand.backend.eraser.erase(stand.device, request, lambda _: None)
        claimed &= place == "global" or any("claimed" in each for each in report.not_covered)
        found, reached = await _look(stand, place, secret)
        after += found
        looked += reached
    log.passed(
        f"attack.{name}.before",
        f"{before} bytes of the secret were found by the next tenant, without a scrub.",
        left_bytes=left,
        found_bytes=before,
        attacks=stand.extent.attacks,
    )
    if claimed:
        log.judged(
            f"attack.{name}.after",
            after == 0 and looked >= _LOOKED_SHARE * left > 0,
            f"{after} bytes of the secret were found in {looked} bytes after a scrub; {left} had been filled.",
            found_bytes=after,
            looked_bytes=looked,
        )
    return claimed


async def _leave(stand: AmdStand, place: str, secret: int) -> int:
    """Let a tenant fill ``place`` and kill it there; return the bytes that it filled once the memory is free again."""
    async with running(_TENANT, *stand.tenant("leave", place, str(secret)), environment=stand.environment()) as tenant:
        filled = int((await tenant.line())["filled_bytes"])
        await tenant.kill()
    await _settle(stand)
    return filled


async def _look(stand: AmdStand, place: str, secret: int) -> tuple[int, int]:
    async with running(_TENANT, *stand.tenant("look", place, str(secret)), environment=stand.environment()) as tenant:
        message = await tenant.line()
    await _settle(stand)
    return int(message["found_bytes"]), int(message["looked_bytes"])


async def _settle(stand: AmdStand) -> None:
    """Wait until no process is listed and the memory is free: KFD's entry and the memory go one after the other."""
    async with asyncio.timeout(_SETTLING):
        while True:
            if not await stand.holders.is_held(stand.device):
                break
            await asyncio.sleep(0.02)
    await stand.wait_until_idle(_SETTLING)


async def kill(stand: AmdStand, log: Log) -> None:
    """SIGKILL in mid-clear: no result, the memory released, and the next scrub passes."""
    reached, phases = asyncio.Event(), list[str]()

    def on_progress(progress: EraseProgress) -> None:
        phases.append(progress.phase)
        if progress.phase == "clear":
            reached.set()

    eraser, request = stand.backend.eraser, EraseRequest("killed", audit=True, pattern=True, deadline=_DEADLINE)
    erasing = asyncio.create_task(eraser.erase(stand.device, request, on_progress))
    try:
        clearing = asyncio.create_task(reached.wait())
        await asyncio.wait({erasing, clearing}, return_when=asyncio.FIRST_COMPLETED)
        clearing.cancel()
        if pid := await eraser.find_orphan(stand.device):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await erasing
    except DeviceFault as fault:
        log.passed("kill.no-result", f"Killed in its {phases[-1]} pass: {fault}")
    else:
        log.unavailable("kill.no-result", "The scrub was over before its eraser could be killed.")
    finally:
        erasing.cancel()
        await asyncio.gather(erasing, return_exceptions=True)
    await _settle(stand)
    report = await eraser.erase(stand.device, request, lambda _: None)
    log.judged(
        "kill.next-scrub",
        report.failed_bytes == 0 and (report.verified_bytes or 0) > 0,
        f"The next scrub counted {report.residue_bytes} bytes of residue and verified {report.verified_bytes} bytes.",
    )


async def bench(stand: AmdStand, log: Log) -> None:
    """Time the slow path by its parts, and the queries of the fast path."""
    paths = [await slow_path(stand.ports, stand.device, {}) for _ in range(stand.extent.scrubs)]
    typical = sorted(paths, key=lambda path: path.seconds)[len(paths) // 2]
    rates = {
        f"{phase}_bytes_per_second": typical.report.cleared_bytes / seconds
        for phase, seconds in typical.passes.items()
        if seconds
    }
    log.passed(
        "bench.slow-path",
        f"{median(path.seconds for path in paths):.3f} s: "
        + ", ".join(f"{part} {1000 * seconds:.0f} ms" for part, seconds in typical.parts.items())
        + ".",
        seconds=typical.seconds,
        parts=dict(typical.parts),
        **rates,
    )

    async def nothing_beside() -> None:
        """No other tool is measured beside it."""

    found, _ = await fast_path(stand.ports, stand.device, stand.extent.questions, nothing_beside)
    log.passed(
        "bench.fast-path",
        f"The fast path's two questions: {1000 * found.p50:.2f} ms, p99 {1000 * found.p99:.2f} ms.",
        p50_seconds=found.p50,
        p99_seconds=found.p99,
        samples=found.samples,
    )


async def diagnostics(stand: AmdStand, log: Log) -> None:
    """Run every level for which there is time; on a healthy GPU all checks pass."""
    for level in stand.extent.diagnostics:
        checks = await stand.backend.diagnostics.diagnose(stand.device, level, 3 * level.seconds + 30.0)
        errors = sum(check.errors for check in checks)
        log.judged(
            f"diagnostics.{level}",
            errors == 0 and bool(checks),
            f"{len(checks)} checks, {errors} wrong results.",
            checks={check.name: dict(check.measured) for check in checks},
        )


async def reset(stand: AmdStand, log: Log) -> None:
    """Report the plan always, reset on request."""
    plan = await stand.backend.resetter.plan(stand.device)
    log.passed(
        "reset.plan",
        f"{plan.method}: {plan.unavailable or f'{len(plan.actions)} actions'}; {'; '.join(plan.blockers) or 'nothing blocks it'}.",
        actions=list(plan.actions),
        together=len(plan.also_reset),
    )
    if not stand.options.allow_reset or plan.unavailable is not None or plan.blockers:
        reason = plan.unavailable or " ".join(plan.blockers) or "Not requested: pass --allow-reset."
        log.unavailable("reset", reason)
        return
    start = time.perf_counter()
    await stand.backend.resetter.reset(stand.device, _RESET_SECONDS)
    seconds = time.perf_counter() - start
    snapshot = await stand.backend.telemetry.snapshot(stand.device)
    same = stand.device in await stand.backend.inventory.devices()
    log.judged(
        "reset",
        not snapshot.conditions and same,
        f"It took {seconds:.1f} s; {dict(snapshot.conditions) or 'nothing'} remains; the device is {'the same' if same else 'another'}.",
        seconds=seconds,
    )


PARTS = {
    "inventory": inventory,
    "health": health,
    "settings": settings,
    "holders": holders,
    "coverage": coverage,
    "attack": attack,
    "kill": kill,
    "bench": bench,
    "diagnostics": diagnostics,
    "reset": reset,
}
