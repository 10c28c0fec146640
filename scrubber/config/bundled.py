"""Finds a policy: one that ships with the program by its name, one of the administrator's by its path; and the XIDs.

Shipped policies lie inside the package once installed and at the top of the tree in an editable checkout. A name that
nothing ships under is refused with what there is; it is never quietly taken for a path.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import scrubber
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["bundled_policies", "bundled_xid_table", "find_policy"]

_PACKAGE = Path(scrubber.__file__).parent
_SUFFIXES = (".yaml", ".yml")
_XIDS = "xid.yaml"
"""Lies beside the policies, and is none."""


def bundled_policies() -> dict[str, Path]:
    """Name → file of every policy that ships with the program.

    Raises:
        InvalidConfiguration: the installation is incomplete.
    """
    return {path.stem: path for path in sorted(_directory().glob("*.yaml")) if path.name != _XIDS}


def bundled_xid_table() -> Path:
    """The table of XIDs that ships with the program.

    Raises:
        InvalidConfiguration: the installation is incomplete.
    """
    return _directory() / _XIDS


def _directory() -> Path:
    for directory in (_PACKAGE / "_policies", _PACKAGE.parent / "policies"):
        if directory.is_dir():
            return directory
    raise InvalidConfiguration(
        f"The policies that ship with scrubber are missing beside {_PACKAGE}; install it again, "
        "or name a policy file of your own with --policy FILE."
    )


def find_policy(name_or_path: str) -> Path:
    """The file of ``name_or_path``: a path when it holds a slash or ends in .yaml or .yml, else the name of a shipped policy.

    Raises:
        InvalidConfiguration: nothing ships under that name.
    """
    if "/" in name_or_path or name_or_path.endswith(_SUFFIXES):
        return Path(name_or_path)
    shipped = bundled_policies()
    if name_or_path in shipped:
        return shipped[name_or_path]
    close = get_close_matches(name_or_path, shipped, n=1)
    meant = f' Did you mean "{close[0]}"?' if close else ""
    raise InvalidConfiguration(
        f'No policy ships under the name "{name_or_path}".{meant} There is: {", ".join(shipped)}. '
        f"A file of your own is given by its path, such as ./{name_or_path or 'policy'}.yaml."
    )
