"""Reads a policy file into the domain's policy, or says in which line it cannot be read and what to write instead.

All complaints about a file come together, each with its line. The digest is taken over the values in force, not over
the text: a comment changes no certificate, a changed default does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from scrubber.config.policy_model import UNIT, PolicyFile
from scrubber.config.shipped import find_policy, shipped_policies
from scrubber.config.yaml_lines import Located, Location, file_content, read_yaml
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import Policy, XidClass

__all__ = ["load_policy", "parse_policy", "policy_digest", "signed"]

_TYPES = {
    "bool_type": "write true or false",
    "int_type": "write a whole number",
    "string_type": "write a word; quote it if it looks like a number or like true or false",
    "list_type": "write a list, such as [79, 151]",
    "model_type": "write its keys below it, indented",
    "dict_type": "write its keys below it, indented",
}
_LISTS = {
    "units": "write a list, such as [nvidia-dcgm.service]",
    "pods": "write a list, such as [{namespace: gpu-operator, service-account: nvidia-dcgm}]",
}


def load_policy(wanted: str | Path) -> Policy:
    """The policy at a path, or the shipped one of that name.

    XIDs that the file does not name have the class of the shipped default.

    Raises:
        BadConfiguration: no such policy, or a file that cannot be read or cannot be in force.
    """
    path = find_policy(wanted) if isinstance(wanted, str) else wanted
    base = _read(shipped_policies()["default"], {}).xids
    return _read(path, base)


def parse_policy(content: bytes, name: str, *, xids: Mapping[int, XidClass]) -> Policy:
    """The policy in ``content``; ``name`` is how the file is called in complaints, ``xids`` what it changes.

    Raises:
        BadConfiguration: one line for each complaint, in the order of the file: ``FILE:LINE: what is wrong; what helps``.
    """
    document = read_yaml(content, name)
    if not isinstance(document.value, dict):
        raise BadConfiguration(
            f"{name}:{document.line(())}: a policy is a mapping of keys to values; begin with a line such as name: mine."
        )
    try:
        written = PolicyFile.model_validate(document.value)
    except ValidationError as error:
        complaints = sorted({_complaint(each, document) for each in error.errors(include_url=False)})
        raise BadConfiguration("\n".join(f"{name}:{line}: {text}" for line, text in complaints)) from None
    policy = written.policy()
    policy = dataclasses.replace(policy, xids=dict(sorted({**xids, **policy.xids}.items())))
    return signed(policy)


def signed(policy: Policy) -> Policy:
    """``policy`` with the digest of the values that are in force."""
    return dataclasses.replace(policy, digest=policy_digest(policy))


def policy_digest(policy: Policy) -> str:
    """Hexadecimal SHA-256 of the canonical JSON of the values in force; the policy's name and digest are not in it."""
    values = dataclasses.asdict(policy)
    del values["name"], values["digest"]
    canonical = json.dumps(
        values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=sorted
    )
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _read(path: Path, xids: Mapping[int, XidClass]) -> Policy:
    try:
        content = file_content(path, "a policy")
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        why = getattr(error, "strerror", None) or error
        raise BadConfiguration(f"{path}: the policy cannot be read: {why}.") from error
    return parse_policy(content, str(path), xids=xids)


def _complaint(error: ErrorDetails, document: Located) -> tuple[int, str]:
    """Line and text of one of pydantic's errors."""
    where: Location = error["loc"]
    context = error.get("ctx", {})
    kind = error["type"]
    if kind == "policy":
        where = (*where, *context["at"])
        text = f"{_name(where)}{context['sentence']}" if where else context["sentence"]
    elif kind == "extra_forbidden":
        text = _unknown_key(where)
    elif error["input"] is None:
        text = f"{_name(where)}nothing is written here; write its value, or remove the key"
    elif kind == "choice":
        text = _name(where) + _not_a_choice(context["written"], context["choices"])
    elif kind == "missing":
        text = f'the key "{where[-1]}" is missing; add a line such as {where[-1]}: mine'
    elif kind == "string_pattern_mismatch" and context["pattern"] == UNIT:
        text = f'{_name(where)}"{error["input"]}" is no service of systemd; write all of its name, such as nvidia-dcgm.service'
    elif kind == "string_pattern_mismatch":
        text = f'{_name(where)}"{error["input"]}" is no name; use small letters, digits and hyphens, such as my-policy'
    elif kind in ("greater_than_equal", "less_than_equal"):
        least_or_most = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        text = f"{_name(where)}{error['input']} is impossible; write {least_or_most}"
    else:
        helps = _LISTS.get(str(where[-1])) if kind == "list_type" else None
        helps = helps or _TYPES.get(kind, error["msg"])
        text = f"{_name(where)}{_shown(error['input'])} does not fit here; {helps}"
    return document.line(where), text if text.endswith("?") else f"{text}."


def _name(where: Location) -> str:
    """``limits.hand-over: ``; list positions are left to the line number."""
    return ".".join(part for part in where if isinstance(part, str)) + ": "


def _unknown_key(where: Location) -> str:
    known = _keys(where[:-1])
    key = str(where[-1])
    close = get_close_matches(key.lower().replace("_", "-"), known, n=1)
    helps = f'did you mean "{close[0]}"?' if close else f"known here: {', '.join(known)}"
    around = [part for part in where[:-1] if isinstance(part, str)]
    place = f' in "{around[-1]}"' if around else ""
    return f'unknown key "{key}"{place}; {helps}'


def _keys(where: Location) -> list[str]:
    """The keys that may stand at ``where``."""
    model: type[BaseModel] = PolicyFile
    for part in where:
        if isinstance(part, int):  # of a list, of which all entries are alike
            continue
        annotation = {field.alias: field.annotation for field in model.model_fields.values()}.get(part)
        annotation = next(iter(get_args(annotation)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return [str(field.alias) for field in model.model_fields.values()]


def _not_a_choice(written: str, choices: list[str]) -> str:
    close = get_close_matches(written.lower().replace("_", "-"), choices, n=1)
    helps = f'did you mean "{close[0]}"?' if close else f"write one of {', '.join(choices)}"
    return f'"{written}" is not known; {helps}'


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
