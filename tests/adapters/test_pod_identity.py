"""A pod's identity is what the kubelet recorded; nothing that a pod's author provides gives it another one."""

import base64
import json
import os
from pathlib import Path

import pytest

from scrubber.adapters.kubelet.pod_identity import PodIdentities, parse_account
from scrubber.domain.assignment import Assignment, KubeletReading, Pod, Trust
from scrubber.domain.infrastructure import PodIdentity

UID = "11111111-2222-3333-4444-555555555555"
POD = ("gpu-operator", "nvidia-dcgm-x7x9q")
DCGM = PodIdentity(*POD, UID, "nvidia-dcgm")
WITHOUT_TOKEN = PodIdentity(*POD, UID)


def payload(**changes: object) -> dict[str, object]:
    claims: dict[str, object] = {
        "namespace": POD[0],
        "node": {"name": "node-1", "uid": "n"},
        "pod": {"name": POD[1], "uid": UID},
        "serviceaccount": {"name": DCGM.service_account, "uid": "s"},
        "warnafter": 1,
    }
    return {"aud": ["https://kubernetes.default.svc"], "exp": 2, "kubernetes.io": {**claims, **changes}}


def token(content: object) -> bytes:
    def part(each: object) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=")

    return b".".join((part({"alg": "RS256"}), part(content), b"c2lnbmF0dXJl"))


class Kubelet:
    """The kubelet's directory and its pods' logs."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "kubelet"
        self.logs = root / "logs"
        self.logs.mkdir()
        self.reading = KubeletReading(Trust.UNREADABLE)
        self.now = 0.0
        self.ended: set[str] = set()
        self.pods = PodIdentities(
            self.directory,
            self.logs,
            may_run=lambda uid: uid not in self.ended,
            reading=lambda: self.reading,
            monotonic=lambda: self.now,
        )

    def log(self, namespace: str, name: str, uid: str = UID) -> None:
        (self.logs / f"{namespace}_{name}_{uid}").mkdir()

    def volume(self, name: str, content: bytes | None, *, uid: str = UID) -> Path:
        """Create a volume as the kubelet does: the files are in a separate directory, behind a replaceable link."""
        volume = self.directory / "pods" / uid / "volumes" / "kubernetes.io~projected" / name
        written = volume / "..2026_01_01_00_00_00.1"
        written.mkdir(parents=True)
        (volume / "..data").symlink_to(written.name)
        for file in ("token", "namespace") if content is not None else ("namespace",):
            (written / file).write_bytes(content or b"")
            (volume / file).symlink_to(f"..data/{file}")
        return volume


@pytest.fixture
def kubelet(tmp_path: Path) -> Kubelet:
    made = Kubelet(tmp_path)
    made.log(*POD)
    return made


def test_pod_runs_under_the_service_account_of_its_token(kubelet: Kubelet) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    kubelet.volume("certificates", None)
    assert kubelet.pods.find(UID) == DCGM


def test_several_tokens_of_one_account_yield_that_account(kubelet: Kubelet) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    kubelet.volume("vault", token(payload(warnafter=2)))
    assert kubelet.pods.find(UID) == DCGM


def test_pod_without_a_token_is_identified_by_its_namespace_without_an_account(kubelet: Kubelet) -> None:
    assert kubelet.pods.find(UID) == WITHOUT_TOKEN
    kubelet.volume("certificates", None)
    assert kubelet.pods.find(UID) == WITHOUT_TOKEN


def test_token_not_confirmed_by_the_kubelets_logs_yields_no_identity(tmp_path: Path) -> None:
    """A pod's author may put a file called ``token`` into a volume, but cannot create a log directory."""
    kubelet = Kubelet(tmp_path)
    kubelet.volume("kube-api-access-abcde", token(payload()))
    assert kubelet.pods.find(UID) is None
    kubelet.log("tenant-a", POD[1])
    assert kubelet.pods.find(UID) is None


@pytest.mark.parametrize(
    "other",
    [
        payload(serviceaccount={"name": "nvidia-device-plugin"}),
        payload(namespace="tenant-a"),
        {"not": "a token"},
    ],
)
def test_tokens_that_disagree_yield_no_identity(kubelet: Kubelet, other: object) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    kubelet.volume("of-the-author", token(other))
    assert kubelet.pods.find(UID) is None


@pytest.mark.parametrize(
    "content",
    [
        token(payload(pod={"name": POD[1], "uid": "another"})),
        token(payload(pod={"name": "another", "uid": UID})),
        token(payload(pod={"name": POD[1]})),
        token(payload(pod=None)),
        token(payload(namespace="")),
        token(payload(namespace=7)),
        token(payload(serviceaccount={"name": ""})),
        token(payload(serviceaccount={})),
        token({"aud": []}),
        token([]),
        token(None),
        b"",
        b"..",
        b"a.b.c",
        b"a.\xff\xfe.c",
        b"a." + base64.urlsafe_b64encode(b"{") + b".c",
        b"a." + base64.urlsafe_b64encode(b"[" * 10000) + b".c",
        b"no token at all",
        token(payload()) + b".more",
    ],
)
def test_invalid_or_foreign_token_yields_no_identity(kubelet: Kubelet, content: bytes) -> None:
    assert parse_account(content, UID, POD) is None
    kubelet.volume("kube-api-access-abcde", content)
    assert kubelet.pods.find(UID) is None


