"""The shipped default policy equals the built-in defaults, and files generated from the declarations are current."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.config.bundled import bundled_infrastructure_table, bundled_policies, bundled_xid_table, find_policy
from scrubber.config.infrastructure_file import infrastructure_schema
from scrubber.config.policy_file import load_policy, parse_policy
from scrubber.config.policy_format import policy_schema
from scrubber.config.xid_file import xid_schema
from scrubber.domain.declaration import camel_case, decides_proof
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import Policy

ROOT = Path(__file__).parents[2]


def test_bundled_default_policy_equals_the_programs_default() -> None:
    shipped = load_policy("default")
    infrastructure = dataclasses.replace(shipped.infrastructure, all_units=frozenset(), all_pods=frozenset())
    plain = dataclasses.replace(shipped, infrastructure=infrastructure, digest="", error_classes={}, error_notes={})
    assert plain == Policy()


def test_bundled_default_policy_states_every_key() -> None:
    written, schema = yaml.safe_load(find_policy("default").read_text()), policy_schema()
    for name, each in schema["properties"].items():
        keys = schema["$defs"].get(each.get("$ref", "").rpartition("/")[2], {}).get("properties", {})
        if name in ("xids", "errors"):
            assert written[name] == {}, "XIDs have a file of their own, and only an administrator knows other errors"
        else:
            assert not keys or set(keys) == set(written[name]), name
    assert set(written["health"]["quarantineAfter"]) == NVIDIA_SIGNALS.soft


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
        (124, ErrorClass.REPAIR),
        (1, ErrorClass.UNKNOWN),
        (162, ErrorClass.UNKNOWN),
        (9999, ErrorClass.UNKNOWN),
    ],
)
def test_bundled_default_policy_classifies_known_xids_and_treats_others_as_unknown(code: int, kind: ErrorClass) -> None:
    assert load_policy("default").error_class(code) is kind


def test_every_bundled_policy_loads_under_its_file_name() -> None:
    for name in bundled_policies():
        assert load_policy(name).name == name


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_schema", ROOT / "scripts" / "gen_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_generated_from_the_declarations_are_committed(generator: ModuleType) -> None:
    assert {path.name for path in generator.DERIVED} == {
        "command.schema.json",
        "infrastructure.schema.json",
        "policy.schema.json",
        "xid.schema.json",
        "policy-settings.md",
    }
    for path, content in generator.DERIVED.items():
        assert path.read_text() == content(), "run python scripts/gen_schema.py"


def test_schema_has_exactly_the_keys_of_the_bundled_default_policy() -> None:
    schema = policy_schema()
    assert set(yaml.safe_load(find_policy("default").read_text())) == set(schema["properties"])
    for each in (schema, infrastructure_schema(), xid_schema()):
        sections = [part for part in each["$defs"].values() if part["type"] == "object"]
        assert all(part["additionalProperties"] is False for part in (each, *sections))
        assert json.loads(json.dumps(each)) == each


def test_schema_of_an_override_states_no_defaults() -> None:
    override = policy_schema()["$defs"]["OverrideSection"]
    assert not [name for name, each in override["properties"].items() if "default" in each]


@pytest.mark.parametrize(
    "path",
    [*bundled_policies().values(), bundled_infrastructure_table(), bundled_xid_table()],
    ids=lambda path: path.name,
)
def test_every_bundled_file_names_its_schema_for_editors(path: Path) -> None:
    comment, _, schema = path.read_text().splitlines()[0].partition("$schema=")
    assert comment == "# yaml-language-server: "
    assert (path.parent / schema).is_file()


PAGE = (ROOT / "docs" / "policies.md").read_text()
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", [each for each in EXAMPLES if not each.startswith("#")])
def test_every_example_on_the_policy_page_is_a_valid_policy(text: str) -> None:
    named = text if text.startswith("name:") else f"name: example\n{text}"
    assert parse_policy(named.encode(), "docs/policies.md", xids={}).name


def test_policy_page_lists_the_settings_that_the_digest_omits() -> None:
    (left_out,) = re.findall(r"\| ([^|]*`enforcement`[^|]*) \|\n\| [^|]* \| ([^|]*) \|", PAGE)
    listed = set(re.findall(r"`([a-zA-Z]+)`", " ".join(left_out))) - {"health", "maintenance", "limits"}
    policy = Policy()
    left = {each.name for each in dataclasses.fields(policy) if not decides_proof(each)}
    for each in dataclasses.fields(policy):
        rule = getattr(policy, each.name)
        if dataclasses.is_dataclass(rule) and each.name not in left:
            left |= {inner.name for inner in dataclasses.fields(rule) if not decides_proof(inner)}
    assert listed == {camel_case(each) for each in left - {"digest", "error_notes", "signals", "by_backend"}}


def test_xid_table_is_not_a_bundled_policy() -> None:
    assert set(bundled_policies()) == {"default", "strict", "trusted"}
    with pytest.raises(InvalidConfiguration, match='There is no bundled policy named "xid"'):
        find_policy("xid")
