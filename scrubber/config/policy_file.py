"""Reads a policy file into the domain's policy, or says in which line it cannot be read and what to write instead.

The digest is what a certificate says of the rules that it was issued by. It is taken over the values in force, not over the
text: a comment changes no certificate, a changed default does. Values that decide nothing about what a certificate proves
are left out (:data:`DECIDES_NO_PROOF`), so that a changed alert has no device scrubbed again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from scrubber.config.complaints import validated
from scrubber.config.policy_model import PolicyFile
from scrubber.config.shipped import find_policy
from scrubber.config.xid_file import XidRow, load_xids
from scrubber.config.yaml_lines import file_content, read_yaml
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import Envvar, Policy

__all__ = ["DECIDES_NO_PROOF", "load_policy", "parse_policy", "policy_digest", "signed"]

DECIDES_NO_PROOF: Mapping[str, frozenset[str] | None] = {
    "name": None,
    "digest": None,
    "overrides": None,  # each of them has a digest of its own
    "xid_notes": None,
    "enforcement": None,  # what is proved is the same, whether it is acted on or not
    "recovery": None,
    "breaker": None,
    "uninspectable": None,
    "stuck": None,
    "health": frozenset({"news", "blame"}),
    "maintenance": frozenset({"every", "between"}),
    "limits": frozenset({"break_glass"}),
}
"""Fields of a policy that its digest leaves out: whole (None), or of a rule the ones named. A new field is in the digest."""


def load_policy(wanted: str | Path) -> Policy:
    """The policy at a path, or the shipped one of that name.

    XIDs that the file does not name have the class of the shipped table.

    Raises:
        BadConfiguration: no such policy, or a file that cannot be read or cannot be in force.
    """
    path = find_policy(wanted) if isinstance(wanted, str) else wanted
    try:
        content = file_content(path, "a policy")
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        why = getattr(error, "strerror", None) or error
        raise BadConfiguration(f"{path}: the policy cannot be read: {why}.") from error
    return parse_policy(content, str(path), xids=load_xids())


def parse_policy(content: bytes, name: str, *, xids: Mapping[int, XidRow]) -> Policy:
    """The policy in ``content``; ``name`` is how the file is called in complaints, ``xids`` the table that it changes.

    Raises:
        BadConfiguration: one line for each complaint, in the order of the file: ``FILE:LINE: what is wrong; what helps``.
    """
    document = read_yaml(content, name)
    if not isinstance(document.value, dict):
        raise BadConfiguration(
            f"{name}:{document.line(())}: a policy is a mapping of keys to values; begin with a line such as name: mine."
        )
    policy = _upon(validated(PolicyFile, document, name).policy(), xids)
    overrides = tuple(dataclasses.replace(each, policy=_upon(each.policy, xids)) for each in policy.overrides)
    return signed(dataclasses.replace(policy, overrides=overrides))


def _upon(policy: Policy, table: Mapping[int, XidRow]) -> Policy:
    """``policy`` with the table's classes for the XIDs that it does not name, and the table's notes."""
    xids = {**{code: row.kind for code, row in table.items()}, **policy.xids}
    notes = {code: row.note for code, row in table.items()}
    return dataclasses.replace(policy, xids=dict(sorted(xids.items())), xid_notes=notes)


def signed(policy: Policy) -> Policy:
    """``policy`` and its overrides, each with the digest of the values that are in force under it."""
    overrides = tuple(dataclasses.replace(each, policy=signed(each.policy)) for each in policy.overrides)
    return dataclasses.replace(policy, overrides=overrides, digest=policy_digest(policy))


def policy_digest(policy: Policy) -> str:
    """Hexadecimal SHA-256 of the canonical JSON of the values that decide what a certificate proves."""
    values = dataclasses.asdict(dataclasses.replace(policy, overrides=()))
    for name, parts in DECIDES_NO_PROOF.items():
        if parts is None:
            del values[name]
        else:
            values[name] = {key: value for key, value in values[name].items() if key not in parts}
    # The names under which these two are in the digest.
    values["envvar_refused"] = values.pop("injection")["envvar"] is Envvar.REFUSE
    values["max_temperature_celsius"] = values["limits"].pop("temperature_celsius")
    # Of the patterns of the floors the first that fits counts, so their order is part of what they say.
    values["diagnostics"]["floors"] = list(values["diagnostics"]["floors"].items())
    canonical = json.dumps(
        values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=sorted
    )
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
