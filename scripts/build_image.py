"""Builds the container image of all programs as an OCI archive, without a registry and without a container engine.

    python -m scripts.build_image [--cuda 12|13|none] [--out dist] [--debs DIR]      as root, on Debian 12
    python -m scripts.build_image --lock         write the current versions of the Debian packages to the lock file

The image contains the Debian packages of deploy/container/debian-ARCH.txt, unpacked, and a virtual environment with the
Python packages of a lock file; every one has its hash in a lock file. Beside the archive: the digest of the image, and a list of
its contents (CycloneDX). One commit gives one digest. See docs/decisions/0047-image.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.parser import HeaderParser
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.component import ComponentType
from packageurl import PackageURL

import scrubber
from scripts.bill_of_materials import bill_of_materials, component, installed_packages
from scripts.build_deb import LOCKS, PREFIX, create_environment
from scripts.check_image import CheckError, check, digest_file

_ROOT = Path(__file__).resolve().parent.parent
CONTAINER = _ROOT / "deploy" / "container"
PROGRAM = f"/{PREFIX}/bin/scrubber"
PYTHON = Path("/usr/bin/python3.11")
"""The interpreter of Debian 12, at its place in the image. The builder's own, of the same release, prepares the environment."""
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/nonexistent:/sbin/nologin\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_LINKS = {
    "usr/bin/scrubber": PROGRAM,
    # Init containers of deploy/kubernetes/gpu-operator wait in a shell.
    "usr/bin/sh": "busybox",
    "usr/bin/sleep": "busybox",
}
_MERGED = ("bin", "lib", "lib64", "sbin")
_UNUSED = ("bash-completion", "bug", "doc-base", "info", "lintian", "locale", "man")


class BuildError(Exception):
    """The image cannot be built; the message says why and what to do."""


@dataclass(frozen=True)
class DebianPackage:
    """One line of the lock file: the package, its version, and the SHA-256 of the file in hexadecimal digits."""

    name: str
    version: str
    sha256: str


# --- Debian packages -------------------------------------------------------------------------------------------------


def read_lock(path: Path) -> list[DebianPackage]:
    """Return the packages of a lock file.

    Raises:
        BuildError: there is none for this architecture, or a line is not ``NAME=VERSION sha256:DIGITS``.
    """
    if not path.exists():
        raise BuildError(f"{path} does not exist: the image is built for the architectures that have a lock file.")
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9][a-z0-9.+-]+)=(\S+) sha256:([0-9a-f]{64})", line)
            if match is None:
                raise BuildError(f'{path}: "{line}" is not NAME=VERSION sha256:DIGITS; write the file with --lock.')
            found.append(DebianPackage(*match.groups()))
    return found


def write_lock(path: Path) -> None:
    """Set the versions and hashes in a lock file to those of the packages that apt would install now."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name = line.partition("=")[0]
            record = HeaderParser().parsestr(_run("apt-cache", "show", "--no-all-versions", name))
            line = f"{name}={record['Version']} sha256:{record['SHA256']}"
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def fetch(packages: Sequence[DebianPackage], directory: Path) -> list[Path]:
    """Return the file of each package. What ``directory`` does not contain is downloaded into it, as apt is configured.

    Raises:
        BuildError: apt does not offer this version, or offers another file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    missing = [each for each in packages if each.sha256 not in _by_hash(directory)]
    if missing:
        words = [f"{each.name}={each.version}" for each in missing]
        if not (
            _apt("download", *words, cwd=directory) or (_apt("update") and _apt("download", *words, cwd=directory))
        ):
            raise BuildError(
                f"apt cannot download {', '.join(words)}. If Debian has newer versions now, configure a snapshot of its "
                f"archive, copy the files to {directory}, or take the newer versions with --lock."
            )
    found = _by_hash(directory)
    for each in packages:
        if each.sha256 not in found:
            raise BuildError(
                f"{each.name} {each.version} has another hash than the lock file says. Do not use it before you know why; "
                f"then delete it from {directory}."
            )
    return [found[each.sha256] for each in packages]


def _by_hash(directory: Path) -> dict[str, Path]:
    return {hashlib.sha256(each.read_bytes()).hexdigest(): each for each in sorted(directory.glob("*.deb"))}


def unpack(debs: Iterable[Path], tree: Path) -> None:
    """Unpack Debian packages into the empty directory ``tree``, without running their scripts.

    Each one's control file goes to var/lib/dpkg/status.d, where scanners of images look for it. Of its documentation, only
    the licence is kept.
    """
    for name in _MERGED:
        (tree / "usr" / name).mkdir(parents=True)
        (tree / name).symlink_to(f"usr/{name}")
    records = tree / "var/lib/dpkg/status.d"
    records.mkdir(parents=True)
    for deb in debs:
        # dpkg-deb --extract would replace the links by directories.
        files = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], check=True, stdout=subprocess.PIPE).stdout
        extract = ("tar", "--extract", "--keep-directory-symlink", "--same-permissions", "--numeric-owner")
        subprocess.run([*extract, "--directory", tree], check=True, input=files)
        control = _run("dpkg-deb", "--field", deb)
        (records / HeaderParser().parsestr(control)["Package"]).write_text(control, encoding="utf-8")
    for package in (tree / "usr/share/doc").iterdir():
        for each in () if package.is_symlink() else package.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            elif each.name != "copyright":
                each.unlink()
    for name in _UNUSED:
        shutil.rmtree(tree / "usr/share" / name, ignore_errors=True)


