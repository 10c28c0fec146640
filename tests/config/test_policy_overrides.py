"""Policy overrides for some devices: what one changes, which devices it matches, and which are invalid."""

from __future__ import annotations

import dataclasses

import pytest

from scrubber.config.policy_file import load_policy, parse_policy, policy_digest, with_digest
from scrubber.config.settings import DisabledHealthchecks
from scrubber.config.xid_file import XidRow
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import Enforcement, Policy, RequiredProof, ResetMode, SharingMode, UnauthorizedUseAction

TABLE = {
    13: XidRow(13, ErrorClass.APPLICATION, "action", "an exception"),
    94: XidRow(94, ErrorClass.APPLICATION, "action", "a memory error"),
}


def read(text: str) -> Policy:
    return parse_policy(text.encode(), "policy.yaml", xids=TABLE)


def errors_of(text: str) -> list[str]:
    with pytest.raises(InvalidConfiguration) as caught:
        read(text)
    return str(caught.value).splitlines()


def override(text: str) -> Policy:
    (only,) = read(text).overrides
    return only.policy


def test_override_may_set_everything_that_may_differ_between_devices() -> None:
    policy = override(
        """\
        name: mine
        overrides:
          - name: other
            models: ["NVIDIA L4*"]
            handOver: {samePod: checks}
            reset: required
            sharing: never
            enforcement: observe
            unauthorizedUse: kill
            limits: {slowPath: 3m, clearTimeoutBase: 1s, minClearRate: 1GiB/s, reset: 1m, leftoverGracePeriod: 0, unknownPodIdlePeriod: 0,
                     maxTemperatureCelsius: 80}
            memory: {patternPass: true}
            diagnostics: {slowPath: quick}
            health: {quarantineAfter: {too-hot: 1m}, quarantineAt: release}
            recovery: {maxAttempts: 2}
            maintenance: {interval: 24h}
            settings: {power_limit_watts: 300}
            xids: {reset: [94]}
        """
    )
    plain = read("name: mine\n")
    assert policy.name == "mine/other"
    assert policy.required_proofs == {**plain.required_proofs, HandOverKind.SAME_POD: RequiredProof.CHECKS}
    assert (policy.reset, policy.sharing) == (ResetMode.REQUIRED, SharingMode.NEVER)
    assert (policy.enforcement, policy.unauthorized_use) == (Enforcement.OBSERVE, UnauthorizedUseAction.KILL)
    assert (policy.limits.slow_path, policy.limits.reset, policy.limits.unknown_pod_idle_period) == (180.0, 60.0, 0.0)
    assert (policy.limits.hand_over, policy.limits.max_temperature_celsius) == (plain.limits.hand_over, 80)
    assert policy.memory == dataclasses.replace(plain.memory, pattern_pass=True)
    assert policy.health.quarantine_after == {**plain.health.quarantine_after, "too-hot": 60.0}
    assert (policy.recovery.max_attempts, policy.maintenance.interval) == (2, 86400.0)
    assert policy.settings == {"power_limit_watts": "300"}
    assert policy.error_classes == {13: ErrorClass.APPLICATION, 94: ErrorClass.RESET}
    assert policy.error_notes == {13: "an exception", 94: "a memory error"}
    assert policy.overrides == ()


