"""The domain and the engine know no vendor: vendor-specific data comes as values from its backend."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from scrubber.backends import BACKENDS
from scrubber.config.policy_format import policy_schema

PACKAGE: Final = Path(__file__).parents[2] / "scrubber"
WORD: Final = re.compile(r"xid|nvlink|inforom|(?<![a-z])mig(?![a-z])|nvidia|cuda|nvml", re.IGNORECASE)

ALLOWED: Final = {
    # The name of a fact in baselines: used in the ledger, in JSON and in messages.
    '_FACTS = ("serial", "vbios", "inforom")',
    # Keys, values, defaults, examples and descriptions of policy settings: in the JSON schema, in the reference page
    # and in digests. They can be removed when the policy language changes.
    'key="xids",',
    '"What an XID means for the device. Codes that are not listed here keep their class from xid.yaml.",',
    '("hw-slowdown", "hw-thermal-slowdown", "nvlink-down", "pcie-width", "power-brake", "too-hot"), 600.0',
    'EnvvarInjection.ALLOW, "refuse: not by NVIDIA_VISIBLE_DEVICES, because any pod can set that variable."',
    '(), "Patterns of model names: NVIDIA H200*.", ValueType.PATTERNS, example=\'["NVIDIA H200*"]\'',
    '(), "Resource names: nvidia.com/gpu.", ValueType.RESOURCES, example="[nvidia.com/gpu]"',
}
"""Lines that cannot change without changing the files that users write and read."""


def lines_of_the_core() -> Iterator[tuple[str, str]]:
    for folder in ("domain", "engine"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            yield from ((str(path.relative_to(PACKAGE)), line.strip()) for line in path.read_text().splitlines())


FOUND: Final = [(path, line) for path, line in lines_of_the_core() if WORD.search(line)]


def test_domain_and_engine_contain_no_vendor_terms() -> None:
    assert [(path, line) for path, line in FOUND if line not in ALLOWED] == []


def test_every_allowed_line_with_a_vendor_term_exists_exactly_once() -> None:
    assert sorted(line for _, line in FOUND) == sorted(ALLOWED)


@pytest.mark.parametrize(
    ("line", "rejected"),
    [
        ("mig_mode = 1", True),
        ("a MIG instance", True),
        ("def xid_of(code):", True),
        ("XID_CLASS", True),
        ("libnvidia-ml", True),
        ("migrate the ledger", False),
        ("an enigma", False),
    ],
)
def test_vendor_terms_are_detected_inside_names(line: str, rejected: bool) -> None:
    assert bool(WORD.search(line)) is rejected


def test_policy_file_may_name_the_soft_conditions_of_all_backends_and_no_others() -> None:
    quarantine_after = policy_schema()["$defs"]["HealthSection"]["properties"]["quarantineAfter"]
    known = sorted({code for each in BACKENDS.values() for code in each.signal_table().soft})
    assert quarantine_after["propertyNames"]["enum"] == known