def complete(tree: Path) -> None:
    """Add to ``tree`` what the scripts of the packages would have created, and the links of the image."""
    for name, text in _FILES.items():
        _file(tree, name).write_text(text, encoding="utf-8")
    for name, target in _LINKS.items():
        _file(tree, name).symlink_to(target)
    certificates = sorted((tree / "usr/share/ca-certificates").rglob("*.crt"))
    _file(tree, _CERTIFICATES).write_bytes(b"".join(each.read_bytes() for each in certificates))


def _file(tree: Path, name: str) -> Path:
    place = tree / name
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


# --- the list of contents ---------------------------------------------------------------------------------------------


def contents(tree: Path, packages: Iterable[DebianPackage], architecture: str, digest: str) -> str:
    """Return the contents of the image in ``tree`` as CycloneDX JSON. The same contents give the same text.

    Args:
        digest: the image's, ``sha256:…``.
    """
    parts = []
    for package in packages:
        qualifiers = {"arch": architecture, "distro": "debian-12"}
        file = HashType(alg=HashAlgorithm.SHA_256, content=package.sha256)
        parts.append(component(PackageURL("deb", "debian", package.name, package.version, qualifiers), file))
    (site,) = (tree / PREFIX / "lib").glob("python3*/site-packages")
    parts += installed_packages(site)
    return bill_of_materials("scrubber", ComponentType.CONTAINER, digest, parts, epoch())


# --- the image -------------------------------------------------------------------------------------------------------


