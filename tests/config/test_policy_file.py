"""An invalid policy is refused with file, line and a hint; a valid one has exactly the specified meaning."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from scrubber.config.bundled import bundled_policies
from scrubber.config.policy_file import load_policy, parse_policy, policy_digest
from scrubber.domain.declaration import decides_proof, setting
from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.infrastructure import InfrastructureClass, InfrastructurePod, InfrastructureUnit
from scrubber.domain.policy import (
    BreakerRule,
    DeviceTaintRule,
    DiagnosticsRule,
    Enforcement,
    EnvvarInjection,
    HealthRule,
    Infrastructure,
    MaintenanceRule,
    Policy,
    QuarantineTiming,
    RequiredProof,
    ResetMode,
    SharingMode,
    StuckPodsRule,
)


def read(text: str) -> Policy:
    return parse_policy(text.encode(), "policy.yaml", xids={})


def errors_of(content: str | bytes) -> list[str]:
    with pytest.raises(InvalidConfiguration) as caught:
        parse_policy(content.encode() if isinstance(content, str) else content, "policy.yaml", xids={})
    return str(caught.value).splitlines()


def test_every_value_of_a_policy_file_reaches_the_policy() -> None:
    policy = read(
        """\
        name: mine
        handOver: {sameContainer: certificate, samePod: checks, sameTenant: checks}
        reset: required
        sharing: never
        enforcement: observe
        limits:
          handOver: 20
          slowPath: 1.5m
          clearTimeoutBase: 500ms
          minClearRate: 1GiB/s
          driverCall: 250 ms
          reset: 10s
          leftoverGracePeriod: 0
          unknownPodIdlePeriod: 0s
          eraserSlots: 4
          maxTemperatureCelsius: 80
          breakGlass: 30m
        memory: {countResidue: false, patternPass: true, onChip: false, maxUncovered: 64MiB}
        diagnostics: {slowPath: quick, recovery: extended, minRates: {"NVIDIA H200*": {host-to-device: 20GB/s}}}
        infrastructure: {groups: [], systemdUnits: [a@1.service], pods: [{namespace: ops, serviceAccount: dcgm, class: driver}]}
        injection: {envvar: refuse}
        health: {quarantineAfter: {too-hot: 2m, pcie-width: never, inforom-corrupt: 1h}, quietPeriod: 30s, quarantineAt: release, tenantQuarantineThreshold: 5}
        recovery:
          {initialBackoff: 2s, maxBackoff: 1h, maxAttempts: 3, maxAttemptsPerDay: 9, maxResetsPerDay: 2, probationScrubs: 1,
           probationInterval: 0}
        breaker: {maxResets: 0, window: 10m, maxSoftPercent: 50}
        maintenance: {interval: 24h, timeOfDay: "22:00-04:30", diagnostics: standard}
        stuckPods: {notifyAfter: 2m, evictAfter: 1h}
        deviceTaints: {dirtyAfter: 5m, evictFromCondemned: true}
        settings: {power_limit_watts: 300, compute_mode: default}
        xids: {ignore: [13, 69-72], reboot: [79]}
        """
    )
    assert policy.name == "mine"
    assert policy.required_proofs == {
        HandOverKind.SAME_CONTAINER: RequiredProof.CERTIFICATE,
        HandOverKind.SAME_POD: RequiredProof.CHECKS,
        HandOverKind.SAME_TENANT: RequiredProof.CHECKS,
        HandOverKind.OTHER_TENANT: RequiredProof.CERTIFICATE,
        HandOverKind.UNKNOWN: RequiredProof.CERTIFICATE,
    }
    assert (policy.reset, policy.sharing, policy.enforcement) == (
        ResetMode.REQUIRED,
        SharingMode.NEVER,
        Enforcement.OBSERVE,
    )
    limits = policy.limits
    assert (limits.hand_over, limits.slow_path, limits.clear_timeout_base, limits.driver_call) == (
        20.0,
        90.0,
        0.5,
        0.25,
    )
    assert (limits.reset, limits.leftover_grace_period, limits.unknown_pod_idle_period, limits.eraser_slots) == (
        10.0,
        0.0,
        0.0,
        4,
    )
    assert (limits.min_clear_rate, limits.break_glass) == (1024**3, 1800.0)
    assert policy.limits.max_temperature_celsius == 80
    assert (policy.memory.count_residue, policy.memory.pattern_pass) == (False, True)
    assert (policy.memory.on_chip, policy.memory.max_uncovered) == (False, 64 * 1024**2)
    assert policy.diagnostics == DiagnosticsRule(
        DiagnosticLevel.QUICK, DiagnosticLevel.EXTENDED, {"NVIDIA H200*": {"host-to-device": 20e9}}
    )
    pods = frozenset({InfrastructurePod("ops", "dcgm", InfrastructureClass.DRIVER)})
    units = frozenset({InfrastructureUnit("a@1.service", InfrastructureClass.DRIVER)})
    assert policy.infrastructure == Infrastructure(frozenset(), frozenset({"a@1.service"}), pods, units, pods)
    assert policy.injection.envvar is EnvvarInjection.REFUSE
    recovery = policy.recovery
    assert (recovery.initial_backoff, recovery.max_backoff, recovery.max_attempts) == (2.0, 3600.0, 3)
    assert (recovery.max_attempts_per_day, recovery.max_resets_per_day) == (9, 2)
    assert (recovery.probation_scrubs, recovery.probation_interval) == (1, 0.0)
    lasting = {**HealthRule().quarantine_after, "too-hot": 120.0, "inforom-corrupt": 3600.0}
    del lasting["pcie-width"]
    assert policy.health == HealthRule(
        lasting, quiet_period=30.0, quarantine_at=QuarantineTiming.RELEASE, tenant_quarantine_threshold=5
    )
    assert policy.breaker == BreakerRule(max_resets=0, window=600.0, max_soft_percent=50)
    assert policy.maintenance == MaintenanceRule(86400.0, (22 * 3600.0, 4.5 * 3600.0), DiagnosticLevel.STANDARD)
    assert policy.stuck_pods == StuckPodsRule(notify_after=120.0, evict_after=3600.0)
    assert policy.device_taints == DeviceTaintRule(dirty_after=300.0, evict_from_condemned=True)
    assert policy.settings == {"power_limit_watts": "300", "compute_mode": "default"}
    assert policy.error_classes == {
        13: ErrorClass.IGNORE,
        **dict.fromkeys((69, 70, 71, 72), ErrorClass.IGNORE),
        79: ErrorClass.REBOOT,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "name: mine\nlimts:\n  driverCall: 1s\n",
            'policy.yaml:2: unknown key "limts"; did you mean "limits"?',
            id="unknown key",
        ),
        pytest.param(
            "name: mine\nlimits:\n  slow_path: 1m\n",
            'policy.yaml:3: unknown key "slow_path" in "limits"; did you mean "slowPath"?',
            id="unknown key in a section",
        ),
        pytest.param(
            "name: mine\nmemory:\n  zebra: true\n",
            'policy.yaml:3: unknown key "zebra" in "memory"; the keys are: countResidue, patternPass, onChip, maxUncovered, acceptClaims.',
            id="unknown key like no other",
        ),
        pytest.param(
            "name: mine\nhandOver:\n  samePod: check\n",
            'policy.yaml:3: handOver.samePod: "check" is not a valid value; did you mean "checks"?',
            id="unknown word",
        ),
        pytest.param(
            "name: mine\nreset: 7\n",
            'policy.yaml:2: reset: "7" is not a valid value; write one of required, best-effort, never.',
            id="unknown word like no other",
        ),
        pytest.param(
            "name: mine\nmemory:\n  countResidue: yes\n",
            'policy.yaml:3: memory.countResidue: "yes" is not valid here; write true or false.',
            id="not a truth value",
        ),
        pytest.param(
            "name: mine\nlimits: {eraserSlots: 2.5}\n",
            "policy.yaml:2: limits.eraserSlots: 2.5 is not valid here; write a whole number, or auto.",
            id="not a whole number",
        ),
        pytest.param(
            "name: mine\nlimits: 3\n",
            "policy.yaml:2: limits: 3 is not valid here; write its keys on indented lines below it.",
            id="not a section",
        ),
        pytest.param(
            "name: mine\nlimits:\nreset: never\n",
            "policy.yaml:2: limits: the value is missing; write one, or remove the key.",
            id="nothing",
        ),
        pytest.param(
            "reset: never\n",
            'policy.yaml:1: the key "name" is missing; add a line such as name: mine.',
            id="no name",
        ),
        pytest.param(
            "name: My Policy\n",
            'policy.yaml:1: name: "My Policy" is not a valid name; use lowercase letters, digits and '
            "hyphens, such as my-policy.",
            id="impossible name",
        ),
        pytest.param(
            "name: mine\nlimits:\n  driverCall: 5 seconds\n",
            'policy.yaml:3: limits.driverCall: "5 seconds" is not a time; '
            "write seconds as a number, or a time such as 500ms, 25s, 2m or 1h.",
            id="not a time",
        ),
        pytest.param(
            "name: mine\nlimits:\n  unknownPodIdlePeriod: 1:30\n",
            'policy.yaml:3: limits.unknownPodIdlePeriod: "1:30" is not a time; '
            "write seconds as a number, or a time such as 500ms, 25s, 2m or 1h.",
            id="not ninety seconds",
        ),
        pytest.param(
            "name: mine\nlimits:\n  unknownPodIdlePeriod: -1\n",
            "policy.yaml:3: limits.unknownPodIdlePeriod: a time cannot be negative (-1).",
            id="negative time",
        ),
        pytest.param(
            "name: mine\nlimits:\n  unknownPodIdlePeriod: .inf\n",
            "policy.yaml:3: limits.unknownPodIdlePeriod: this is not a time; "
            "write seconds as a number, or a time such as 500ms, 25s, 2m or 1h.",
            id="endless time",
        ),
        pytest.param(
            "name: mine\nlimits:\n  unknownPodIdlePeriod: 1" + "0" * 400 + "\n",
            "policy.yaml:3: limits.unknownPodIdlePeriod: this is not a time; "
            "write seconds as a number, or a time such as 500ms, 25s, 2m or 1h.",
            id="longer than anything",
        ),
        pytest.param(
            "name: mine\nmemory:\n  maxUncovered: 1" + "0" * 40 + "\n",
            f"policy.yaml:3: memory.maxUncovered: 1{'0' * 40} is not a size; "
            "write bytes as a number, or a size such as 256MiB or 1GiB.",
            id="larger than anything",
        ),
        pytest.param(
            "name: mine\nlimits:\n  slowPath: 0s\n",
            "policy.yaml:3: limits.slowPath: a time of 0 s is too short here; write at least 10ms.",
            id="no time at all",
        ),
        pytest.param(
            "name: mine\nrecovery:\n  initialBackoff: 9ms\n",
            "policy.yaml:3: recovery.initialBackoff: a time of 0.009 s is too short here; write at least 10ms.",
            id="hardly any time",
        ),
        pytest.param(
            "name: mine\nlimits:\n  driverCall: 49ms\n",
            "policy.yaml:3: limits.driverCall: a time of 0.049 s is too short here; write at least 50ms.",
            id="too short for a healthy driver",
        ),
        pytest.param(
            "name: mine\nlimits:\n  slowPath: 2m\n  handOver: 26s\n",
            "policy.yaml:4: limits.handOver: a hand-over cannot wait 26 s: the kubelet allows 30 s for "
            "PreStartContainer, and the plugin waits for at most 25 s; write at most 25s.",
            id="longer than the plugin waits",
        ),
        pytest.param(
            "name: mine\nlimits:\n  driverCall: 25s\n",
            "policy.yaml:3: limits.driverCall: a driver call (25 s) must be shorter than the whole "
            "hand-over (25 s); write a shorter driverCall.",
            id="a question as long as the hand-over",
        ),
        pytest.param(
            "name: mine\nlimits:\n  slowPath: 20s\n  reset: 20s\n",
            "policy.yaml:4: limits.reset: a reset (20 s) is one step of the slow path (20 s) and must "
            "take less time; write a shorter reset or a longer slowPath.",
            id="a step as long as its path",
        ),
        pytest.param(
            "name: mine\nrecovery:\n  probationScrubs: 0\n",
            "policy.yaml:3: recovery.probationScrubs: 0 is too small; write at least 1.",
            id="no probation",
        ),
        pytest.param(
            "name: mine\nlimits:\n  maxTemperatureCelsius: 9000\n",
            "policy.yaml:3: limits.maxTemperatureCelsius: 9000 is too large; write at most 150.",
            id="hotter than possible",
        ),
        pytest.param(
            "name: mine\nrecovery:\n  maxBackoff: 1s\n  initialBackoff: 2s\n",
            "policy.yaml:3: recovery.maxBackoff: the longest pause (1 s) is shorter than the first (2 s); "
            "write a maxBackoff of at least initialBackoff.",
            id="pauses that shrink",
        ),
        pytest.param(
            "name: mine\nlimits:\n  minClearRate: 0\n",
            "policy.yaml:3: limits.minClearRate: 0 is too low for a rate; write at least 1.",
            id="no rate",
        ),
        pytest.param(
            "name: mine\nlimits:\n  minClearRate: fast\n",
            'policy.yaml:3: limits.minClearRate: "fast" is not a rate; '
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
            "policy.yaml:3: xids.ignore: 0 is not an XID; XIDs go from 1 to 9999.",
            id="an XID out of range",
        ),
        pytest.param(
            "name: mine\nxids:\n  ignore: 13\n",
            "policy.yaml:3: xids.ignore: 13 is not valid here; write a list, such as [79, 151].",
            id="not a list",
        ),
        pytest.param(
            "name: mine\nxids:\n  ignore:\n    - 13\n  reset:\n    - 12-14\n",
            "policy.yaml:6: xids.reset: XID 13 is listed twice, under ignore and reset; keep one of them.",
            id="an XID in two classes",
        ),
        pytest.param(
            "name: mine\nsettings:\n  persistence: true\n",
            "policy.yaml:3: settings.persistence: a setting is a string or a number; quote it if it must be "
            'the string true or false, as in "true".',
            id="a setting that is a truth value",
        ),
        pytest.param(
            "name: mine\nreset: never\nname: yours\n",
            'policy.yaml:3: the key "name" is a duplicate (first on line 1); keep one of them.',
            id="duplicate key",
        ),
        pytest.param(
            "name: mine\nlimits:\n\tdriverCall: 1s\n",
            "policy.yaml:3: this is not YAML: found character '\\t' that cannot start any token; "
            "indent with spaces, not tabs.",
            id="a tab",
        ),
        pytest.param(
            "name: mine: yours\n",
            "policy.yaml:1: this is not YAML: mapping values are not allowed here; check the indentation, "
            "and quote text that contains a colon.",
            id="a colon too many",
        ),
        pytest.param(
            "name: mine\n---\nname: yours\n",
            "policy.yaml:2: this is not YAML: but found another document; a file contains one document (a "
            "line --- begins another).",
            id="two documents",
        ),
        pytest.param(
            "name: &n mine\nsettings: {a: *n}\n",
            "policy.yaml:1: anchors and aliases (& and *) are not supported; write the value out.",
            id="an alias",
        ),
        pytest.param(
            "name: mine\nsettings: !!python/object:os.system {}\n",
            "policy.yaml:2: the tag tag:yaml.org,2002:python/object:os.system is not supported; remove it.",
            id="a tag",
        ),
        pytest.param("name: mine\n? [a]\n: 1\n", "policy.yaml:2: a key must be a scalar.", id="a key that is a list"),
        pytest.param("", "policy.yaml:1: the file is empty.", id="empty"),
        pytest.param("# nothing but a comment\n", "policy.yaml:1: the file is empty.", id="a comment only"),
        pytest.param(
            "- name: mine\n",
            "policy.yaml:1: a policy is a mapping of keys to values; begin with a line such as name: mine.",
            id="not a mapping",
        ),
        pytest.param(
            "name: mine\x01\n",
            "policy.yaml:1: the character U+0001 is not allowed in a YAML file.",
            id="control character",
        ),
        pytest.param(
            b"name: mine\n# \xff\n",
            "policy.yaml:2: the byte 0xff is not UTF-8; save the file as UTF-8.",
            id="not UTF-8",
        ),
        pytest.param(
            "settings: " + '{"a": ' * 3000 + "1" + "}" * 3000,
            "policy.yaml:1: the file is nested too deeply; at most 64 levels are read.",
            id="nested too deeply",
        ),
        pytest.param(
            "settings: " + "[" * 1_000_000,
            "policy.yaml:1: the file is nested too deeply; at most 64 levels are read.",
            id="a megabyte of brackets",
        ),
        pytest.param(
            "name: mine\nsettings:\n" + "".join(f"{'  ' * level}a:\n" for level in range(1, 70)),
            "policy.yaml:66: the file is nested too deeply; at most 64 levels are read.",
            id="nested more deeply than any policy",
        ),
        pytest.param(
            '"a\\u2028\\n\\x1b": 1\n"a\\u2028\\n\\x1b": 2\n',
            'policy.yaml:2: the key "a\\u2028\\n\\x1b" is a duplicate (first on line 1); keep one of them.',
            id="line ends in a key",
        ),
        pytest.param(
            'name: mine\nsharing: "a\\u2028b"\n',
            'policy.yaml:2: sharing: "a\\u2028b" is not a valid value; write one of same-tenant, never.',
            id="a line end in a value",
        ),
        pytest.param(
            "name: mine\nlimits:\n  eraserSlots: " + "9" * 5000,
            f"policy.yaml:3: the number {'9' * 20}… has 5000 digits, which is out of range.",
            id="a number beyond all measure",
        ),
        pytest.param(
            'name: mine\nsettings:\n  a: "\\ud83d"\n',
            "policy.yaml:3: an escape produces half a surrogate pair; write the character itself.",
            id="half a character",
        ),
        pytest.param(
            'name: mine\nsettings:\n  "\\udc80": b\n',
            "policy.yaml:3: an escape produces half a surrogate pair; write the character itself.",
            id="half a character in a key",
        ),
        *(
            pytest.param(
                f'name: "\\U{number}"\n',
                "policy.yaml:1: this is not YAML: it contains an escape that is not a character.",
                id=f"an escape of nothing, {number}",
            )
            for number in ("00110000", "FFFFFFFF")
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  recovery:\n",
            "policy.yaml:3: diagnostics.recovery: the value is missing; write one, or remove the key.",
            id="no word",
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  minRates:\n    H200:\n      memory-pattern: 1TB/s\n      matrix: 5\n",
            "policy.yaml:6: diagnostics.minRates.H200.matrix: this is not a check; the checks are: "
            "memory-pattern, matrix-product, host-to-device, device-to-host.",
            id="a floor of no check",
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  minRates:\n    A100: {}\n    H200: 20GB/s\n",
            "policy.yaml:5: diagnostics.minRates.H200: write checks with their rates below the pattern; the "
            "checks are: memory-pattern, matrix-product, host-to-device, device-to-host.",
            id="a floor of all checks",
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  minRates:\n    H200:\n      host-to-device: 20 Gbit/s\n",
            'policy.yaml:5: diagnostics.minRates.H200.host-to-device: "20 Gbit/s" is not a rate; '
            "write bytes (or operations) per second as a number, or a rate such as 64MiB/s or 20GB/s.",
            id="a floor that is no rate",
        ),
        pytest.param(
            "name: mine\ndiagnostics:\n  minRates: [H200]\n",
            'policy.yaml:3: diagnostics.minRates: write patterns of model names here, such as "NVIDIA '
            'H200*", each with its checks below it.',
            id="floors of nothing",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  systemdUnits:\n    - nvidia-persistenced.service\n    - nvidia-dcgm\n",
            'policy.yaml:5: infrastructure.systemdUnits: "nvidia-dcgm" is not a systemd service; write its '
            "full name, such as nvidia-dcgm.service.",
            id="not a unit",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  systemdUnits: nvidia-dcgm.service\n",
            'policy.yaml:3: infrastructure.systemdUnits: "nvidia-dcgm.service" is not valid here; write a '
            "list, such as [my-monitor.service].",
            id="one unit for a list",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  pods: gpu-operator/nvidia-dcgm\n",
            'policy.yaml:3: infrastructure.pods: "gpu-operator/nvidia-dcgm" is not valid here; write a list, '
            "such as [{namespace: monitoring, serviceAccount: dcgm-exporter}].",
            id="one pod for a list",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  groups:\n    - systemd\n    - gpu-operater\n",
            'policy.yaml:5: infrastructure.groups: "gpu-operater" is not a valid value; did you mean "gpu-operator"?',
            id="unknown group of infrastructure",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  pods: [{namespace: a, serviceAccount: nvidia-*-x}]\n",
            'policy.yaml:3: infrastructure.pods.serviceAccount: "nvidia-*-x" is not a service account; use lowercase '
            "letters, digits and hyphens, and * at the end only, such as nvidia-gpu-driver-*.",
            id="pattern that is no prefix",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  pods: [{namespace: a, class: tenant}]\n",
            'policy.yaml:3: infrastructure.pods.class: "tenant" is not a valid value; write one of monitoring, driver, '
            "validation.",
            id="unknown class of infrastructure",
        ),
        pytest.param(
            "name: mine\ninfrastructure:\n  pods:\n    - {namespace: a, serviceAccount: b}\n"
            "    - {namespace: a, serviceAccount: b, name: c}\n",
            'policy.yaml:5: unknown key "name" in "pods"; did you mean "namespace"?',
            id="unknown key in a list",
        ),
        pytest.param(
            "name: mine\ninjection:\n  envvar: refused\n",
            'policy.yaml:3: injection.envvar: "refused" is not a valid value; did you mean "refuse"?',
            id="nearly a word",
        ),
        pytest.param(
            "name: mine\nmemory:\n  maxUncovered: none\n",
            'policy.yaml:3: memory.maxUncovered: "none" is not a size; '
            "write bytes as a number, or a size such as 256MiB or 1GiB.",
            id="not a size",
        ),
        pytest.param(
            "name: mine\nhealth:\n  quarantineAfter:\n    too-hott: 5m\n",
            'policy.yaml:4: health.quarantineAfter: "too-hott" is not a valid value; did you mean "too-hot"?',
            id="no soft condition",
        ),
        pytest.param(
            "name: mine\nhealth:\n  quarantineAfter:\n    lost: 5m\n",
            'policy.yaml:4: health.quarantineAfter: "lost" is not a valid value; write one of '
            "baseline-mismatch, command-broken, ecc-mode-pending, event-stream-lost, hw-slowdown, hw-thermal-slowdown, "
            "inforom-corrupt, mig-mode-pending, nvlink-down, pcie-generation, pcie-width, power-brake, "
            "too-hot.",
            id="a condition that is a fault at once",
        ),
        pytest.param(
            "name: mine\nhealth:\n  quarantineAfter:\n    too-hot: forever\n",
            'policy.yaml:4: health.quarantineAfter.too-hot: "forever" is not a time; write never, seconds as a number, or a time such '
            "as 500ms, 25s, 2m or 1h.",
            id="neither a time nor never",
        ),
        pytest.param(
            "name: mine\nhealth:\n  quarantineAt: later\n",
            'policy.yaml:3: health.quarantineAt: "later" is not a valid value; write one of detection, release.',
            id="no such news",
        ),
        pytest.param(
            "name: mine\nbreaker:\n  maxSoftPercent: 200\n",
            "policy.yaml:3: breaker.maxSoftPercent: 200 is too large; write at most 100.",
            id="more than all devices",
        ),
        pytest.param(
            "name: mine\nmaintenance:\n  interval: 0\n",
            "policy.yaml:3: maintenance.interval: a time of 0 s is too short here; write at least 10ms, or never.",
            id="without a pause",
        ),
        pytest.param(
            "name: mine\nmaintenance:\n  timeOfDay: night\n",
            'policy.yaml:3: maintenance.timeOfDay: "night" is not a time of day; write from and until, such '
            "as 02:00-05:00, or always.",
            id="no time of the day",
        ),
        pytest.param(
            "name: mine\nmaintenance:\n  timeOfDay: 23:00-24:30\n",
            'policy.yaml:3: maintenance.timeOfDay: "23:00-24:30" is not a time of day; hours go from 00:00 '
            "to 24:00, or always.",
            id="after the end of the day",
        ),
        pytest.param(
            "name: mine\nmaintenance:\n  timeOfDay: 00:00-24:00\n",
            'policy.yaml:3: maintenance.timeOfDay: "00:00-24:00" has the same start and end; write two '
            "different times, or always.",
            id="all day",
        ),
        pytest.param(
            "name: mine\nstuckPods:\n  notifyAfter: 5m\n  evictAfter: 1m\n",
            "policy.yaml:4: stuckPods.evictAfter: a pod cannot be evicted (60 s) before its owner is notified (300 s); write an "
            "evictAfter of at least notifyAfter.",
            id="evicted before the owner is notified",
        ),
        pytest.param(
            "name: mine\nrecovery:\n  maxResetsPerDay: 0\n",
            "policy.yaml:3: recovery.maxResetsPerDay: 0 is too small; write at least 1.",
            id="no resets at all",
        ),
        pytest.param(
            b" " * (1024 * 1024 + 1),
            "policy.yaml: the file has 1048577 bytes; the limit is 1048576.",
            id="too large",
        ),
    ],
)
def test_invalid_policy_is_refused_with_line_and_hint(text: str | bytes, message: str) -> None:
    assert errors_of(text) == [message]


@pytest.mark.parametrize(
    "key",
    [
        "limits.unknownPodIdlePeriod",
        "limits.minClearRate",
        "memory.maxUncovered",
        "maintenance.interval",
        "maintenance.timeOfDay",
        "stuckPods.evictAfter",
        "health.quarantineAfter.too-hot",
        "settings.power_limit_watts",
        "diagnostics.minRates",
        "handOver.samePod",
        "breaker.maxResets",
        "xids.ignore",
    ],
)
@pytest.mark.parametrize("nothing", ["", "~", "null"])
def test_key_without_a_value_is_refused_as_empty(key: str, nothing: str) -> None:
    *above, last = key.split(".")
    text = "name: mine\n" + "".join(f"{'  ' * depth}{each}:\n" for depth, each in enumerate(above))
    text += f"{'  ' * len(above)}{last}: {nothing}\n"
    (message,) = errors_of(text)
    assert message == f"policy.yaml:{len(above) + 2}: {key}: the value is missing; write one, or remove the key."


@pytest.mark.parametrize("kind", ["otherTenant", "unknown"])
def test_policy_cannot_allow_checks_for_a_hand_over_to_another_or_unknown_tenant(kind: str) -> None:
    (message,) = errors_of(f"name: mine\nhandOver:\n  {kind}: checks\n")
    assert message.startswith(f'policy.yaml:3: handOver.{kind}: "{kind}" always needs a certificate')


def test_all_validation_errors_are_reported_in_the_order_of_the_file() -> None:
    found = errors_of("name: mine\nrecovery: {maxAttempts: 0}\nlimits:\n  driverCall: soon\nfoo: 1\n")
    assert [each.split(" ")[0] for each in found] == ["policy.yaml:2:", "policy.yaml:4:", "policy.yaml:5:"]


def test_values_that_yaml_1_1_reads_as_numbers_or_booleans_stay_strings() -> None:
    assert read("name: mine\nsettings: {a: no, b: 2026-11-20, c: 1_000, d: 0o17}\n").settings == {
        "a": "no",
        "b": "2026-11-20",
        "c": "1_000",
        "d": "0o17",
    }


def test_policy_digest_depends_on_the_values_and_not_on_the_text() -> None:
    plain = read("name: mine\n")
    assert read("# why\nname: yours\nlimits: {driverCall: 1000ms}\n").digest == plain.digest
    assert plain.digest == policy_digest(plain)
    assert len(plain.digest) == 64


IN, OUT = True, False


@pytest.mark.parametrize(
    ("written", "decides"),
    [
        ("handOver: {samePod: checks}", IN),
        ("reset: required", IN),
        ("sharing: never", IN),
        ("unauthorizedUse: kill", IN),
        ("limits: {driverCall: 2s}", IN),
        ("limits: {slowPath: 3m}", IN),
        ("limits: {maxTemperatureCelsius: 80}", IN),
        ("limits: {breakGlass: 1h}", OUT),
        ("memory: {patternPass: true}", IN),
        ("diagnostics: {slowPath: quick}", IN),
        ('diagnostics: {minRates: {"NVIDIA L4*": {host-to-device: 10GB/s}}}', IN),
        ("health: {quarantineAfter: {too-hot: 1m}}", IN),
        ("health: {quietPeriod: 2m}", IN),
        ("health: {quarantineAt: release}", OUT),
        ("health: {tenantQuarantineThreshold: 1}", OUT),
        ("infrastructure: {groups: [systemd]}", IN),
        ("infrastructure: {systemdUnits: [a.service]}", IN),
        ("infrastructure: {pods: [{namespace: a}]}", IN),
        ("injection: {envvar: refuse}", IN),
        ("settings: {power_limit_watts: 300}", IN),
        ("xids: {reset: [94]}", IN),
        ("maintenance: {diagnostics: quick}", IN),
        ("maintenance: {interval: 24h}", OUT),
        ("maintenance: {timeOfDay: 02:00-05:00}", OUT),
        ("enforcement: observe", OUT),
        ("recovery: {initialBackoff: 2s}", OUT),
        ("recovery: {maxAttempts: 9, maxAttemptsPerDay: 9, maxResetsPerDay: 9}", OUT),
        ("recovery: {probationScrubs: 9, probationInterval: 1s}", OUT),
        ("breaker: {maxResets: 1, window: 1m, maxSoftPercent: 1}", OUT),
        ("stuckPods: {notifyAfter: 5m, evictAfter: 1h}", OUT),
        ("deviceTaints: {dirtyAfter: never, evictFromCondemned: true}", OUT),
        ("overrides: [{name: a, models: [x], sharing: never}]", OUT),
    ],
)
def test_only_settings_that_decide_about_proof_change_the_policy_digest(written: str, decides: bool) -> None:
    changed, plain = read(f"name: mine\n{written}\n"), read("name: mine\n")
    assert changed != plain
    assert (changed.digest != plain.digest) is decides


def test_new_policy_field_is_part_of_the_digest_unless_declared_otherwise() -> None:
    @dataclass(frozen=True)
    class Rule:
        plain: int = 3
        declared: int = setting(3, "Decides about proof.")
        spared: int = setting(3, "Decides nothing.", decides_proof=False)

    assert [each.name for each in dataclasses.fields(Rule) if decides_proof(each)] == ["plain", "declared"]


def test_order_of_minimum_rates_is_part_of_the_policy_digest() -> None:
    one, other = ('"NVIDIA H*": {host-to-device: 10GB/s}', '"NVIDIA H200*": {host-to-device: 20GB/s}')
    digests = {
        read(f"name: mine\ndiagnostics: {{minRates: {{{a}, {b}}}}}\n").digest for a, b in ((one, other), (other, one))
    }
    assert len(digests) == 2


def test_xid_that_a_policy_does_not_name_keeps_its_class_of_the_bundled_table(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nxids: {ignore: [94], unknown: [13]}\n")
    policy, shipped = load_policy(file), load_policy("default")
    assert policy.error_classes == {**shipped.error_classes, 94: ErrorClass.IGNORE, 13: ErrorClass.UNKNOWN}


def test_missing_policy_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"mine\.yaml: the policy cannot be read: No such file or directory\."
    ):
        load_policy(str(tmp_path / "mine.yaml"))


def test_shortest_time_limits_are_accepted() -> None:
    limits = read(
        "name: mine\nlimits: {driverCall: 50ms, clearTimeoutBase: 10ms, unknownPodIdlePeriod: 0, leftoverGracePeriod: 0}\n"
    ).limits
    assert (
        limits.driver_call,
        limits.clear_timeout_base,
        limits.unknown_pod_idle_period,
        limits.leftover_grace_period,
    ) == (0.05, 0.01, 0, 0)


def test_policy_path_that_is_no_regular_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (f"{tmp_path}/", "/dev/zero", "/dev/null", str(tmp_path / "pipe.yaml")):
        with pytest.raises(InvalidConfiguration, match="a policy must be a regular file"):
            load_policy(path)


def test_oversized_policy_file_is_refused_without_reading_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(InvalidConfiguration, match=r"mine\.yaml: a policy may have at most 1048576 bytes"):
        load_policy(path)


def test_invalid_policy_path_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        load_policy("./mine\0.yaml")


def test_unknown_bundled_policy_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        load_policy("defualt")
    assert 'Did you mean "default"?' in str(caught.value)
    assert "./defualt.yaml" in str(caught.value)


@pytest.mark.parametrize("path", bundled_policies().values(), ids=lambda path: path.stem)
def test_bundled_policy_means_the_same_to_both_yaml_parsers(path: Path) -> None:
    content, name = path.read_bytes(), str(path)
    assert parse_policy(content, name, xids={}, bundled=True) == parse_policy(content, name, xids={})
