"""Writes ``policies/schema/*.schema.json``, so that an editor knows the keys of a policy and of the table of XIDs.

They come from the same models that read the files; a test compares the committed ones with them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scrubber.config.policy_model import policy_schema
from scrubber.config.xid_file import xid_schema

_DIRECTORY = Path(__file__).resolve().parent.parent / "policies" / "schema"

SCHEMAS: Mapping[Path, Callable[[], dict[str, Any]]] = {
    _DIRECTORY / "policy.schema.json": policy_schema,
    _DIRECTORY / "xid.schema.json": xid_schema,
}


def rendered(schema: dict[str, Any]) -> str:
    """A schema as it stands in its file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Regenerate in place, and name what was written."""
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    for path, schema in SCHEMAS.items():
        path.write_text(rendered(schema()), encoding="utf-8")
        print(path.relative_to(path.parents[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
