"""Files of the node's container runtime and toolkit, and processes of the node, as ``scrubber doctor`` reads them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from scrubber.doctor import container_runtime
from scrubber.doctor.model import CheckLevel
from tests.fuzz.loop import directory
from tests.fuzz.target import SLOW_GOAL, target

_OPTIONS = ("pod_annotations", "allowed_annotations")


@cache
def _file() -> Path:
    return directory() / "config.toml"


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        return tomllib.loads(content.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _annotations(value: object) -> Iterator[tuple[str, str]]:
    """Yield every text in a list under one of the options, in any table."""
    for key, below in value.items() if isinstance(value, dict) else ():
        yield from _annotations(below)
        if key in _OPTIONS and isinstance(below, list):
            yield from ((key, each) for each in below if isinstance(each, str))


@target(
    "runtime-configuration",
    parser="the configuration of containerd, CRI-O and NVIDIA's toolkit",
    covers=("scrubber.doctor.container_runtime",),
    oracle="a file that Python's TOML reader refuses is refused; pods that select GPUs by a variable are ruled out only where "
    "the toolkit's option is false; every pattern in the file that matches CDI's annotations is found",
    seeds=(
        b"accept-nvidia-visible-devices-envvar-when-unprivileged = false\n",
        b"accept-nvidia-visible-devices-as-volume-mounts = true\n[nvidia-container-cli]\n",
        (
            b'version = 2\nimports = ["/etc/x/*.toml"]\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]\n'
            b'pod_annotations = ["cdi.k8s.io/*", "a"]\n'
        ),
        b'[crio.runtime.runtimes.x]\nallowed_annotations = ["cdi.*"]\n',
        b"accept-nvidia-visible-devices-envvar-when-unprivileged = 0x" + b"f" * 4000,
    ),
    words=(b"pod_annotations = [", b'"*"', b"[[a]]\n", b"a.b.c = {}", b"imports = ['/", b"[" * 300, b"= false\n"),
    longest=8192,
    goal=SLOW_GOAL,
)
def runtime_configuration(data: bytes) -> bool:
    path = _file()
    path.write_bytes(data)
    reference = _parsed(data)
    (first, *_) = container_runtime._toolkit_config(path, uses_cdi=False, operators=False)
    assert (first.level is CheckLevel.OK) == (
        reference is not None and reference.get(container_runtime.ENVVAR) is False
    )
    try:
        options = container_runtime.read_toml(path)
    except (ValueError, RecursionError):
        assert reference is None
        return False
    assert reference is not None
    expected = [(key, each) for key, each in _annotations(reference) if fnmatchcase("cdi.k8s.io", each.split("/")[0])]
    assert sorted(container_runtime._patterns_in(options)) == sorted(expected)
    return True
