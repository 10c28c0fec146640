"""Writes ``policies/schema/policy.schema.json``, so that an editor knows the keys of a policy.

It comes from the same model that reads policies; a test compares the committed file with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scrubber.config.policy_model import policy_schema

SCHEMA = Path(__file__).resolve().parent.parent / "policies" / "schema" / "policy.schema.json"


def rendered() -> str:
    """The schema as it stands in the file."""
    return json.dumps(policy_schema(), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Regenerate in place, and name what was written."""
    SCHEMA.parent.mkdir(parents=True, exist_ok=True)
    SCHEMA.write_text(rendered(), encoding="utf-8")
    print(SCHEMA.relative_to(SCHEMA.parents[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
