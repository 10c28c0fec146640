"""Finds policies, bundled ones by name and the administrator's by path, and the bundled tables.

Bundled policies are inside the package once installed, and at the top of the repository in an editable checkout. An
unknown name is refused with a list of the existing ones; it is never silently used as a path.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import scrubber
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["bundled_infrastructure_table", "bundled_policies", "bundled_xid_table", "find_policy", "is_bundled"]

_PACKAGE = Path(scrubber.__file__).parent
_SUFFIXES = (".yaml", ".yml")
_INFRASTRUCTURE, _XIDS = "infrastructure.yaml", "xid.yaml"
"""Located beside the policies, but not policies."""


def bundled_policies() -> dict[str, Path]:
    """Return the file of every bundled policy by name.

    Raises:
        InvalidConfiguration: the installation is incomplete.
    """
    return {
        path.stem: path for path in sorted(_directory().glob("*.yaml")) if path.name not in (_INFRASTRUCTURE, _XIDS)
    }


def bundled_infrastructure_table() -> Path:
    """Return the file of the bundled table of infrastructure.

    Raises:
        InvalidConfiguration: the installation is incomplete.
    """
    return _directory() / _INFRASTRUCTURE


def bundled_xid_table() -> Path:
    """Return the file of the bundled XID table.

    Raises:
        InvalidConfiguration: the installation is incomplete.
    """
    return _directory() / _XIDS


def is_bundled(path: Path) -> bool:
    """Return whether ``path`` is the file of a bundled policy, as :func:`find_policy` returns it."""
    return path.parent in (_PACKAGE / "_policies", _PACKAGE.parent / "policies")


def _directory() -> Path:
    for directory in (_PACKAGE / "_policies", _PACKAGE.parent / "policies"):
        if directory.is_dir():
            return directory
    raise InvalidConfiguration(
        f"The policies bundled with scrubber are missing next to {_PACKAGE}; reinstall scrubber, or pass your "
        "own policy file with --policy FILE."
    )


def find_policy(name_or_path: str) -> Path:
    """Return the file of ``name_or_path``: a path if it contains a slash or ends in .yaml or .yml, else a bundled name.

    Raises:
        InvalidConfiguration: no bundled policy has that name.
    """
    if "/" in name_or_path or name_or_path.endswith(_SUFFIXES):
        return Path(name_or_path)
    shipped = bundled_policies()
    if name_or_path in shipped:
        return shipped[name_or_path]
    close = get_close_matches(name_or_path, shipped, n=1)
    meant = f' Did you mean "{close[0]}"?' if close else ""
    raise InvalidConfiguration(
        f'There is no bundled policy named "{name_or_path}".{meant} The bundled policies are: '
        f"{', '.join(shipped)}. To use your own file, pass its path, such as "
        f"./{name_or_path or 'policy'}.yaml."
    )
