"""A policy's file is replaced while the service runs: all of it counts, or none."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.config.policy_file import PolicySource, signed
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import Envvar, InjectionRule, Policy, Sharing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    return path


def test_a_file_that_is_written_anew_takes_effect(file: Path) -> None:
    source = PolicySource(file)
    before, touched = source.policy, [source.touched]
    file.write_text("name: mine\nsharing: never\n")
    touched.append(source.touched)
    assert source.reload()
    touched.append(source.touched)
    assert (before.sharing, source.policy.sharing) == (Sharing.SAME_TENANT, Sharing.NEVER)
    assert touched == [False, True, False]


def test_a_link_that_leads_elsewhere_counts_as_another_file(file: Path, tmp_path: Path) -> None:
    """As a ConfigMap's volume is updated: the link is replaced, and the file behind it is new."""
    link, other = tmp_path / "policy.yaml", tmp_path / "other.yaml"
    link.symlink_to(file)
    other.write_text("name: other\n")
    source = PolicySource(link)
    fresh = tmp_path / "fresh"
    fresh.symlink_to(other)
    os.replace(fresh, link)
    assert source.touched
    assert source.reload()
    assert source.policy.name == "other"


@pytest.mark.parametrize("text", ["name: mine\nsharing: sometime\n", "", "{"])
def test_a_bad_file_keeps_the_old_policy_and_is_complained_of_once(file: Path, text: str) -> None:
    source = PolicySource(file)
    before = source.policy
    file.write_text(text)
    with pytest.raises(BadConfiguration, match=r"mine\.yaml"):
        source.reload()
    assert source.policy is before
    assert not source.touched


def test_a_file_that_is_gone_keeps_the_old_policy(file: Path) -> None:
    source = PolicySource(file)
    file.unlink()
    assert source.touched
    with pytest.raises(BadConfiguration, match="cannot be read"):
        source.reload()
    assert source.policy.name == "mine"


def test_a_comment_changes_nothing(file: Path) -> None:
    source = PolicySource(file)
    file.write_text("name: mine  # and a comment\n")
    assert not source.reload()


@pytest.mark.parametrize(
    "text",
    [
        "stuck: {tell-after: 5m}",
        "breaker: {resets: 1}",
        "enforcement: observe",
        "recovery: {backoff-max: 2h}",
        "overrides: [{name: a, models: [x], sharing: never}]",
    ],
)
def test_a_change_that_has_nothing_scrubbed_again_is_a_change_all_the_same(file: Path, text: str) -> None:
    source = PolicySource(file)
    before = source.policy
    file.write_text(f"name: mine\n{text}\n")
    assert source.reload()
    assert source.policy.digest == before.digest
    assert source.policy != before


def test_what_this_start_makes_of_a_policy_it_makes_of_the_next_one_too(file: Path) -> None:
    def adjust(policy: Policy) -> Policy:
        if policy.name == "impossible":
            raise BadConfiguration("mine.yaml: not on this node.")
        return signed(replace(policy, injection=InjectionRule(Envvar.REFUSE)))

    source = PolicySource(file, adjust=adjust)
    assert source.policy.injection.envvar is Envvar.REFUSE
    file.write_text("name: impossible\n")
    with pytest.raises(BadConfiguration, match="not on this node"):
        source.reload()
    file.write_text("name: again\n")
    assert source.reload()
    assert (source.policy.name, source.policy.injection.envvar) == ("again", Envvar.REFUSE)


def test_one_that_ships_is_found_by_its_name() -> None:
    assert PolicySource("strict").policy.name == "strict"
