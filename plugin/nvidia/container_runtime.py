"""Checks whether this node's container runtime gives containers the devices that the plugin passes to it.

A runtime silently ignores what it is not configured for: the container starts, without a GPU. What is configured is
known only if the files are visible. Invariant: only a file that says so counts as an error; a missing, unreadable or
ambiguous one leaves the answer open.

Source: the documentation of containerd 1.7 and 2.1, CRI-O 1.34 and NVIDIA's container toolkit 1.20. Not tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugin.nvidia.injection import ListStrategy

__all__ = ["InjectionCheck", "check_injection"]

CONTAINERD_FILES = (
    "etc/containerd/config.toml",
    "var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "var/lib/rancher/rke2/agent/etc/containerd/config.toml",
)
CONTAINERD_PLUGINS = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")
"""Sections of containerd's configuration for the kubelet's interface, in versions 3, 2 and 1."""
CRIO_FILE = "etc/crio/crio.conf"
CRIO_DROP_INS = "etc/crio/crio.conf.d"
"""CRI-O reads every file below it, whatever its name, in lexical order."""
DEFAULT_CDI_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
"""Where containerd and CRI-O look for CDI specifications unless ``cdi_spec_dirs`` is set."""
CRIO_HOOKS = ("usr/share/containers/oci/hooks.d", "etc/containers/oci/hooks.d")
"""Where CRI-O finds NVIDIA's hook, with which any runtime injects GPUs."""
TOOLKIT_FILES = (
    "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
    "etc/nvidia-container-runtime/config.toml",
)
ACCEPT_VOLUME_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
NVIDIA_RUNTIME = "nvidia-container-runtime"

_ADVICE = (
    "Use --device-list-strategy cdi-cri or cdi-annotations (the kustomizations cdi and gpu-operator do, and the chart with "
    "deviceListStrategy or gpuOperator.enabled), or make NVIDIA's "
    "runtime the default one. If every pod with a GPU sets runtimeClassName, start the plugin with --runtime-check=warn."
)


_NOT_STARTED = "add that directory, or set one of the others with --cdi-dir"
"""End of the reasons for which containers with a GPU do not start at all: the runtime does not know the names."""


@dataclass(frozen=True, slots=True)
class InjectionCheck:
    """The result of the check; at most one of the two is not empty.

    Attributes:
        error: why containers would start without a GPU, or not at all, and what to configure.
        unknown: why that could not be determined.
    """

    error: str = ""
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class _Runtime:
    """What a configuration says; None: it does not say. ``cdi_file`` sets ``cdi_directories``, if any file does."""

    file: Path
    default: str
    default_is_nvidia: bool | None
    has_cdi: bool | None
    cdi_file: Path
    cdi_directories: Sequence[object]


class _Unclear(Exception):
    """The configuration cannot be judged; the text says why."""


def check_injection(
    strategies: Sequence[ListStrategy], host: Path, cdi_directory: Path = Path("/var/run/cdi")
) -> InjectionCheck:
    """Return whether at least one of ``strategies`` works with the runtime's configuration.

    Args:
        host: where this process sees the host's root, or parts of it.
        cdi_directory: where the plugin writes its CDI specification; the path is the same on the host.
    """
    try:
        runtime = _find_runtime(host)
        accepts_mounts = _accepts_volume_mounts(host) if ListStrategy.VOLUME_MOUNTS in strategies else None
    except _Unclear as error:
        return InjectionCheck(unknown=f"Whether containers get their GPUs was not checked: {error}.")
    answers = [_works(strategy, runtime, accepts_mounts, cdi_directory) for strategy in strategies]
    if any(works for works, _ in answers):
        return InjectionCheck()
    if open_questions := [why for works, why in answers if works is None]:
        return InjectionCheck(unknown=f"Whether containers get their GPUs was not checked: {open_questions[0]}.")
    reasons = dict.fromkeys(why for _, why in answers)
    if all(why.endswith(_NOT_STARTED) for why in reasons):
        return InjectionCheck(error=f"No container with a GPU would start: {'; '.join(reasons)}.")
    return InjectionCheck(error=f"Containers would start without a GPU: {'; '.join(reasons)}. {_ADVICE}")


