"""The inhibition rules in a real Alertmanager: which alerts are silenced by which, and that a broken guarantee never is."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from scripts.gen_rules import INHIBITION, RULES
from tests.dashboards.prometheus import POSSIBLE, alertmanager
from tests.pods import only_with
from tests.ports import free_port

_DEADLINE: Final = 60.0
_HOST: Final = "127.0.0.1"

_TEMPLATES: Final = Path("/usr/share/prometheus/alertmanager/default.tmpl")
"""Alertmanager reads its templates here, wherever its program is."""

Alert = Mapping[str, str]

SEVERITIES: Final[Mapping[str, str]] = {
    rule["alert"]: rule["labels"]["severity"]
    for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
GUARANTEES: Final = re.findall(
    r"- alert: (\w+)", (RULES / "alerts.yaml").read_text().partition("critical: a guarantee")[2].partition("# -- ")[0]
)


def with_share(share: Path) -> list[str]:
    """Return the beginning of a command that sees the files of ``share`` also in ``/usr/share``."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = 'mount -t overlay overlay -o "lowerdir=$0:/usr/share" /usr/share && exec "$@"'
    return ["unshare", *user, "--mount", "--propagation", "private", "sh", "-c", mount, str(share)]


def _can_mount() -> bool:
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run([*with_share(Path("/usr/lib")), "true"], capture_output=True, check=False).returncode
    )


RUNS: Final = POSSIBLE and (_TEMPLATES.exists() or _can_mount())
if not RUNS:
    print(
        "NOT TESTED HERE: the inhibition rules with a real Alertmanager (no overlay can be mounted)",
        file=sys.__stderr__,
    )


class Alertmanager:
    """A real Alertmanager on loopback, alone."""

    def __init__(self, directory: Path) -> None:
        configuration = {
            "route": {"receiver": "nowhere"},
            "receivers": [{"name": "nowhere"}],
            **yaml.safe_load(INHIBITION.read_text()),
        }
        (directory / "alertmanager.yml").write_text(yaml.safe_dump(configuration))
        self._port = free_port()
        self._log = directory / "alertmanager.log"
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    *([] if _TEMPLATES.exists() else with_share(alertmanager().parents[1] / "share")),
                    alertmanager(),
                    f"--config.file={directory / 'alertmanager.yml'}",
                    f"--storage.path={directory / 'data'}",
                    f"--web.listen-address={_HOST}:{self._port}",
                    "--cluster.listen-address=",
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(_DEADLINE)

    def silenced(self, *alerts: Alert) -> list[Alert]:
        """Send alerts, and return those that others silence."""
        end = time.monotonic() + _DEADLINE
        while not self._ready():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, self._log.read_text()
            time.sleep(0.05)
        firing = [{"labels": {**each, "severity": SEVERITIES[each["alertname"]]}} for each in alerts]
        assert self._call("POST", "/api/v2/alerts", firing)[0] == http.HTTPStatus.OK
        # One alert of each test silences others, from the moment that one of them is silenced.
        while not any(each["status"]["inhibitedBy"] for each in self._alerts()):
            assert time.monotonic() < end, self._alerts()
            time.sleep(0.05)
        found = self._alerts()
        assert len(found) == len(alerts)
        silenced = [each["labels"] for each in found if each["status"]["inhibitedBy"]]
        return [each for each in alerts if any(each.items() <= labels.items() for labels in silenced)]

    def _alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._call("GET", "/api/v2/alerts")[1])
        return found

    def _ready(self) -> bool:
        try:
            return self._call("GET", "/-/ready")[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def _call(self, method: str, path: str, content: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_DEADLINE)
        try:
            body = None if content is None else json.dumps(content)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture(name="manager")
def _manager(tmp_path: Path) -> Iterator[Alertmanager]:
    manager = Alertmanager(tmp_path)
    yield manager
    manager.close()


def alert(name: str, **labels: str) -> Alert:
    return {"alertname": f"Scrubber{name}", "cluster": "west", "instance": "a", **labels}


@only_with(RUNS)
def test_node_that_is_down_silences_its_own_alerts_only_and_no_broken_guarantee(manager: Alertmanager) -> None:
    others = sorted(SEVERITIES.keys() - {*GUARANTEES, "ScrubberNodeDown"})
    of_node = [alert(name.removeprefix("Scrubber"), device="GPU-1") for name in others]
    kept = [
        alert("NodeDown"),
        *(alert(name.removeprefix("Scrubber")) for name in GUARANTEES),
        alert("DeviceHeld", cluster="east", device="GPU-1"),
        alert("DeviceHeld", instance="b", device="GPU-1"),
        {"alertname": "ScrubberTenantCausesQuarantines", "cluster": "west", "tenant": "team-x"},
    ]
    assert len(GUARANTEES) == 5
    assert manager.silenced(*kept, *of_node) == of_node


@only_with(RUNS)
def test_service_that_is_down_silences_the_warnings_of_its_node(manager: Alertmanager) -> None:
    kept = [
        alert("ServiceDown"),
        alert("UnauthorizedUse"),
        alert("PluginNotRegistered"),
        alert("BreakGlassActive", cluster="east", device="GPU-1"),
    ]
    silenced = [alert("BreakGlassActive", device="GPU-1"), alert("ObserveOnly")]
    assert manager.silenced(*kept, *silenced) == silenced


@only_with(RUNS)
def test_stuck_driver_silences_the_other_alerts_of_its_device(manager: Alertmanager) -> None:
    kept = [alert("DriverTimeout", device="GPU-1"), alert("DeviceHeld", device="GPU-2")]
    silenced = [alert("DeviceNeedsOperator", device="GPU-1")]
    assert manager.silenced(*kept, *silenced) == silenced


@only_with(RUNS)
def test_node_without_a_cluster_label_silences_its_alerts(manager: Alertmanager) -> None:
    """In a single cluster, no alert has the label."""
    down, held = ({"alertname": f"Scrubber{name}", "instance": "a"} for name in ("NodeDown", "DeviceHeld"))
    assert manager.silenced(down, held) == [held]
