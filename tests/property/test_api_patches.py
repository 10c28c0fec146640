"""Patches of the emulated API server: their laws, and that no body of a request is an internal error."""

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scrubber.emulator.cluster import EmulatedApi, StatusError
from scrubber.emulator.cluster.patches import (
    APPLY_PATCH,
    JSON_PATCH,
    MERGE_PATCH,
    STRATEGIC_PATCH,
    FieldOwners,
    json_patch,
    leaves,
    merge_patch,
)
from scrubber.emulator.cluster.resources import CLAIMS, DEVICE_CLASSES, NODES, PODS, SLICES
from tests.cluster.emulated import claim, device, node, slice_of

LEAF = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "node-a", "NoSchedule", "1Gi"])
KEYS = st.sampled_from(["metadata", "spec", "status", "devices", "pool", "name", "labels", "taints", "allocation", "a"])
JSON = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
OBJECTS = st.dictionaries(KEYS, JSON, max_size=4)
OPERATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "op": st.sampled_from(["add", "remove", "replace", "test", "move", "copy"]),
            "path": st.sampled_from(["", "/a", "/spec", "/spec/devices/0", "/spec/devices/-", "/metadata/name", "a"]),
        },
        optional={"value": JSON, "from": st.sampled_from(["/spec", "/a", "/metadata/labels"])},
    ),
    max_size=3,
)
SAMPLES = ((NODES, node()), (SLICES, slice_of(device("gpu-0"))), (CLAIMS, claim()))


@given(OBJECTS, OBJECTS)
def test_merge_patch_is_idempotent_and_leaves_its_target_alone(target: Any, patch: Any) -> None:
    before = copy.deepcopy(target)
    once = merge_patch(target, patch)
    assert merge_patch(once, patch) == once
    assert target == before


@given(OBJECTS, OPERATIONS)
def test_json_patch_leaves_its_target_alone(target: Any, operations: Any) -> None:
    before = copy.deepcopy(target)
    assert refusal(lambda: json_patch(target, operations)) in (None, 422)
    assert target == before


def refusal(write: Callable[[], Any]) -> int | None:
    """Return the code with which a write is refused; None for one that succeeds."""
    try:
        write()
    except StatusError as error:
        return error.code
    return None


LABELS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz"), max_size=4)


@given(LABELS, st.lists(LABELS, min_size=1, max_size=5))
def test_apply_leaves_what_others_own_and_removes_what_the_manager_gave_up(
    foreign: dict[str, str], applied: list[dict[str, str]]
) -> None:
    owners = FieldOwners()
    live = owners.apply({}, {"labels": foreign}, "other", force=True)
    for each in applied:
        mine = {key: value for key, value in each.items() if key not in foreign}
        live = owners.apply(live, {"labels": mine}, "one", force=False)
        assert (live.get("labels") or {}) == foreign | mine
    assert dict(leaves({"labels": {"a": "x"}})) == {("labels", "a"): "x"}


@given(st.sampled_from(SAMPLES), OBJECTS, st.sampled_from(["", "status"]))
def test_no_object_is_an_internal_error(sample: Any, change: Any, subresource: str) -> None:
    kind, body = sample
    api = EmulatedApi()
    made = api.create(kind, body)
    writes: list[Callable[[], Any]] = [
        lambda: api.update(kind, merge_patch(made, change), subresource=subresource),
        lambda: api.create(kind, merge_patch(body, {**change, "metadata": {"name": "other"}})),
        lambda: api.create(PODS, {**change, "metadata": {"name": "p", "namespace": "default"}}),
        lambda: api.create(DEVICE_CLASSES, {**change, "metadata": {"name": "c"}}),
    ]
    for write in writes:
        assert refusal(write) in (None, 400, 404, 409, 422)


@given(
    st.sampled_from(SAMPLES),
    st.one_of(
        st.tuples(st.just(JSON_PATCH), OPERATIONS),
        st.tuples(st.sampled_from([MERGE_PATCH, STRATEGIC_PATCH]), OBJECTS),
        st.tuples(st.just(APPLY_PATCH), OBJECTS),
    ),
    st.sampled_from(["", "status"]),
)
def test_no_patch_is_an_internal_error(sample: Any, patch: Any, subresource: str) -> None:
    kind, body = sample
    patch_type, content = patch
    if patch_type == APPLY_PATCH:
        content = {"metadata": {}, **content, "apiVersion": kind.api_version, "kind": kind.kind}
    api = EmulatedApi()
    made = api.create(kind, body)
    name, namespace = made["metadata"]["name"], made["metadata"].get("namespace", "")
    code = refusal(
        lambda: api.patch(
            kind,
            name,
            content,
            namespace,
            patch_type=patch_type,
            subresource=subresource,
            field_manager="test",
            force=True,
        )
    )
    assert code in (None, 400, 409, 422)
    assert api.get(kind, name, namespace)["metadata"]["uid"] == made["metadata"]["uid"]