def _works(
    strategy: ListStrategy, runtime: _Runtime, accepts_mounts: bool | None, cdi_directory: Path
) -> tuple[bool | None, str]:
    """Return whether ``strategy`` works (None: unknown), and why not."""
    if strategy in (ListStrategy.CDI_ANNOTATIONS, ListStrategy.CDI_CRI):
        if runtime.has_cdi is None:
            return None, (
                f"{runtime.file} does not set enable_cdi, which is off by default in containerd 1.7. Set it to true"
            )
        if not runtime.has_cdi:
            return False, f"{runtime.file} turns CDI off: set enable_cdi = true"
        if _canonical(cdi_directory) not in {_canonical(each) for each in runtime.cdi_directories}:
            return False, (
                f"{runtime.cdi_file} sets cdi_spec_dirs without {cdi_directory}, where the plugin writes its specification: "
                f"{_NOT_STARTED}"
            )
        return True, ""
    if runtime.default_is_nvidia is None:
        return (
            None,
            f"the directories of CRI-O's hooks are not visible, and the default runtime in {runtime.file} is not NVIDIA's",
        )
    if not runtime.default_is_nvidia:
        return False, (
            f'with {strategy}, only NVIDIA\'s runtime adds GPUs, and the default runtime in {runtime.file} is "{runtime.default}"'
        )
    if strategy is ListStrategy.VOLUME_MOUNTS and accepts_mounts is None:
        return None, (
            f"the container toolkit's config.toml is not visible to the plugin; it has to set {ACCEPT_VOLUME_MOUNTS} = true"
        )
    if strategy is ListStrategy.VOLUME_MOUNTS and not accepts_mounts:
        return False, f"the container toolkit's config.toml does not set {ACCEPT_VOLUME_MOUNTS} = true"
    return True, ""


def _find_runtime(host: Path) -> _Runtime:
    found = [*_containerd(host), *_crio(host)]
    if not found:
        raise _Unclear(
            f"no configuration of containerd or CRI-O is visible below {host}. Mount the host's /etc/containerd read-only at "
            f"{host}/etc/containerd, or check enable_cdi or the default runtime in that file on the node yourself"
        )
    if len(found) > 1:
        raise _Unclear(f"there are several runtimes: {', '.join(str(each.file) for each in found)}")
    return found[0]


def _containerd(host: Path) -> Iterator[_Runtime]:
    for name in CONTAINERD_FILES:
        config = _read(host / name)
        disabled = _list(config.get("disabled_plugins")) if config else []
        if config is None or any(
            each in CONTAINERD_PLUGINS for each in disabled
        ):  # then it serves Docker, not the kubelet
            continue
        version = config.get("version")
        for path in _imported(host, host / name, config):
            config = _merged(config, _read(path) or {})
        plugins = _table(config.get("plugins"))
        sections = [_table(plugins.get(each)) for each in CONTAINERD_PLUGINS]
        runtimes = [_table(each.get("containerd")) for each in sections]
        if any("default_runtime" in each for each in runtimes):
            raise _Unclear(f"/{name} describes its default runtime in the deprecated section default_runtime")
        default = next(
            (str(each["default_runtime_name"]) for each in runtimes if "default_runtime_name" in each), "runc"
        )
        described = [_table(_table(_table(each.get("runtimes")).get(default)).get("options")) for each in runtimes]
        binary = next((str(each["BinaryName"]) for each in described if "BinaryName" in each), default)
        switches = [each["enable_cdi"] for each in sections if isinstance(each.get("enable_cdi"), bool)]
        has_cdi = switches[0] if switches else True if isinstance(version, int) and version >= 3 else None
        directories = [each["cdi_spec_dirs"] for each in sections if isinstance(each.get("cdi_spec_dirs"), list)]
        places = directories[0] if directories else DEFAULT_CDI_DIRECTORIES
        yield _Runtime(Path("/", name), default, _is_nvidia(binary), has_cdi, Path("/", name), places)


