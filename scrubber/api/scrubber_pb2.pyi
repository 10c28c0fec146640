from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Access(_message.Message):
    __slots__ = ("kind", "host_path", "container_path")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HOST_PATH_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_PATH_FIELD_NUMBER: _ClassVar[int]
    kind: str
    host_path: str
    container_path: str
    def __init__(self, kind: _Optional[str] = ..., host_path: _Optional[str] = ..., container_path: _Optional[str] = ...) -> None: ...

class SnapshotDevice(_message.Message):
    __slots__ = ("id", "index", "advertised", "certified", "scrubbing", "state", "numa_node", "peers", "parent", "access", "refusal", "profile", "pci_address", "withheld", "model", "memory_bytes", "driver_version", "taints", "binding")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADVERTISED_FIELD_NUMBER: _ClassVar[int]
    CERTIFIED_FIELD_NUMBER: _ClassVar[int]
    SCRUBBING_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    PCI_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TAINTS_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    id: str
    index: str
    advertised: bool
    certified: bool
    scrubbing: bool
    state: str
    numa_node: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    parent: str
    access: _containers.RepeatedCompositeFieldContainer[Access]
    refusal: str
    profile: str
    pci_address: str
    withheld: bool
    model: str
    memory_bytes: int
    driver_version: str
    taints: _containers.RepeatedCompositeFieldContainer[DeviceTaint]
    binding: str
    def __init__(self, id: _Optional[str] = ..., index: _Optional[str] = ..., advertised: _Optional[bool] = ..., certified: _Optional[bool] = ..., scrubbing: _Optional[bool] = ..., state: _Optional[str] = ..., numa_node: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., parent: _Optional[str] = ..., access: _Optional[_Iterable[_Union[Access, _Mapping]]] = ..., refusal: _Optional[str] = ..., profile: _Optional[str] = ..., pci_address: _Optional[str] = ..., withheld: _Optional[bool] = ..., model: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., driver_version: _Optional[str] = ..., taints: _Optional[_Iterable[_Union[DeviceTaint, _Mapping]]] = ..., binding: _Optional[str] = ...) -> None: ...

class DeviceTaint(_message.Message):
    __slots__ = ("reason", "evicts")
    REASON_FIELD_NUMBER: _ClassVar[int]
    EVICTS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    evicts: bool
    def __init__(self, reason: _Optional[str] = ..., evicts: _Optional[bool] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("plugin",)
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    plugin: str
    def __init__(self, plugin: _Optional[str] = ...) -> None: ...

class PodNotice(_message.Message):
    __slots__ = ("namespace", "name", "uid", "devices", "reason", "message", "since", "evict")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    message: str
    since: float
    evict: bool
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., since: _Optional[float] = ..., evict: _Optional[bool] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("version", "devices", "ready", "epoch", "envvar_refused", "notices", "yielded", "agent_pause", "service_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENVVAR_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    YIELDED_FIELD_NUMBER: _ClassVar[int]
    AGENT_PAUSE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    devices: _containers.RepeatedCompositeFieldContainer[SnapshotDevice]
    ready: bool
    epoch: str
    envvar_refused: bool
    notices: _containers.RepeatedCompositeFieldContainer[PodNotice]
    yielded: str
    agent_pause: AgentPause
    service_version: str
    def __init__(self, version: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[SnapshotDevice, _Mapping]]] = ..., ready: _Optional[bool] = ..., epoch: _Optional[str] = ..., envvar_refused: _Optional[bool] = ..., notices: _Optional[_Iterable[_Union[PodNotice, _Mapping]]] = ..., yielded: _Optional[str] = ..., agent_pause: _Optional[_Union[AgentPause, _Mapping]] = ..., service_version: _Optional[str] = ...) -> None: ...

class AgentPause(_message.Message):
    __slots__ = ("id", "way", "device_ids", "ending", "changes", "since", "message", "driver_closed")
    ID_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DRIVER_CLOSED_FIELD_NUMBER: _ClassVar[int]
    id: str
    way: str
    device_ids: _containers.RepeatedScalarFieldContainer[str]
    ending: bool
    changes: _containers.RepeatedCompositeFieldContainer[LabelChange]
    since: float
    message: str
    driver_closed: bool
    def __init__(self, id: _Optional[str] = ..., way: _Optional[str] = ..., device_ids: _Optional[_Iterable[str]] = ..., ending: _Optional[bool] = ..., changes: _Optional[_Iterable[_Union[LabelChange, _Mapping]]] = ..., since: _Optional[float] = ..., message: _Optional[str] = ..., driver_closed: _Optional[bool] = ...) -> None: ...

class LabelChange(_message.Message):
    __slots__ = ("key", "before", "during")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    DURING_FIELD_NUMBER: _ClassVar[int]
    key: str
    before: str
    during: str
    def __init__(self, key: _Optional[str] = ..., before: _Optional[str] = ..., during: _Optional[str] = ...) -> None: ...

