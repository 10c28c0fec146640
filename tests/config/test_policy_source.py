"""The policy file is replaced while the service runs: it is applied completely, or not at all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.config.policy_file import PolicySource, with_digest
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.policy import EnvvarInjection, InjectionRule, Policy, SharingMode


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    return path


def test_rewritten_policy_file_takes_effect_on_reload(file: Path) -> None:
    source = PolicySource(file)
    before, touched = source.policy, [source.has_changed]
    file.write_text("name: mine\nsharing: never\n")
    touched.append(source.has_changed)
    assert source.reload()
    touched.append(source.has_changed)
    assert (before.sharing, source.policy.sharing) == (SharingMode.SAME_TENANT, SharingMode.NEVER)
    assert touched == [False, True, False]


def test_symbolic_link_to_another_file_counts_as_a_change(file: Path, tmp_path: Path) -> None:
    """A ConfigMap volume is updated this way: the link is replaced, and the file behind it is new."""
    link, other = tmp_path / "policy.yaml", tmp_path / "other.yaml"
    link.symlink_to(file)
    other.write_text("name: other\n")
    source = PolicySource(link)
    fresh = tmp_path / "fresh"
    fresh.symlink_to(other)
    os.replace(fresh, link)
    assert source.has_changed
    assert source.reload()
    assert source.policy.name == "other"


@pytest.mark.parametrize("text", ["name: mine\nsharing: sometime\n", "", "{"])
def test_invalid_policy_file_keeps_the_old_policy_and_is_reported_once(file: Path, text: str) -> None:
    source = PolicySource(file)
    before = source.policy
    file.write_text(text)
    with pytest.raises(InvalidConfiguration, match=r"mine\.yaml"):
        source.reload()
    assert source.policy is before
    assert not source.has_changed


def test_removed_policy_file_keeps_the_old_policy(file: Path) -> None:
    source = PolicySource(file)
    file.unlink()
    assert source.has_changed
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        source.reload()
    assert source.policy.name == "mine"


def test_comment_in_a_policy_file_is_no_change(file: Path) -> None:
    source = PolicySource(file)
    file.write_text("name: mine  # and a comment\n")
    assert not source.reload()


@pytest.mark.parametrize(
    "text",
    [
        "stuckPods: {notifyAfter: 5m}",
        "breaker: {maxResets: 1}",
        "enforcement: observe",
        "recovery: {maxBackoff: 2h}",
        "overrides: [{name: a, models: [x], sharing: never}]",
    ],
)
def test_change_that_leaves_the_digest_equal_is_still_a_change(file: Path, text: str) -> None:
    source = PolicySource(file)
    before = source.policy
    file.write_text(f"name: mine\n{text}\n")
    assert source.reload()
    assert source.policy.digest == before.digest
    assert source.policy != before


def test_adjustments_of_the_service_start_apply_to_reloaded_policies(file: Path) -> None:
    def adjust(policy: Policy) -> Policy:
        if policy.name == "impossible":
            raise InvalidConfiguration("mine.yaml: not on this node.")
        return with_digest(replace(policy, injection=InjectionRule(EnvvarInjection.REFUSE)))

    source = PolicySource(file, adjust=adjust)
    assert source.policy.injection.envvar is EnvvarInjection.REFUSE
    file.write_text("name: impossible\n")
    with pytest.raises(InvalidConfiguration, match="not on this node"):
        source.reload()
    file.write_text("name: again\n")
    assert source.reload()
    assert (source.policy.name, source.policy.injection.envvar) == ("again", EnvvarInjection.REFUSE)


def test_bundled_policy_is_found_by_name() -> None:
    assert PolicySource("strict").policy.name == "strict"
