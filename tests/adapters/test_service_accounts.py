"""A pod's account is what the kubelet's own token says, and a token of its author's own making says nothing."""

import base64
import json
import os
from pathlib import Path

import pytest

from scrubber.adapters.kubelet.service_accounts import ServiceAccount, ServiceAccounts, account_in

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
    """Its directory and its pods' logs."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "kubelet"
        self.logs = root / "logs"
        self.logs.mkdir()
        self.accounts = ServiceAccounts(self.directory, self.logs)

    def log(self, namespace: str, name: str, uid: str = UID) -> None:
        (self.logs / f"{namespace}_{name}_{uid}").mkdir()

    def volume(self, name: str, content: bytes | None, *, uid: str = UID) -> Path:
        """As the kubelet lays it out: the files in a directory of their own, behind a link that is exchanged."""
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


def test_a_pod_runs_under_the_account_of_its_token(kubelet: Kubelet) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    kubelet.volume("certificates", None)
    assert kubelet.accounts.of(UID) == DCGM
    assert "/".join(DCGM) == "gpu-operator/nvidia-dcgm"


def test_several_tokens_of_one_account_are_that_account(kubelet: Kubelet) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    kubelet.volume("vault", token(payload(warnafter=2)))
    assert kubelet.accounts.of(UID) == DCGM


def test_a_pod_without_a_token_has_no_account(kubelet: Kubelet) -> None:
    assert kubelet.accounts.of(UID) is None
    kubelet.volume("certificates", None)
    assert kubelet.accounts.of(UID) is None


def test_a_token_that_the_kubelet_s_logs_do_not_bear_out_names_nobody(tmp_path: Path) -> None:
    """A pod's author may put a file called ``token`` into a volume; he cannot make a log directory."""
    kubelet = Kubelet(tmp_path)
    kubelet.volume("kube-api-access-abcde", token(payload()))
    assert kubelet.accounts.of(UID) is None
    kubelet.log("tenant-a", POD[1])
    assert kubelet.accounts.of(UID) is None


@pytest.mark.parametrize(
    "other",
    [
        payload(serviceaccount={"name": "nvidia-device-plugin"}),
        payload(namespace="tenant-a"),
        {"not": "a token"},
    ],
)
def test_tokens_that_disagree_name_nobody(kubelet: Kubelet, other: object) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    kubelet.volume("of-the-author", token(other))
    assert kubelet.accounts.of(UID) is None


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
def test_what_is_no_token_of_this_pod_names_nobody(kubelet: Kubelet, content: bytes) -> None:
    assert account_in(content, UID, POD) is None
    kubelet.volume("kube-api-access-abcde", content)
    assert kubelet.accounts.of(UID) is None


def test_a_link_out_of_the_volume_is_not_followed(kubelet: Kubelet, tmp_path: Path) -> None:
    stolen = tmp_path / "stolen"
    stolen.write_bytes(token(payload()))
    volume = kubelet.volume("kube-api-access-abcde", None)
    (volume / "token").symlink_to(stolen)
    assert kubelet.accounts.of(UID) is None
    (volume / "token").unlink()
    (volume / "token").symlink_to("../../../../../../stolen")
    assert kubelet.accounts.of(UID) is None


def test_a_volume_that_is_a_link_is_not_followed(kubelet: Kubelet, tmp_path: Path) -> None:
    elsewhere = kubelet.volume("kube-api-access-abcde", token(payload()), uid="other-pod")
    volumes = kubelet.directory / "pods" / UID / "volumes" / "kubernetes.io~projected"
    volumes.mkdir(parents=True)
    (volumes / "kube-api-access-abcde").symlink_to(elsewhere)
    assert kubelet.accounts.of(UID) is None


def test_what_is_no_readable_file_is_not_waited_for(kubelet: Kubelet) -> None:
    volume = kubelet.volume("kube-api-access-abcde", None)
    os.mkfifo(volume / "token")
    assert kubelet.accounts.of(UID) is None
    (volume / "token").unlink()
    (volume / "token").mkdir()
    assert kubelet.accounts.of(UID) is None
    (volume / "token").rmdir()
    (volume / "token").symlink_to("token")
    assert kubelet.accounts.of(UID) is None


def test_a_token_that_is_too_long_is_not_read(kubelet: Kubelet) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload(padding="x" * (64 * 1024))))
    assert kubelet.accounts.of(UID) is None


@pytest.mark.parametrize("uid", ["", ".", "..", f"../pods/{UID}", "another"])
def test_what_is_no_uid_names_nobody(kubelet: Kubelet, uid: str) -> None:
    kubelet.volume("kube-api-access-abcde", token(payload()))
    assert kubelet.accounts.of(uid) is None


def test_without_a_kubelet_nobody_has_an_account(tmp_path: Path) -> None:
    assert ServiceAccounts(tmp_path / "none", tmp_path / "neither").of(UID) is None
