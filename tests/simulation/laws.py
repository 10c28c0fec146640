"""The invariants of the design, in terms of events in the cluster: bytes, processes, signals, durable rows.

A law is checked where the event happens (a process opens a device, an eraser touches a cell, a signal is sent, a row
becomes durable), so that no state of the engine can hide a breach. Breaches are collected; the test asserts that there
are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from scrubber.domain.assignment import Pod
from scrubber.domain.errors import ScrubberError
from scrubber.domain.evidence import PathKind
from scrubber.domain.handover_kind import UNCONDITIONAL_BASES, Basis
from scrubber.domain.policy import Enforcement, Policy, RequiredProof, UnauthorizedUseAction
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import ADVERTISED, Health, Hygiene
from scrubber.domain.telemetry import HolderKind
from scrubber.engine.views import DeviceView, GrantedDevice
from scrubber.ports.record import LedgerChange
from tests.simulation.erasing import Erasers, Erasing
from tests.simulation.health_laws import HealthLaws
from tests.simulation.kubelet import Kubelet, Tenant
from tests.simulation.ledger_store import LedgerStore
from tests.simulation.process_table import Gpu, Proc, ProcessTable

__all__ = ["Laws"]


# See docs/decisions/0015-generated-pod-matrix.md.
class Laws:
    """Watches one world. A test asserts that ``breaches`` is empty."""

    def __init__(
        self,
        *,
        process_table: ProcessTable,
        kubelet: Kubelet,
        erasers: Erasers,
        ledger_store: LedgerStore,
        policy: Callable[[], Policy],
        boot: Callable[[], str],
        now: Callable[[], float],
        wall: Callable[[], float],
        late: Callable[[], float],
    ) -> None:
        self._process_table = process_table
        self._kubelet = kubelet
        self._erasers = erasers
        self._ledger_store = ledger_store
        self._policy = policy
        self._boot = boot
        self._now = now
        self._wall = wall
        self._called_clean: dict[str, str] = {}
        self.requested_by_jobs: list[set[str]] = []
        self.breaches: list[str] = []
        self.health = HealthLaws(policy=policy, wall=wall, late=late, breach=self.breach)

    def breach(self, law: str, message: str) -> None:
        self.breaches.append(f"{self._now():.3f} s: {law}: {message}")

    # -- bytes and processes ---------------------------------------------------------------------------------------

    def opened(self, proc: Proc, gpu: Gpu) -> None:
        """A process opens a device: an eraser's fence breaks, and no eraser may be running on a tenant's device.

        Infrastructure that has no context passes the fence.
        """
        erasing = self._erasers.running.get(gpu.id)
        if erasing is not None and proc.agent is not HolderKind.INFRASTRUCTURE:
            erasing.fence_broken = True
            if proc.pod is not None and not self._unjudged(proc.pod):
                self.breach("5", f"{proc.label} opens {gpu.id} while eraser {erasing.pid} works on it")

    def started(self, tenant: Tenant, proc: Proc) -> None:
        """A container starts: it is alone on its devices, and no eraser is running on them."""
        if tenant.unjudged:
            return
        for device in tenant.devices:
            if device in self._erasers.running:
                self.breach("5", f"{proc.label} starts while an eraser works on {device}")
            for other in self._unauthorized_processes(device, tenant.uid):
                self.breach("4", f"{proc.label} starts on {device} while {other.label} (PID {other.pid}) lives")

    def read(self, proc: Proc, device: str) -> None:
        """A tenant reads a device: zeros, its own bytes, or what the policy permits."""
        if self._unjudged(proc.pod):
            return
        for label in set(self._process_table.read(proc, device)) - {""}:
            if not self._may_see(proc.label, label):
                self.breach("1", f"{proc.label} reads on {device} what {label} wrote")

    def _unjudged(self, uid: str | None) -> bool:
        """Return whether its pod was given a device regardless of its state: no law applies to it."""
        tenant = self._kubelet.of(uid)
        return tenant is not None and tenant.unjudged

    def _may_see(self, reader: str, writer: str) -> bool:
        if reader == writer or self._share_a_claim(reader.split("/")[1:2], writer.split("/")[1:2]):
            return True
        reader_space, reader_uid, reader_start = reader.split("/")
        writer_space, writer_uid, writer_start = writer.split("/")
        proofs = {kind.value: proof for kind, proof in self._policy().required_proofs.items()}
        if reader_uid == writer_uid and reader_start.split("#")[0] == writer_start.split("#")[0]:
            return proofs["same-container"] is RequiredProof.CHECKS
        return reader_space == writer_space and proofs["same-tenant"] is RequiredProof.CHECKS

    def _unnamed(self, tenant: Tenant) -> bool:
        """Return whether only its holding a device tells that the pod has it.

        No source named it, or no source named it as a further pod of its claim while it lived.
        """
        return tenant.unnamed or (tenant.claim is not None and tenant.pod not in self._ledger_store.claim_pods)

    def _share_a_claim(self, one: list[str], other: list[str]) -> bool:
        """Return whether pods of these UIDs have their devices by the same claim: its data is theirs."""
        tenants = [self._kubelet.of(uid) for uid in (*one, *other)]
        claims = {None if tenant is None else tenant.claim for tenant in tenants}
        return len(tenants) == 2 and len(claims) == 1 and None not in claims

    def _unauthorized_processes(self, device: str, uid: str | None) -> list[Proc]:
        """Return living processes of other pods that may use the device, except allowed infrastructure.

        A pod that no source could identify when it was granted is recognized only by holding the device.
        """
        found = []
        for proc in self._process_table.living():
            allowed = proc.agent is HolderKind.INFRASTRUCTURE
            if uid is not None and proc.pod is not None and self._share_a_claim([uid], [proc.pod]):
                continue
            if device in proc.mounted and proc.pod not in (None, uid) and not proc.sandbox and not allowed:
                tenant = self._kubelet.of(proc.pod)
                if device in proc.holds or tenant is None or not self._unnamed(tenant):
                    found.append(proc)
        return found

    # -- actions of the service ------------------------------------------------------------------------------------

    def eraser_starts(self, gpu: Gpu) -> None:
        other = self._erasers.running.get(gpu.id)
        if other is not None:
            self.breach("3", f"an eraser starts on {gpu.id} while eraser {other.pid} works on it")
        record = self._ledger_store.records[gpu.id]
        if record.hygiene is not Hygiene.SCRUBBING:
            self.breach("2", f"an eraser starts on {gpu.id} while the ledger says {record.hygiene.value}")

    def eraser_works(self, erasing: Erasing) -> None:
        for proc in self._unauthorized_processes(erasing.gpu.id, None):
            if self._starts_on_what_is_not_known(proc, erasing.gpu.id):
                continue
            self.breach("5", f"{erasing.gpu.id} is cleared while {proc.label} (PID {proc.pid}) lives")

    def _starts_on_what_is_not_known(self, proc: Proc, device: str) -> bool:
        """Return whether the device is cleared for the pod of ``proc`` itself, with an unknown last container.

        The service was killed between the grant and the start. Then holders alone decide.
        """
        tenant, last = self._kubelet.of(proc.pod), self._ledger_store.records[device].last_grant
        unseen = last is not None and last.pod is not None and last.pod.uid == proc.pod and not last.cgroups
        return unseen and tenant is not None and tenant.waiting and device not in proc.holds

    def resets(self, gpu: Gpu) -> None:
        self.health.resets(gpu)
        for proc in self._process_table.holders(gpu.id):
            self.breach("5", f"{gpu.id} is reset while {proc.label} (PID {proc.pid}) holds it")

    def signalled(self, pod: Pod, proc: Proc) -> None:
        """A leftover is proved: its pod is gone, and its container's first process dead or the grace period over."""
        tenant = self._kubelet.of(proc.pod)
        if (
            tenant is not None
            and proc.holds - set(tenant.devices)
            and self._policy().unauthorized_use is UnauthorizedUseAction.KILL
        ):
            return  # it has a device that is not its pod's, and the policy decides what follows
        if tenant is None or tenant.pod != pod:
            self.breach("5", f"PID {proc.pid} is signalled as {pod}'s and is not")
            return
        if tenant.gone_since is None and not (tenant.claim is not None and tenant.complete):
            self.breach("5", f"PID {proc.pid} of {proc.label} is signalled while the kubelet has its pod")
            return
        same_start = (each for each in self._process_table.living(proc.pod) if each.container == proc.container)
        gone_since = self._now() if tenant.gone_since is None else tenant.gone_since
        grace_over = self._now() - gone_since >= self._policy().limits.leftover_grace_period
        if any(each.first for each in same_start) and not grace_over:
            self.breach("5", f"PID {proc.pid} of {proc.label} is signalled within its grace")

    def service_starts(self) -> None:
        """What the previous service recorded as clean has not been watched since."""
        self._called_clean.clear()

    # -- durable rows ----------------------------------------------------------------------------------------------

    def stored(self, change: LedgerChange) -> None:
        """All or none, in one transaction; never a device that is out of service; clean means zeros."""
        self.health.stored(change)
        unjudged = {device for device, grant in change.grants if grant.basis in UNCONDITIONAL_BASES}
        new = {device for device, grant in change.grants if grant.basis is not Basis.ADOPTED}
        if new and new not in self.requested_sets():
            self.breach("4", f"{sorted(new)} were granted together without a request")
        for record in change.records:
            if record.device in new and record.health not in ADVERTISED and record.device not in unjudged:
                self.breach("1", f"{record.device} was granted while {record.health.value}")
            if record.device in unjudged:
                self._may_be_unjudged(record)
            if record.device in new and record.hygiene is not Hygiene.IN_USE:
                self.breach("2", f"{record.device} was granted and the ledger says {record.hygiene.value}")
            gpu = self._process_table.gpus[record.device]
            # Users of a device that fell off the bus cannot be identified; it is certified again before it is
            # advertised.
            if record.hygiene is Hygiene.CLEAN and not gpu.lost and not self._may_be_called_clean(gpu, record):
                self.breach("6", f"{record.device} is called clean and holds {gpu.cells}")
            if record.hygiene is Hygiene.CLEAN and record.certificate is not None:
                self._called_clean[record.device] = record.certificate.id
            else:
                self._called_clean.pop(record.device, None)  # its earlier proof is void
        for certificate in change.certificates:
            if not certificate.not_covered:
                self.breach("6", f"{certificate.id} does not say what it left out")

    def requested_sets(self) -> list[set[str]]:
        """Return the sets of devices that the kubelet or a job requests together."""
        return [set(tenant.devices) for tenant in self._kubelet.tenants] + self.requested_by_jobs

    def _may_be_called_clean(self, gpu: Gpu, record: DeviceRecord) -> bool:
        """Return whether it contains zeros, or was certified by this service before an unnoticed write by the host."""
        written = set(gpu.cells) - {""}
        known = record.certificate is not None and self._called_clean.get(gpu.id) == record.certificate.id
        return not written or (known and all(each.startswith("host/") for each in written))

    def _may_be_unjudged(self, record: DeviceRecord) -> None:
        """Unconditional grants require an observing policy, or an active break-glass override by an operator."""
        policy, override = self._policy(), record.break_glass
        observed = Enforcement.OBSERVE in {each.enforcement for each in (policy, *_overrides(policy))}
        if not observed and (override is None or self._wall() >= override.until):
            self.breach("1", f"{record.device} is granted without an override while {record.health.value}")
        if record.quarantined_by_operator and record.health is Health.QUARANTINED:
            self.breach("1", f"{record.device} is granted although a person took it out")

    def granted(self, tenant: Tenant, answer: tuple[GrantedDevice, ...]) -> None:
        """PreStart is answered: the grant is in the ledger already, and so is everything on which it is based."""
        if tuple(each.device for each in answer) != tenant.devices:
            self.breach("4", f"{tenant.devices} were requested and {answer} granted")
        for each in answer:
            self._one_granted(tenant, each)

    def _one_granted(self, tenant: Tenant, answer: GrantedDevice) -> None:
        device = answer.device
        record, grant = self._ledger_store.records[device], self._ledger_store.grants.get((device, answer.grant))
        last = record.last_grant
        if grant is not None and grant.claim is not None:
            # Its pods may be others since, and one that joined unseen was adopted beside it.
            held = next((each for each in record.open_grants if each.sequence == grant.sequence), None)
            last = held and replace(held, claim=grant.claim)
        if grant is None or last != grant or record.hygiene is not Hygiene.IN_USE:
            self.breach("2", f"{device} is answered as granted and the ledger does not say so")
            return
        if grant.pod is not None and grant.pod != tenant.pod:
            self.breach("2", f"{device} is granted to {grant.pod} and {tenant.pod} starts")
        fast = self._ledger_store.certificates.get(grant.certificate or "")
        if fast is None or fast.next_grant != grant.sequence or fast.boot != self._boot():
            self.breach("1", f"{device}: grant {grant.sequence} has no certificate of its own")
            return
        if grant.basis in UNCONDITIONAL_BASES:
            return
        if grant.basis is not Basis.CERTIFICATE:
            allowed = (
                grant.basis == grant.kind.value and self._policy().required_proof(grant.kind) is RequiredProof.CHECKS
            )
            if not allowed:
                self.breach("1", f"{device}: the policy names no exception {grant.basis}")
            return
        slow = self._ledger_store.certificates.get(fast.rests_on or "")
        if (
            slow is None
            or slow.path is not PathKind.SLOW
            or (slow.previous_grant, slow.next_grant) != (grant.sequence - 1, grant.sequence)
            or slow.boot != self._boot()
            or slow.policy_digest not in _digests(self._policy())
        ):
            self.breach("1", f"{device}: grant {grant.sequence} rests on {slow}, which is not of its time")

    def claim_released(self, uid: str, devices: Iterable[str], withheld: Iterable[str]) -> None:
        """Unprepare succeeded: its devices are clean, or have another grant or none since, or are out of service."""
        for device in set(devices) - set(withheld):
            record = self._ledger_store.records[device]
            if record.boot != self._boot():
                continue  # of a device that has left the node: the claims of an earlier boot are forgotten
            if record.claim(uid) is not None and self._policy().enforcement is not Enforcement.OBSERVE:
                self.breach("dra", f"{device} is {record.state} with a grant of {uid}, which was unprepared")

    def refused(self, error: ScrubberError) -> None:
        """A pod's status names device, state and scrub, never another tenant, namespace, process or command."""
        forbidden = {"PID", "python"}
        for tenant in self._kubelet.tenants:
            forbidden |= {tenant.pod.namespace, tenant.pod.name, tenant.uid}
        named = [word for word in forbidden if word in error.public_message]
        if named or not error.public_message.strip():
            self.breach("7", f"the refusal {error.public_message!r} names {named}")

    # -- between any two steps -------------------------------------------------------------------------------------

    def at_rest(self, in_memory: dict[str, int], stored: dict[str, int], views: Iterable[DeviceView]) -> None:
        """The engine's state is never newer than the ledger, and nothing out of service is advertised.

        Args:
            believed, stored: version of each device's record.
            views: the node's views of its devices.
        """
        self.health.offered(views)
        for device, version in in_memory.items():
            if version > stored.get(device, 0):
                self.breach("2", f"{device}: version {version} is believed and {stored.get(device, 0)} stored")


def _overrides(policy: Policy) -> Iterable[Policy]:
    return (each.policy for each in policy.overrides)


def _digests(policy: Policy) -> set[str]:
    """Return the digests of the node's policy and its overrides; an observing one accepts both of its own."""
    everyone = (policy, *_overrides(policy))
    return {digest for each in everyone for digest in (each.digest, each.proof_digest)}
