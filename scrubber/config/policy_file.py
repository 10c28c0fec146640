"""The policy in force and its source file: loads it, computes its digest, and follows changes.

A certificate contains the digest to identify the rules that it was issued under. It is computed from the values in
force, not from the text: a comment changes no certificate, a changed default does. Values that are declared not to
affect what a certificate proves are excluded, so changing an alert causes no scrubs.

A replaced file takes effect completely or not at all: an invalid file leaves the old policy in force, and the reason is
reported. Files are replaced in many ways (an editor's rename, a ConfigMap's symlink, a write in place), so the check
follows the path to its target.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from scrubber.config.bundled import find_policy, is_bundled
from scrubber.config.infrastructure_file import load_infrastructure_table, with_groups
from scrubber.config.policy_format import read_policy
from scrubber.config.xid_file import XidRow, load_xid_table
from scrubber.config.yaml_document import parse_yaml, read_configuration_file
from scrubber.domain.declaration import decides_proof
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.policy import EnvvarInjection, Policy

__all__ = ["PolicySource", "load_policy", "parse_policy", "policy_digest", "with_digest"]

_Fingerprint = tuple[int, int, int, int] | None


def load_policy(name_or_path: str | Path) -> Policy:
    """Load the policy at a path, or the bundled policy of that name.

    XIDs that the file does not name have the class of the bundled table.

    Raises:
        InvalidConfiguration: no such policy, or the file cannot be read or applied.
    """
    path = find_policy(name_or_path) if isinstance(name_or_path, str) else name_or_path
    return _parsed(read_configuration_file(path, "policy"), str(path))


@lru_cache(maxsize=8)
def _parsed(content: bytes, name: str) -> Policy:
    """Cached, because one run of a command loads the same policy several times, and parsing takes long."""
    return parse_policy(content, name, xids=load_xid_table(), bundled=is_bundled(Path(name)))


def parse_policy(content: bytes, name: str, *, xids: Mapping[int, XidRow], bundled: bool = False) -> Policy:
    """Parse the policy in ``content``; ``name`` is the name of the file in messages, ``xids`` the table to change.

    Args:
        bundled: as for :func:`parse_yaml`.

    Raises:
        InvalidConfiguration: one line for each error, in the order of the file: ``FILE:LINE: what is wrong; what
            helps``.
    """
    document = parse_yaml(content, name, bundled=bundled)
    if not isinstance(document.value, dict):
        raise InvalidConfiguration(
            f"{name}:{document.line(())}: a policy is a mapping of keys to values; begin with a line such as name: mine."
        )
    policy = _with_tables(read_policy(document, name), xids)
    overrides = tuple(replace(each, policy=_with_tables(each.policy, xids)) for each in policy.overrides)
    return with_digest(replace(policy, overrides=overrides))


def _with_tables(policy: Policy, xids: Mapping[int, XidRow]) -> Policy:
    """Return ``policy`` with what the bundled tables contain about its XIDs and its groups of infrastructure."""
    infrastructure = with_groups(policy.infrastructure, load_infrastructure_table())
    return _with_xid_defaults(replace(policy, infrastructure=infrastructure), xids)


def _with_xid_defaults(policy: Policy, table: Mapping[int, XidRow]) -> Policy:
    """Return ``policy`` with the table's classes for the XIDs that it does not name, and the table's notes."""
    classes = {**{code: row.error_class for code, row in table.items()}, **policy.error_classes}
    notes = {code: row.note for code, row in table.items()}
    return replace(policy, error_classes=dict(sorted(classes.items())), error_notes=notes)


def with_digest(policy: Policy) -> Policy:
    """Return ``policy`` and its overrides, each with the digest of the values in force under it."""
    overrides = tuple(replace(each, policy=with_digest(each.policy)) for each in policy.overrides)
    return replace(policy, overrides=overrides, digest=policy_digest(policy))


def policy_digest(policy: Policy) -> str:
    """Return the hexadecimal SHA-256 of the canonical JSON of the values that determine what a certificate proves."""
    values = _proof_values(policy)
    # The digest contains these four under these names.
    values["xids"], values["unlisted_xid"] = values.pop("error_classes"), values.pop("unlisted_error")
    values["envvar_refused"] = values.pop("injection")["envvar"] is EnvvarInjection.REFUSE
    values["max_temperature_celsius"] = values["limits"].pop("max_temperature_celsius")
    # Which agents are allowed matters, and not by which key: a group can change with the program.
    values["infrastructure"] = {each: values["infrastructure"][each] for each in ("all_units", "all_pods")}
    # The first matching pattern of the minimum rates applies, so their order is significant.
    values["diagnostics"]["min_rates"] = list(values["diagnostics"]["min_rates"].items())
    canonical = json.dumps(
        values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=sorted
    )
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _proof_values(rule: Any) -> dict[str, Any]:
    values = {each.name: getattr(rule, each.name) for each in fields(rule) if decides_proof(each)}
    return {name: _proof_values(value) if is_dataclass(value) else value for name, value in values.items()}


# See docs/decisions/0030-policy-changes.md.
class PolicySource:
    """The source of one policy.

    Args:
        name_or_path: a path, or the name of a bundled policy.
        adjust: applies the settings of this start to the policy; may refuse it.

    Raises:
        InvalidConfiguration: the policy cannot be read or applied.
    """

    def __init__(self, name_or_path: str | Path, *, adjust: Callable[[Policy], Policy] = lambda policy: policy) -> None:
        self._path = find_policy(name_or_path) if isinstance(name_or_path, str) else name_or_path
        self._adjust = adjust
        self._fingerprint = _fingerprint(self._path)
        self._policy = adjust(load_policy(self._path))
        self._rejection = ""

    @property
    def rejection(self) -> str:
        """Why the file as last read is not in force; empty otherwise."""
        return self._rejection

    @property
    def path(self) -> Path:
        return self._path

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def has_changed(self) -> bool:
        """Whether the file was replaced or modified since it was last read."""
        return _fingerprint(self._path) != self._fingerprint

    def reload(self) -> bool:
        """Read the file again and apply it; return whether any setting changed.

        Raises:
            InvalidConfiguration: the file cannot be read or applied; the old policy stays in force.
        """
        self._fingerprint = _fingerprint(self._path)
        try:
            policy = self._adjust(load_policy(self._path))
        except InvalidConfiguration as error:
            self._rejection = str(error)
            raise
        before, self._policy, self._rejection = self._policy, policy, ""
        return policy != before  # compare policies and not digests, which cover only the proof


def _fingerprint(path: Path) -> _Fingerprint:
    try:
        found = os.stat(path)
    except OSError:
        return None  # missing, temporarily or permanently: reading it reports why
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