class PauseOffer(_message.Message):
    __slots__ = ("way", "actions")
    WAY_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    way: str
    actions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, way: _Optional[str] = ..., actions: _Optional[_Iterable[str]] = ...) -> None: ...

class AgentPauseReport(_message.Message):
    __slots__ = ("offers", "pause_id", "changes", "state", "message")
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_ID_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    offers: _containers.RepeatedCompositeFieldContainer[PauseOffer]
    pause_id: str
    changes: _containers.RepeatedCompositeFieldContainer[LabelChange]
    state: str
    message: str
    def __init__(self, offers: _Optional[_Iterable[_Union[PauseOffer, _Mapping]]] = ..., pause_id: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[LabelChange, _Mapping]]] = ..., state: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class AgentPauseReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("device_ids", "resource")
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    device_ids: _containers.RepeatedScalarFieldContainer[str]
    resource: str
    def __init__(self, device_ids: _Optional[_Iterable[str]] = ..., resource: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("scrubs_started",)
    SCRUBS_STARTED_FIELD_NUMBER: _ClassVar[int]
    scrubs_started: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, scrubs_started: _Optional[_Iterable[str]] = ...) -> None: ...

class HandOverRequest(_message.Message):
    __slots__ = ("device_ids", "wait_seconds", "unreserved_ids", "resource")
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNRESERVED_IDS_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    device_ids: _containers.RepeatedScalarFieldContainer[str]
    wait_seconds: float
    unreserved_ids: _containers.RepeatedScalarFieldContainer[str]
    resource: str
    def __init__(self, device_ids: _Optional[_Iterable[str]] = ..., wait_seconds: _Optional[float] = ..., unreserved_ids: _Optional[_Iterable[str]] = ..., resource: _Optional[str] = ...) -> None: ...

