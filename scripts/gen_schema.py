"""Generates files from the declared settings: ``policies/schema/*.schema.json`` for editors, and the reference page.

They are derived from the code that reads the files; a test compares the committed ones with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scrubber.config.command_file import command_file_schema
from scrubber.config.infrastructure_file import infrastructure_schema
from scrubber.config.policy_format import policy_reference, policy_schema
from scrubber.config.xid_file import xid_schema

_ROOT = Path(__file__).resolve().parent.parent

DERIVED: Mapping[Path, Callable[[], str]] = {
    _ROOT / "policies" / "schema" / "command.schema.json": lambda: render_schema(command_file_schema()),
    _ROOT / "policies" / "schema" / "infrastructure.schema.json": lambda: render_schema(infrastructure_schema()),
    _ROOT / "policies" / "schema" / "policy.schema.json": lambda: render_schema(policy_schema()),
    _ROOT / "policies" / "schema" / "xid.schema.json": lambda: render_schema(xid_schema()),
    _ROOT / "docs" / "policy-settings.md": policy_reference,
}


def render_schema(schema: dict[str, Any]) -> str:
    """Return the content of a schema's file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Regenerate in place, and print the files written."""
    for path, content in DERIVED.items():
        path.write_text(content(), encoding="utf-8")
        print(path.relative_to(_ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
