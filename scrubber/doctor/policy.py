"""Checks whether the policy file is valid, and whether it is the active policy."""

from __future__ import annotations

import os
from collections.abc import Iterator

from scrubber.doctor.model import AS_ROOT, CheckContext, CheckLevel, CheckResult
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["policy"]

_RELOAD = (
    "systemctl reload scrubber.service has it read again, and scrubber history says what came of it. Where "
    "DP_DISABLE_HEALTHCHECKS is set for the service the two differ for good."
)


def policy(node: CheckContext) -> Iterator[CheckResult]:
    """The file that the service would start with is a policy, and is the one that it follows."""
    said = node.service
    file = node.policy or _active_policy_file(node)
    if not file:
        if said.is_available:
            message = f"The policy {said.policy} is in force; which file it comes from was not seen."
            yield CheckResult("policy", CheckLevel.WARNING, message, "Give the file with --policy FILE.")
        return  # none was given, and the service does not reply
    mend = f"Mend it: scrubber policy check {file} says where; it is taken over within seconds."
    if said.policy_error:
        message = f"{said.policy_error} A service that starts now would not come up with it."
        yield CheckResult("policy", CheckLevel.ERROR, message, mend)
        return
    if said.is_available and not node.policy and not _is_readable(file):
        # A file of the service's pod, or one that this user may not read; the service itself checks it continuously.
        yield CheckResult(
            "policy", CheckLevel.OK, f"{said.policy} is in force, and the service finds nothing wrong with {file}."
        )
        return
    if os.path.exists(file) and not _is_readable(file):
        message = f"You may not read {file}; whether it can be in force was not seen."
        yield CheckResult("policy", CheckLevel.WARNING, message, AS_ROOT)
        return
    # Imported here: otherwise every other command would wait for a YAML parser.
    from scrubber.config.policy_file import load_policy

    try:
        found = load_policy(file)
    except InvalidConfiguration as error:
        first, *more = str(error).split("\n")
        rest = f" ({len(more)} more)" if more else ""
        yield CheckResult(
            "policy", CheckLevel.ERROR, f"{first}{rest} A service that starts now would not come up with it.", mend
        )
        return
    if not said.is_available:
        yield CheckResult(
            "policy", CheckLevel.OK, f"{file} can be in force; whether it is was not seen, for nobody answers."
        )
        return
    if (found.name, found.digest, found.enforcement.value) != (said.policy, said.policy_digest, said.enforcement):
        message = (
            f"{file} says otherwise ({found.name}, {found.enforcement.value}, digest {found.digest[:12]}) than what is in "
            f"force ({said.policy}, {said.enforcement}, digest {said.policy_digest[:12]})."
        )
        yield CheckResult("policy", CheckLevel.WARNING, message, _RELOAD)
        return
    yield CheckResult("policy", CheckLevel.OK, f"{file} is in force: {found.name}, digest {found.digest[:12]}.")


def _active_policy_file(node: CheckContext) -> str:
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
