"""What a CDI specification must fulfil to be loaded, from the documentation of the Container Device Interface."""

from __future__ import annotations

import re
from typing import Any

HOOK_NAMES = {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}
SINCE = {"hostPath of a device node": (0, 5, 0), "a name that begins with a digit": (0, 5, 0)}


def errors_of(spec: Any) -> list[str]:
    """Return every reason for which a runtime would refuse ``spec``."""
    return [*_of_the_top(spec), *(each for device in spec["devices"] for each in _of_a_device(device, spec))]


def _of_the_top(spec: Any) -> list[str]:
    found = [
        f"unknown key {key}" for key in set(spec) - {"cdiVersion", "kind", "devices", "containerEdits", "annotations"}
    ]
    if not re.fullmatch(r"\d+\.\d+\.\d+", spec["cdiVersion"]):
        found.append("cdiVersion is no version")
    vendor, _, kind = spec["kind"].partition("/")
    if not re.fullmatch(r"[A-Za-z]([\w.-]*[A-Za-z0-9])?", vendor) or not re.fullmatch(
        r"[A-Za-z]([\w-]*[A-Za-z0-9])?", kind
    ):
        found.append(f"kind {spec['kind']} is no vendor and class")
    names = [device["name"] for device in spec["devices"]]
    if not names:
        found.append("there is no device")
    if len(names) != len(set(names)):
        found.append("a name is there twice")
    return found + _of_edits(spec.get("containerEdits", {}), spec)


def _of_a_device(device: Any, spec: Any) -> list[str]:
    name, edits = device["name"], device["containerEdits"]
    found = [f"unknown key {key}" for key in set(device) - {"name", "containerEdits", "annotations"}]
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?", name):
        found.append(f"{name} is no name")
    if name[0].isdigit() and _version(spec) < SINCE["a name that begins with a digit"]:
        found.append(f"{name} begins with a digit")
    if not any(edits.values()):
        found.append(f"{name} changes nothing")
    return found + _of_edits(edits, spec)


def _of_edits(edits: Any, spec: Any) -> list[str]:
    found = [f"unknown edit {key}" for key in set(edits) - {"env", "deviceNodes", "mounts", "hooks"}]
    found += [f"{each} sets nothing" for each in edits.get("env", []) if not re.match(r"[^=]+=", each)]
    for node in edits.get("deviceNodes", []):
        found += [f"unknown key {key}" for key in set(node) - {"path", "hostPath", "permissions"}]
        found += [
            f"{node[key]} is not absolute" for key in ("path", "hostPath") if not node.get(key, "/").startswith("/")
        ]
        if "hostPath" in node and _version(spec) < SINCE["hostPath of a device node"]:
            found.append("hostPath is not known yet")
        if not set(node.get("permissions", "rwm")) <= set("rwm"):
            found.append(f"{node['permissions']} are no permissions")
    for mount in edits.get("mounts", []):
        found += [f"unknown key {key}" for key in set(mount) - {"hostPath", "containerPath", "options"}]
        found += [f"{mount} is no mount" for key in ("hostPath", "containerPath") if not mount[key].startswith("/")]
    for hook in edits.get("hooks", []):
        found += [f"unknown key {key}" for key in set(hook) - {"hookName", "path", "args", "env", "timeout"}]
        if hook["hookName"] not in HOOK_NAMES or not hook["path"].startswith("/"):
            found.append(f"{hook} is no hook")
    return found


def _version(spec: Any) -> tuple[int, ...]:
    return tuple(map(int, spec["cdiVersion"].split(".")))
