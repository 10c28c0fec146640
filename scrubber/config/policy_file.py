"""The policy in force, and the file that it comes from: loaded, named by a digest, and followed.

The digest is what a certificate says of the rules that it was issued by. It is taken over the values in force, not over the
text: a comment changes no certificate, a changed default does. Values that decide nothing about what a certificate proves
are left out, as they declare, so that a changed alert has no device scrubbed again.

A file that is replaced takes effect as a whole or not at all: one that is no policy leaves the old one in force, and says
why. Files are replaced in many ways (an editor's rename, a ConfigMap's link, a write in place), so what is looked at is
what the path leads to.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from scrubber.config.bundled import find_policy
from scrubber.config.policy_format import read_policy
from scrubber.config.xid_file import XidRow, load_xid_table
from scrubber.config.yaml_document import parse_yaml, read_regular_file
from scrubber.domain.declaration import decides_proof
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.policy import EnvvarInjection, Policy

__all__ = ["PolicySource", "load_policy", "parse_policy", "policy_digest", "with_digest"]

_Fingerprint = tuple[int, int, int, int] | None


def load_policy(name_or_path: str | Path) -> Policy:
    """The policy at a path, or the shipped one of that name.

    XIDs that the file does not name have the class of the shipped table.

    Raises:
        InvalidConfiguration: no such policy, or a file that cannot be read or cannot be in force.
    """
    path = find_policy(name_or_path) if isinstance(name_or_path, str) else name_or_path
    try:
        content = read_regular_file(path, "a policy")
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        why = getattr(error, "strerror", None) or error
        raise InvalidConfiguration(f"{path}: the policy cannot be read: {why}.") from error
    return parse_policy(content, str(path), xids=load_xid_table())


def parse_policy(content: bytes, name: str, *, xids: Mapping[int, XidRow]) -> Policy:
    """The policy in ``content``; ``name`` is how the file is called in complaints, ``xids`` the table that it changes.

    Raises:
        InvalidConfiguration: one line for each complaint, in the order of the file: ``FILE:LINE: what is wrong; what helps``.
    """
    document = parse_yaml(content, name)
    if not isinstance(document.value, dict):
        raise InvalidConfiguration(
            f"{name}:{document.line(())}: a policy is a mapping of keys to values; begin with a line such as name: mine."
        )
    policy = _with_xid_defaults(read_policy(document, name), xids)
    overrides = tuple(replace(each, policy=_with_xid_defaults(each.policy, xids)) for each in policy.overrides)
    return with_digest(replace(policy, overrides=overrides))


def _with_xid_defaults(policy: Policy, table: Mapping[int, XidRow]) -> Policy:
    """``policy`` with the table's classes for the XIDs that it does not name, and the table's notes."""
    classes = {**{code: row.error_class for code, row in table.items()}, **policy.error_classes}
    notes = {code: row.note for code, row in table.items()}
    return replace(policy, error_classes=dict(sorted(classes.items())), error_notes=notes)


def with_digest(policy: Policy) -> Policy:
    """``policy`` and its overrides, each with the digest of the values that are in force under it."""
    overrides = tuple(replace(each, policy=with_digest(each.policy)) for each in policy.overrides)
    return replace(policy, overrides=overrides, digest=policy_digest(policy))


def policy_digest(policy: Policy) -> str:
    """Hexadecimal SHA-256 of the canonical JSON of the values that decide what a certificate proves."""
    values = _proof_values(policy)
    # The names under which these four are in the digest.
    values["xids"], values["unlisted_xid"] = values.pop("error_classes"), values.pop("unlisted_error")
    values["envvar_refused"] = values.pop("injection")["envvar"] is EnvvarInjection.REFUSE
    values["max_temperature_celsius"] = values["limits"].pop("max_temperature_celsius")
    # Of the patterns of the floors the first that fits counts, so their order is part of what they say.
    values["diagnostics"]["min_rates"] = list(values["diagnostics"]["min_rates"].items())
    canonical = json.dumps(
        values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=sorted
    )
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _proof_values(rule: Any) -> dict[str, Any]:
    values = {each.name: getattr(rule, each.name) for each in fields(rule) if decides_proof(each)}
    return {name: _proof_values(value) if is_dataclass(value) else value for name, value in values.items()}


class PolicySource:
    """One policy's.

    Args:
        name_or_path: a path, or the name of a policy that ships.
        adjust: what the settings of this start make of it; may refuse it.

    Raises:
        InvalidConfiguration: it cannot be read, or cannot be in force.
    """

    def __init__(self, name_or_path: str | Path, *, adjust: Callable[[Policy], Policy] = lambda policy: policy) -> None:
        self._path = find_policy(name_or_path) if isinstance(name_or_path, str) else name_or_path
        self._adjust = adjust
        self._fingerprint = _fingerprint(self._path)
        self._policy = adjust(load_policy(self._path))
        self._rejection = ""

    @property
    def rejection(self) -> str:
        """Why the file as it was last read is not in force; empty otherwise."""
        return self._rejection

    @property
    def path(self) -> Path:
        return self._path

    @property
    def policy(self) -> Policy:
        """The one in force."""
        return self._policy

    @property
    def has_changed(self) -> bool:
        """Whether the file is another one, or another state of it, than when it was last read."""
        return _fingerprint(self._path) != self._fingerprint

    def reload(self) -> bool:
        """Read the file again and put it in force; whether anything is another policy's now.

        Raises:
            InvalidConfiguration: it cannot be read, or cannot be in force; the old one stays.
        """
        self._fingerprint = _fingerprint(self._path)
        try:
            policy = self._adjust(load_policy(self._path))
        except InvalidConfiguration as error:
            self._rejection = str(error)
            raise
        before, self._policy, self._rejection = self._policy, policy, ""
        return policy != before  # not their digests, which are about proof alone


def _fingerprint(path: Path) -> _Fingerprint:
    try:
        found = os.stat(path)
    except OSError:
        return None  # gone, for now or for good: reading it says why
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
