"""Finds the user-space files of NVIDIA's driver, which a container gets beside its devices.

The kernel module accepts only libraries of its own version, so the driver's version decides which files are taken. A
root with the files of two drivers is refused when it does not say which one runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from scrubber.domain.errors import InvalidConfiguration

__all__ = ["CdiHook", "DriverFiles", "DriverRoot", "find_cdi_hook", "find_driver_files", "is_unchanged"]

LIBRARY_DIRECTORIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "usr/local/nvidia/lib64",
    "lib/x86_64-linux-gnu",
)
PROGRAM_DIRECTORIES = ("usr/bin", "usr/sbin", "usr/local/nvidia/bin", "bin")
PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
HOOK_PROGRAMS = ("nvidia-cdi-hook", "nvidia-ctk")
HOOK_DIRECTORIES = ("usr/bin", "usr/local/nvidia/toolkit", "usr/local/bin")

_LIBRARY_NAME = re.compile(
    r"lib(cuda|cudadebugger|nvidia-|nvcuvid|nvoptix|(EGL|GLX|GLESv1_CM|GLESv2)_nvidia)[A-Za-z0-9_.+-]*\.so[.0-9]*"
)
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?")
_KERNEL_MODULE = re.compile(rf"NVRM version:.*?\s({_VERSION.pattern})\s")
_CUDA = re.compile(rf"libcuda\.so\.({_VERSION.pattern})")


HOST_ROOT = PurePosixPath("/")


@dataclass(frozen=True, slots=True)
class DriverRoot:
    """Where the driver is installed: on the host, and the same directory as this process sees it."""

    host: PurePosixPath = HOST_ROOT
    local_path: Path = Path("/")

    def host_path(self, path: str) -> str:
        """Return the host's path of ``path``, which begins at the driver's root."""
        return str(self.host / path.lstrip("/"))


@dataclass(frozen=True, slots=True)
class LibraryLink:
    """A symbolic link beside the libraries, such as ``libcuda.so.1``.

    Attributes:
        path: path of the link, from the driver's root.
        target: content of the link.
        file: the library that it resolves to, from the driver's root.
    """

    path: str
    target: str
    file: str


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """Absolute paths that begin at the driver's root; the same in a container. Sorted."""

    version: str
    libraries: tuple[str, ...]
    links: tuple[LibraryLink, ...]
    programs: tuple[str, ...]

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories of the libraries."""
        return tuple(sorted({os.path.dirname(path) for path in self.libraries}))


@dataclass(frozen=True, slots=True)
class CdiHook:
    """NVIDIA's program that prepares a container's links and its linker cache; the runtime calls it on the host."""

    path: str

    def arguments(self, command: str, *flags: str) -> list[str]:
        """Return the argument list; ``nvidia-ctk``, the older program, needs the word ``hook`` before the command."""
        name = PurePosixPath(self.path).name
        return [name, *(["hook"] if name == "nvidia-ctk" else []), command, *flags]


def find_driver_files(root: DriverRoot) -> DriverFiles:
    """Return the files of the running driver, below ``root``.

    Raises:
        InvalidConfiguration: there are none, or it is unknown which of several drivers runs.
    """
    version = _driver_version(root.local_path)
    libraries: dict[str, str] = {}
    links: dict[str, LibraryLink] = {}
    for directory in _directories(root.local_path):
        inside = "/" + str(directory.relative_to(root.local_path))
        for name in sorted(os.listdir(directory)):
            path = directory / name
            if path.is_symlink() or name in libraries or not _belongs(name, version) or not path.is_file():
                continue
            libraries[name] = f"{inside}/{name}"
        for name in sorted(os.listdir(directory)):
            path = directory / name
            file = libraries.get(os.path.basename(os.path.realpath(path))) if path.is_symlink() else None
            if file is not None and os.path.dirname(file) == inside:
                links[f"{inside}/{name}"] = LibraryLink(f"{inside}/{name}", os.path.basename(os.readlink(path)), file)
    programs = (
        next((f"/{place}/{name}" for place in PROGRAM_DIRECTORIES if (root.local_path / place / name).is_file()), None)
        for name in PROGRAMS
    )
    return DriverFiles(
        version,
        tuple(sorted(libraries.values())),
        tuple(link for _, link in sorted(links.items())),
        tuple(sorted(path for path in programs if path is not None)),
    )


def is_unchanged(files: DriverFiles, root: DriverRoot) -> bool:
    """Return whether ``files`` all still exist, and the kernel, if it reports a version, runs the same driver."""
    paths = (*files.libraries, *files.programs)
    return _kernel_module_version(root.local_path) in (None, files.version) and all(
        (root.local_path / path.lstrip("/")).is_file() for path in paths
    )


def find_cdi_hook(root: DriverRoot) -> CdiHook | None:
    """Return NVIDIA's hook program; None where the driver has a separate root, because only the host is searched."""
    if root.host != HOST_ROOT:
        return None
    for name in HOOK_PROGRAMS:
        for place in HOOK_DIRECTORIES:
            if (root.local_path / place / name).is_file():
                return CdiHook(f"/{place}/{name}")
    return None


def _driver_version(root: Path) -> str:
    """Return the version of the kernel module if it is readable, else of the only ``libcuda`` below ``root``."""
    version = _kernel_module_version(root)
    found = sorted(
        {
            match[1]
            for directory in _directories(root)
            for name in os.listdir(directory)
            if (match := _CUDA.fullmatch(name))
        }
    )
    where = f"below {root}. Set the driver's location with --nvidia-driver-root and --driver-root-ctr-path"
    if not found:
        raise InvalidConfiguration(f"NVIDIA's driver was not found: there is no libcuda.so.<version> {where}.")
    if version is not None and version not in found:
        raise InvalidConfiguration(
            f"The kernel runs NVIDIA's driver {version}, but there is only libcuda.so.{' and '.join(found)} {where}."
        )
    if version is None and len(found) > 1:
        raise InvalidConfiguration(
            f"The version of the running driver is unknown: there are libcuda.so.{' and '.join(found)} {where}."
        )
    return version or found[0]


def _kernel_module_version(root: Path) -> str | None:
    """Return the version of the kernel module; None where it is not readable."""
    try:
        match = _KERNEL_MODULE.search((root / "proc/driver/nvidia/version").read_bytes().decode(errors="replace"))
    except OSError:
        return None
    return None if match is None else match[1]


def _directories(root: Path) -> Iterator[Path]:
    """Yield the existing library directories, each once although many are links to another."""
    met = set()
    for name in LIBRARY_DIRECTORIES:
        directory = root / name
        real = os.path.realpath(directory)
        if directory.is_dir() and real not in met:
            met.add(real)
            yield directory


def _belongs(name: str, version: str) -> bool:
    return name.endswith(f".so.{version}") and _LIBRARY_NAME.fullmatch(name) is not None
