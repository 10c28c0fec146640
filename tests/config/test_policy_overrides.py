"""For some devices another policy: what an override changes, whom it is for, and which overrides cannot be meant."""

from __future__ import annotations

import dataclasses

import pytest

from scrubber.config.policy_file import load_policy, parse_policy, policy_digest, signed
from scrubber.config.settings import DisabledHealthchecks
from scrubber.config.xid_file import XidRow
from scrubber.domain.basis import HandOver
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import Enforcement, Policy, Proof, ResetUse, Sharing, Ungranted
from scrubber.domain.signal_table import ErrorClass

TABLE = {
    13: XidRow(13, ErrorClass.APPLICATION, "action", "an exception"),
    94: XidRow(94, ErrorClass.APPLICATION, "action", "a memory error"),
}


def read(text: str) -> Policy:
    return parse_policy(text.encode(), "policy.yaml", xids=TABLE)


def complaints(text: str) -> list[str]:
    with pytest.raises(BadConfiguration) as caught:
        read(text)
    return str(caught.value).splitlines()


def override(text: str) -> Policy:
    (only,) = read(text).overrides
    return only.policy


def test_an_override_says_all_that_may_differ_between_devices() -> None:
    policy = override(
        """\
        name: mine
        overrides:
          - name: other
            models: ["NVIDIA L4*"]
            hand-over: {same-pod: checks}
            reset: required
            sharing: never
            enforcement: observe
            ungranted: end
            limits: {slow-path: 3m, memory-floor: 1s, memory-rate: 1GiB/s, reset: 1m, dying-grace: 0, settle: 0,
                     temperature-celsius: 80}
            memory: {pattern: true}
            diagnostics: {slow-path: quick}
            health: {sustained: {too-hot: 1m}, news: at-release}
            recovery: {attempts: 2}
            maintenance: {every: 24h}
            settings: {power_limit_watts: 300}
            xids: {reset: [94]}
        """
    )
    plain = read("name: mine\n")
    assert policy.name == "mine/other"
    assert policy.proofs == {**plain.proofs, HandOver.SAME_POD: Proof.CHECKS}
    assert (policy.reset, policy.sharing) == (ResetUse.REQUIRED, Sharing.NEVER)
    assert (policy.enforcement, policy.ungranted) == (Enforcement.OBSERVE, Ungranted.END)
    assert (policy.limits.slow_path, policy.limits.reset, policy.limits.settle) == (180.0, 60.0, 0.0)
    assert (policy.limits.hand_over, policy.limits.temperature_celsius) == (plain.limits.hand_over, 80)
    assert policy.memory == dataclasses.replace(plain.memory, pattern=True)
    assert policy.health.sustained == {**plain.health.sustained, "too-hot": 60.0}
    assert (policy.recovery.attempts, policy.maintenance.every) == (2, 86400.0)
    assert policy.settings == {"power_limit_watts": "300"}
    assert policy.error_classes == {13: ErrorClass.APPLICATION, 94: ErrorClass.RESET}
    assert policy.error_notes == {13: "an exception", 94: "a memory error"}
    assert policy.overrides == ()


def test_what_an_override_does_not_name_is_as_in_its_file_and_not_as_in_the_default() -> None:
    policy = override(
        """\
        name: mine
        reset: never
        memory: {audit: false, max-uncovered: 2GiB}
        health: {sustained: {too-hot: never, pcie-width: 1m}, calm: 5s}
        settings: {a: 1, b: 2}
        xids: {ignore: [13, 62], reset: [94]}
        diagnostics: {floors: {"NVIDIA *": {host-to-device: 1GB/s}}}
        overrides:
          - name: other
            resources: [nvidia.com/gpu]
            memory: {max-uncovered: 3GiB}
            health: {sustained: {pcie-width: never}}
            settings: {b: 3}
            xids: {service: [13], ignore: [95]}
            diagnostics: {floors: {"NVIDIA H*": {host-to-device: 2GB/s}}}
        """
    )
    assert policy.reset is ResetUse.NEVER
    assert (policy.memory.audit, policy.memory.max_uncovered) == (False, 3 * 1024**3)
    assert policy.health.calm == 5.0
    assert not {"too-hot", "pcie-width"} & policy.health.sustained.keys()
    assert policy.settings == {"a": "1", "b": "3"}
    assert policy.error_classes == {
        13: ErrorClass.SERVICE,
        62: ErrorClass.IGNORE,
        94: ErrorClass.RESET,
        95: ErrorClass.IGNORE,
    }
    assert list(policy.diagnostics.floors) == ["NVIDIA H*", "NVIDIA *"], "the first that fits counts"


