"""The section ``sharing`` of NVIDIA's configuration file: which resources are advertised as shares.

Time slicing is read. MPS is refused: a daemon of its own would have to serve the clients, and a device that it serves is
not cleared beside them. ``rename`` and ``devices`` of an entry are refused where they say anything, because NVIDIA's plugin
ignores them: a node would be shared differently from what is written.
"""

from __future__ import annotations

from collections.abc import Mapping

from plugin.config_file import ConfigFile
from plugin.kubelet import resource_complaint
from plugin.resources import NVIDIA
from plugin.shares import MOST_SHARES, Preference, Sharing
from scrubber.config.yaml_lines import Location, Value

__all__ = ["read_sharing"]

_AT: Location = ("sharing", "timeSlicing")


def read_sharing(file: ConfigFile, value: Value, preference: Preference | None) -> Sharing | None:
    """What the file shares; None where it says nothing of sharing.

    Raises:
        BadConfiguration: it asks for what is not done here; the sentence has the line.
    """
    ways = file.section(("sharing",), value, {"timeSlicing", "mps"})
    keys = {"resources", "renameByDefault", "failRequestsGreaterThanOne"}
    if file.section(("sharing", "mps"), ways.get("mps"), keys).get("resources"):
        raise file.complaint(
            ("sharing", "mps"),
            "asks for MPS, which is detected and not provided: the service scrubs no device that an MPS server has. "
            "Write timeSlicing, or remove it",
        )
    slicing = file.section(_AT, ways.get("timeSlicing"), keys)
    renamed = bool(file.truth(_AT, slicing, "renameByDefault"))
    one_each = bool(file.truth(_AT, slicing, "failRequestsGreaterThanOne"))
    entries = slicing.get("resources")
    if not isinstance(entries, list | None):
        raise file.complaint((*_AT, "resources"), "must be a list of names and replicas")
    if not entries:
        return None
    shares: dict[str, int] = {}
    for position, entry in enumerate(entries):
        where = (*_AT, "resources", position)
        known = file.section(where, entry, {"name", "replicas", "rename", "devices"})
        name = _name(file, where, known)
        if name in shares:
            raise file.complaint(where, f"names {name} a second time")
        shares[name] = _replicas(file, where, known)
        sharing = Sharing({name: shares[name]}, renamed)
        _refuse_the_ignored(file, where, known, name, sharing.called(name))
        if complaint := resource_complaint(sharing.called(name)):
            raise file.complaint(where, f"cannot be advertised: {complaint.rstrip('.')}")
    return Sharing(shares, renamed, one_each, preference or Preference.DISTRIBUTED)


def _name(file: ConfigFile, where: Location, entry: Mapping[str, Value]) -> str:
    name = file.text(where, entry, "name")
    if name is None:
        raise file.complaint(where, "has no name; write the resource's, such as nvidia.com/gpu")
    return _whole(name)


def _whole(name: str) -> str:
    """The name with its domain; NVIDIA's where none is written."""
    return name if "/" in name else f"{NVIDIA.partition('/')[0]}/{name}"


def _replicas(file: ConfigFile, where: Location, entry: Mapping[str, Value]) -> int:
    count = entry.get("replicas")
    if count is None:
        raise file.complaint(where, "has no replicas; write how many shares each device has")
    if not isinstance(count, int) or isinstance(count, bool) or not 2 <= count <= MOST_SHARES:
        raise file.complaint((*where, "replicas"), f'is "{count}"; write a number from 2 to {MOST_SHARES}')
    return count


def _refuse_the_ignored(file: ConfigFile, where: Location, entry: Mapping[str, Value], name: str, called: str) -> None:
    rename = file.text(where, entry, "rename")
    if rename is not None and _whole(rename) != called:
        raise file.complaint(
            (*where, "rename"),
            f"calls {name} {rename}, which NVIDIA's plugin ignores: it is {called}. Remove it; renameByDefault: true "
            "puts .shared behind the name",
        )
    if entry.get("devices") not in (None, "all"):
        raise file.complaint(
            (*where, "devices"),
            "chooses devices, which NVIDIA's plugin ignores: it shares all. Remove it, or write all",
        )
