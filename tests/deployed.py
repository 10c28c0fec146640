"""Read the deployment files of a node: the manifests as kustomize would build them, and the systemd units."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
CDI = DEPLOY / "kubernetes" / "cdi"
GPU_OPERATOR = DEPLOY / "kubernetes" / "gpu-operator"
UNITS = {path.name: path.read_text() for path in (DEPLOY / "systemd").glob("*.service")}
DROP_INS = {f"{path.parent.name}/{path.name}": path.read_text() for path in (DEPLOY / "systemd").glob("*.d/*.conf")}
"""Optional drop-ins for the units; systemd finds them in the unit's ``.d`` directory."""


def documents(directory: Path = BASE) -> list[dict[str, Any]]:
    """Return every object of the base, with what ``directory`` adds to it, as kustomize would build them."""
    found = [each for name in yaml_of(BASE)["resources"] for each in yaml.safe_load_all((BASE / name).read_text())]
    patch_all(found, directory)
    return found


def patch_all(found: list[dict[str, Any]], directory: Path) -> None:
    """Apply the patches of ``directory``, a base or a component, to these objects."""
    apply_patches(found, yaml_of(directory).get("patches", []))


def apply_patches(found: list[dict[str, Any]], patches: list[dict[str, Any]]) -> None:
    """Apply the patches of a kustomization to these objects.

    One without a target is a strategic merge patch; the project uses those only to delete an object.
    """
    for patch in patches:
        content = yaml.safe_load(patch["patch"])
        if "target" not in patch:
            assert content["$patch"] == "delete"
            (target,) = [each for each in found if _identity(each) == _identity(content)]
            found.remove(target)
            continue
        (target,) = [
            each for each in found if all(value_of(each, key) == wish for key, wish in patch["target"].items())
        ]
        for step in content:
            apply(target, **step)


def _identity(document: dict[str, Any]) -> tuple[str, str, str]:
    return document["apiVersion"], document["kind"], value_of(document, "name")


def apply(target: Any, op: str, path: str, value: Any = None) -> None:
    """Apply one step of a JSON patch (RFC 6902).

    Only the operations that the project uses are supported: ``add`` to the end of a list, ``replace`` in a list or of an
    existing field, ``add`` of a field that does not exist yet, and ``remove`` of one that does.
    """
    *way, last = (word.replace("~1", "/") for word in path.strip("/").split("/"))
    for word in way:
        target = target[int(word)] if isinstance(target, list) else target[word]
    if isinstance(target, dict) and op == "remove":
        del target[last]
    elif isinstance(target, dict):
        assert (op == "replace") is (last in target)
        target[last] = value
    elif (op, last) == ("add", "-"):
        target.append(value)
    else:
        assert op == "replace"
        target[int(last)] = value


def value_of(document: dict[str, Any], key: str) -> Any:
    return document["metadata"]["name"] if key == "name" else document[key]


def yaml_of(directory: Path) -> Any:
    return yaml.safe_load((directory / "kustomization.yaml").read_text())


class Workload(NamedTuple):
    pod: dict[str, Any]
    container: dict[str, Any]
    whole: dict[str, Any]


def workload(name: str, directory: Path = BASE) -> Workload:
    (whole,) = [each for each in documents(directory) if (each["kind"], value_of(each, "name")) == ("DaemonSet", name)]
    pod = whole["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return Workload(pod, container, whole)


SERVICE, PLUGIN = workload("scrubber"), workload("scrubber-plugin")


def mounts(of: Workload) -> set[tuple[str, str, str]]:
    """Return the host paths that are mounted, as (path on the node, path in the container, ``ro`` or ``rw``)."""
    paths = {each["name"]: each["hostPath"]["path"] for each in of.pod["volumes"] if "hostPath" in each}
    found = [(paths[each["name"]], each) for each in of.container["volumeMounts"] if each["name"] in paths]
    return {(path, each["mountPath"], "ro" if each.get("readOnly") else "rw") for path, each in found}


def unit(name: str) -> dict[str, list[str]]:
    """Return the directives of a unit, regardless of the section: name → values, in their order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS | DROP_INS)[name].splitlines():
        if line and line[0] not in "#[":
            directive, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(directive, []).append(value)
    return found


def environment_of(of: Workload) -> dict[str, str]:
    return {each["name"]: each.get("value", "some-value") for each in of.container.get("env", [])}
