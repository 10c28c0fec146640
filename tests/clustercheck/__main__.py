"""``python -m tests.clustercheck``, or ``make cluster-check``: run the scenarios, print the table, write the report."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from rich.console import Console

from scrubber import __version__
from tests.clustercheck.api import ApiError, ApiServer, CannotStart, Forbidden
from tests.clustercheck.check import ClusterCheck, Waiting, delete_leftovers
from tests.clustercheck.manifests import PodSettings
from tests.clustercheck.placement import find_placement
from tests.clustercheck.report import ExitCode, Report, Result, print_table
from tests.clustercheck.scenarios import SCENARIOS, Scenario

_PREFIX = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_DEFAULT_PREFIX = "scrubber-check"
_WIDTH = 200
"""Columns of the table where there is no terminal."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived."""


@dataclass(slots=True)
class Signals:
    """Ends the check at the first signal; while it cleans up, only the second one ends that."""

    received: int = 0
    cleaning_up: bool = False

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.received = bool(self.received), number
        if again or not self.cleaning_up:
            raise Interrupted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cluster-check",
        description="Check on a cluster what a tenant finds of the tenant that had the device before.",
        epilog="Exit codes: 0 nothing was found, 1 a secret was found, 2 the check could not start or lacks a permission, "
        "3 a scenario is incomplete. See docs/cluster-check.md.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--resource", default="", help="extended resource that pods request, such as nvidia.com/gpu")
    what.add_argument("--device-class", default="", help="device class that pods claim, such as gpu.scrubber.dev")
    parser.add_argument(
        "--kubeconfig", default=os.environ.get("KUBECONFIG", ""), help="kubeconfig file (default: KUBECONFIG)"
    )
    parser.add_argument("--image", default=f"scrubber:{__version__}", help="image with python3 (default: %(default)s)")
    parser.add_argument("--namespace-prefix", default=_DEFAULT_PREFIX, help="default: %(default)s")
    parser.add_argument("--node", default="", help="node (default: the one with the fewest devices)")
    parser.add_argument("--runtime-class", default="", help="RuntimeClass of the pods (default: the cluster's)")
    parser.add_argument(
        "--pull-secret-file",
        type=Path,
        help="Docker configuration file (config.json) with credentials for the image; they are copied into the check's own "
        "namespaces",
    )
    parser.add_argument("--report", type=Path, default=Path("cluster-check.json"), help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each step of a pod (default: 300)")
    parser.add_argument("--poll", type=float, default=0.5, help="seconds between two requests (default: 0.5)")
    parser.add_argument("--memory-limit", type=int, default=2048, help="MiB; of the pod that runs out (default: 2048)")
    parser.add_argument(
        "--scenario", action="append", choices=[each.name for each in SCENARIOS], help="repeatable; default: all"
    )
    return parser


def _check_arguments(options: argparse.Namespace) -> Path:
    """Return the kubeconfig file.

    Raises:
        CannotStart: an argument is missing or wrong.
    """
    if not (options.resource or options.device_class):
        raise CannotStart("Set RESOURCE (such as nvidia.com/gpu) or DEVICE_CLASS (such as gpu.scrubber.dev).")
    if options.resource and "/" not in options.resource:
        raise CannotStart(f"The resource {options.resource!r} is no extended resource, such as nvidia.com/gpu.")
    if not options.kubeconfig:
        raise CannotStart("Set KUBECONFIG to a kubeconfig file. The check reads no default file.")
    if os.pathsep in options.kubeconfig:
        raise CannotStart("KUBECONFIG names several files; name one.")
    if not _PREFIX.fullmatch(options.namespace_prefix):
        raise CannotStart(
            f"The namespace prefix {options.namespace_prefix!r} must be 1 to 40 lower-case letters, digits and hyphens, "
            "begin with a letter and not end with a hyphen."
        )
    if not (options.timeout > 0 and options.poll > 0 and options.memory_limit > 0):
        raise CannotStart("The timeout, the polling interval and the memory limit must be positive.")
    return Path(options.kubeconfig)


def _pull_secret(path: Path | None) -> str:
    """Return the content of the file with the credentials for the image; empty without one.

    Raises:
        CannotStart: it cannot be read, or contains no credentials.
    """
    if path is None:
        return ""
    try:
        text = path.read_text(encoding="utf-8")
        registries = json.loads(text).get("auths")
    except OSError as error:
        raise CannotStart(f"The pull secret file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, AttributeError) as error:
        raise CannotStart(f"The pull secret file {path} is no Docker configuration file (JSON with auths).") from error
    if not isinstance(registries, dict) or not any(isinstance(each, dict) and each for each in registries.values()):
        raise CannotStart(
            f"The pull secret file {path} has no credentials under auths; where a credential helper keeps them, write them "
            "with kubectl create secret docker-registry --dry-run=client."
        )
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return the exit code."""
    options = _parser().parse_args(arguments)
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    signals = Signals()
    signals.install()
    report = Report(secrets.token_hex(3), __version__, options.image, datetime.now(UTC))
    scenarios = [each for each in SCENARIOS if options.scenario is None or each.name in options.scenario]
    try:
        _run(options, scenarios, report, signals, errors)
    except CannotStart as error:
        errors.print(f"cluster-check: {error}")
        return ExitCode.CANNOT_START
    except Forbidden as error:
        errors.print(f"cluster-check: a permission is missing: {error} (docs/cluster-check.md lists all of them).")
        code = ExitCode.CANNOT_START
    except ApiError as error:
        errors.print(f"cluster-check: {error}")
        code = ExitCode.CANNOT_START
    except Interrupted:
        report.interrupted = True
        code = 128 + signals.received
    else:
        code = report.exit_code
    report.finished_at = datetime.now(UTC)
    if any(each.result is Result.FOUND for each in report.scenarios):
        code = ExitCode.FOUND
    if report.scenarios:
        width = None if sys.stdout.isatty() else _WIDTH
        print_table(report, Console(width=width, soft_wrap=True))
    if report.remaining:
        errors.print(f"Not deleted: the namespaces {', '.join(report.remaining)}. The next run with this prefix does.")
    try:
        options.report.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        errors.print(f"cluster-check: the report {options.report} cannot be written: {error.strerror}.")
        return code or ExitCode.INCOMPLETE
    errors.print(f"Report: {options.report}")
    return code


def _run(
    options: argparse.Namespace, scenarios: Sequence[Scenario], report: Report, signals: Signals, errors: Console
) -> None:
    kubeconfig, credentials = _check_arguments(options), _pull_secret(options.pull_secret_file)
    api = ApiServer(kubeconfig)
    waiting = Waiting(options.timeout, options.poll)
    placement = find_placement(api, resource=options.resource, device_class=options.device_class, node=options.node)
    report.path, report.node = placement.path.value, placement.node
    report.resource, report.device_class = placement.resource, placement.device_class
    report.driver = placement.driver_version
    report.server_version = str(api.get("/version").get("gitVersion", ""))
    try:
        report.leftovers = delete_leftovers(api, options.namespace_prefix, waiting)
    except TimeoutError as error:
        raise CannotStart(f"Namespaces of an earlier run remain: {error}.") from error
    if report.leftovers:
        errors.print(f"Deleted what an earlier run had left: the namespaces {', '.join(report.leftovers)}.")
    settings = PodSettings(options.image, placement, options.runtime_class, options.memory_limit << 20, credentials)
    check = ClusterCheck(api, settings, report, prefix=options.namespace_prefix, waiting=waiting, progress=errors.print)
    errors.print(f"Node {placement.node_name}, {placement.devices} device(s), through {placement.path.value}.")
    try:
        check.create()
        for each in scenarios:
            check.run(each)
    finally:
        signals.cleaning_up = True
        check.clean_up()
        api.close()


if __name__ == "__main__":
    sys.exit(main())
