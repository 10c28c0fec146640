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
    __slots__ = ("id", "index", "advertised", "certified", "scrubbing", "state", "numa_node", "peers", "parent", "access", "refusal", "profile", "pci_address")
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
    def __init__(self, id: _Optional[str] = ..., index: _Optional[str] = ..., advertised: _Optional[bool] = ..., certified: _Optional[bool] = ..., scrubbing: _Optional[bool] = ..., state: _Optional[str] = ..., numa_node: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., parent: _Optional[str] = ..., access: _Optional[_Iterable[_Union[Access, _Mapping]]] = ..., refusal: _Optional[str] = ..., profile: _Optional[str] = ..., pci_address: _Optional[str] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PodNotice(_message.Message):
    __slots__ = ("namespace", "name", "uid", "devices", "reason", "sentence", "since", "evict")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    uid: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    sentence: str
    since: float
    evict: bool
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ..., uid: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., sentence: _Optional[str] = ..., since: _Optional[float] = ..., evict: _Optional[bool] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("version", "devices", "ready", "epoch", "envvar_refused", "notices")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENVVAR_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    version: int
    devices: _containers.RepeatedCompositeFieldContainer[SnapshotDevice]
    ready: bool
    epoch: str
    envvar_refused: bool
    notices: _containers.RepeatedCompositeFieldContainer[PodNotice]
    def __init__(self, version: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[SnapshotDevice, _Mapping]]] = ..., ready: _Optional[bool] = ..., epoch: _Optional[str] = ..., envvar_refused: _Optional[bool] = ..., notices: _Optional[_Iterable[_Union[PodNotice, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("device_ids", "wait_seconds", "reserved_unseen", "resource")
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_UNSEEN_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    device_ids: _containers.RepeatedScalarFieldContainer[str]
    wait_seconds: float
    reserved_unseen: _containers.RepeatedScalarFieldContainer[str]
    resource: str
    def __init__(self, device_ids: _Optional[_Iterable[str]] = ..., wait_seconds: _Optional[float] = ..., reserved_unseen: _Optional[_Iterable[str]] = ..., resource: _Optional[str] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("id", "device")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    id: str
    device: str
    def __init__(self, id: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("resource", "offers")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    resource: str
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    def __init__(self, resource: _Optional[str] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GrantedDevice(_message.Message):
    __slots__ = ("id", "grant", "path", "certificate", "exception", "kind")
    ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    id: str
    grant: int
    path: str
    certificate: str
    exception: str
    kind: str
    def __init__(self, id: _Optional[str] = ..., grant: _Optional[int] = ..., path: _Optional[str] = ..., certificate: _Optional[str] = ..., exception: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class HandOverResponse(_message.Message):
    __slots__ = ("devices", "seconds")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[GrantedDevice]
    seconds: float
    def __init__(self, devices: _Optional[_Iterable[_Union[GrantedDevice, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("code", "sentence", "way_back", "since", "actor")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    WAY_BACK_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    code: str
    sentence: str
    way_back: str
    since: float
    actor: str
    def __init__(self, code: _Optional[str] = ..., sentence: _Optional[str] = ..., way_back: _Optional[str] = ..., since: _Optional[float] = ..., actor: _Optional[str] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("id", "node", "boot", "driver", "device", "sequence", "previous_grant", "next_grant", "path", "scrub", "covered", "not_covered", "policy", "policy_digest", "issued_at", "rests_on", "key_id", "signature")
    ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_GRANT_FIELD_NUMBER: _ClassVar[int]
    NEXT_GRANT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    COVERED_FIELD_NUMBER: _ClassVar[int]
    NOT_COVERED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    RESTS_ON_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    id: str
    node: str
    boot: str
    driver: str
    device: str
    sequence: int
    previous_grant: int
    next_grant: int
    path: str
    scrub: str
    covered: _containers.RepeatedScalarFieldContainer[str]
    not_covered: _containers.RepeatedScalarFieldContainer[str]
    policy: str
    policy_digest: str
    issued_at: float
    rests_on: str
    key_id: str
    signature: bytes
    def __init__(self, id: _Optional[str] = ..., node: _Optional[str] = ..., boot: _Optional[str] = ..., driver: _Optional[str] = ..., device: _Optional[str] = ..., sequence: _Optional[int] = ..., previous_grant: _Optional[int] = ..., next_grant: _Optional[int] = ..., path: _Optional[str] = ..., scrub: _Optional[str] = ..., covered: _Optional[_Iterable[str]] = ..., not_covered: _Optional[_Iterable[str]] = ..., policy: _Optional[str] = ..., policy_digest: _Optional[str] = ..., issued_at: _Optional[float] = ..., rests_on: _Optional[str] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("id", "index", "model", "memory_bytes", "state", "hygiene", "health", "cause", "certificate", "tenant_namespace", "pod", "container", "grants", "scrub", "parent", "numa_node", "retry_at", "kind", "profile", "peers", "traits", "offered", "policy", "enforcement", "glass", "failures", "waits", "tenancies", "lasting", "lifetime", "must_reset", "clean_scrubs", "strikes", "attempts", "baseline", "strangers", "uninspected")
    class TraitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LifetimeEntry(_message.Message):
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
    TENANT_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TRAITS_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ENFORCEMENT_FIELD_NUMBER: _ClassVar[int]
    GLASS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    TENANCIES_FIELD_NUMBER: _ClassVar[int]
    LASTING_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    MUST_RESET_FIELD_NUMBER: _ClassVar[int]
    CLEAN_SCRUBS_FIELD_NUMBER: _ClassVar[int]
    STRIKES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    STRANGERS_FIELD_NUMBER: _ClassVar[int]
    UNINSPECTED_FIELD_NUMBER: _ClassVar[int]
    id: str
    index: str
    model: str
    memory_bytes: int
    state: str
    hygiene: str
    health: str
    cause: Cause
    certificate: Certificate
    tenant_namespace: str
    pod: str
    container: str
    grants: int
    scrub: str
    parent: str
    numa_node: int
    retry_at: float
    kind: str
    profile: str
    peers: _containers.RepeatedScalarFieldContainer[str]
    traits: _containers.ScalarMap[str, str]
    offered: bool
    policy: str
    enforcement: str
    glass: Glass
    failures: int
    waits: str
    tenancies: _containers.RepeatedCompositeFieldContainer[Tenancy]
    lasting: _containers.RepeatedCompositeFieldContainer[Lasting]
    lifetime: _containers.ScalarMap[str, int]
    must_reset: bool
    clean_scrubs: int
    strikes: _containers.RepeatedCompositeFieldContainer[Strike]
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    baseline: Baseline
    strangers: _containers.RepeatedScalarFieldContainer[str]
    uninspected: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., index: _Optional[str] = ..., model: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., state: _Optional[str] = ..., hygiene: _Optional[str] = ..., health: _Optional[str] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ..., tenant_namespace: _Optional[str] = ..., pod: _Optional[str] = ..., container: _Optional[str] = ..., grants: _Optional[int] = ..., scrub: _Optional[str] = ..., parent: _Optional[str] = ..., numa_node: _Optional[int] = ..., retry_at: _Optional[float] = ..., kind: _Optional[str] = ..., profile: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ..., traits: _Optional[_Mapping[str, str]] = ..., offered: _Optional[bool] = ..., policy: _Optional[str] = ..., enforcement: _Optional[str] = ..., glass: _Optional[_Union[Glass, _Mapping]] = ..., failures: _Optional[int] = ..., waits: _Optional[str] = ..., tenancies: _Optional[_Iterable[_Union[Tenancy, _Mapping]]] = ..., lasting: _Optional[_Iterable[_Union[Lasting, _Mapping]]] = ..., lifetime: _Optional[_Mapping[str, int]] = ..., must_reset: _Optional[bool] = ..., clean_scrubs: _Optional[int] = ..., strikes: _Optional[_Iterable[_Union[Strike, _Mapping]]] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., baseline: _Optional[_Union[Baseline, _Mapping]] = ..., strangers: _Optional[_Iterable[str]] = ..., uninspected: _Optional[_Iterable[str]] = ...) -> None: ...

class Tenancy(_message.Message):
    __slots__ = ("grant", "tenant_namespace", "pod", "uid", "container", "kind", "at", "certificate", "exception")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    grant: int
    tenant_namespace: str
    pod: str
    uid: str
    container: str
    kind: str
    at: float
    certificate: str
    exception: str
    def __init__(self, grant: _Optional[int] = ..., tenant_namespace: _Optional[str] = ..., pod: _Optional[str] = ..., uid: _Optional[str] = ..., container: _Optional[str] = ..., kind: _Optional[str] = ..., at: _Optional[float] = ..., certificate: _Optional[str] = ..., exception: _Optional[str] = ...) -> None: ...

class Strike(_message.Message):
    __slots__ = ("at", "code", "tenant_namespace")
    AT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TENANT_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    at: float
    code: str
    tenant_namespace: str
    def __init__(self, at: _Optional[float] = ..., code: _Optional[str] = ..., tenant_namespace: _Optional[str] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("at", "reset", "ordered")
    AT_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    at: float
    reset: bool
    ordered: bool
    def __init__(self, at: _Optional[float] = ..., reset: _Optional[bool] = ..., ordered: _Optional[bool] = ...) -> None: ...

class Lasting(_message.Message):
    __slots__ = ("code", "since")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    code: str
    since: float
    def __init__(self, code: _Optional[str] = ..., since: _Optional[float] = ...) -> None: ...

class Baseline(_message.Message):
    __slots__ = ("at", "actor", "reason", "facts", "conditions")
    AT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    at: float
    actor: str
    reason: str
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    conditions: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, at: _Optional[float] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ..., facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ..., conditions: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("name", "expected", "found")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    name: str
    expected: str
    found: str
    def __init__(self, name: _Optional[str] = ..., expected: _Optional[str] = ..., found: _Optional[str] = ...) -> None: ...

class Glass(_message.Message):
    __slots__ = ("until", "reason", "actor")
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    until: float
    reason: str
    actor: str
    def __init__(self, until: _Optional[float] = ..., reason: _Optional[str] = ..., actor: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("device", "since", "limit", "tenant", "outcome", "events", "before")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    device: str
    since: float
    limit: int
    tenant: str
    outcome: str
    events: _containers.RepeatedScalarFieldContainer[str]
    before: int
    def __init__(self, device: _Optional[str] = ..., since: _Optional[float] = ..., limit: _Optional[int] = ..., tenant: _Optional[str] = ..., outcome: _Optional[str] = ..., events: _Optional[_Iterable[str]] = ..., before: _Optional[int] = ...) -> None: ...

class HistoryEntry(_message.Message):
    __slots__ = ("sequence", "hash", "name", "at", "device", "scrub_id", "actor", "fields_json", "scrub", "certificate")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SCRUB_ID_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    FIELDS_JSON_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    hash: str
    name: str
    at: float
    device: str
    scrub_id: str
    actor: str
    fields_json: str
    scrub: Scrub
    certificate: Certificate
    def __init__(self, sequence: _Optional[int] = ..., hash: _Optional[str] = ..., name: _Optional[str] = ..., at: _Optional[float] = ..., device: _Optional[str] = ..., scrub_id: _Optional[str] = ..., actor: _Optional[str] = ..., fields_json: _Optional[str] = ..., scrub: _Optional[_Union[Scrub, _Mapping]] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ...) -> None: ...

class GetHistoryResponse(_message.Message):
    __slots__ = ("entries", "next_before")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    next_before: int
    def __init__(self, entries: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ..., next_before: _Optional[int] = ...) -> None: ...

class GetServiceInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceInfo(_message.Message):
    __slots__ = ("version", "backend", "node", "boot", "driver", "policy", "policy_digest", "enforcement", "ledger", "epoch", "breaker", "key_id", "public_key", "audit_head", "places", "policy_refused", "kubelet", "pid", "admin_group", "read_group")
    class PlacesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENFORCEMENT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    AUDIT_HEAD_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    POLICY_REFUSED_FIELD_NUMBER: _ClassVar[int]
    KUBELET_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADMIN_GROUP_FIELD_NUMBER: _ClassVar[int]
    READ_GROUP_FIELD_NUMBER: _ClassVar[int]
    version: str
    backend: str
    node: str
    boot: str
    driver: str
    policy: str
    policy_digest: str
    enforcement: str
    ledger: str
    epoch: str
    breaker: Breaker
    key_id: str
    public_key: str
    audit_head: AuditHead
    places: _containers.ScalarMap[str, str]
    policy_refused: str
    kubelet: str
    pid: int
    admin_group: str
    read_group: str
    def __init__(self, version: _Optional[str] = ..., backend: _Optional[str] = ..., node: _Optional[str] = ..., boot: _Optional[str] = ..., driver: _Optional[str] = ..., policy: _Optional[str] = ..., policy_digest: _Optional[str] = ..., enforcement: _Optional[str] = ..., ledger: _Optional[str] = ..., epoch: _Optional[str] = ..., breaker: _Optional[_Union[Breaker, _Mapping]] = ..., key_id: _Optional[str] = ..., public_key: _Optional[str] = ..., audit_head: _Optional[_Union[AuditHead, _Mapping]] = ..., places: _Optional[_Mapping[str, str]] = ..., policy_refused: _Optional[str] = ..., kubelet: _Optional[str] = ..., pid: _Optional[int] = ..., admin_group: _Optional[str] = ..., read_group: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("certificate", "payload", "standing")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    certificate: Certificate
    payload: bytes
    standing: str
    def __init__(self, certificate: _Optional[_Union[Certificate, _Mapping]] = ..., payload: _Optional[bytes] = ..., standing: _Optional[str] = ...) -> None: ...

class ReadAuditRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("sequence", "at", "name", "device", "scrub", "actor", "fields", "prev_hash", "hash")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    PREV_HASH_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    at: float
    name: str
    device: str
    scrub: str
    actor: str
    fields: str
    prev_hash: str
    hash: str
    def __init__(self, sequence: _Optional[int] = ..., at: _Optional[float] = ..., name: _Optional[str] = ..., device: _Optional[str] = ..., scrub: _Optional[str] = ..., actor: _Optional[str] = ..., fields: _Optional[str] = ..., prev_hash: _Optional[str] = ..., hash: _Optional[str] = ...) -> None: ...

class Breaker(_message.Message):
    __slots__ = ("resets", "resets_until", "soft", "waiting", "spared")
    RESETS_FIELD_NUMBER: _ClassVar[int]
    RESETS_UNTIL_FIELD_NUMBER: _ClassVar[int]
    SOFT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SPARED_FIELD_NUMBER: _ClassVar[int]
    resets: str
    resets_until: float
    soft: str
    waiting: _containers.RepeatedScalarFieldContainer[str]
    spared: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, resets: _Optional[str] = ..., resets_until: _Optional[float] = ..., soft: _Optional[str] = ..., waiting: _Optional[_Iterable[str]] = ..., spared: _Optional[_Iterable[str]] = ...) -> None: ...

class GetResetPlanRequest(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: str
    def __init__(self, device: _Optional[str] = ...) -> None: ...

class ResetPlan(_message.Message):
    __slots__ = ("device", "method", "acts", "unavailable", "blockers", "together")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ACTS_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKERS_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    device: str
    method: str
    acts: _containers.RepeatedScalarFieldContainer[str]
    unavailable: str
    blockers: _containers.RepeatedScalarFieldContainer[str]
    together: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, device: _Optional[str] = ..., method: _Optional[str] = ..., acts: _Optional[_Iterable[str]] = ..., unavailable: _Optional[str] = ..., blockers: _Optional[_Iterable[str]] = ..., together: _Optional[_Iterable[str]] = ...) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ("device", "path")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    device: str
    path: str
    def __init__(self, device: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "verdict", "seconds", "findings", "measured_json", "not_covered")
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_JSON_FIELD_NUMBER: _ClassVar[int]
    NOT_COVERED_FIELD_NUMBER: _ClassVar[int]
    step: str
    verdict: str
    seconds: float
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    measured_json: str
    not_covered: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[str] = ..., verdict: _Optional[str] = ..., seconds: _Optional[float] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., measured_json: _Optional[str] = ..., not_covered: _Optional[_Iterable[str]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("step", "code", "severity", "sentence", "evidence_json")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    step: str
    code: str
    severity: str
    sentence: str
    evidence_json: str
    def __init__(self, step: _Optional[str] = ..., code: _Optional[str] = ..., severity: _Optional[str] = ..., sentence: _Optional[str] = ..., evidence_json: _Optional[str] = ...) -> None: ...

class Scrub(_message.Message):
    __slots__ = ("id", "device", "path", "occasion", "started", "ended", "outcome", "steps", "certificate", "actor")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OCCASION_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    id: str
    device: str
    path: str
    occasion: str
    started: float
    ended: float
    outcome: str
    steps: _containers.RepeatedCompositeFieldContainer[StepResult]
    certificate: str
    actor: str
    def __init__(self, id: _Optional[str] = ..., device: _Optional[str] = ..., path: _Optional[str] = ..., occasion: _Optional[str] = ..., started: _Optional[float] = ..., ended: _Optional[float] = ..., outcome: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ..., certificate: _Optional[str] = ..., actor: _Optional[str] = ...) -> None: ...

class ScrubProgress(_message.Message):
    __slots__ = ("scrub", "device", "step", "phase", "done_bytes", "total_bytes", "joined")
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    scrub: str
    device: str
    step: str
    phase: str
    done_bytes: int
    total_bytes: int
    joined: bool
    def __init__(self, scrub: _Optional[str] = ..., device: _Optional[str] = ..., step: _Optional[str] = ..., phase: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., joined: _Optional[bool] = ...) -> None: ...

class ScrubUpdate(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: ScrubProgress
    result: ScrubResult
    def __init__(self, progress: _Optional[_Union[ScrubProgress, _Mapping]] = ..., result: _Optional[_Union[ScrubResult, _Mapping]] = ...) -> None: ...

class ScrubResult(_message.Message):
    __slots__ = ("scrub", "certificate", "device", "unexplained")
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UNEXPLAINED_FIELD_NUMBER: _ClassVar[int]
    scrub: Scrub
    certificate: Certificate
    device: Device
    unexplained: str
    def __init__(self, scrub: _Optional[_Union[Scrub, _Mapping]] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., unexplained: _Optional[str] = ...) -> None: ...

class QuarantineRequest(_message.Message):
    __slots__ = ("device", "reason")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    device: str
    reason: str
    def __init__(self, device: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class BreakGlassRequest(_message.Message):
    __slots__ = ("device", "reason", "seconds")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    device: str
    reason: str
    seconds: float
    def __init__(self, device: _Optional[str] = ..., reason: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("device", "reason")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    device: str
    reason: str
    def __init__(self, device: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AcceptBaselineRequest(_message.Message):
    __slots__ = ("device", "reason", "shown")
    class ShownEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    device: str
    reason: str
    shown: _containers.ScalarMap[str, str]
    def __init__(self, device: _Optional[str] = ..., reason: _Optional[str] = ..., shown: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DeviceAnswer(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: Device
    def __init__(self, device: _Optional[_Union[Device, _Mapping]] = ...) -> None: ...
