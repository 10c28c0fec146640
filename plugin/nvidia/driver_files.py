"""Finds the user-space files of NVIDIA's driver, which a container gets beside its devices.

The kernel module accepts only libraries of its own version, so the driver's version decides which files are taken. A
root with the files of two drivers is refused when it does not say which one runs.

They are the files that NVIDIA's own generator (container toolkit 1.20) puts into a CDI specification: libraries for
compute, video, EGL, Vulkan and X.Org, their configuration, programs, firmware, and sockets. Two things are left out,
because tenants would share them: the socket of nvidia-persistenced, with which any container could switch the
persistence mode of every GPU (a container without it only displays that mode wrongly), and the directory of MPS.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator
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
    "nvidia-imex",
    "nvidia-imex-ctl",
    "nvidia-xconfig",
)
XORG_DIRECTORIES = ("nvidia/xorg", "xorg/modules/drivers", "xorg/modules/extensions")
"""Relative to a directory of libraries."""
CONFIG_DIRECTORIES = ("etc", "usr/local/share", "usr/share")
SHARED_CONFIGS = (
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "nvidia/nvoptix.bin",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
)
"""Configuration whose place in a container is below ``/usr/share``."""
ETC_CONFIGS = (
    "OpenCL/vendors/nvidia.icd",
    "vulkan/icd.d/nvidia_icd.json",
    f"vulkan/icd.d/nvidia_icd.{platform.machine()}.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
)
"""Configuration whose place in a container is below ``/etc``."""
FIRMWARE_DIRECTORIES = ("lib/firmware/updates", "lib/firmware", "usr/lib/firmware/updates", "usr/lib/firmware")
FIRMWARE_ROOT = "/lib/firmware"
"""Where a container gets firmware."""
SOCKET_DIRECTORIES = ("run", "var/run")
SOCKETS = ("nvidia-fabricmanager/socket",)
REQUIRED_LINKS = {
    "libcuda.so": ("libcuda.so.1", "libcuda.so"),
    "libGLX_indirect.so.0": ("libGLX_nvidia.so.{version}", "libGLX_nvidia.so"),
    "libnvidia-opticalflow.so": ("libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"),
    "gbm/nvidia-drm_gbm.so": ("../libnvidia-allocator.so.1", "libnvidia-allocator.so"),
}
"""Links that programs expect, also where the installation lacks them: path → target, and the library behind it."""
HOOK_PROGRAMS = ("nvidia-cdi-hook", "nvidia-ctk")
HOOK_DIRECTORIES = ("usr/local/nvidia/toolkit", "usr/bin", "usr/local/bin")
"""The GPU Operator's toolkit first: where it is installed, a program of the host may be older."""

_LIBRARY_NAME = re.compile(
    r"lib(cuda|cudadebugger|nvidia-|nvcuvid|nvoptix|nvsdm|vdpau_nvidia|(EGL|GLX|GLESv1_CM|GLESv2)_nvidia)"
    r"[A-Za-z0-9_.+-]*\.so[.0-9]*"
)
_OWN_VERSION = re.compile(
    r"libnvidia-egl-(gbm|wayland2?|xcb|xlib)\.so\.\d+\.\d+(\.\d+)?|libnvidia-nvvm70\.so\.\d+[.0-9]*"
)
"""Libraries of the driver that do not have its version."""
_FIRMWARE = re.compile(r"gsp[A-Za-z0-9_]*\.bin")
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


@dataclass(frozen=True, order=True, slots=True)
class PlacedFile:
    """A file that a container may get at another path.

    Attributes:
        path: from the driver's root.
        container_path: in the container.
    """

    path: str
    container_path: str


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """Absolute paths that begin at the driver's root; the same in a container. Sorted.

    Attributes:
        data: firmware, configuration, and modules of the X server.
        sockets: of the driver's daemons.
        mount: identity of the root directory when it was searched.
    """

    version: str
    libraries: tuple[str, ...]
    links: tuple[LibraryLink, ...]
    programs: tuple[str, ...]
    data: tuple[PlacedFile, ...] = ()
    sockets: tuple[PlacedFile, ...] = ()
    mount: tuple[int, int] | None = None

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
    mount = _mount_of(root.local_path)  # before the search: a mount that appears during it makes it outdated
    version = _driver_version(root)
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
    for name, (target, library) in REQUIRED_LINKS.items():
        file = libraries.get(f"{library}.{version}")
        if file is not None:
            path_ = f"{os.path.dirname(file)}/{name}"
            links.setdefault(path_, LibraryLink(path_, target.format(version=version), file))
    programs = (
        next((f"/{place}/{name}" for place in PROGRAM_DIRECTORIES if (root.local_path / place / name).is_file()), None)
        for name in PROGRAMS
    )
    return DriverFiles(
        version,
        tuple(sorted(libraries.values())),
        tuple(link for _, link in sorted(links.items())),
        tuple(sorted(path for path in programs if path is not None)),
        tuple(
            sorted({*_firmware(root.local_path, version), *_configs(root.local_path), *_xorg(root.local_path, version)})
        ),
        _sockets(root.local_path),
        mount,
    )


