"""Checks whether the policy file is valid, and whether it is the active policy."""

from __future__ import annotations

import os
from collections.abc import Iterator

from scrubber.doctor.model import AS_ROOT, CheckContext, CheckLevel, CheckResult
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["active_policy_file", "policy"]

_RELOAD = (
    "systemctl reload scrubber.service makes the service read it again, and scrubber history shows the "
    "result. Where DP_DISABLE_HEALTHCHECKS is set for the service, the two always differ."
)


def policy(node: CheckContext) -> Iterator[CheckResult]:
    """The file that the service would start with is a valid policy, and is the policy in force."""
    service = node.service
    file = node.policy or active_policy_file(node)
    if not file:
        if service.is_available:
            message = f"The policy {service.policy} is in force; its file is unknown."
            yield CheckResult("policy", CheckLevel.WARNING, message, "Pass the file with --policy FILE.")
        return  # none was given, and the service does not reply
    mend = f"Fix it: scrubber policy check {file} shows where; the service applies it within seconds."
    if service.policy_error:
        message = f"{service.policy_error} The service would not start with it."
        yield CheckResult("policy", CheckLevel.ERROR, message, mend)
        return
    if service.is_available and not node.policy and not _is_readable(file):
        # A file of the service's pod, or one that this user may not read; the service itself checks it continuously.
        yield CheckResult(
            "policy", CheckLevel.OK, f"{service.policy} is in force, and the service reports no error in {file}."
        )
        return
    if os.path.exists(file) and not _is_readable(file):
        message = f"You may not read {file}; whether it is a valid policy is unknown."
        yield CheckResult("policy", CheckLevel.WARNING, message, AS_ROOT)
        return
    # Imported here: otherwise every other command would wait for a YAML parser.
    from scrubber.config.policy_file import load_policy

    try:
        found = load_policy(file)
    except InvalidConfiguration as error:
        first, *more = str(error).split("\n")
        rest = f" ({len(more)} more)" if more else ""
        yield CheckResult("policy", CheckLevel.ERROR, f"{first}{rest} The service would not start with it.", mend)
        return
    if not service.is_available:
        yield CheckResult(
            "policy",
            CheckLevel.OK,
            f"{file} is a valid policy; whether it is in force is unknown, because no service answers.",
        )
        return
    if (found.name, found.digest, found.enforcement.value) != (
        service.policy,
        service.policy_digest,
        service.enforcement,
    ):
        message = (
            f"{file} differs ({found.name}, {found.enforcement.value}, digest {found.digest[:12]}) from the "
            f"policy in force ({service.policy}, {service.enforcement}, digest {service.policy_digest[:12]})."
        )
        yield CheckResult("policy", CheckLevel.WARNING, message, _RELOAD)
        return
    yield CheckResult("policy", CheckLevel.OK, f"{file} is in force: {found.name}, digest {found.digest[:12]}.")


def active_policy_file(node: CheckContext) -> str:
    """Return the file that the service names, or the bundled policy of that name; empty where neither is known."""
    if node.service.paths.policy is not None:
        return str(node.path(node.service.paths.policy))
    return node.service.policy if node.service.is_available and _is_bundled(node.service.policy) else ""


def _is_readable(file: str) -> bool:
    return os.access(file, os.R_OK, effective_ids=True)


def _is_bundled(name: str) -> bool:
    from scrubber.config.bundled import bundled_policies

    try:
        return name in bundled_policies()
    except InvalidConfiguration:
        return False