def test_setting_missing_from_an_override_keeps_the_value_of_the_file() -> None:
    policy = override(
        """\
        name: mine
        reset: never
        memory: {countResidue: false, maxUncovered: 2GiB}
        health: {quarantineAfter: {too-hot: never, pcie-width: 1m}, quietPeriod: 5s}
        settings: {a: 1, b: 2}
        xids: {ignore: [13, 62], reset: [94]}
        diagnostics: {minRates: {"NVIDIA *": {host-to-device: 1GB/s}}}
        overrides:
          - name: other
            resources: [nvidia.com/gpu]
            memory: {maxUncovered: 3GiB}
            health: {quarantineAfter: {pcie-width: never}}
            settings: {b: 3}
            xids: {repair: [13], ignore: [95]}
            diagnostics: {minRates: {"NVIDIA H*": {host-to-device: 2GB/s}}}
        """
    )
    assert policy.reset is ResetMode.NEVER
    assert (policy.memory.count_residue, policy.memory.max_uncovered) == (False, 3 * 1024**3)
    assert policy.health.quiet_period == 5.0
    assert not {"too-hot", "pcie-width"} & policy.health.quarantine_after.keys()
    assert policy.settings == {"a": "1", "b": "3"}
    assert policy.error_classes == {
        13: ErrorClass.REPAIR,
        62: ErrorClass.IGNORE,
        94: ErrorClass.RESET,
        95: ErrorClass.IGNORE,
    }
    assert list(policy.diagnostics.min_rates) == ["NVIDIA H*", "NVIDIA *"], "the first that fits counts"


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
def test_first_override_that_matches_a_device_applies(model: str, resources: list[str], name: str) -> None:
    assert read(SEVERAL).for_device(model, resources).name == name


def test_override_has_a_digest_of_its_own_that_does_not_affect_the_files_digest() -> None:
    text = "name: mine\noverrides: [{name: other, models: [x], sharing: never}]\n"
    policy = read(text)
    assert policy.digest == read("name: mine\n").digest
    assert override(text).digest == policy_digest(override(text)) == read("name: mine\nsharing: never\n").digest
    assert with_digest(dataclasses.replace(policy, digest="")) == policy


def test_xids_disabled_at_the_start_are_disabled_in_every_override() -> None:
    policy = read("name: mine\noverrides: [{name: other, models: [x], xids: {reset: [79, 94]}}]\n")
    off = with_digest(DisabledHealthchecks(codes=frozenset({79})).apply_to(policy))
    assert {each.error_class(79) for each in (off, off.overrides[0].policy)} == {ErrorClass.IGNORE}
    assert off.overrides[0].policy.error_class(94) is ErrorClass.RESET
    assert off.overrides[0].policy.digest != policy.overrides[0].policy.digest


@pytest.mark.parametrize("name", ["default", "strict", "trusted"])
def test_bundled_policies_have_no_overrides(name: str) -> None:
    assert load_policy(name).overrides == ()


