"""Starts an image from its OCI archive, without a container engine, and checks that both programs work in it.

    python -m scripts.check_image --version VERSION ARCHIVE...        as root

Everything runs in the unpacked image as root directory, read-only but for /tmp and /run, without a network and with PIDs of
its own. See docs/decisions/0047-image.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_UNPRIVILEGED = 65532
_TIMEOUT = 900
"""Seconds for one program in the image. The demo is the longest: half a minute of CPU time, minutes on a busy machine."""

# $1: the root directory; the rest: the command. As the runtime would set it up.
_ENTER = """
set -eu
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom; do : >"$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
mkdir -m 1777 "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=1777 tmpfs "$root/run"
mount -o remount,bind,ro "$root"
exec "$@"
"""

_IMPORTS = """
import importlib, importlib.metadata, pathlib, sys, sysconfig
# What these need is not in the image: line editing, terminal windows, NIS, Berkeley DB.
missing = {"readline", "_curses", "_curses_panel", "nis", "_dbm"}
names = {file.name.split(".")[0] for file in pathlib.Path(sysconfig.get_path("stdlib"), "lib-dynload").iterdir()}
names |= {"cryptography.hazmat.bindings._rust", "grpc", "lightkube", "google.protobuf", "msgspec", "pydantic", "plugin", "yaml"}
installed = {each.name for each in importlib.metadata.distributions()}
names |= {"cupy", "pynvml"} if any(name.startswith("cupy") for name in installed) else set()
names |= {"opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace"}
failed = []
for name in sorted(names - missing):
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
sys.exit("\\n".join(failed) or None)
"""

_SERVICE = """
import json, subprocess, sys, time
program, node = sys.argv[1], "/tmp/node"
def run(*words):
    return subprocess.run([program, *words], capture_output=True, text=True)
created = run("sim", "create", "--dir", node, "--devices", "2", "--memory", "1MiB")
if created.returncode:
    sys.exit(created.stderr)
service = subprocess.Popen([
    program, "serve", "--backend", "sim", "--sim-dir", node, "--state-dir", "/tmp/state", "--socket-dir", "/run/scrubber",
    "--node-name", "node", "--metrics-address", "off",
])
try:
    states = []
    for _ in range(600):
        if service.poll() is not None:
            sys.exit(f"the service exited with {service.returncode}")
        listed = run("devices", "--socket-dir", "/run/scrubber", "--output", "json")
        if listed.returncode == 0:
            states = [each["hygiene"] for each in json.loads(listed.stdout)["items"]]
            if states == ["clean", "clean"]:
                break
        time.sleep(0.2)
    else:
        sys.exit(f"the devices did not become clean: {states} {listed.stdout} {listed.stderr}")
    doctor = run("doctor", "--socket-dir", "/run/scrubber", "--output", "json")
    json.loads(doctor.stdout)
finally:
    service.terminate()
    service.wait()
