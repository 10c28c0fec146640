"""The shipped default is what the program does by itself, and its schema is the model's."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from pydantic import BaseModel

from scrubber.config.policy_file import load_policy
from scrubber.config.policy_model import PolicyFile, policy_schema
from scrubber.config.shipped import find_policy, shipped_policies
from scrubber.domain.policy import Policy, XidClass

ROOT = Path(__file__).parents[2]


def test_the_shipped_default_is_the_programs_own_default() -> None:
    shipped = load_policy("default")
    assert dataclasses.replace(shipped, digest="", xids={}) == Policy()


def test_the_shipped_default_writes_every_key_out() -> None:
    written = yaml.safe_load(find_policy("default").read_text())
    for name, field in PolicyFile.model_fields.items():
        section, kind = written[field.alias or name], field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            known = {inner.alias for inner in kind.model_fields.values()} - {"unknown"}
            assert known <= set(section), name


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (14, XidClass.IGNORE),
        (107, XidClass.IGNORE),
        (13, XidClass.APPLICATION),
        (71, XidClass.APPLICATION),
        (94, XidClass.APPLICATION),
        (48, XidClass.RESET),
        (95, XidClass.RESET),
        (79, XidClass.REBOOT),
        (149, XidClass.CONTEXT),
        (124, XidClass.SERVICE),
        (1, XidClass.UNKNOWN),
        (162, XidClass.UNKNOWN),
        (9999, XidClass.UNKNOWN),
    ],
)
def test_an_xid_has_its_class_and_one_that_nobody_listed_is_unknown(code: int, kind: XidClass) -> None:
    assert load_policy("default").xid_class(code) is kind


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


def test_the_committed_schema_is_the_models(generator: ModuleType) -> None:
    assert generator.SCHEMA.read_text() == generator.rendered(), "run python scripts/gen_schema.py"


def test_the_schema_knows_the_keys_of_the_shipped_default_and_no_others() -> None:
    schema = policy_schema()
    assert set(yaml.safe_load(find_policy("default").read_text())) == set(schema["properties"])
    sections = [each for each in schema["$defs"].values() if each["type"] == "object"]
    assert all(each["additionalProperties"] is False for each in (schema, *sections))
    assert json.loads(json.dumps(schema)) == schema


def test_the_shipped_default_names_its_schema() -> None:
    path = find_policy("default")
    first = path.read_text().splitlines()[0]
    assert (path.parent / first.partition("$schema=")[2]).is_file()