class IdMapping(_message.Message):
    __slots__ = ("id", "device_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    device_id: str
    def __init__(self, id: _Optional[str] = ..., device_id: _Optional[str] = ...) -> None: ...

class SetResourceMappingRequest(_message.Message):
    __slots__ = ("resource", "mappings", "plugin")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    MAPPINGS_FIELD_NUMBER: _ClassVar[int]
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    resource: str
    mappings: _containers.RepeatedCompositeFieldContainer[IdMapping]
    plugin: str
    def __init__(self, resource: _Optional[str] = ..., mappings: _Optional[_Iterable[_Union[IdMapping, _Mapping]]] = ..., plugin: _Optional[str] = ...) -> None: ...

class SetResourceMappingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GrantedDevice(_message.Message):
    __slots__ = ("id", "grant", "path", "certificate_id", "exception", "hand_over_kind")
    ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ID_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_KIND_FIELD_NUMBER: _ClassVar[int]
    id: str
    grant: int
    path: str
    certificate_id: str
    exception: str
    hand_over_kind: str
    def __init__(self, id: _Optional[str] = ..., grant: _Optional[int] = ..., path: _Optional[str] = ..., certificate_id: _Optional[str] = ..., exception: _Optional[str] = ..., hand_over_kind: _Optional[str] = ...) -> None: ...

class HandOverResponse(_message.Message):
    __slots__ = ("devices", "duration_seconds")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[GrantedDevice]
    duration_seconds: float
    def __init__(self, devices: _Optional[_Iterable[_Union[GrantedDevice, _Mapping]]] = ..., duration_seconds: _Optional[float] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("uid", "namespace", "name")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    uid: str
    namespace: str
    name: str
    def __init__(self, uid: _Optional[str] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ClaimPod(_message.Message):
    __slots__ = ("uid", "namespace", "name")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    uid: str
    namespace: str
    name: str
    def __init__(self, uid: _Optional[str] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ClaimDevice(_message.Message):
    __slots__ = ("device_id", "admin_access")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ACCESS_FIELD_NUMBER: _ClassVar[int]
    device_id: str
    admin_access: bool
    def __init__(self, device_id: _Optional[str] = ..., admin_access: _Optional[bool] = ...) -> None: ...

class PrepareClaimRequest(_message.Message):
    __slots__ = ("claim", "devices", "pods", "deadline_seconds", "driver", "extended_resources", "restores", "withdrawn")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    EXTENDED_RESOURCES_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    claim: Claim
    devices: _containers.RepeatedCompositeFieldContainer[ClaimDevice]
    pods: _containers.RepeatedCompositeFieldContainer[ClaimPod]
    deadline_seconds: float
    driver: str
    extended_resources: _containers.RepeatedScalarFieldContainer[str]
    restores: bool
    withdrawn: bool
    def __init__(self, claim: _Optional[_Union[Claim, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[ClaimDevice, _Mapping]]] = ..., pods: _Optional[_Iterable[_Union[ClaimPod, _Mapping]]] = ..., deadline_seconds: _Optional[float] = ..., driver: _Optional[str] = ..., extended_resources: _Optional[_Iterable[str]] = ..., restores: _Optional[bool] = ..., withdrawn: _Optional[bool] = ...) -> None: ...

class PrepareClaimResponse(_message.Message):
    __slots__ = ("devices", "duration_seconds", "certificates")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[GrantedDevice]
    duration_seconds: float
    certificates: _containers.RepeatedCompositeFieldContainer[ClaimCertificate]
    def __init__(self, devices: _Optional[_Iterable[_Union[GrantedDevice, _Mapping]]] = ..., duration_seconds: _Optional[float] = ..., certificates: _Optional[_Iterable[_Union[ClaimCertificate, _Mapping]]] = ...) -> None: ...

class ClaimCertificate(_message.Message):
    __slots__ = ("id", "digest", "device_id", "issued_at", "covered", "not_covered")
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    COVERED_FIELD_NUMBER: _ClassVar[int]
    NOT_COVERED_FIELD_NUMBER: _ClassVar[int]
    id: str
    digest: str
    device_id: str
    issued_at: float
    covered: _containers.RepeatedScalarFieldContainer[str]
    not_covered: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., digest: _Optional[str] = ..., device_id: _Optional[str] = ..., issued_at: _Optional[float] = ..., covered: _Optional[_Iterable[str]] = ..., not_covered: _Optional[_Iterable[str]] = ...) -> None: ...

class UnprepareClaimRequest(_message.Message):
    __slots__ = ("claim_uid", "deadline_seconds", "withdrawn")
    CLAIM_UID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    claim_uid: str
    deadline_seconds: float
    withdrawn: bool
    def __init__(self, claim_uid: _Optional[str] = ..., deadline_seconds: _Optional[float] = ..., withdrawn: _Optional[bool] = ...) -> None: ...

class WithheldDevice(_message.Message):
    __slots__ = ("device_id", "cause_code")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_CODE_FIELD_NUMBER: _ClassVar[int]
    device_id: str
    cause_code: str
    def __init__(self, device_id: _Optional[str] = ..., cause_code: _Optional[str] = ...) -> None: ...

class UnprepareClaimResponse(_message.Message):
    __slots__ = ("done", "waits_for", "withheld")
    DONE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    done: bool
    waits_for: str
    withheld: _containers.RepeatedCompositeFieldContainer[WithheldDevice]
    def __init__(self, done: _Optional[bool] = ..., waits_for: _Optional[str] = ..., withheld: _Optional[_Iterable[_Union[WithheldDevice, _Mapping]]] = ...) -> None: ...

class SetClaimPodsRequest(_message.Message):
    __slots__ = ("claim_uid", "pods")
    CLAIM_UID_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    claim_uid: str
    pods: _containers.RepeatedCompositeFieldContainer[ClaimPod]
    def __init__(self, claim_uid: _Optional[str] = ..., pods: _Optional[_Iterable[_Union[ClaimPod, _Mapping]]] = ...) -> None: ...

class SetClaimPodsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListClaimsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PreparedClaim(_message.Message):
    __slots__ = ("claim", "devices", "pods", "driver", "releasing")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    RELEASING_FIELD_NUMBER: _ClassVar[int]
    claim: Claim
    devices: _containers.RepeatedCompositeFieldContainer[ClaimDevice]
    pods: _containers.RepeatedCompositeFieldContainer[ClaimPod]
    driver: str
    releasing: bool
    def __init__(self, claim: _Optional[_Union[Claim, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[ClaimDevice, _Mapping]]] = ..., pods: _Optional[_Iterable[_Union[ClaimPod, _Mapping]]] = ..., driver: _Optional[str] = ..., releasing: _Optional[bool] = ...) -> None: ...

class UnpreparedClaim(_message.Message):
    __slots__ = ("driver", "namespace", "name")
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    driver: str
    namespace: str
    name: str
    def __init__(self, driver: _Optional[str] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ListClaimsResponse(_message.Message):
    __slots__ = ("claims", "unprepared")
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    UNPREPARED_FIELD_NUMBER: _ClassVar[int]
    claims: _containers.RepeatedCompositeFieldContainer[PreparedClaim]
    unprepared: _containers.RepeatedCompositeFieldContainer[UnpreparedClaim]
    def __init__(self, claims: _Optional[_Iterable[_Union[PreparedClaim, _Mapping]]] = ..., unprepared: _Optional[_Iterable[_Union[UnpreparedClaim, _Mapping]]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("manager", "id", "user", "user_id")
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    manager: str
    id: str
    user: str
    user_id: int
    def __init__(self, manager: _Optional[str] = ..., id: _Optional[str] = ..., user: _Optional[str] = ..., user_id: _Optional[int] = ...) -> None: ...

class StartJobRequest(_message.Message):
    __slots__ = ("job", "devices", "count", "wait_seconds")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    job: Job
    devices: _containers.RepeatedScalarFieldContainer[str]
    count: int
    wait_seconds: float
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., devices: _Optional[_Iterable[str]] = ..., count: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class StartJobResponse(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[GrantedDevice]
    def __init__(self, devices: _Optional[_Iterable[_Union[GrantedDevice, _Mapping]]] = ...) -> None: ...

class EndJobRequest(_message.Message):
    __slots__ = ("job", "wait_seconds")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    job: Job
    wait_seconds: float
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class EndJobResponse(_message.Message):
    __slots__ = ("done", "waits_for", "withheld")
    DONE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    done: bool
    waits_for: str
    withheld: _containers.RepeatedCompositeFieldContainer[WithheldDevice]
    def __init__(self, done: _Optional[bool] = ..., waits_for: _Optional[str] = ..., withheld: _Optional[_Iterable[_Union[WithheldDevice, _Mapping]]] = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("code", "message", "recovery_method", "since", "actor")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_METHOD_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    recovery_method: str
    since: float
    actor: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., recovery_method: _Optional[str] = ..., since: _Optional[float] = ..., actor: _Optional[str] = ...) -> None: ...

class Attestation(_message.Message):
    __slots__ = ("digest", "nonce")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    nonce: str
    def __init__(self, digest: _Optional[str] = ..., nonce: _Optional[str] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("id", "node_name", "boot_id", "driver_version", "device_id", "sequence", "previous_grant", "next_grant", "path", "scrub_id", "covered", "not_covered", "policy", "policy_digest", "issued_at", "base_certificate_id", "key_id", "signature", "attestation")
    ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_GRANT_FIELD_NUMBER: _ClassVar[int]
    NEXT_GRANT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SCRUB_ID_FIELD_NUMBER: _ClassVar[int]
    COVERED_FIELD_NUMBER: _ClassVar[int]
    NOT_COVERED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    BASE_CERTIFICATE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    node_name: str
    boot_id: str
    driver_version: str
    device_id: str
    sequence: int
    previous_grant: int
    next_grant: int
    path: str
    scrub_id: str
    covered: _containers.RepeatedScalarFieldContainer[str]
    not_covered: _containers.RepeatedScalarFieldContainer[str]
    policy: str
    policy_digest: str
    issued_at: float
    base_certificate_id: str
    key_id: str
    signature: bytes
    attestation: Attestation
    def __init__(self, id: _Optional[str] = ..., node_name: _Optional[str] = ..., boot_id: _Optional[str] = ..., driver_version: _Optional[str] = ..., device_id: _Optional[str] = ..., sequence: _Optional[int] = ..., previous_grant: _Optional[int] = ..., next_grant: _Optional[int] = ..., path: _Optional[str] = ..., scrub_id: _Optional[str] = ..., covered: _Optional[_Iterable[str]] = ..., not_covered: _Optional[_Iterable[str]] = ..., policy: _Optional[str] = ..., policy_digest: _Optional[str] = ..., issued_at: _Optional[float] = ..., base_certificate_id: _Optional[str] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ..., attestation: _Optional[_Union[Attestation, _Mapping]] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("id", "index", "model", "memory_bytes", "state", "hygiene", "health", "cause", "certificate", "tenant", "pod", "container", "grant_count", "active_scrub_id", "parent", "numa_node", "next_attempt_at", "last_hand_over_kind", "profile", "peers", "attributes", "advertised", "policy", "enforcement", "break_glass", "failed_recoveries", "recovery_blocker", "open_grants", "conditions", "lifetime_counters", "reset_pending", "probation_scrubs_passed", "quarantines", "recovery_attempts", "baseline", "unauthorized_users", "holders", "uninspected_processes", "claim", "admin_claims", "probation_scrubs_required", "job")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LifetimeCountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HYGIENE_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    GRANT_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SCRUB_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    NEXT_ATTEMPT_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_HAND_OVER_KIND_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    ADVERTISED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ENFORCEMENT_FIELD_NUMBER: _ClassVar[int]
    BREAK_GLASS_FIELD_NUMBER: _ClassVar[int]
    FAILED_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_BLOCKER_FIELD_NUMBER: _ClassVar[int]
    OPEN_GRANTS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_COUNTERS_FIELD_NUMBER: _ClassVar[int]
    RESET_PENDING_FIELD_NUMBER: _ClassVar[int]
    PROBATION_SCRUBS_PASSED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    UNAUTHORIZED_USERS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    UNINSPECTED_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    ADMIN_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    PROBATION_SCRUBS_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    id: str
    index: str
    model: str
    memory_bytes: int
    state: str
    hygiene: str
    health: str
    cause: Cause
    certificate: Certificate
    tenant: str
    pod: str
    container: str
    grant_count: int
    active_scrub_id: str
    parent: str
    numa_node: int
    next_attempt_at: float
    last_hand_over_kind: str
    profile: str
    peers: _containers.RepeatedScalarFieldContainer[str]
    attributes: _containers.ScalarMap[str, str]
    advertised: bool
    policy: str
    enforcement: str
    break_glass: BreakGlass
    failed_recoveries: int
    recovery_blocker: str
    open_grants: _containers.RepeatedCompositeFieldContainer[OpenGrant]
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    lifetime_counters: _containers.ScalarMap[str, int]
    reset_pending: bool
    probation_scrubs_passed: int
    quarantines: _containers.RepeatedCompositeFieldContainer[QuarantineRecord]
    recovery_attempts: _containers.RepeatedCompositeFieldContainer[RecoveryAttempt]
    baseline: Baseline
    unauthorized_users: _containers.RepeatedScalarFieldContainer[str]
    holders: _containers.RepeatedCompositeFieldContainer[DeviceHolder]
    uninspected_processes: _containers.RepeatedScalarFieldContainer[str]
    claim: Claim
    admin_claims: _containers.RepeatedCompositeFieldContainer[Claim]
    probation_scrubs_required: int
    job: Job
    def __init__(self, id: _Optional[str] = ..., index: _Optional[str] = ..., model: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., state: _Optional[str] = ..., hygiene: _Optional[str] = ..., health: _Optional[str] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ..., tenant: _Optional[str] = ..., pod: _Optional[str] = ..., container: _Optional[str] = ..., grant_count: _Optional[int] = ..., active_scrub_id: _Optional[str] = ..., parent: _Optional[str] = ..., numa_node: _Optional[int] = ..., next_attempt_at: _Optional[float] = ..., last_hand_over_kind: _Optional[str] = ..., profile: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ..., attributes: _Optional[_Mapping[str, str]] = ..., advertised: _Optional[bool] = ..., policy: _Optional[str] = ..., enforcement: _Optional[str] = ..., break_glass: _Optional[_Union[BreakGlass, _Mapping]] = ..., failed_recoveries: _Optional[int] = ..., recovery_blocker: _Optional[str] = ..., open_grants: _Optional[_Iterable[_Union[OpenGrant, _Mapping]]] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., lifetime_counters: _Optional[_Mapping[str, int]] = ..., reset_pending: _Optional[bool] = ..., probation_scrubs_passed: _Optional[int] = ..., quarantines: _Optional[_Iterable[_Union[QuarantineRecord, _Mapping]]] = ..., recovery_attempts: _Optional[_Iterable[_Union[RecoveryAttempt, _Mapping]]] = ..., baseline: _Optional[_Union[Baseline, _Mapping]] = ..., unauthorized_users: _Optional[_Iterable[str]] = ..., holders: _Optional[_Iterable[_Union[DeviceHolder, _Mapping]]] = ..., uninspected_processes: _Optional[_Iterable[str]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., admin_claims: _Optional[_Iterable[_Union[Claim, _Mapping]]] = ..., probation_scrubs_required: _Optional[int] = ..., job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class OpenGrant(_message.Message):
    __slots__ = ("sequence", "tenant", "pod", "pod_uid", "container", "hand_over_kind", "granted_at", "certificate_id", "exception", "claim", "claim_pods", "claim_releasing", "job", "job_ended")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_KIND_FIELD_NUMBER: _ClassVar[int]
    GRANTED_AT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ID_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    CLAIM_PODS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_RELEASING_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_ENDED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    tenant: str
    pod: str
    pod_uid: str
    container: str
    hand_over_kind: str
    granted_at: float
    certificate_id: str
    exception: str
    claim: Claim
    claim_pods: _containers.RepeatedCompositeFieldContainer[ClaimPod]
    claim_releasing: bool
    job: Job
    job_ended: bool
    def __init__(self, sequence: _Optional[int] = ..., tenant: _Optional[str] = ..., pod: _Optional[str] = ..., pod_uid: _Optional[str] = ..., container: _Optional[str] = ..., hand_over_kind: _Optional[str] = ..., granted_at: _Optional[float] = ..., certificate_id: _Optional[str] = ..., exception: _Optional[str] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., claim_pods: _Optional[_Iterable[_Union[ClaimPod, _Mapping]]] = ..., claim_releasing: _Optional[bool] = ..., job: _Optional[_Union[Job, _Mapping]] = ..., job_ended: _Optional[bool] = ...) -> None: ...

class QuarantineRecord(_message.Message):
    __slots__ = ("timestamp", "code", "tenant")
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    timestamp: float
    code: str
    tenant: str
    def __init__(self, timestamp: _Optional[float] = ..., code: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class RecoveryAttempt(_message.Message):
    __slots__ = ("timestamp", "reset", "by_operator")
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    BY_OPERATOR_FIELD_NUMBER: _ClassVar[int]
    timestamp: float
    reset: bool
    by_operator: bool
    def __init__(self, timestamp: _Optional[float] = ..., reset: _Optional[bool] = ..., by_operator: _Optional[bool] = ...) -> None: ...

class DeviceHolder(_message.Message):
    __slots__ = ("pid", "command", "kind", "code", "namespace", "pod", "pod_uid", "unit", "since", "blocking", "memory_bytes")
    PID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    BLOCKING_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    command: str
    kind: str
    code: str
    namespace: str
    pod: str
    pod_uid: str
    unit: str
    since: float
    blocking: bool
    memory_bytes: int
    def __init__(self, pid: _Optional[int] = ..., command: _Optional[str] = ..., kind: _Optional[str] = ..., code: _Optional[str] = ..., namespace: _Optional[str] = ..., pod: _Optional[str] = ..., pod_uid: _Optional[str] = ..., unit: _Optional[str] = ..., since: _Optional[float] = ..., blocking: _Optional[bool] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("code", "since")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    code: str
    since: float
    def __init__(self, code: _Optional[str] = ..., since: _Optional[float] = ...) -> None: ...

class Baseline(_message.Message):
    __slots__ = ("recorded_at", "actor", "reason", "facts", "accepted_conditions")
    RECORDED_AT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    recorded_at: float
    actor: str
    reason: str
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    accepted_conditions: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, recorded_at: _Optional[float] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ..., facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ..., accepted_conditions: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("name", "expected", "actual")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    expected: str
    actual: str
    def __init__(self, name: _Optional[str] = ..., expected: _Optional[str] = ..., actual: _Optional[str] = ...) -> None: ...

class BreakGlass(_message.Message):
    __slots__ = ("expires_at", "reason", "actor")
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    expires_at: float
    reason: str
    actor: str
    def __init__(self, expires_at: _Optional[float] = ..., reason: _Optional[str] = ..., actor: _Optional[str] = ...) -> None: ...

class ListDevicesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDevicesResponse(_message.Message):
    __slots__ = ("version", "devices")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    version: int
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    def __init__(self, version: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ...) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ("device", "since", "limit", "tenant", "outcome", "events", "before_sequence")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    device: str
    since: float
    limit: int
    tenant: str
    outcome: str
    events: _containers.RepeatedScalarFieldContainer[str]
    before_sequence: int
    def __init__(self, device: _Optional[str] = ..., since: _Optional[float] = ..., limit: _Optional[int] = ..., tenant: _Optional[str] = ..., outcome: _Optional[str] = ..., events: _Optional[_Iterable[str]] = ..., before_sequence: _Optional[int] = ...) -> None: ...

class HistoryEntry(_message.Message):
    __slots__ = ("sequence", "hash", "event", "timestamp", "device_id", "scrub_id", "actor", "fields_json", "scrub", "certificate")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    SCRUB_ID_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    hash: str
    event: str
    timestamp: float
    device_id: str
    scrub_id: str
    actor: str
    fields_json: str
    scrub: Scrub
    certificate: Certificate
    def __init__(self, sequence: _Optional[int] = ..., hash: _Optional[str] = ..., event: _Optional[str] = ..., timestamp: _Optional[float] = ..., device_id: _Optional[str] = ..., scrub_id: _Optional[str] = ..., actor: _Optional[str] = ..., fields_json: _Optional[str] = ..., scrub: _Optional[_Union[Scrub, _Mapping]] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ...) -> None: ...

class GetHistoryResponse(_message.Message):
    __slots__ = ("entries", "next_before_sequence")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_BEFORE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    next_before_sequence: int
    def __init__(self, entries: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ..., next_before_sequence: _Optional[int] = ...) -> None: ...

class GetServiceInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceInfo(_message.Message):
    __slots__ = ("version", "backend", "node_name", "boot_id", "driver_version", "policy", "policy_digest", "enforcement", "ledger_status", "epoch", "breaker", "key_id", "public_key", "audit_head", "paths", "policy_rejection", "kubelet_status", "pid", "admin_group", "read_group", "node_yield", "agent_pause", "plugin_versions")
    class PathsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENFORCEMENT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_STATUS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    AUDIT_HEAD_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    POLICY_REJECTION_FIELD_NUMBER: _ClassVar[int]
    KUBELET_STATUS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADMIN_GROUP_FIELD_NUMBER: _ClassVar[int]
    READ_GROUP_FIELD_NUMBER: _ClassVar[int]
    NODE_YIELD_FIELD_NUMBER: _ClassVar[int]
    AGENT_PAUSE_FIELD_NUMBER: _ClassVar[int]
    PLUGIN_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    backend: str
    node_name: str
    boot_id: str
    driver_version: str
    policy: str
    policy_digest: str
    enforcement: str
    ledger_status: str
    epoch: str
    breaker: Breaker
    key_id: str
    public_key: str
    audit_head: AuditHead
    paths: _containers.ScalarMap[str, str]
    policy_rejection: str
    kubelet_status: str
    pid: int
    admin_group: str
    read_group: str
    node_yield: NodeYield
    agent_pause: AgentPause
    plugin_versions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., backend: _Optional[str] = ..., node_name: _Optional[str] = ..., boot_id: _Optional[str] = ..., driver_version: _Optional[str] = ..., policy: _Optional[str] = ..., policy_digest: _Optional[str] = ..., enforcement: _Optional[str] = ..., ledger_status: _Optional[str] = ..., epoch: _Optional[str] = ..., breaker: _Optional[_Union[Breaker, _Mapping]] = ..., key_id: _Optional[str] = ..., public_key: _Optional[str] = ..., audit_head: _Optional[_Union[AuditHead, _Mapping]] = ..., paths: _Optional[_Mapping[str, str]] = ..., policy_rejection: _Optional[str] = ..., kubelet_status: _Optional[str] = ..., pid: _Optional[int] = ..., admin_group: _Optional[str] = ..., read_group: _Optional[str] = ..., node_yield: _Optional[_Union[NodeYield, _Mapping]] = ..., agent_pause: _Optional[_Union[AgentPause, _Mapping]] = ..., plugin_versions: _Optional[_Iterable[str]] = ...) -> None: ...

class YieldRequest(_message.Message):
    __slots__ = ("requester", "reason", "actor", "since")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    requester: str
    reason: str
    actor: str
    since: float
    def __init__(self, requester: _Optional[str] = ..., reason: _Optional[str] = ..., actor: _Optional[str] = ..., since: _Optional[float] = ...) -> None: ...

class NodeYield(_message.Message):
    __slots__ = ("requests", "driver_closed", "remaining_pids")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DRIVER_CLOSED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_PIDS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[YieldRequest]
    driver_closed: bool
    remaining_pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[_Union[YieldRequest, _Mapping]]] = ..., driver_closed: _Optional[bool] = ..., remaining_pids: _Optional[_Iterable[int]] = ...) -> None: ...

class SetYieldRequest(_message.Message):
    __slots__ = ("reason", "plugin")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    plugin: str
    def __init__(self, reason: _Optional[str] = ..., plugin: _Optional[str] = ...) -> None: ...

class YieldNodeRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ResumeNodeRequest(_message.Message):
    __slots__ = ("reason", "all")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    all: bool
    def __init__(self, reason: _Optional[str] = ..., all: _Optional[bool] = ...) -> None: ...

class AuditHead(_message.Message):
    __slots__ = ("sequence", "hash")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    hash: str
    def __init__(self, sequence: _Optional[int] = ..., hash: _Optional[str] = ...) -> None: ...

class GetCertificateRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class SignedCertificate(_message.Message):
    __slots__ = ("certificate", "payload", "status")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    certificate: Certificate
    payload: bytes
    status: str
    def __init__(self, certificate: _Optional[_Union[Certificate, _Mapping]] = ..., payload: _Optional[bytes] = ..., status: _Optional[str] = ...) -> None: ...

class ReadAuditRequest(_message.Message):
    __slots__ = ("after_sequence",)
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    def __init__(self, after_sequence: _Optional[int] = ...) -> None: ...

class AuditPage(_message.Message):
    __slots__ = ("pruned", "head", "rows")
    PRUNED_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    pruned: AuditHead
    head: AuditHead
    rows: _containers.RepeatedCompositeFieldContainer[AuditRow]
    def __init__(self, pruned: _Optional[_Union[AuditHead, _Mapping]] = ..., head: _Optional[_Union[AuditHead, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[AuditRow, _Mapping]]] = ...) -> None: ...

class AuditRow(_message.Message):
    __slots__ = ("sequence", "timestamp", "event", "device_id", "scrub_id", "actor", "fields", "previous_hash", "hash")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    SCRUB_ID_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASH_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    timestamp: float
    event: str
    device_id: str
    scrub_id: str
    actor: str
    fields: str
    previous_hash: str
    hash: str
    def __init__(self, sequence: _Optional[int] = ..., timestamp: _Optional[float] = ..., event: _Optional[str] = ..., device_id: _Optional[str] = ..., scrub_id: _Optional[str] = ..., actor: _Optional[str] = ..., fields: _Optional[str] = ..., previous_hash: _Optional[str] = ..., hash: _Optional[str] = ...) -> None: ...

class Breaker(_message.Message):
    __slots__ = ("resets_stopped_reason", "resets_stopped_until", "soft_quarantines_stopped_reason", "awaiting_reset_ids", "kept_in_service_ids")
    RESETS_STOPPED_REASON_FIELD_NUMBER: _ClassVar[int]
    RESETS_STOPPED_UNTIL_FIELD_NUMBER: _ClassVar[int]
    SOFT_QUARANTINES_STOPPED_REASON_FIELD_NUMBER: _ClassVar[int]
    AWAITING_RESET_IDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_IN_SERVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    resets_stopped_reason: str
    resets_stopped_until: float
    soft_quarantines_stopped_reason: str
    awaiting_reset_ids: _containers.RepeatedScalarFieldContainer[str]
    kept_in_service_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, resets_stopped_reason: _Optional[str] = ..., resets_stopped_until: _Optional[float] = ..., soft_quarantines_stopped_reason: _Optional[str] = ..., awaiting_reset_ids: _Optional[_Iterable[str]] = ..., kept_in_service_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetResetPlanRequest(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: str
    def __init__(self, device: _Optional[str] = ...) -> None: ...

class ResetPlan(_message.Message):
    __slots__ = ("device_id", "method", "actions", "unavailable_reason", "blockers", "also_reset_ids", "agents", "pause_ways")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCKERS_FIELD_NUMBER: _ClassVar[int]
    ALSO_RESET_IDS_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_WAYS_FIELD_NUMBER: _ClassVar[int]
    device_id: str
    method: str
    actions: _containers.RepeatedScalarFieldContainer[str]
    unavailable_reason: str
    blockers: _containers.RepeatedScalarFieldContainer[str]
    also_reset_ids: _containers.RepeatedScalarFieldContainer[str]
    agents: _containers.RepeatedScalarFieldContainer[str]
    pause_ways: _containers.RepeatedCompositeFieldContainer[PauseOffer]
    def __init__(self, device_id: _Optional[str] = ..., method: _Optional[str] = ..., actions: _Optional[_Iterable[str]] = ..., unavailable_reason: _Optional[str] = ..., blockers: _Optional[_Iterable[str]] = ..., also_reset_ids: _Optional[_Iterable[str]] = ..., agents: _Optional[_Iterable[str]] = ..., pause_ways: _Optional[_Iterable[_Union[PauseOffer, _Mapping]]] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ("device", "path")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    device: str
    path: str
    def __init__(self, device: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "verdict", "duration_seconds", "findings", "measurements_json", "not_covered")
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    NOT_COVERED_FIELD_NUMBER: _ClassVar[int]
    step: str
    verdict: str
    duration_seconds: float
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    measurements_json: str
    not_covered: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[str] = ..., verdict: _Optional[str] = ..., duration_seconds: _Optional[float] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., measurements_json: _Optional[str] = ..., not_covered: _Optional[_Iterable[str]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("step", "code", "severity", "message", "evidence_json")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    step: str
    code: str
    severity: str
    message: str
    evidence_json: str
    def __init__(self, step: _Optional[str] = ..., code: _Optional[str] = ..., severity: _Optional[str] = ..., message: _Optional[str] = ..., evidence_json: _Optional[str] = ...) -> None: ...

class Scrub(_message.Message):
    __slots__ = ("id", "device_id", "path", "trigger", "started_at", "finished_at", "outcome", "steps", "certificate_id", "actor")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ID_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    id: str
    device_id: str
    path: str
    trigger: str
    started_at: float
    finished_at: float
    outcome: str
    steps: _containers.RepeatedCompositeFieldContainer[StepResult]
    certificate_id: str
    actor: str
    def __init__(self, id: _Optional[str] = ..., device_id: _Optional[str] = ..., path: _Optional[str] = ..., trigger: _Optional[str] = ..., started_at: _Optional[float] = ..., finished_at: _Optional[float] = ..., outcome: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ..., certificate_id: _Optional[str] = ..., actor: _Optional[str] = ...) -> None: ...

class ScrubProgress(_message.Message):
    __slots__ = ("scrub_id", "device_id", "step", "phase", "done_bytes", "total_bytes", "joined")
    SCRUB_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    scrub_id: str
    device_id: str
    step: str
    phase: str
    done_bytes: int
    total_bytes: int
    joined: bool
    def __init__(self, scrub_id: _Optional[str] = ..., device_id: _Optional[str] = ..., step: _Optional[str] = ..., phase: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., joined: _Optional[bool] = ...) -> None: ...

class ScrubUpdate(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: ScrubProgress
    result: ScrubResult
    def __init__(self, progress: _Optional[_Union[ScrubProgress, _Mapping]] = ..., result: _Optional[_Union[ScrubResult, _Mapping]] = ...) -> None: ...

class ScrubResult(_message.Message):
    __slots__ = ("scrub", "certificate", "device", "unexplained_residue")
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UNEXPLAINED_RESIDUE_FIELD_NUMBER: _ClassVar[int]
    scrub: Scrub
    certificate: Certificate
    device: Device
    unexplained_residue: str
    def __init__(self, scrub: _Optional[_Union[Scrub, _Mapping]] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., unexplained_residue: _Optional[str] = ...) -> None: ...

class QuarantineRequest(_message.Message):
    __slots__ = ("device", "reason")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    device: str
    reason: str
    def __init__(self, device: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class BreakGlassRequest(_message.Message):
    __slots__ = ("device", "reason", "duration_seconds")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DURATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    device: str
    reason: str
    duration_seconds: float
    def __init__(self, device: _Optional[str] = ..., reason: _Optional[str] = ..., duration_seconds: _Optional[float] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("device", "reason")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    device: str
    reason: str
    def __init__(self, device: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AcceptBaselineRequest(_message.Message):
    __slots__ = ("device", "reason", "expected_facts")
    class ExpectedFactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FACTS_FIELD_NUMBER: _ClassVar[int]
    device: str
    reason: str
    expected_facts: _containers.ScalarMap[str, str]
    def __init__(self, device: _Optional[str] = ..., reason: _Optional[str] = ..., expected_facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DeviceResponse(_message.Message):
    __slots__ = ("device", "previous_cause")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_CAUSE_FIELD_NUMBER: _ClassVar[int]
    device: Device
    previous_cause: Cause
    def __init__(self, device: _Optional[_Union[Device, _Mapping]] = ..., previous_cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...