SEVERAL = """\
name: mine
overrides:
  - {name: shared-l4, models: ["NVIDIA L4*"], resources: [nvidia.com/gpu.shared]}
  - {name: l4, models: ["NVIDIA L4*"]}
  - {name: mig, resources: [nvidia.com/mig-1g.10gb, nvidia.com/mig-2g.20gb]}
"""


@pytest.mark.parametrize(
    ("model", "resources", "name"),
    [
        ("NVIDIA L4", ["nvidia.com/gpu.shared"], "mine/shared-l4"),
        ("NVIDIA L40S", ["nvidia.com/gpu"], "mine/l4"),
        ("NVIDIA L4", [], "mine/l4"),
        ("NVIDIA H200", ["nvidia.com/gpu", "nvidia.com/mig-2g.20gb"], "mine/mig"),
        ("NVIDIA H200", ["nvidia.com/gpu"], "mine"),
        ("", [], "mine"),
    ],
)
def test_the_first_override_that_fits_a_device_counts(model: str, resources: list[str], name: str) -> None:
    assert read(SEVERAL).of(model, resources).name == name


def test_each_override_has_a_digest_of_its_own_values_and_the_file_says_nothing_of_them() -> None:
    text = "name: mine\noverrides: [{name: other, models: [x], sharing: never}]\n"
    policy = read(text)
    assert policy.digest == read("name: mine\n").digest
    assert override(text).digest == policy_digest(override(text)) == read("name: mine\nsharing: never\n").digest
    assert signed(dataclasses.replace(policy, digest="")) == policy


def test_xids_that_a_start_turns_off_are_off_for_every_device() -> None:
    policy = read("name: mine\noverrides: [{name: other, models: [x], xids: {reset: [79, 94]}}]\n")
    off = signed(DisabledHealthchecks(codes=frozenset({79})).applied_to(policy))
    assert {each.error_class(79) for each in (off, off.overrides[0].policy)} == {ErrorClass.IGNORE}
    assert off.overrides[0].policy.error_class(94) is ErrorClass.RESET
    assert off.overrides[0].policy.digest != policy.overrides[0].policy.digest


@pytest.mark.parametrize("name", ["default", "strict", "trusted"])
def test_no_policy_that_ships_makes_a_difference_between_devices(name: str) -> None:
    assert load_policy(name).overrides == ()


