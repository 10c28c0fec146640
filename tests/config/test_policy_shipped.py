"""The shipped default is what the program does by itself, and what is derived from the declarations is committed."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.config.bundled import find_policy, shipped_policies, shipped_xids
from scrubber.config.policy_file import load_policy, parse_policy
from scrubber.config.policy_format import policy_schema
from scrubber.config.xid_file import xid_schema
from scrubber.domain.declaration import decides_proof
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import Policy
from scrubber.domain.signal_table import ErrorClass

ROOT = Path(__file__).parents[2]


def test_the_shipped_default_is_the_programs_own_default() -> None:
    shipped = load_policy("default")
    assert dataclasses.replace(shipped, digest="", error_classes={}, error_notes={}) == Policy()


def test_the_shipped_default_writes_every_key_out() -> None:
    written, schema = yaml.safe_load(find_policy("default").read_text()), policy_schema()
    for name, each in schema["properties"].items():
        keys = schema["$defs"].get(each.get("$ref", "").rpartition("/")[2], {}).get("properties", {})
        if name == "xids":
            assert written[name] == {}, "they have a file of their own"
        else:
            assert not keys or set(keys) == set(written[name]), name
    assert set(written["health"]["sustained"]) == NVIDIA_SIGNALS.soft


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (14, ErrorClass.IGNORE),
        (107, ErrorClass.IGNORE),
        (13, ErrorClass.APPLICATION),
        (71, ErrorClass.APPLICATION),
        (94, ErrorClass.APPLICATION),
        (48, ErrorClass.RESET),
        (95, ErrorClass.RESET),
        (79, ErrorClass.REBOOT),
        (149, ErrorClass.CONTEXT),
        (124, ErrorClass.SERVICE),
        (1, ErrorClass.UNKNOWN),
        (162, ErrorClass.UNKNOWN),
        (9999, ErrorClass.UNKNOWN),
    ],
)
def test_an_xid_has_its_class_and_one_that_nobody_listed_is_unknown(code: int, kind: ErrorClass) -> None:
    assert load_policy("default").error_class(code) is kind


def test_every_shipped_policy_loads_under_the_name_of_its_file() -> None:
    for name in shipped_policies():
        assert load_policy(name).name == name


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_schema", ROOT / "scripts" / "gen_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_derived_from_the_declarations_is_committed(generator: ModuleType) -> None:
    assert {path.name for path in generator.DERIVED} == {"policy.schema.json", "xid.schema.json", "policy-settings.md"}
    for path, content in generator.DERIVED.items():
        assert path.read_text() == content(), "run python scripts/gen_schema.py"


def test_the_schema_knows_the_keys_of_the_shipped_default_and_no_others() -> None:
    schema = policy_schema()
    assert set(yaml.safe_load(find_policy("default").read_text())) == set(schema["properties"])
    for each in (schema, xid_schema()):
        sections = [part for part in each["$defs"].values() if part["type"] == "object"]
        assert all(part["additionalProperties"] is False for part in (each, *sections))
        assert json.loads(json.dumps(each)) == each


def test_the_schema_of_an_override_tells_no_default_but_the_files_own() -> None:
    override = policy_schema()["$defs"]["OverrideSection"]
    assert not [name for name, each in override["properties"].items() if "default" in each]


@pytest.mark.parametrize("path", [*shipped_policies().values(), shipped_xids()], ids=lambda path: path.name)
def test_every_shipped_file_names_its_schema_for_editors(path: Path) -> None:
    comment, _, schema = path.read_text().splitlines()[0].partition("$schema=")
    assert comment == "# yaml-language-server: "
    assert (path.parent / schema).is_file()


PAGE = (ROOT / "docs" / "policies.md").read_text()
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", [each for each in EXAMPLES if not each.startswith("#")])
def test_what_the_page_shows_is_a_policy(text: str) -> None:
    named = text if text.startswith("name:") else f"name: example\n{text}"
    assert parse_policy(named.encode(), "docs/policies.md", xids={}).name


def test_the_page_says_what_the_digest_leaves_out() -> None:
    (left_out,) = re.findall(r"\| ([^|]*`enforcement`[^|]*) \|\n\| [^|]* \| ([^|]*) \|", PAGE)
    said = set(re.findall(r"`([a-z-]+)`", " ".join(left_out))) - {"health", "maintenance", "limits"}
    policy = Policy()
    left = {each.name for each in dataclasses.fields(policy) if not decides_proof(each)}
    for each in dataclasses.fields(policy):
        rule = getattr(policy, each.name)
        if dataclasses.is_dataclass(rule) and each.name not in left:
            left |= {inner.name for inner in dataclasses.fields(rule) if not decides_proof(inner)}
    assert said == {each.replace("_", "-") for each in left} - {"digest", "error-notes", "signals"}


def test_the_table_of_xids_is_not_taken_for_a_policy() -> None:
    assert set(shipped_policies()) == {"default", "strict", "trusted"}
    with pytest.raises(BadConfiguration, match='No policy ships under the name "xid"'):
        find_policy("xid")
