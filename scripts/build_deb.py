"""Builds the Debian package: both programs as systemd units, with the Python packages of the lock file.

Beside it: the list of its contents (CycloneDX), ``NAME.deb.cdx.json``.

    python scripts/build_deb.py [--cuda 12|13|none] [--out dist]

The package contains a virtual environment in /opt/scrubber for the distribution's own Python, so it is for the release of
Debian or Ubuntu on which it was built. Nothing on this machine is changed but the output directory.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import time
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from email.utils import formatdate
from hashlib import sha256
from pathlib import Path

import scrubber
from scripts.bill_of_materials import installed_packages, write_bill_of_materials

_ROOT = Path(__file__).resolve().parent.parent
DEBIAN = _ROOT / "deploy" / "debian"
SYSTEMD = _ROOT / "deploy" / "systemd"
SLURM = _ROOT / "deploy" / "slurm"
PREFIX = Path("opt/scrubber")
LOCKS = {
    "12": _ROOT / "deploy" / "container" / "cuda12.txt",
    "13": _ROOT / "deploy" / "container" / "cuda13.txt",
    "none": _ROOT / "deploy" / "container" / "none.txt",
}
_MAINTAINER = "gpu-scrubber maintainers <gpu-scrubber@localhost>"
_SCRIPTS = ("postinst", "prerm", "postrm")


def create_environment(tree: Path, python: Path, lock: Path) -> None:
    """Create the virtual environment below ``tree``, as it is to be at its place on the node.

    Raises:
        CalledProcessError: a package has another hash than the lock file says, or cannot be downloaded.
    """
    place = tree / PREFIX
    _run(python, "-m", "venv", "--without-pip", "--symlinks", place)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    with tempfile.TemporaryDirectory() as wheels:
        _run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, _ROOT)
        install = (*pip, "--python", place / "bin" / "python", "install", "--quiet", "--no-compile")
        _run(*install, "--require-hashes", "--only-binary", ":all:", "--requirement", lock)
        # By its name: the record of a package that was installed by its path contains the path.
        _run(*install, "--no-deps", "--no-index", "--find-links", wheels, f"gpu-scrubber=={scrubber.__version__}")
    for file in (place / "bin").iterdir():
        if file.name != "scrubber" and not file.is_symlink():
            file.unlink()
    for file in (place / "pyvenv.cfg", *(each for each in (place / "bin").iterdir() if not each.is_symlink())):
        file.write_text(file.read_text(encoding="utf-8").replace(str(place), f"/{PREFIX}"), encoding="utf-8")
    update_records(place)
    # By hash: the time of the sources is not that of their installation.
    compiling = ("-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", tree, "-p", "/")
    _run(place / "bin" / "python", *compiling, place / "lib")


def update_records(place: Path) -> None:
    """Make the lists of installed files in the environment at ``place`` agree with its scripts.

    pip wrote them before scripts were removed and got their final interpreter, so they contain hashes of files that name the
    directory of this build.
    """
    for record in place.glob("lib/python3*/site-packages/*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        kept = []
        for name, digest, size in rows:
            path = record.parent.parent / name
            if name.startswith("../"):
                if not path.exists():
                    continue
                content = path.read_bytes()
                digest = f"sha256={urlsafe_b64encode(sha256(content).digest()).rstrip(b'=').decode()}"
                size = str(len(content))
            kept.append((name, digest, size))
        with record.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(kept)


def assemble(tree: Path, out: Path, version: str, depends: str, maintainer: str = _MAINTAINER) -> Path:
    """Add the units, the configuration and the maintainer scripts to ``tree``, and return the package built from it.

    With SOURCE_DATE_EPOCH (Unix time, in seconds) in the environment, the package has no other time in it.

    Args:
        tree: the root directory of the package, with the environment in it.
        depends: the field Depends.
    """
    for unit in sorted(SYSTEMD.glob("*.service")):
        _copy(unit, tree / "usr/lib/systemd/system" / unit.name)
    for file in sorted((DEBIAN / "conffiles").iterdir()):
        _copy(file, tree / "etc/scrubber" / file.name)
    documents = tree / "usr/share/doc/gpu-scrubber"
    _copy(DEBIAN / "copyright", documents / "copyright")
    for drop_in in sorted(SYSTEMD.glob("*.d/*.conf")):
        _copy(drop_in, documents / "examples" / drop_in.parent.name / drop_in.name)
    for example in sorted(SLURM.iterdir()):
        _copy(example, documents / "examples" / SLURM.name / example.name, 0o755)
    built = formatdate(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    entry = f"gpu-scrubber ({version}) unstable; urgency=medium\n\n  * CHANGELOG.md.\n\n -- {maintainer}  {built}\n"
    for name, text in (("changelog", entry), ("CHANGELOG.md", (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))):
        (documents / f"{name}.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    _copy(DEBIAN / "lintian-overrides", tree / "usr/share/lintian/overrides/gpu-scrubber")
    command = tree / "usr/bin/scrubber"
    command.parent.mkdir(parents=True)
    command.symlink_to(f"/{PREFIX}/bin/scrubber")
    size = sum(each.lstat().st_size for each in tree.rglob("*") if not each.is_dir()) // 1024 + 1
    architecture = _run("dpkg", "--print-architecture").strip()
    control = tree / "DEBIAN"
    for script in _SCRIPTS:
        _copy(DEBIAN / script, control / script, 0o755)
    fields = (DEBIAN / "control").read_text(encoding="utf-8")
    (control / "control").write_text(
        fields.format(version=version, architecture=architecture, maintainer=maintainer, size=size, depends=depends),
        encoding="utf-8",
    )
    names = sorted(f"/etc/scrubber/{each.name}\n" for each in (DEBIAN / "conffiles").iterdir())
    (control / "conffiles").write_text("".join(names), encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    package = out / f"gpu-scrubber_{version}_{architecture}.deb"
    _run("dpkg-deb", "--root-owner-group", "-Zzstd", "--build", tree, package)
    return package


def _copy(source: Path, target: Path, mode: int = 0o644) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def _run(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the package, and print its path."""
    parser = argparse.ArgumentParser(description="Build the Debian package.")
    parser.add_argument(
        "--cuda", choices=LOCKS, default="12", help="CUDA version of the GPU libraries; 13 for drivers from 580"
    )
    parser.add_argument("--python", type=Path, default=Path("/usr/bin/python3"), help="the distribution's interpreter")
    parser.add_argument("--out", type=Path, default=_ROOT / "dist", help="directory of the package")
    parser.add_argument("--maintainer", default=_MAINTAINER, help="name and address, for the field Maintainer")
    options = parser.parse_args(arguments)
    if not options.python.exists():
        parser.error(f"{options.python} does not exist; install python3, or select the distribution's with --python")
    minor = _run(options.python, "-c", "import sys; print(*sys.version_info[:2], sep='.')").strip()
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "tree")
        tree.mkdir(mode=0o755)
        create_environment(tree, options.python.resolve(), LOCKS[options.cuda])
        package = assemble(tree, options.out, scrubber.__version__, f"python{minor}, libc6", options.maintainer)
        (site,) = (tree / PREFIX / "lib").glob("python3*/site-packages")
        write_bill_of_materials(package, installed_packages(site))
        print(package)
    return 0


if __name__ == "__main__":
    sys.exit(main())
