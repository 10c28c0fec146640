"""What took devices out of service, whose doing it was, and who used a device without a grant."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter

from scrubber.adapters.journal.labels import CAUSES, OTHER, cause_class, one_of
from scrubber.adapters.journal.page import Page
from scrubber.domain.health import OPERATOR
from scrubber.ports.journal import Event

__all__ = ["MOST_TENANTS", "Quarantines"]

MOST_TENANTS: Final = 64
"""Tenants that are counted by name in the life of one service: each is a series, and namespaces come and go."""
_MOST_INNOCENT: Final = 32
"""Tenants that have a series, at 0, from their first grant: the first quarantine of a tenant is seen as a step then. The rest
of the names is kept for those who cause one."""

_USES = frozenset({"stranger", "unannounced", "foreign-assignment"})


class Quarantines:
    """The metrics of what went wrong."""

    def __init__(self, page: Page) -> None:
        self._quarantines = Counter(
            "scrubber_quarantines", "Devices taken out of service.", ("cause_class",), registry=page.counted
        )
        self._ungranted = Counter(
            "scrubber_ungranted_uses",
            "Uses of devices without a grant: of a stranger, unannounced by the kubelet, assigned by another plugin.",
            ("use",),
            registry=page.counted,
        )
        self._by_tenant = Counter(
            "scrubber_tenant_quarantines",
            "Devices taken out of service while one tenant had them, by tenant.",
            ("tenant_namespace",),
            registry=page.counted,
        )
        self._tenants: set[str] = set()
        for cause in sorted(CAUSES | {OTHER}):
            self._quarantines.labels(cause)
        for use in sorted(_USES | {OTHER}):
            self._ungranted.labels(use)

    def quarantined(self, event: Event) -> None:
        """A person's quarantine is counted by :meth:`by_a_person` alone."""
        if event.fields.get("cause") != OPERATOR:
            self._quarantines.labels(cause_class(event.fields.get("cause"))).inc()
            self.blamed(event)

    def by_a_person(self, event: Event) -> None:
        self._quarantines.labels(OPERATOR).inc()

    def granted(self, event: Event) -> None:
        tenant = _tenant(event)
        if tenant and len(self._tenants) < _MOST_INNOCENT:
            self._tenants.add(tenant)
            self._by_tenant.labels(tenant)

    def blamed(self, event: Event) -> None:
        tenant = _tenant(event)
        if not tenant:
            return
        if len(self._tenants) < MOST_TENANTS:
            self._tenants.add(tenant)
        self._by_tenant.labels(tenant if tenant in self._tenants else OTHER).inc()

    def used(self, event: Event) -> None:
        self._ungranted.labels(one_of(_USES, event.fields.get("use"))).inc()


def _tenant(event: Event) -> str:
    tenant = event.fields.get("tenant_namespace")
    return tenant.encode(errors="replace").decode() if isinstance(tenant, str) else ""