def test_symlink_out_of_the_volume_is_not_followed(kubelet: Kubelet, tmp_path: Path) -> None:
    stolen = tmp_path / "stolen"
    stolen.write_bytes(token(payload()))
    volume = kubelet.volume("kube-api-access-abcde", None)
    (volume / "token").symlink_to(stolen)
    assert kubelet.pods.find(UID) is None
    (volume / "token").unlink()
    (volume / "token").symlink_to("../../../../../../stolen")
    assert kubelet.pods.find(UID) is None


def test_token_that_becomes_a_symlink_before_it_is_opened_is_not_followed(
    kubelet: Kubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stolen = tmp_path / "stolen"
    stolen.write_bytes(token(payload()))
    kubelet.volume("kube-api-access-abcde", token(payload()))
    kernel_open, replaced = os.open, []

    def replace_and_open(path: Path, flags: int) -> int:
        replaced.append(path.name)
        path.unlink()
        path.symlink_to(stolen)
        return kernel_open(path, flags)

    monkeypatch.setattr(os, "open", replace_and_open)
    assert kubelet.pods.find(UID) is None
    assert replaced == ["token"]


def test_fifo_or_directory_in_place_of_a_token_does_not_block(kubelet: Kubelet) -> None:
    volume = kubelet.volume("kube-api-access-abcde", None)
    os.mkfifo(volume / "token")
    assert kubelet.pods.find(UID) is None
    (volume / "token").unlink()
    (volume / "token").mkdir()
    assert kubelet.pods.find(UID) is None
    (volume / "token").rmdir()
    (volume / "token").symlink_to("token")
    assert kubelet.pods.find(UID) is None


def test_oversized_token_is_not_read(kubelet: Kubelet) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload(padding="x" * (64 * 1024))))
    assert kubelet.pods.find(UID) is None


@pytest.mark.parametrize("uid", ["", ".", "..", f"../pods/{UID}", "another"])
def test_invalid_pod_uid_yields_no_identity(kubelet: Kubelet, uid: str) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    assert kubelet.pods.find(uid) is None


def test_no_pod_has_an_identity_without_a_kubelet(tmp_path: Path) -> None:
    kubelet = Kubelet(tmp_path)
    kubelet.logs.rmdir()
    assert kubelet.pods.find(UID) is None
    assert kubelet.pods.name_of(UID) is None


def test_volume_that_is_a_symlink_yields_no_account_of_another_pod(kubelet: Kubelet) -> None:
    elsewhere = kubelet.volume("kube-api-access-abcde", token(payload()), uid="other-pod")
    volumes = kubelet.directory / "pods" / UID / "volumes" / "kubernetes.io~projected"
    volumes.mkdir(parents=True)
    (volumes / "kube-api-access-abcde").symlink_to(elsewhere)
    assert kubelet.pods.find(UID) is None


def test_uid_with_log_directories_of_two_pods_has_no_identity(kubelet: Kubelet) -> None:
    """A privileged pod that adds a directory for its own UID is not in the other namespace."""
    kubelet.log("tenant-a", "train-0")
    assert kubelet.pods.find(UID) is None


def test_pod_name_with_log_directories_of_two_uids_gives_neither_an_identity(kubelet: Kubelet) -> None:
    """A privileged pod renamed its own directory to that of an existing agent."""
    kubelet.log(*POD, uid="99999999-2222-3333-4444-555555555555")
    assert kubelet.pods.find(UID) is None
    assert kubelet.pods.find("99999999-2222-3333-4444-555555555555") is None


def test_pod_is_identified_although_the_logs_of_the_pod_that_it_replaced_remain(kubelet: Kubelet) -> None:
    """A pod with a fixed name, such as that of a StatefulSet: the kubelet removes logs only once a minute."""
    replaced = "99999999-2222-3333-4444-555555555555"
    kubelet.log(*POD, uid=replaced)
    kubelet.ended.add(replaced)
    assert kubelet.pods.find(UID) == WITHOUT_TOKEN


def test_pod_that_a_later_trusted_list_of_the_kubelet_lacks_has_no_identity(kubelet: Kubelet) -> None:
    kubelet.reading = KubeletReading(Trust.TRUSTED, started_at=-1.0)
    assert kubelet.pods.find(UID) == WITHOUT_TOKEN  # the list is older than the pod may be
    kubelet.reading = KubeletReading(Trust.TRUSTED, started_at=1.0)
    assert kubelet.pods.find(UID) is None
    kubelet.reading = KubeletReading(Trust.EMPTY_AFTER_RESTART, started_at=2.0)
    assert kubelet.pods.find(UID) == WITHOUT_TOKEN
    listed = (Assignment(Pod(*POD, UID), "", frozenset()),)
    kubelet.reading = KubeletReading(Trust.TRUSTED, listed, started_at=3.0)
    assert kubelet.pods.find(UID) == WITHOUT_TOKEN
