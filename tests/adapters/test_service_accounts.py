"""A pod's service account is taken from the kubelet's own token; a token that the pod's author provided is ignored."""

import base64
import json
import os
from pathlib import Path

import pytest

from scrubber.adapters.kubelet.service_accounts import ServiceAccount, ServiceAccounts, parse_account

UID = "11111111-2222-3333-4444-555555555555"
POD = ("gpu-operator", "nvidia-dcgm-x7x9q")
DCGM = ServiceAccount("gpu-operator", "nvidia-dcgm")


def payload(**changes: object) -> dict[str, object]:
    claims: dict[str, object] = {
        "namespace": POD[0],
        "node": {"name": "node-1", "uid": "n"},
        "pod": {"name": POD[1], "uid": UID},
        "serviceaccount": {"name": DCGM.name, "uid": "s"},
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
        self.accounts = ServiceAccounts(self.directory, self.logs)

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
    assert kubelet.accounts.find(UID) == DCGM
    assert "/".join(DCGM) == "gpu-operator/nvidia-dcgm"


def test_several_tokens_of_one_account_yield_that_account(kubelet: Kubelet) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    kubelet.volume("vault", token(payload(warnafter=2)))
    assert kubelet.accounts.find(UID) == DCGM


def test_pod_without_a_token_has_no_account(kubelet: Kubelet) -> None:
    assert kubelet.accounts.find(UID) is None
    kubelet.volume("certificates", None)
    assert kubelet.accounts.find(UID) is None


def test_token_not_confirmed_by_the_kubelets_logs_yields_no_account(tmp_path: Path) -> None:
    """A pod's author may put a file called ``token`` into a volume, but cannot create a log directory."""
    kubelet = Kubelet(tmp_path)
    kubelet.volume("kube-api-access-abcde", token(payload()))
    assert kubelet.accounts.find(UID) is None
    kubelet.log("tenant-a", POD[1])
    assert kubelet.accounts.find(UID) is None


@pytest.mark.parametrize(
    "other",
    [
        payload(serviceaccount={"name": "nvidia-device-plugin"}),
        payload(namespace="tenant-a"),
        {"not": "a token"},
    ],
)
def test_tokens_that_disagree_yield_no_account(kubelet: Kubelet, other: object) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    kubelet.volume("of-the-author", token(other))
    assert kubelet.accounts.find(UID) is None


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
def test_invalid_or_foreign_token_yields_no_account(kubelet: Kubelet, content: bytes) -> None:
    assert parse_account(content, UID, POD) is None
    kubelet.volume("kube-api-access-abcde", content)
    assert kubelet.accounts.find(UID) is None


def test_symlink_out_of_the_volume_is_not_followed(kubelet: Kubelet, tmp_path: Path) -> None:
    stolen = tmp_path / "stolen"
    stolen.write_bytes(token(payload()))
    volume = kubelet.volume("kube-api-access-abcde", None)
    (volume / "token").symlink_to(stolen)
    assert kubelet.accounts.find(UID) is None
    (volume / "token").unlink()
    (volume / "token").symlink_to("../../../../../../stolen")
    assert kubelet.accounts.find(UID) is None


def test_volume_that_is_a_symlink_is_not_followed(kubelet: Kubelet, tmp_path: Path) -> None:
    elsewhere = kubelet.volume("kube-api-access-abcde", token(payload()), uid="other-pod")
    volumes = kubelet.directory / "pods" / UID / "volumes" / "kubernetes.io~projected"
    volumes.mkdir(parents=True)
    (volumes / "kube-api-access-abcde").symlink_to(elsewhere)
    assert kubelet.accounts.find(UID) is None


def test_fifo_or_directory_in_place_of_a_token_does_not_block(kubelet: Kubelet) -> None:
    volume = kubelet.volume("kube-api-access-abcde", None)
    os.mkfifo(volume / "token")
    assert kubelet.accounts.find(UID) is None
    (volume / "token").unlink()
    (volume / "token").mkdir()
    assert kubelet.accounts.find(UID) is None
    (volume / "token").rmdir()
    (volume / "token").symlink_to("token")
    assert kubelet.accounts.find(UID) is None


def test_oversized_token_is_not_read(kubelet: Kubelet) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload(padding="x" * (64 * 1024))))
    assert kubelet.accounts.find(UID) is None


@pytest.mark.parametrize("uid", ["", ".", "..", f"../pods/{UID}", "another"])
def test_invalid_pod_uid_yields_no_account(kubelet: Kubelet, uid: str) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    assert kubelet.accounts.find(uid) is None


def test_no_pod_has_an_account_without_a_kubelet(tmp_path: Path) -> None:
    assert ServiceAccounts(tmp_path / "none", tmp_path / "neither").find(UID) is None
