"""Every check of ``scrubber doctor``, and how they run: a file system that hangs costs one check, and nothing else.

A check is a function of :class:`CheckContext` in :data:`CHECKS`; to add one, write it in this package, list it there,
and document its purpose in docs/node-setup.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from scrubber.doctor.cgroups import cgroups
from scrubber.doctor.container_runtime import cdi_annotations, nri_annotations, toolkit
from scrubber.doctor.dra import dra_binding, dra_cdi, dra_cluster, dra_devices, dra_driver, dra_restarts
from scrubber.doctor.gpu_operator import (
    config_manager,
    deploy_label,
    driver_mounts,
    driver_root,
    mig_manager,
    nvsentinel_yield,
    operator_validations,
    runtime_class,
)
from scrubber.doctor.gpus import (
    confidential_computing,
    device_nodes,
    driver,
    persistenced,
    scrub_on_free,
    unauthorized_use,
)
from scrubber.doctor.host import clock, kernel
from scrubber.doctor.infrastructure import (
    holders,
    infrastructure_accounts,
    infrastructure_agents,
    infrastructure_namespaces,
    reset_blockers,
)
from scrubber.doctor.injection import cdi_hook, injection, plugin_config_file
from scrubber.doctor.kubelet import kubelet, pid_namespace, plugins, pod_resources
from scrubber.doctor.ledger import ledger_disk, ledger_lock, signing_key, state_dir
from scrubber.doctor.libraries import bindings, driver_libraries, libraries
from scrubber.doctor.model import CheckContext, CheckFunction, CheckLevel, CheckResult, unknown_result
from scrubber.doctor.permissions import capabilities, permissions, sockets
from scrubber.doctor.platforms import platform
from scrubber.doctor.policy import policy
from scrubber.doctor.recommendation import recommendation
from scrubber.doctor.service import (
    agents_paused,
    audit_head,
    break_glass,
    breaker,
    devices,
    enforcement,
    key,
    service,
    version,
    yielded,
)

__all__ = ["CHECKS", "CHECK_TIMEOUT", "check_node", "run_checks"]

CHECK_TIMEOUT = 3.0
"""Timeout of one check, in seconds."""
_TOTAL_TIMEOUT_FACTOR = 3
"""How many timeouts all checks together may take before the rest get only a short time each."""
_MIN_TIMEOUT = 0.1


CHECKS: tuple[CheckFunction, ...] = (
    service,
    version,
    enforcement,
    devices,
    holders,
    reset_blockers,
    breaker,
    break_glass,
    yielded,
    agents_paused,
    policy,
    infrastructure_agents,
    infrastructure_namespaces,
    infrastructure_accounts,
    permissions,
    sockets,
    capabilities,
    state_dir,
    ledger_disk,
    ledger_lock,
    signing_key,
    key,
    audit_head,
    toolkit,
    cdi_annotations,
    nri_annotations,
    injection,
    cdi_hook,
    plugin_config_file,
    config_manager,
    driver_root,
    driver_mounts,
    deploy_label,
    nvsentinel_yield,
    mig_manager,
    runtime_class,
    operator_validations,
    driver,
    driver_libraries,
    bindings,
    libraries,
    device_nodes,
    unauthorized_use,
    scrub_on_free,
    persistenced,
    confidential_computing,
    kubelet,
    plugins,
    dra_driver,
    dra_binding,
    dra_cluster,
    dra_cdi,
    dra_devices,
    dra_restarts,
    pod_resources,
    pid_namespace,
    cgroups,
    kernel,
    clock,
    platform,
    recommendation,
)
"""Every check, in the order in which people read them."""


class _CheckThread:
    """Runs one check in a separate thread, which is abandoned when the check does not return."""

    def __init__(self, check: CheckFunction, node: CheckContext) -> None:
        self._check, self._node = check, node
        self._results: tuple[CheckResult, ...] = ()
        self._thread = threading.Thread(target=self._run, name=check.__name__, daemon=True)
        self._thread.start()

    def wait_for_results(self, seconds: float) -> tuple[CheckResult, ...]:
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return self._results
        message = "The check did not finish: something that it reads hangs, so its result is unknown."
        remedy = "Run dmesg and cat /proc/mounts: look for a file system or a driver that does not respond."
        return (CheckResult(self._name, CheckLevel.WARNING, message, remedy),)

    @property
    def _name(self) -> str:
        return self._check.__name__.replace("_", "-")

    def _run(self) -> None:
        try:
            self._results = tuple(self._check(self._node))
        except OSError as error:
            self._results = (unknown_result(self._name, "the result of this check is unknown", error),)
        except Exception as bug:  # noqa: BLE001 - one defective check must not hide the results of all others
            message = f"The check failed because of a bug in scrubber ({type(bug).__name__}: {bug})."
            remedy = "Report it; docs/node-setup.md explains the check."
            self._results = (CheckResult(self._name, CheckLevel.ERROR, message, remedy),)


def run_checks(
    checks: Sequence[CheckFunction], node: CheckContext, timeout: float = CHECK_TIMEOUT
) -> tuple[CheckResult, ...]:
    """Return what every check found, in their order; raises nothing.

    The checks run one after the other: they load modules, and two threads that load the same modules can find them half
    initialised.

    Args:
        timeout: seconds for each check; however many hang, all together take little more than three times as long.
    """
    due = time.monotonic() + _TOTAL_TIMEOUT_FACTOR * timeout
    found: list[CheckResult] = []
    for check in checks:
        found += _CheckThread(check, node).wait_for_results(
            max(min(timeout, due - time.monotonic()), min(_MIN_TIMEOUT, timeout))
        )
    return tuple(found)


def check_node(node: CheckContext) -> tuple[CheckResult, ...]:
    """Return what every check found about ``node``, within seconds.

    Raises nothing: a failed check is a result as well.
    """
    return run_checks(CHECKS, node)