HEAD = "name: mine\nlimits: {slowPath: 40s}\noverrides:\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            HEAD + "  - {name: all}\n",
            'policy.yaml:4: overrides: the override "all" selects no devices; write models: ["NVIDIA '
            'H200*"], resources: [nvidia.com/gpu] or nodes: ["gpu-test-*"], or several of these.',
            id="without a selector",
        ),
        pytest.param(
            HEAD + "  - {name: a, models: []}\n",
            'policy.yaml:4: overrides: the override "a" selects no devices; write models: ["NVIDIA H200*"], '
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
            'policy.yaml:4: overrides.models: "NVIDIA L4" is not valid here; write a list, such as ["NVIDIA H200*"].',
            id="one model for a list",
        ),
        pytest.param(
            HEAD + "  - {name: a, resources: [gpu]}\n",
            'policy.yaml:4: overrides.resources: "gpu" is not a resource; write its full name, such as nvidia.com/gpu.',
            id="half a resource",
        ),
        pytest.param(
            "name: mine\noverrides: {a: 1}\n",
            "policy.yaml:2: overrides: a mapping is not valid here; write a list, each entry with a name, "
            "such as - name: inference.",
            id="not a list",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    enforcment: observe\n",
            'policy.yaml:6: unknown key "enforcment" in "overrides"; did you mean "enforcement"?',
            id="unknown key",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    memory:\n      onChips: true\n",
            'policy.yaml:7: unknown key "onChips" in "memory"; did you mean "onChip"?',
            id="unknown key in a section",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    breaker: {maxResets: 1}\n",
            'policy.yaml:6: overrides.breaker: "breaker" applies to the whole node, not to some devices; '
            "write it in the policy itself.",
            id="a section of the node",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    limits:\n      handOver: 20s\n",
            'policy.yaml:7: overrides.limits.handOver: "handOver" applies to the whole node, not to some '
            "devices; write it in limits.",
            id="a limit of the node",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    health:\n      tenantQuarantineThreshold: 1\n",
            'policy.yaml:7: overrides.health.tenantQuarantineThreshold: "tenantQuarantineThreshold" applies '
            "to the whole node, not to some devices; write it in health.",
            id="how the node counts",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    handOver: {unknown: checks}\n",
            'policy.yaml:6: overrides.handOver.unknown: "unknown" always needs a certificate, because '
            'checks cannot prove that the memory is clean; write "certificate" (to evaluate without '
            "refusing: enforcement: observe).",
            id="a stranger's bytes on checks",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    limits:\n      reset: 1m\n",
            "policy.yaml:7: overrides.limits.reset: a reset (60 s) is one step of the slow path (40 s) "
            "and must take less time; write a shorter reset or a longer slowPath.",
            id="a step as long as the file's path",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    limits:\n      slowPath: 20s\n",
            "policy.yaml:6: overrides.limits.reset: a reset (30 s) is one step of the slow path (20 s) "
            "and must take less time; write a shorter reset or a longer slowPath.",
            id="a path as short as the file's step",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    recovery: {initialBackoff: 2h}\n",
            "policy.yaml:6: overrides.recovery.maxBackoff: the longest pause (3600 s) is shorter than the first (7200 s); "
            "write a maxBackoff of at least initialBackoff.",
            id="pauses that shrink",
        ),
        pytest.param(
            HEAD + "  - name: a\n    models: [x]\n    health:\n",
            "policy.yaml:6: overrides.health: the value is missing; write one, or remove the key.",
            id="nothing",
        ),
        pytest.param(
            HEAD + "  - {name: a, models: [x]}\n  - {name: a, models: [y]}\n",
            'policy.yaml:5: overrides.name: two overrides are named "a"; rename one of them.',
            id="the same name",
        ),
        pytest.param(
            HEAD + '  - {name: a, models: ["NVIDIA *"]}\n  - {name: b, models: ["NVIDIA H200*"]}\n',
            'policy.yaml:5: overrides.name: "b" never applies: "a" comes first and matches all of its '
            'devices; put it before "a", or remove it.',
            id="never the first that fits",
        ),
    ],
)
def test_invalid_override_is_refused_with_line_and_hint(text: str, message: str) -> None:
    assert errors_of(text) == [message]


def test_limit_of_an_override_is_validated_against_the_limits_of_its_file() -> None:
    text = "name: mine\nlimits: {slowPath: 10m}\noverrides: [{name: a, models: [x], limits: {reset: 5m}}]\n"
    assert override(text).limits.reset == 300.0


def test_override_for_named_nodes_applies_to_those_nodes_only() -> None:
    policy = read(HEAD + '  - {name: test, nodes: ["gpu-test-*"], enforcement: observe}\n')
    assert policy.for_node("gpu-test-3").for_device("NVIDIA H200", []).enforcement is Enforcement.OBSERVE
    assert policy.for_node("gpu-7").for_device("NVIDIA H200", []).enforcement is Enforcement.ENFORCE
    assert policy.for_node("gpu-7").overrides == ()


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
def test_override_is_refused_if_and_only_if_an_earlier_one_hides_it_completely(
    first: tuple[str, ...], second: tuple[str, ...], hidden: bool
) -> None:
    text = "name: mine\noverrides:\n" + entry("a", *first) + entry("b", *second)
    if hidden:
        assert '"b" never applies' in errors_of(text)[0]
    else:
        assert [each.policy.name for each in read(text).overrides] == ["mine/a", "mine/b"]