"""


class CheckError(Exception):
    """The image does not work; the message says what failed."""


def digest_file(archive: Path) -> Path:
    """Return the path of the file with the digest of the image in ``archive``."""
    return archive.with_name(archive.name + ".digest")


def unpack(archive: Path, root: Path) -> dict[str, Any]:
    """Unpack the image in ``archive`` to ``root``, and return its configuration.

    Raises:
        CheckError: it is no such archive, a part has another digest than stated, or the image has another digest than the
            one beside the archive.
    """
    with tempfile.TemporaryDirectory(prefix="layout-", dir=root.parent) as name:
        layout = Path(name)
        try:
            stated = digest_file(archive).read_text(encoding="utf-8").strip()
            with tarfile.open(archive) as tar:
                tar.extractall(layout, filter="data")
            (entry,) = json.loads((layout / "index.json").read_text(encoding="utf-8"))["manifests"]
            if entry["digest"] != stated:
                raise CheckError(f"{archive.name} contains the image {entry['digest']}, and not {stated}.")
            manifest = json.loads(_blob(layout, entry).read_text(encoding="utf-8"))
            configuration: dict[str, Any] = json.loads(_blob(layout, manifest["config"]).read_text(encoding="utf-8"))
            layers = [_blob(layout, layer) for layer in manifest["layers"]]
        except (OSError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
            raise CheckError(
                f"{archive} is not an OCI archive with one image and its digest beside it: {error}"
            ) from None
        for layer in layers:
            _run("tar", "--extract", "--numeric-owner", "--file", layer, "--directory", root)
    return configuration


def _blob(layout: Path, descriptor: Mapping[str, Any]) -> Path:
    algorithm, _, digest = descriptor["digest"].partition(":")
    path: Path = layout / "blobs" / algorithm / digest
    with path.open("rb") as file:
        if hashlib.file_digest(file, algorithm).hexdigest() != digest:
            raise CheckError(f"The content of {descriptor['digest']} has another digest.")
    return path


def check(archive: Path, version: str) -> None:
    """Check the image in ``archive``.

    Raises:
        CheckError: a file was altered, or a program in the image fails.
    """
    with tempfile.TemporaryDirectory(prefix="image-") as name:
        root = Path(name, "root")
        root.mkdir(mode=0o755)
        Path(name).chmod(0o755)
        settings = unpack(archive, root)["config"]
        (program,) = settings["Entrypoint"]
        environment = dict(each.split("=", 1) for each in settings["Env"])
        python = str(Path(program).with_name("python"))

        def step(title: str, *command: str, user: int, stdin: str = "") -> str:
            return _inside(root, title, environment, command, user, stdin)

        printed = step("scrubber version", "scrubber", "version", "--output", "json", user=_UNPRIVILEGED)
        if json.loads(printed)["clientVersion"] != version:
            raise CheckError(f"The program in the image is not version {version}: {printed}")
        step("the import of every module that needs a library", python, "-", user=_UNPRIVILEGED, stdin=_IMPORTS)
        step(
            "a shell that waits, for init containers",
            "sh",
            "-c",
            "[ -f /etc/debian_version ] && sleep 0",
            user=_UNPRIVILEGED,
        )
        step("the service on a simulated node, and scrubber doctor", python, "-", program, user=0, stdin=_SERVICE)
        step("the demo: hand-overs by service and plugin", program, "demo", user=_UNPRIVILEGED)


def _inside(
    root: Path, title: str, environment: Mapping[str, str], command: Sequence[str], user: int, stdin: str
) -> str:
    """Run ``command`` in ``root`` and return its output. Uid 0 has no capabilities either."""
    namespaces = ("unshare", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child")
    limited = ("setpriv", "--no-new-privs", "--bounding-set=-all,+sys_chroot,+setuid,+setgid", "--inh-caps=-all")
    entered = ("chroot", f"--userspec={user}:{user}", root)
    words = [*namespaces, "sh", "-c", _ENTER, "sh", root, *limited, *entered, *command]
    variables = {**environment, "HOME": "/tmp"}
    print(f"check_image: {title}", file=sys.stderr)
    try:
        done = subprocess.run(
            [*map(str, words)],
            input=stdin,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckError(f"In the image, this did not end within {_TIMEOUT} s: {title}.") from None
    if done.returncode != 0:
        raise CheckError(f"In the image, this failed with {done.returncode}: {title}.\n{done.stdout}{done.stderr}")
    return done.stdout


def _run(*command: str | Path) -> None:
    subprocess.run([*map(str, command)], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the images in the given archives."""
    parser = argparse.ArgumentParser(description="Start images and check that they work.")
    parser.add_argument("archives", type=Path, nargs="+", metavar="ARCHIVE")
    parser.add_argument("--version", required=True, help="version of the programs in them")
    options = parser.parse_args(arguments)
    try:
        for archive in options.archives:
            check(archive, options.version)
    except CheckError as error:
        print(f"check_image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