HEAD = "name: mine\nlimits: {slow-path: 40s}\noverrides:\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param(
            HEAD + "  - {name: all}\n",
            'policy.yaml:4: overrides: the override "all" says for no devices; write models: ["NVIDIA H200*"], '
            'resources: [nvidia.com/gpu] or nodes: ["gpu-test-*"], or several of these.',
            id="for nobody",
        ),
        pytest.param(
            HEAD + "  - {name: a, models: []}\n",
            'policy.yaml:4: overrides: the override "a" says for no devices; write models: ["NVIDIA H200*"], '
            'resources: [nvidia.com/gpu] or nodes: ["gpu-test-*"], or several of these.',
            id="an empty list",
        ),
        pytest.param(
            HEAD + "  - models: [x]\n",
            'policy.yaml:4: the key "name" is missing; add a line such as name: mine.',
            id="no name",
        ),
        pytest.param(
            HEAD + "  - {name: a, models: NVIDIA L4}\n",
            'policy.yaml:4: overrides.models: "NVIDIA L4" does not fit here; write a list, such as ["NVIDIA H200*"].',
            id="one model for a list",
        ),
        pytest.param(
            HEAD + "  - {name: a, resources: [gpu]}\n",
            'policy.yaml:4: overrides.resources: "gpu" is no resource; write all of its name, such as nvidia.com/gpu.',
            id="half a resource",
        ),
        pytest.param(
            "name: mine\noverrides: {a: 1}\n",
            "policy.yaml:2: overrides: a mapping does not fit here; write a list, each entry with a name, such as "
            "- name: inference.",
            id="not a list",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    enforcment: observe\n",
            'policy.yaml:6: unknown key "enforcment" in "overrides"; did you mean "enforcement"?',
            id="unknown key",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    memory:\n      audits: true\n",
            'policy.yaml:7: unknown key "audits" in "memory"; did you mean "audit"?',
            id="unknown key in a section",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    breaker: {resets: 1}\n",
            'policy.yaml:6: overrides.breaker: "breaker" counts for the whole node, not for some devices; write it in the '
            "policy itself.",
            id="a section of the node",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    limits:\n      hand-over: 20s\n",
            'policy.yaml:7: overrides.limits.hand-over: "hand-over" counts for the whole node, not for some devices; write it '
            "in limits.",
            id="a limit of the node",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    health:\n      blame: 1\n",
            'policy.yaml:7: overrides.health.blame: "blame" counts for the whole node, not for some devices; write it in '
            "health.",
            id="how the node counts",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    hand-over: {unknown: checks}\n",
            'policy.yaml:6: overrides.hand-over.unknown: "unknown" always needs a certificate, because checks say nothing about '
            'what is in the memory; write "certificate" (to judge without refusing: enforcement: observe).',
            id="a stranger's bytes on checks",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    limits:\n      reset: 1m\n",
            "policy.yaml:7: overrides.limits.reset: a reset (60 s) is one step of the slow path (40 s) and cannot take as long "
            "as all of it; write a shorter reset or a longer slow-path.",
            id="a step as long as the file's path",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    limits:\n      slow-path: 20s\n",
            "policy.yaml:6: overrides.limits.reset: a reset (30 s) is one step of the slow path (20 s) and cannot take as long "
            "as all of it; write a shorter reset or a longer slow-path.",
            id="a path as short as the file's step",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    recovery: {backoff-initial: 2h}\n",
            "policy.yaml:6: overrides.recovery.backoff-max: the longest pause (3600 s) is shorter than the first (7200 s); "
            "write a backoff-max of at least backoff-initial.",
            id="pauses that shrink",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    health:\n",
            "policy.yaml:6: overrides.health: nothing is written here; write its value, or remove the key.",
            id="nothing",
        ),
        pytest.param(
            HEAD + "  - {name: a, models: [x]}\n  - {name: a, models: [y]}\n",
            'policy.yaml:5: overrides.name: two overrides are called "a"; give one of them another name.',
            id="the same name",
        ),
        pytest.param(
            HEAD + '  - {name: a, models: ["NVIDIA *"]}\n  - {name: b, models: ["NVIDIA H200*"]}\n',
            'policy.yaml:5: overrides.name: "b" never counts: "a" comes first and fits all of its devices; put it before "a", or '
            "remove it.",
            id="never the first that fits",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_line_and_hint(text: str, complaint: str) -> None:
    assert complaints(text) == [complaint]


def test_a_limit_that_fits_the_files_own_is_in_force_although_it_would_not_fit_the_defaults() -> None:
    text = "name: mine\nlimits: {slow-path: 10m}\noverrides: [{name: a, models: [x], limits: {reset: 5m}}]\n"
    assert override(text).limits.reset == 300.0


def test_an_override_for_some_nodes_counts_on_those_and_nowhere_else() -> None:
    policy = read(HEAD + '  - {name: test, nodes: ["gpu-test-*"], enforcement: observe}\n')
    assert policy.on("gpu-test-3").of("NVIDIA H200", []).enforcement is Enforcement.OBSERVE
    assert policy.on("gpu-7").of("NVIDIA H200", []).enforcement is Enforcement.ENFORCE
    assert policy.on("gpu-7").overrides == ()


def entry(name: str, models: str = "", resources: str = "", nodes: str = "") -> str:
    parts = [f"name: {name}"]
    parts += [f"nodes: [{nodes}]"] if nodes else []
    parts += [f"models: [{models}]"] if models else []
    parts += [f"resources: [{resources}]"] if resources else []
    return f"  - {{{', '.join(parts)}}}\n"


@pytest.mark.parametrize(
    ("first", "second", "hidden"),
    [
        (("x",), ("x",), True),
        (('"*"',), ("", "a.b/c"), True),
        (('"*"',), ("x", "a.b/c"), True),
        (("", "a.b/c"), ("x",), False),
        (("", "a.b/c"), ("x", "a.b/c"), True),
        (("", "a.b/c, a.b/d"), ("", "a.b/d"), True),
        (("", "a.b/d"), ("", "a.b/c, a.b/d"), False),
        (('"A*", "B*"',), ('"A1*", B2',), True),
        (('"A*"',), ('"A*", B',), False),
        (('"A1*"',), ('"A*"',), False),
        (('"A?"',), ('"A*"',), False),
        (('"A?"',), ("A1",), True),
        (('"A[12]"',), ('"A[1]"',), False),
        (('"A*Z"',), ('"A?Z"',), True),
        (("x",), ("x", "", "n"), True),
        (("x", "", "n"), ("x",), False),
        (("", "", '"n*"'), ("x", "", "n1"), True),
        (("", "", "n1"), ("x", "", '"n*"'), False),
    ],
)
def test_an_override_is_refused_only_if_an_earlier_one_fits_all_that_it_fits(
    first: tuple[str, ...], second: tuple[str, ...], hidden: bool
) -> None:
    text = "name: mine\noverrides:\n" + entry("a", *first) + entry("b", *second)
    if hidden:
        assert '"b" never counts' in complaints(text)[0]
    else:
        assert [each.policy.name for each in read(text).overrides] == ["mine/a", "mine/b"]