def _imported(host: Path, file: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files that containerd merges into ``config``, in its order."""
    if "imports" not in config and any((file.parent / "conf.d").glob("*.toml")):
        raise _Unclear(
            f"/{file.relative_to(host)} does not import conf.d/*.toml, which some versions of containerd read anyway"
        )
    for pattern in _list(config.get("imports")):
        place = host / str(pattern).lstrip("/") if str(pattern).startswith("/") else file.parent / str(pattern)
        if not place.parent.is_dir() and not place.is_relative_to(file.parent):  # which is visible
            raise _Unclear(f"/{file.relative_to(host)} imports {pattern}, which is not visible below {host}")
        yield from sorted(path for path in place.parent.glob(place.name) if path != file)


def _crio(host: Path) -> Iterator[_Runtime]:
    drop_ins = host / CRIO_DROP_INS
    files = [host / CRIO_FILE, *sorted(each for each in drop_ins.rglob("*") if not each.is_dir())]
    config: Mapping[str, Any] = {}
    found = False
    cdi_file = host / CRIO_FILE
    for path in files:
        part = _read(path)
        found = found or part is not None
        config = _merged(config, part or {})
        cdi_file = path if "cdi_spec_dirs" in _table(_table((part or {}).get("crio")).get("runtime")) else cdi_file
    if not found:
        return
    options = _table(_table(config.get("crio")).get("runtime"))
    default = str(options.get("default_runtime") or "crun")
    binary = str(_table(_table(options.get("runtimes")).get(default)).get("runtime_path") or default)
    named = [host / str(each).lstrip("/") for each in _list(options.get("hooks_dir"))]
    places = named or [host / each for each in CRIO_HOOKS]
    hooked = any(any(place.glob("*nvidia*.json")) for place in places)
    # /etc/containers exists wherever CRI-O runs: without it, only a part of /etc is visible here.
    visible = all(each.is_dir() for each in named or [host / "usr/share", host / "etc/containers"])
    directories = options.get("cdi_spec_dirs")
    yield _Runtime(
        Path("/", CRIO_FILE),
        default,
        True if _is_nvidia(binary) or hooked else False if visible else None,
        True,
        Path("/", cdi_file.relative_to(host)),
        directories if isinstance(directories, list) else DEFAULT_CDI_DIRECTORIES,
    )


def _canonical(directory: object) -> str:
    """Return a path without the link from ``/var/run`` to ``/run``, which nodes have."""
    path = str(Path(str(directory)))
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


def _accepts_volume_mounts(host: Path) -> bool | None:
    """Return whether NVIDIA's runtime reads mounts; None if its configuration is not visible."""
    for name in TOOLKIT_FILES:
        config = _read(host / name)
        if config is not None:
            return config.get(ACCEPT_VOLUME_MOUNTS) is True
    return None


def _is_nvidia(program: str) -> bool:
    name = program.rpartition("/")[2]
    return name == "nvidia" or name.startswith(NVIDIA_RUNTIME)


def _read(path: Path) -> Mapping[str, Any] | None:
    """Return the content of a TOML file; None if it does not exist.

    Raises:
        _Unclear: it cannot be read, or is not TOML.
    """
    try:
        content = path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _Unclear(f"{path} cannot be read: {reason}") from error
    import tomllib  # most plugins see no such file

    try:
        return tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        raise _Unclear(f"{path} is not TOML: {error}") from error


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both tables as one; ``second`` overrides."""
    whole = dict(first)
    for key, value in second.items():
        known = whole.get(key)
        whole[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return whole


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else []
