"""Finds a policy: one that ships with the program by its name, one of the administrator's by its path; and the XIDs.

Shipped policies lie inside the package once installed and at the top of the tree in an editable checkout. A name that
nothing ships under is refused with what there is; it is never quietly taken for a path.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import scrubber
from scrubber.domain.errors import BadConfiguration

__all__ = ["find_policy", "shipped_policies", "shipped_xids"]

_PACKAGE = Path(scrubber.__file__).parent
_SUFFIXES = (".yaml", ".yml")
_XIDS = "xid.yaml"
"""Lies beside the policies, and is none."""


def shipped_policies() -> dict[str, Path]:
    """Name → file of every policy that ships with the program.

    Raises:
        BadConfiguration: the installation is incomplete.
    """
    return {path.stem: path for path in sorted(_directory().glob("*.yaml")) if path.name != _XIDS}


def shipped_xids() -> Path:
    """The table of XIDs that ships with the program.

    Raises:
        BadConfiguration: the installation is incomplete.
    """
    return _directory() / _XIDS


def _directory() -> Path:
    for directory in (_PACKAGE / "_policies", _PACKAGE.parent / "policies"):
        if directory.is_dir():
            return directory
    raise BadConfiguration(
        f"The policies that ship with scrubber are missing beside {_PACKAGE}; install it again, "
        "or name a policy file of your own with --policy FILE."
    )


def find_policy(wanted: str) -> Path:
    """The file of ``wanted``: a path when it holds a slash or ends in .yaml or .yml, else the name of a shipped policy.

    Raises:
        BadConfiguration: nothing ships under that name.
    """
    if "/" in wanted or wanted.endswith(_SUFFIXES):
        return Path(wanted)
    shipped = shipped_policies()
    if wanted in shipped:
        return shipped[wanted]
    close = get_close_matches(wanted, shipped, n=1)
    meant = f' Did you mean "{close[0]}"?' if close else ""
    raise BadConfiguration(
        f'No policy ships under the name "{wanted}".{meant} There is: {", ".join(shipped)}. '
        f"A file of your own is given by its path, such as ./{wanted or 'policy'}.yaml."
    )
