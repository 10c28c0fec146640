"""A policy that cannot be in force is refused with file, line and a hint; one that can says exactly what it means."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from scrubber.config.policy_file import load_policy, parse_policy, policy_digest
from scrubber.domain.basis import HandOver
from scrubber.domain.declaration import decides_proof, setting
from scrubber.domain.diagnosis import Level
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import (
    BreakerRule,
    DiagnosticsRule,
    Enforcement,
    Envvar,
    HealthRule,
    Infrastructure,
    MaintenanceRule,
    News,
    Policy,
    Proof,
    ResetUse,
    Sharing,
    StuckRule,
)
from scrubber.domain.signal_table import ErrorClass


def read(text: str) -> Policy:
    return parse_policy(text.encode(), "policy.yaml", xids={})


def complaints(content: str | bytes) -> list[str]:
    with pytest.raises(BadConfiguration) as caught:
        parse_policy(content.encode() if isinstance(content, str) else content, "policy.yaml", xids={})
    return str(caught.value).splitlines()


def test_every_value_reaches_the_domain() -> None:
    policy = read(
        """\
        name: mine
        hand-over: {same-container: certificate, same-pod: checks, same-tenant: checks}
        reset: required
        sharing: never
        enforcement: observe
        limits:
          hand-over: 20
          slow-path: 1.5m
          memory-floor: 500ms
          memory-rate: 1GiB/s
          question: 250 ms
          reset: 10s
          dying-grace: 0
          settle: 0s
          eraser-slots: 4
          temperature-celsius: 80
          break-glass: 30m
        memory: {audit: false, pattern: true, on-chip: false, max-uncovered: 64MiB}
        diagnostics: {slow-path: quick, recovery: extended, floors: {"NVIDIA H200*": {host-to-device: 20GB/s}}}
        infrastructure: {units: [a@1.service], pods: [{namespace: ops, service-account: dcgm}]}
        injection: {envvar: refuse}
        health: {sustained: {too-hot: 2m, pcie-width: never, inforom-corrupt: 1h}, calm: 30s, news: at-release, blame: 5}
        recovery:
          {backoff-initial: 2s, backoff-max: 1h, attempts: 3, attempts-per-day: 9, resets-per-day: 2, probation-scrubs: 1,
           probation-interval: 0}
        breaker: {resets: 0, window: 10m, soft-percent: 50}
        maintenance: {every: 24h, between: "22:00-04:30", diagnostics: standard}
        stuck: {tell-after: 2m, evict-after: 1h}
        settings: {power_limit_watts: 300, compute_mode: default}
        xids: {ignore: [13, 69-72], reboot: [79]}
        """
    )
    assert policy.name == "mine"
    assert policy.proofs == {
        HandOver.SAME_CONTAINER: Proof.CERTIFICATE,
        HandOver.SAME_POD: Proof.CHECKS,
        HandOver.SAME_TENANT: Proof.CHECKS,
        HandOver.OTHER_TENANT: Proof.CERTIFICATE,
        HandOver.UNKNOWN: Proof.CERTIFICATE,
    }
    assert (policy.reset, policy.sharing, policy.enforcement) == (
        ResetUse.REQUIRED,
        Sharing.NEVER,
        Enforcement.OBSERVE,
    )
    limits = policy.limits
    assert (limits.hand_over, limits.slow_path, limits.memory_floor, limits.question) == (20.0, 90.0, 0.5, 0.25)
    assert (limits.reset, limits.dying_grace, limits.settle, limits.eraser_slots) == (10.0, 0.0, 0.0, 4)
    assert (limits.memory_bytes_per_second, limits.break_glass) == (1024**3, 1800.0)
    assert policy.limits.temperature_celsius == 80
    assert (policy.memory.audit, policy.memory.pattern) == (False, True)
    assert (policy.memory.on_chip, policy.memory.max_uncovered) == (False, 64 * 1024**2)
    assert policy.diagnostics == DiagnosticsRule(
        Level.QUICK, Level.EXTENDED, {"NVIDIA H200*": {"host-to-device": 20e9}}
    )
    assert policy.infrastructure == Infrastructure(frozenset({"a@1.service"}), frozenset({("ops", "dcgm")}))
    assert policy.injection.envvar is Envvar.REFUSE
    recovery = policy.recovery
    assert (recovery.backoff_initial, recovery.backoff_max, recovery.attempts) == (2.0, 3600.0, 3)
    assert (recovery.attempts_per_day, recovery.resets_per_day) == (9, 2)
    assert (recovery.probation_scrubs, recovery.probation_interval) == (1, 0.0)
    lasting = {**HealthRule().sustained, "too-hot": 120.0, "inforom-corrupt": 3600.0}
    del lasting["pcie-width"]
    assert policy.health == HealthRule(lasting, calm=30.0, news=News.AT_RELEASE, blame=5)
    assert policy.breaker == BreakerRule(resets=0, window=600.0, soft_percent=50)
    assert policy.maintenance == MaintenanceRule(86400.0, (22 * 3600.0, 4.5 * 3600.0), Level.STANDARD)
    assert policy.stuck == StuckRule(tell_after=120.0, evict_after=3600.0)
    assert policy.settings == {"power_limit_watts": "300", "compute_mode": "default"}
    assert policy.error_classes == {
        13: ErrorClass.IGNORE,
        **dict.fromkeys((69, 70, 71, 72), ErrorClass.IGNORE),
        79: ErrorClass.REBOOT,
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param(
            "name: mine\nlimts:\n  question: 1s\n",
            'policy.yaml:2: unknown key "limts"; did you mean "limits"?',
            id="unknown key",
        ),
        pytest.param(
            "name: mine\nlimits:\n  slow_path: 1m\n",
            'policy.yaml:3: unknown key "slow_path" in "limits"; did you mean "slow-path"?',
            id="unknown key in a section",
        ),
        pytest.param(
            "name: mine\nmemory:\n  zebra: true\n",
            'policy.yaml:3: unknown key "zebra" in "memory"; known here: audit, pattern, on-chip, max-uncovered.',
            id="unknown key like no other",
        ),
        pytest.param(
            "name: mine\nhand-over:\n  same-pod: check\n",
            'policy.yaml:3: hand-over.same-pod: "check" is not known; did you mean "checks"?',
            id="unknown word",
        ),
        pytest.param(
            "name: mine\nreset: 7\n",
            'policy.yaml:2: reset: "7" is not known; write one of required, best-effort, never.',
            id="unknown word like no other",
        ),
        pytest.param(
            "name: mine\nmemory:\n  audit: yes\n",
            'policy.yaml:3: memory.audit: "yes" does not fit here; write true or false.',
            id="not a truth value",
        ),
        pytest.param(
            "name: mine\nlimits: {eraser-slots: 2.5}\n",
            "policy.yaml:2: limits.eraser-slots: 2.5 does not fit here; write a whole number.",
            id="not a whole number",
        ),
        pytest.param(
            "name: mine\nlimits: 3\n",
            "policy.yaml:2: limits: 3 does not fit here; write its keys below it, indented.",
            id="not a section",
        ),
        pytest.param(
            "name: mine\nlimits:\nreset: never\n",
            "policy.yaml:2: limits: nothing is written here; write its value, or remove the key.",
            id="nothing",
        ),
        pytest.param(
            "reset: never\n",
            'policy.yaml:1: the key "name" is missing; add a line such as name: mine.',
            id="no name",
        ),
        pytest.param(
            "name: My Policy\n",
            'policy.yaml:1: name: "My Policy" is no name; use small letters, digits and hyphens, such as my-policy.',
            id="impossible name",
        ),
        pytest.param(
            "name: mine\nlimits:\n  question: 5 seconds\n",
            'policy.yaml:3: limits.question: "5 seconds" is not a time; '
            "write seconds as a number, or a time such as 500ms, 25s, 2m or 1h.",
            id="not a time",
        ),
        pytest.param(
            "name: mine\nlimits:\n  settle: 1:30\n",
            'policy.yaml:3: limits.settle: "1:30" is not a time; '
            "write seconds as a number, or a time such as 500ms, 25s, 2m or 1h.",
            id="not ninety seconds",
        ),
        pytest.param(
            "name: mine\nlimits:\n  settle: -1\n",
            "policy.yaml:3: limits.settle: a time cannot be negative (-1).",
            id="negative time",
        ),
        pytest.param(
            "name: mine\nlimits:\n  settle: .inf\n",
            "policy.yaml:3: limits.settle: this is not a time; "
            "write seconds as a number, or a time such as 500ms, 25s, 2m or 1h.",
            id="endless time",
        ),
        pytest.param(
            "name: mine\nlimits:\n  settle: 1" + "0" * 400 + "\n",
            "policy.yaml:3: limits.settle: this is not a time; "
            "write seconds as a number, or a time such as 500ms, 25s, 2m or 1h.",
            id="longer than anything",
        ),
        pytest.param(
            "name: mine\nmemory:\n  max-uncovered: 1" + "0" * 40 + "\n",
            f"policy.yaml:3: memory.max-uncovered: 1{'0' * 40} is not a size; "
            "write bytes as a number, or a size such as 256MiB or 1GiB.",
            id="larger than anything",
        ),
        pytest.param(
            "name: mine\nlimits:\n  slow-path: 0s\n",
            "policy.yaml:3: limits.slow-path: a time of 0 s is impossible here; write at least 10ms.",
            id="no time at all",
        ),
        pytest.param(
            "name: mine\nrecovery:\n  backoff-initial: 9ms\n",
            "policy.yaml:3: recovery.backoff-initial: a time of 0.009 s is impossible here; write at least 10ms.",
            id="hardly any time",
        ),
        pytest.param(
            "name: mine\nlimits:\n  question: 49ms\n",
            "policy.yaml:3: limits.question: a time of 0.049 s is impossible here; write at least 50ms.",
            id="too short for a healthy driver",
        ),
        pytest.param(
            "name: mine\nlimits:\n  slow-path: 2m\n  hand-over: 26s\n",
            "policy.yaml:4: limits.hand-over: a hand-over cannot wait 26 s: the kubelet gives PreStartContainer 30 s, "
            "and the plugin waits for 25 s of them; write at most 25s.",
            id="longer than the plugin waits",
        ),
        pytest.param(
            "name: mine\nlimits:\n  question: 25s\n",
            "policy.yaml:3: limits.question: one question to the driver (25 s) cannot take as long as the whole "
            "hand-over (25 s); write less.",
            id="a question as long as the hand-over",
        ),
        pytest.param(
            "name: mine\nlimits:\n  slow-path: 20s\n  reset: 20s\n",
            "policy.yaml:4: limits.reset: a reset (20 s) is one step of the slow path (20 s) and cannot take as long as "
            "all of it; write a shorter reset or a longer slow-path.",
            id="a step as long as its path",
        ),
        pytest.param(
            "name: mine\nrecovery:\n  probation-scrubs: 0\n",
            "policy.yaml:3: recovery.probation-scrubs: 0 is impossible; write at least 1.",
            id="no probation",
        ),
        pytest.param(
            "name: mine\nlimits:\n  temperature-celsius: 9000\n",
            "policy.yaml:3: limits.temperature-celsius: 9000 is impossible; write at most 150.",
            id="hotter than possible",
        ),
        pytest.param(
            "name: mine\nrecovery:\n  backoff-max: 1s\n  backoff-initial: 2s\n",
            "policy.yaml:3: recovery.backoff-max: the longest pause (1 s) is shorter than the first (2 s); "
            "write a backoff-max of at least backoff-initial.",
            id="pauses that shrink",
        ),
        pytest.param(
            "name: mine\nlimits:\n  memory-rate: 0\n",
            "policy.yaml:3: limits.memory-rate: 0 is too slow a rate; write at least 1.",
            id="no rate",
        ),
        pytest.param(
            "name: mine\nlimits:\n  memory-rate: fast\n",
            'policy.yaml:3: limits.memory-rate: "fast" is not a rate; '
            "write bytes (or operations) per second as a number, or a rate such as 64MiB/s or 20GB/s.",
            id="not a rate",
        ),
        pytest.param(
            "name: mine\nxids:\n  ignore:\n    - 13\n    - 72-69\n",
            'policy.yaml:5: xids.ignore: the range "72-69" is empty; write the lower number first: 69-72.',
            id="an empty range",
        ),
        pytest.param(
            "name: mine\nxids:\n  ignore: [13,\n    twelve]\n",
            'policy.yaml:4: xids.ignore: "twelve" is not an XID; write a number such as 79, or a range such as 69-72.',
            id="not an XID",
        ),
        pytest.param(
            "name: mine\nxids:\n  ignore: [0]\n",
            "policy.yaml:3: xids.ignore: 0 is not an XID; they go from 1 to 9999.",
            id="an XID out of range",
        ),
        pytest.param(
            "name: mine\nxids:\n  ignore: 13\n",
            "policy.yaml:3: xids.ignore: 13 does not fit here; write a list, such as [79, 151].",
            id="not a list",
        ),
        pytest.param(
            "name: mine\nxids:\n  ignore:\n    - 13\n  reset:\n    - 12-14\n",
            "policy.yaml:6: xids.reset: XID 13 is listed twice, under ignore and reset; keep one of them.",
            id="an XID in two classes",
        ),
        pytest.param(
            "name: mine\nsettings:\n  persistence: true\n",
            "policy.yaml:3: settings.persistence: a setting is a word or a number; "
            'quote it if it must read true or false, as in "true".',
            id="a setting that is a truth value",
        ),
        pytest.param(
            "name: mine\nreset: never\nname: yours\n",
            'policy.yaml:3: the key "name" is here for the second time (first on line 1); keep one of them.',
            id="duplicate key",
        ),
        pytest.param(
            "name: mine\nlimits:\n\tquestion: 1s\n",
            "policy.yaml:3: this is not YAML: found character '\\t' that cannot start any token; "
            "indent with spaces, not tabs.",
            id="a tab",
        ),
        pytest.param(
            "name: mine: yours\n",
            "policy.yaml:1: this is not YAML: mapping values are not allowed here; "
            "check the indentation, and quote text that holds a colon.",
            id="a colon too many",
        ),
        pytest.param(
            "name: mine\n---\nname: yours\n",
            "policy.yaml:2: this is not YAML: but found another document; "
            "one file holds one document (a line --- begins another).",
            id="two documents",
        ),
        pytest.param(
            "name: &n mine\nsettings: {a: *n}\n",
            "policy.yaml:1: anchors and aliases (& and *) are not read; write it out.",
            id="an alias",
        ),
        pytest.param(
            "name: mine\nsettings: !!python/object:os.system {}\n",
            "policy.yaml:2: the tag tag:yaml.org,2002:python/object:os.system is not read; remove it.",
            id="a tag",
        ),
        pytest.param("name: mine\n? [a]\n: 1\n", "policy.yaml:2: a key must be one word.", id="a key that is a list"),
        pytest.param("", "policy.yaml:1: the file is empty.", id="empty"),
        pytest.param("# nothing but a comment\n", "policy.yaml:1: the file is empty.", id="a comment only"),
        pytest.param(
            "- name: mine\n",
            "policy.yaml:1: a policy is a mapping of keys to values; begin with a line such as name: mine.",
            id="not a mapping",
        ),
        pytest.param(
            "name: mine\x01\n",
            "policy.yaml:1: the character U+0001 may not stand in a YAML file.",
            id="control character",
        ),
        pytest.param(
            b"name: mine\n# \xff\n",
            "policy.yaml:2: the byte 0xff is not UTF-8; save the file as UTF-8.",
            id="not UTF-8",
        ),
        pytest.param(
            "settings: " + '{"a": ' * 3000 + "1" + "}" * 3000,
            "policy.yaml:1: the file is nested too deeply to be read.",
            id="nested too deeply",
        ),
        pytest.param(
            "name: mine\nlimits:\n  eraser-slots: " + "9" * 5000,
            f"policy.yaml:3: the number {'9' * 20}… has 5000 digits; nothing is as large as that.",
            id="a number beyond all measure",
        ),
        pytest.param(
            'name: mine\nsettings:\n  a: "\\ud83d"\n',
            "policy.yaml:3: an escape of half a character stands here; write the character itself.",
            id="half a character",
        ),
        pytest.param(
            'name: mine\nsettings:\n  "\\udc80": b\n',
            "policy.yaml:3: an escape of half a character stands here; write the character itself.",
            id="half a character in a key",
        ),
        *(
            pytest.param(
                f'name: "\\U{number}"\n',
                "policy.yaml:1: this is not YAML: an escape in it is no character.",
                id=f"an escape of nothing, {number}",
            )
            for number in ("00110000", "FFFFFFFF")
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  recovery:\n",
            "policy.yaml:3: diagnostics.recovery: nothing is written here; write its value, or remove the key.",
            id="no word",
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  floors:\n    H200:\n      memory-pattern: 1TB/s\n      matrix: 5\n",
            "policy.yaml:6: diagnostics.floors.H200.matrix: this is not a check; "
            "known are memory-pattern, matrix-product, host-to-device, device-to-host.",
            id="a floor of no check",
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  floors:\n    A100: {}\n    H200: 20GB/s\n",
            "policy.yaml:5: diagnostics.floors.H200: write checks below the pattern, each with its rate; "
            "known are memory-pattern, matrix-product, host-to-device, device-to-host.",
            id="a floor of all checks",
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  floors:\n    H200:\n      host-to-device: 20 Gbit/s\n",
            'policy.yaml:5: diagnostics.floors.H200.host-to-device: "20 Gbit/s" is not a rate; '
            "write bytes (or operations) per second as a number, or a rate such as 64MiB/s or 20GB/s.",
            id="a floor that is no rate",
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  floors: [H200]\n",
            "policy.yaml:3: diagnostics.floors: floors are patterns of model names, each with its checks below it, "
            'such as "NVIDIA H200*".',
            id="floors of nothing",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  units:\n    - nvidia-persistenced.service\n    - nvidia-dcgm\n",
            'policy.yaml:5: infrastructure.units: "nvidia-dcgm" is no service of systemd; '
            "write all of its name, such as nvidia-dcgm.service.",
            id="not a unit",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  units: nvidia-dcgm.service\n",
            'policy.yaml:3: infrastructure.units: "nvidia-dcgm.service" does not fit here; '
            "write a list, such as [nvidia-dcgm.service].",
            id="one unit for a list",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  pods: gpu-operator/nvidia-dcgm\n",
            'policy.yaml:3: infrastructure.pods: "gpu-operator/nvidia-dcgm" does not fit here; '
            "write a list, such as [{namespace: gpu-operator, service-account: nvidia-dcgm}].",
            id="one pod for a list",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  pods:\n    - {namespace: a, service-account: b}\n"
            "    - {namespace: a, service-account: b, name: c}\n",
            'policy.yaml:5: unknown key "name" in "pods"; did you mean "namespace"?',
            id="unknown key in a list",
        ),
        pytest.param(
            "name: mine\ninjection:\n  envvar: refused\n",
            'policy.yaml:3: injection.envvar: "refused" is not known; did you mean "refuse"?',
            id="nearly a word",
        ),
        pytest.param(
            "name: mine\nmemory:\n  max-uncovered: none\n",
            'policy.yaml:3: memory.max-uncovered: "none" is not a size; '
            "write bytes as a number, or a size such as 256MiB or 1GiB.",
            id="not a size",
        ),
        pytest.param(
            "name: mine\nhealth:\n  sustained:\n    too-hott: 5m\n",
            'policy.yaml:4: health.sustained: "too-hott" is not known; did you mean "too-hot"?',
            id="no soft condition",
        ),
        pytest.param(
            "name: mine\nhealth:\n  sustained:\n    lost: 5m\n",
            'policy.yaml:4: health.sustained: "lost" is not known; write one of baseline-changed, ecc-mode-pending, events-unheard, '
            "hw-slowdown, hw-thermal-slowdown, inforom-corrupt, mig-mode-pending, nvlink-down, pcie-generation, pcie-width, "
            "power-brake, too-hot.",
            id="a condition that is a fault at once",
        ),
        pytest.param(
            "name: mine\nhealth:\n  sustained:\n    too-hot: forever\n",
            'policy.yaml:4: health.sustained.too-hot: "forever" is not a time; write never, seconds as a number, or a time such '
            "as 500ms, 25s, 2m or 1h.",
            id="neither a time nor never",
        ),
        pytest.param(
            "name: mine\nhealth:\n  news: later\n",
            'policy.yaml:3: health.news: "later" is not known; write one of at-once, at-release.',
            id="no such news",
        ),
        pytest.param(
            "name: mine\nbreaker:\n  soft-percent: 200\n",
            "policy.yaml:3: breaker.soft-percent: 200 is impossible; write at most 100.",
            id="more than all devices",
        ),
        pytest.param(
            "name: mine\nmaintenance:\n  every: 0\n",
            "policy.yaml:3: maintenance.every: a time of 0 s is impossible here; write at least 10ms, or never.",
            id="without a pause",
        ),
        pytest.param(
            "name: mine\nmaintenance:\n  between: night\n",
            'policy.yaml:3: maintenance.between: "night" is no time of the day; write from and until, such as 02:00-05:00, or '
            "always.",
            id="no time of the day",
        ),
        pytest.param(
            "name: mine\nmaintenance:\n  between: 23:00-24:30\n",
            'policy.yaml:3: maintenance.between: "23:00-24:30" is no time of the day; a day has hours from 00:00 to 24:00, or '
            "always.",
            id="after the end of the day",
        ),
        pytest.param(
            "name: mine\nmaintenance:\n  between: 00:00-24:00\n",
            'policy.yaml:3: maintenance.between: "00:00-24:00" begins when it ends; write two different times, or always.',
            id="all day",
        ),
        pytest.param(
            "name: mine\nstuck:\n  tell-after: 5m\n  evict-after: 1m\n",
            "policy.yaml:4: stuck.evict-after: a pod cannot be evicted (60 s) before its owner is told why (300 s); write an "
            "evict-after of at least tell-after.",
            id="evicted before it is told",
        ),
        pytest.param(
            "name: mine\nrecovery:\n  resets-per-day: 0\n",
            "policy.yaml:3: recovery.resets-per-day: 0 is impossible; write at least 1.",
            id="no resets at all",
        ),
        pytest.param(
            b" " * (1024 * 1024 + 1),
            "policy.yaml: the file has 1048577 bytes; more than 1048576 are not read.",
            id="too large",
        ),
    ],
)
def test_what_cannot_be_in_force_is_refused_with_line_and_hint(text: str | bytes, complaint: str) -> None:
    assert complaints(text) == [complaint]


@pytest.mark.parametrize(
    "key",
    [
        "limits.settle",
        "limits.memory-rate",
        "memory.max-uncovered",
        "maintenance.every",
        "maintenance.between",
        "stuck.evict-after",
        "health.sustained.too-hot",
        "settings.power_limit_watts",
        "diagnostics.floors",
        "hand-over.same-pod",
        "breaker.resets",
        "xids.ignore",
    ],
)
@pytest.mark.parametrize("nothing", ["", "~", "null"])
def test_a_key_without_a_value_is_called_that_whatever_stands_there_else(key: str, nothing: str) -> None:
    *above, last = key.split(".")
    text = "name: mine\n" + "".join(f"{'  ' * depth}{each}:\n" for depth, each in enumerate(above))
    text += f"{'  ' * len(above)}{last}: {nothing}\n"
    (complaint,) = complaints(text)
    assert (
        complaint
        == f"policy.yaml:{len(above) + 2}: {key}: nothing is written here; write its value, or remove the key."
    )


@pytest.mark.parametrize("kind", ["other-tenant", "unknown"])
def test_no_policy_can_hand_a_strangers_bytes_over_on_checks(kind: str) -> None:
    (complaint,) = complaints(f"name: mine\nhand-over:\n  {kind}: checks\n")
    assert complaint.startswith(f'policy.yaml:3: hand-over.{kind}: "{kind}" always needs a certificate')


def test_all_complaints_come_together_in_the_order_of_the_file() -> None:
    found = complaints("name: mine\nrecovery: {attempts: 0}\nlimits:\n  question: soon\nfoo: 1\n")
    assert [each.split(" ")[0] for each in found] == ["policy.yaml:2:", "policy.yaml:4:", "policy.yaml:5:"]


def test_words_that_older_yaml_takes_for_numbers_or_truth_values_stay_words() -> None:
    assert read("name: mine\nsettings: {a: no, b: 2026-11-20, c: 1_000, d: 0o17}\n").settings == {
        "a": "no",
        "b": "2026-11-20",
        "c": "1_000",
        "d": "0o17",
    }


def test_the_digest_follows_the_values_in_force_and_not_the_text() -> None:
    plain = read("name: mine\n")
    assert read("# why\nname: yours\nlimits: {question: 1000ms}\n").digest == plain.digest
    assert plain.digest == policy_digest(plain)
    assert len(plain.digest) == 64


IN, OUT = True, False


@pytest.mark.parametrize(
    ("written", "decides"),
    [
        ("hand-over: {same-pod: checks}", IN),
        ("reset: required", IN),
        ("sharing: never", IN),
        ("ungranted: end", IN),
        ("limits: {question: 2s}", IN),
        ("limits: {slow-path: 3m}", IN),
        ("limits: {temperature-celsius: 80}", IN),
        ("limits: {break-glass: 1h}", OUT),
        ("memory: {pattern: true}", IN),
        ("diagnostics: {slow-path: quick}", IN),
        ('diagnostics: {floors: {"NVIDIA L4*": {host-to-device: 10GB/s}}}', IN),
        ("health: {sustained: {too-hot: 1m}}", IN),
        ("health: {calm: 2m}", IN),
        ("health: {news: at-release}", OUT),
        ("health: {blame: 1}", OUT),
        ("infrastructure: {units: []}", IN),
        ("injection: {envvar: refuse}", IN),
        ("settings: {power_limit_watts: 300}", IN),
        ("xids: {reset: [94]}", IN),
        ("maintenance: {diagnostics: quick}", IN),
        ("maintenance: {every: 24h}", OUT),
        ("maintenance: {between: 02:00-05:00}", OUT),
        ("enforcement: observe", OUT),
        ("recovery: {backoff-initial: 2s}", OUT),
        ("recovery: {attempts: 9, attempts-per-day: 9, resets-per-day: 9}", OUT),
        ("recovery: {probation-scrubs: 9, probation-interval: 1s}", OUT),
        ("breaker: {resets: 1, window: 1m, soft-percent: 1}", OUT),
        ("stuck: {tell-after: 5m, evict-after: 1h}", OUT),
        ("overrides: [{name: a, models: [x], sharing: never}]", OUT),
    ],
)
def test_only_what_decides_about_proof_has_devices_scrubbed_again(written: str, decides: bool) -> None:
    changed, plain = read(f"name: mine\n{written}\n"), read("name: mine\n")
    assert changed != plain
    assert (changed.digest != plain.digest) is decides


def test_a_new_field_of_a_policy_is_in_the_digest_until_somebody_says_otherwise() -> None:
    @dataclass(frozen=True)
    class Rule:
        plain: int = 3
        declared: int = setting(3, "Decides about proof.")
        spared: int = setting(3, "Decides nothing.", decides_proof=False)

    assert [each.name for each in dataclasses.fields(Rule) if decides_proof(each)] == ["plain", "declared"]


def test_which_floor_comes_first_is_part_of_what_a_policy_says() -> None:
    one, other = ('"NVIDIA H*": {host-to-device: 10GB/s}', '"NVIDIA H200*": {host-to-device: 20GB/s}')
    digests = {
        read(f"name: mine\ndiagnostics: {{floors: {{{a}, {b}}}}}\n").digest for a, b in ((one, other), (other, one))
    }
    assert len(digests) == 2


def test_an_xid_that_a_policy_does_not_name_keeps_the_class_of_the_shipped_default(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nxids: {ignore: [94], unknown: [13]}\n")
    policy, shipped = load_policy(file), load_policy("default")
    assert policy.error_classes == {**shipped.error_classes, 94: ErrorClass.IGNORE, 13: ErrorClass.UNKNOWN}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"mine\.yaml: the policy cannot be read: No such file or directory\."):
        load_policy(str(tmp_path / "mine.yaml"))


def test_the_shortest_times_are_possible() -> None:
    limits = read("name: mine\nlimits: {question: 50ms, memory-floor: 10ms, settle: 0, dying-grace: 0}\n").limits
    assert (limits.question, limits.memory_floor, limits.settle, limits.dying_grace) == (0.05, 0.01, 0, 0)


def test_what_is_no_file_is_no_policy_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (f"{tmp_path}/", "/dev/zero", "/dev/null", str(tmp_path / "pipe.yaml")):
        with pytest.raises(BadConfiguration, match="a policy is a regular file"):
            load_policy(path)


def test_a_policy_that_is_too_large_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(BadConfiguration, match=r"mine\.yaml: a policy has at most 1048576 bytes"):
        load_policy(path)


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="cannot be read"):
        load_policy("./mine\0.yaml")


def test_a_name_that_nothing_ships_under_is_refused_with_what_there_is() -> None:
    with pytest.raises(BadConfiguration) as caught:
        load_policy("defualt")
    assert 'Did you mean "default"?' in str(caught.value)
    assert "./defualt.yaml" in str(caught.value)
