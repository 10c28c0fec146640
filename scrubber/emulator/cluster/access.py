"""Who may do what: accounts with the rules of their roles, and the fine-grained checks of claim status writes.

Promise: a request that the rules of an account do not allow is refused as by RBAC, with 403 and a message that names
user, verb and resource; a write to a claim's status that lacks one of the synthetic permissions of Kubernetes 1.36 is
refused with 422, as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scrubber.emulator.cluster.resources import CLAIMS, Json, ResourceType
from scrubber.emulator.cluster.status import FieldError, StatusError
from scrubber.emulator.cluster.validation import result_key

ALL_RULES: tuple[Json, ...] = ({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},)


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the API. ``rules`` are those of its roles, as in a ClusterRole."""

    name: str
    rules: Sequence[Mapping[str, Any]] = ALL_RULES
    node: str = ""
    """The node of the pod that the token of a service account is bound to; empty without."""

    def allows(self, verb: str, group: str, resource: str, name: str = "") -> bool:
        """Whether a rule allows ``verb`` on ``resource``, which includes a subresource: ``resourceclaims/status``."""
        return any(
            _covers(rule.get("verbs"), verb)
            and _covers(rule.get("apiGroups"), group)
            and _covers(rule.get("resources"), resource)
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self.rules
        )

    def require(self, verb: str, kind: ResourceType, subresource: str, name: str, namespace: str) -> None:
        """Check that the request is allowed.

        Raises:
            StatusError: 403, it is not.
        """
        resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
        if self.allows(verb, kind.group, resource, name):
            return
        scope = f'in the namespace "{namespace}"' if kind.namespaced and namespace else "at the cluster scope"
        subject = f'{kind.qualified} "{name}"' if name else kind.qualified
        raise StatusError(
            403,
            "Forbidden",
            f'{subject} is forbidden: User "{self.name}" cannot {verb} resource "{resource}" in API group '
            f'"{kind.group}" {scope}',
        )


ADMIN = Account("kubernetes-admin")
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def review_access(account: Account, review: Json) -> Json:
    """Return a SelfSubjectAccessReview with its answer; every account may ask."""
    asked = (review.get("spec") or {}).get("resourceAttributes")
    if not isinstance(asked, Mapping):
        raise StatusError(422, "Invalid", "spec.resourceAttributes: Required value")
    parts = [asked.get("resource") or "", *filter(None, [asked.get("subresource")])]
    allowed = account.allows(
        asked.get("verb") or "", asked.get("group") or "", "/".join(parts), asked.get("name") or ""
    )
    return {**review, "status": {"allowed": allowed}}


def _covers(listed: Sequence[str] | None, value: str) -> bool:
    return listed is not None and ("*" in listed or value in listed)


def missing_status_permissions(account: Account, verb: str, item: Json, before: Json) -> list[FieldError]:
    """Return what ``account`` lacks for a change of a claim's status, beside ``resourceclaims/status``.

    Entries of ``status.devices`` need ``associated-node:<verb>`` or ``arbitrary-node:<verb>`` on
    ``resourceclaims/driver`` for their driver; the former counts on the account's own node only. Changes of
    ``allocation`` and ``reservedFor`` need ``<verb>`` on ``resourceclaims/binding``.
    """
    return list(_missing(account, verb, item.get("status") or {}, before.get("status") or {}))


def _missing(account: Account, verb: str, status: Json, old: Json) -> Iterator[FieldError]:
    for key in ("allocation", "reservedFor"):
        changed = (status.get(key) or None) != (old.get(key) or None)
        if changed and not account.allows(verb, CLAIMS.group, "resourceclaims/binding"):
            yield _forbidden(f"status.{key}", account, verb, "resourceclaims/binding", "")
    after, before = _by_key(status), _by_key(old)
    drivers = {key[0] for key in after.keys() | before.keys() if after.get(key) != before.get(key)}
    allocation = status.get("allocation") or old.get("allocation") or {}
    for driver in sorted(drivers):
        own_node = account.node and allocated_node(allocation) == account.node
        scopes = ("associated-node", "arbitrary-node") if own_node else ("arbitrary-node",)
        if not any(
            account.allows(f"{scope}:{verb}", CLAIMS.group, "resourceclaims/driver", driver) for scope in scopes
        ):
            yield _forbidden("status.devices", account, f"{scopes[0]}:{verb}", "resourceclaims/driver", driver)


def _by_key(status: Json) -> dict[tuple[str, str, str, str], Json]:
    return {result_key(each): each for each in status.get("devices") or []}


def _forbidden(field: str, account: Account, verb: str, resource: str, name: str) -> FieldError:
    subject = f' "{name}"' if name else ""
    message = (
        f'Forbidden: User "{account.name}" cannot {verb} resource "{resource}"{subject} in API group "{CLAIMS.group}"'
    )
    return FieldError(field, "FieldValueForbidden", message)


def allocated_node(allocation: Mapping[str, Any]) -> str | None:
    """Return the node that an allocation is bound to: its selector is one term with one field, that node's name."""
    terms = (allocation.get("nodeSelector") or {}).get("nodeSelectorTerms") or []
    if len(terms) != 1 or terms[0].get("matchExpressions") or len(terms[0].get("matchFields") or []) != 1:
        return None
    (field,) = terms[0]["matchFields"]
    single = field.get("key") == "metadata.name" and field.get("operator") == "In" and len(field.get("values", [])) == 1
    return str(field["values"][0]) if single else None
