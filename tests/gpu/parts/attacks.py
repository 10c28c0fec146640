"""A tenant leaves a secret and is killed; the next one searches for it, before a scrub and after.

Before the scrub anything or nothing may be found: a healthy driver clears freed memory itself. After it nothing may be
found, anywhere. Each attack draws a new secret, so that it cannot be mistaken for an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from secrets import randbits

from scrubber.domain.device import Device
from scrubber.ports.device import EraseRequest
from tests.gpu.outcome import Log
from tests.gpu.programs import running
from tests.gpu.stand import Stand

__all__ = ["attacks", "nothing_found"]

TENANT = "tests.gpu.tenant"
PLACES: Mapping[str, str] = {"global-memory": "global", "shared-memory": "shared", "registers": "registers"}
_DEADLINE = 60.0
_SETTLING = 20.0
_LOOKED_SHARE = 0.9


def nothing_found(found: int, looked: int, left: int) -> bool:
    """Return whether a reader proves that the secret is gone: it found none, and read about as much as was filled."""
    return found == 0 and looked > 0 and looked >= _LOOKED_SHARE * left


async def attacks(stand: Stand, log: Log) -> None:
    """Attack every place on the device, and the memory of an instance if there is one."""
    for name, place in PLACES.items():
        await _attack(stand, log, stand.device, name, place)
    instance = next((each for each in stand.devices if each.parent is not None), None)
    if instance is None:
        for when in ("before", "after"):
            log.unavailable(f"attack.mig-instance.{when}", "The GPU has no MIG instances, and none are made here.")
    elif instance == stand.device:
        await _attack(stand, log, instance, "mig-instance", "global")
    else:
        log.unavailable("attack.mig-instance.after", f"Choose the instance: --device {instance.id}.")


async def _attack(stand: Stand, log: Log, device: Device, name: str, place: str) -> None:
    before, after, left, looked, residue = 0, 0, 0, 0, 0
    request = EraseRequest(f"attack-{name}", audit=True, pattern=False, deadline=_DEADLINE)
    for _ in range(stand.extent.attacks):
        secret = randbits(64) | 1
        left += await leave(stand, device, place, secret)
        before += (await look(stand, device, place, secret))[0]
        await leave(stand, device, place, secret)
        await stand.gpu.wait_until_idle(device, _SETTLING)  # no scrub can reach unreleased memory
        report = await stand.eraser.erase(device, request, lambda _: None)
        found, reached = await look(stand, device, place, secret)
        after += found
        looked += reached
        residue += report.residue_bytes or 0
        if place != "global" and report.on_chip is not None:
            residue += report.on_chip.residue_bytes
    log.passed(
        f"attack.{name}.before",
        f"{before} bytes of the secret were found by the next tenant, without a scrub.",
        left_bytes=left,
        found_bytes=before,
        attacks=stand.extent.attacks,
    )
    log.judged(
        f"attack.{name}.after",
        nothing_found(after, looked, left),
        f"{after} bytes of the secret were found in {looked} bytes after a scrub, which had counted {residue} bytes of "
        "residue.",
        found_bytes=after,
        looked_bytes=looked,
        residue_bytes=residue,
        attacks=stand.extent.attacks,
    )


async def leave(stand: Stand, device: Device, place: str, secret: int) -> int:
    """Let a tenant fill ``place`` with ``secret`` and kill it there; return the bytes that it filled."""
    async with running(TENANT, "leave", place, str(secret), environment=stand.cuda_environment(device)) as tenant:
        filled = int((await tenant.line())["filled_bytes"])
        await tenant.kill()
    return filled


async def look(stand: Stand, device: Device, place: str, secret: int) -> tuple[int, int]:
    """Return the bytes of ``secret`` that a new tenant finds in ``place``, and the bytes that it reads."""
    async with running(TENANT, "look", place, str(secret), environment=stand.cuda_environment(device)) as tenant:
        message = await tenant.line()
        return int(message["found_bytes"]), int(message["looked_bytes"])