def _firmware(root: Path, version: str) -> Iterator[PlacedFile]:
    """Yield the firmware of the GPUs' own processors; of files with the same name, the one the kernel would load."""
    release = os.uname().release
    met = set()
    for place in (each for base in FIRMWARE_DIRECTORIES for each in (f"{base}/{release}", base)):
        directory = root / place / "nvidia" / version
        for name in sorted(os.listdir(directory)) if directory.is_dir() else []:
            if _FIRMWARE.fullmatch(name) and name not in met and (directory / name).is_file():
                met.add(name)
                yield PlacedFile(f"/{place}/nvidia/{version}/{name}", f"{FIRMWARE_ROOT}/nvidia/{version}/{name}")


def _configs(root: Path) -> Iterator[PlacedFile]:
    """Yield what loaders of EGL, Vulkan, OpenCL and the X server need to find NVIDIA's libraries."""
    for names, container_root in ((SHARED_CONFIGS, "/usr/share"), (ETC_CONFIGS, "/etc")):
        for name in names:
            found = next((f"{base}/{name}" for base in CONFIG_DIRECTORIES if (root / base / name).is_file()), None)
            if found is not None:
                yield PlacedFile(f"/{found}", f"{container_root}/{name}")


def _xorg(root: Path, version: str) -> Iterator[PlacedFile]:
    for name in ("nvidia_drv.so", f"libglxserver_nvidia.so.{version}"):
        for directory in (f"{base}/{each}" for base in LIBRARY_DIRECTORIES for each in XORG_DIRECTORIES):
            if (root / directory / name).is_file():
                yield PlacedFile(f"/{directory}/{name}", f"/{directory}/{name}")
                break


def _sockets(root: Path) -> tuple[PlacedFile, ...]:
    found = ((name, f"{base}/{name}") for name in SOCKETS for base in SOCKET_DIRECTORIES)
    existing = {name: PlacedFile(f"/{path}", f"/run/{name}") for name, path in found if (root / path).is_socket()}
    return tuple(sorted(existing.values()))


def is_unchanged(files: DriverFiles, root: DriverRoot) -> bool:
    """Return whether ``files`` are still those of the running driver.

    They all exist, the driver's root is the same mount (a driver that runs in a container mounts a new one at each
    start), and the kernel, if it reports a version, runs the same driver.
    """
    paths = (*files.libraries, *files.programs, *(each.path for each in files.data))
    return (
        _mount_of(root.local_path) == files.mount
        and _sockets(root.local_path) == files.sockets
        and _kernel_module_version(root.local_path) in (None, files.version)
        and all((root.local_path / path.lstrip("/")).is_file() for path in paths)
    )


def _mount_of(root: Path) -> tuple[int, int] | None:
    """Return what distinguishes the directory at ``root`` from one that is mounted there later; None: it is missing."""
    try:
        found = root.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def find_cdi_hook(hosts: Iterable[Path]) -> CdiHook | None:
    """Return NVIDIA's hook program, which the runtime runs on the host; None where there is none.

    Args:
        hosts: where this process may see the host's root.
    """
    for host in hosts:
        for name in HOOK_PROGRAMS:
            for place in HOOK_DIRECTORIES:
                if (host / place / name).is_file():
                    return CdiHook(f"/{place}/{name}")
    return None


def _driver_version(root: DriverRoot) -> str:
    """Return the version of the kernel module if it is readable, else of the only ``libcuda`` below ``root``."""
    version = _kernel_module_version(root.local_path)
    found = sorted(
        {
            match[1]
            for directory in _directories(root.local_path)
            for name in os.listdir(directory)
            if (match := _CUDA.fullmatch(name))
        }
    )
    where = f"below {root.local_path}. Set the driver's location with --nvidia-driver-root and --driver-root-ctr-path"
    if root.host != HOST_ROOT:
        where += (
            f". If a container installs the driver in {root.host}, mount the parent directory with mountPropagation: "
            "HostToContainer, or the plugin keeps the mount of an earlier driver container"
        )
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
    for name in (each for base in LIBRARY_DIRECTORIES for each in (base, f"{base}/vdpau")):
        directory = root / name
        real = os.path.realpath(directory)
        if directory.is_dir() and real not in met:
            met.add(real)
            yield directory


def _belongs(name: str, version: str) -> bool:
    if _OWN_VERSION.fullmatch(name):
        return True
    return name.endswith(f".so.{version}") and _LIBRARY_NAME.fullmatch(name) is not None