def configuration(revision: str | None, source: str | None) -> list[str]:
    """Return the flags of ``buildah config`` for the image.

    Args:
        revision: the commit; None if unknown.
        source: the URL of the sources; None for none.
    """
    labels = {
        "title": "gpu-scrubber",
        "description": "Proves that a GPU is clean before a Kubernetes node hands it to the next tenant",
        "licenses": "Apache-2.0",
        "version": scrubber.__version__,
        "created": datetime.fromtimestamp(epoch(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "revision": revision,
        "source": source,
    }
    environment = {
        "PATH": f"/{PREFIX}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "SSL_CERT_FILE": f"/{_CERTIFICATES}",
    }
    # The kubelet's sockets belong to root. The manifests define what else root may do.
    flags = ["--entrypoint", json.dumps([PROGRAM]), "--cmd", "", "--user", "0:0", "--workingdir", "/"]
    for name, value in environment.items():
        flags += ["--env", f"{name}={value}"]
    for name, text in labels.items():
        if text is not None:
            flags += ["--label", f"org.opencontainers.image.{name}={text}"]
    return flags


def build_and_check(cuda: str, out: Path, debs: Path, source: str | None = None) -> Path:
    """Build the image and start it; return its archive. An image that does not work leaves no file in ``out``.

    Raises:
        BuildError, CalledProcessError: as :func:`build`.
        CheckError: the image does not work.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".image-", dir=out) as name:
        archive = build(cuda, Path(name), debs, source)
        check(archive, scrubber.__version__)
        for file in sorted(archive.parent.iterdir()):
            file.replace(out / file.name)
    return out / archive.name


def build(cuda: str, out: Path, debs: Path, source: str | None = None) -> Path:
    """Build the image for one version of CUDA (a key of ``LOCKS``); return its archive, which was not started yet.

    Raises:
        BuildError: a package is not what its lock file says, or cannot be downloaded.
        CalledProcessError: a program failed; its message is on stderr.
    """
    architecture = _run("dpkg", "--print-architecture").strip()
    packages = read_lock(CONTAINER / f"debian-{architecture}.txt")
    files = fetch(packages, debs)
    archive = out / f"scrubber-{scrubber.__version__}-{variant(cuda)}-{architecture}.oci.tar"
    with tempfile.TemporaryDirectory(prefix="image-") as name:
        work = Path(name)
        trust = work / "policy.json"
        trust.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}), encoding="utf-8")
        storage = ("--root", work / "storage", "--runroot", work / "run", "--storage-driver", "vfs")
        buildah = ("buildah", *storage, "--log-level", "error")
        container = _run(*buildah, "from", "--signature-policy", trust, "scratch").strip()
        tree = Path(_run(*buildah, "mount", container).strip())
        try:
            tree.chmod(0o755)
            unpack(files, tree)
            complete(tree)
            compile_library(tree)
            create_environment(tree, PYTHON, LOCKS[cuda])
            _run(*buildah, "config", *configuration(_revision(), source), container)
            commit = (*buildah, "commit", "--quiet", "--timestamp", str(epoch()), "--disable-compression=false")
            plain = ("--identity-label=false", "--omit-history", "--signature-policy", trust)
            layout = work / "layout"
            _run(*commit, *plain, container, f"oci:{layout}:{scrubber.__version__}-{variant(cuda)}")
            index = json.loads((layout / "index.json").read_text(encoding="utf-8"))
            digest = index["manifests"][0]["digest"]
            listed = contents(tree, packages, architecture, digest)
        finally:
            _run(*buildah, "umount", container)
        pack(layout, archive)
    digest_file(archive).write_text(f"{digest}\n", encoding="utf-8")
    archive.with_name(f"{_stem(archive)}.cdx.json").write_text(listed, encoding="utf-8")
    return archive


def variant(cuda: str) -> str:
    """Return the word for a key of ``LOCKS`` in names of files and tags: ``cuda12``, ``cuda13`` or ``none``."""
    return LOCKS[cuda].stem


def compile_library(tree: Path) -> None:
    """Compile Python's standard library in ``tree``: a read-only image cannot do so later."""
    # By hash: the time of the sources is not that of their installation.
    compiling = ("-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", tree, "-p", "/")
    _run(PYTHON, *compiling, tree / "usr/lib/python3.11")


def pack(directory: Path, archive: Path) -> None:
    """Write the files of ``directory`` to a tar archive that contains nothing of this machine: no order, owner or time."""
    with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            entry = tarfile.TarInfo(path.relative_to(directory).as_posix())
            entry.size, entry.mtime, entry.mode = path.stat().st_size, epoch(), 0o644
            with path.open("rb") as content:
                tar.addfile(entry, content)


def epoch() -> int:
    """Return the time of the image, in seconds of Unix time: SOURCE_DATE_EPOCH, or else that of the commit.

    Raises:
        BuildError: there is neither, or the variable is not a number.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct") or ""
    if not (given.isascii() and given.isdecimal()):
        raise BuildError(f'The time of the sources is unknown ("{given}"); set SOURCE_DATE_EPOCH to it, in Unix time.')
    return int(given)


def _revision() -> str | None:
    """Return the commit of the sources, None if unknown."""
    commit = _git("rev-parse", "HEAD")
    return f"{commit}-modified" if commit and _git("status", "--porcelain") else commit


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", "-C", _ROOT, *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def _stem(archive: Path) -> str:
    return archive.name.removesuffix(".oci.tar")


def require_tools() -> None:
    """Check that the machine can build images; as root, install what is missing.

    Raises:
        BuildError: it cannot; the message says what to do.
    """
    if os.geteuid() != 0:
        raise BuildError("The image is built in a mounted root directory, which needs root; run this as root.")
    if shutil.which("apt-get") is None:
        raise BuildError("The image is built of Debian packages; run this on Debian 12.")
    packages = {"buildah": "buildah", "unshare": "util-linux", str(PYTHON): "python3.11-venv"}
    missing = [package for program, package in packages.items() if shutil.which(program) is None]
    if missing and not (_apt("install", *missing) or (_apt("update") and _apt("install", *missing))):
        raise BuildError(
            f"apt-get could not install {' '.join(missing)}, which Debian 12 has; install it, and run this again."
        )


def _apt(*words: str, cwd: Path | None = None) -> bool:
    """Whether apt-get succeeded."""
    command = ("apt-get", "-qq", "-y", "--no-install-recommends", "-o", "APT::Sandbox::User=root", *words)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, env=environment, stdout=sys.stderr, check=False, cwd=cwd).returncode == 0


def _run(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check the image, and print the path of its archive."""
    parser = argparse.ArgumentParser(description="Build the container image.")
    parser.add_argument(
        "--cuda", choices=LOCKS, default="12", help="CUDA version of the GPU libraries; 13 for drivers from 580"
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "dist", help="directory of the archive")
    parser.add_argument("--debs", type=Path, default=_ROOT / "build" / "debs", help="directory of Debian packages")
    parser.add_argument("--source", help="URL of the sources, for a label of the image")
    parser.add_argument("--lock", action="store_true", help="only update the versions in the lock file")
    options = parser.parse_args(arguments)
    os.umask(0o022)
    try:
        if options.lock:
            write_lock(CONTAINER / f"debian-{_run('dpkg', '--print-architecture').strip()}.txt")
            return 0
        require_tools()
        archive = build_and_check(options.cuda, options.out, options.debs, options.source)
    except (BuildError, CheckError) as error:
        print(f"build_image: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"build_image: {error.cmd[0]} failed with {error.returncode}; its message is above.", file=sys.stderr)
        return 1
    print(archive)
    return 0


if __name__ == "__main__":
    sys.exit(main())
