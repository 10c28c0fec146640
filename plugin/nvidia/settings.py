"""The settings of NVIDIA's device plugin: from its flags, its environment variables and its configuration file.

A cluster that runs NVIDIA's plugin keeps its existing settings. The command line overrides the environment, and that
overrides the file, one setting at a time. A setting that would change what a pod gets and is not supported is refused,
in the file with its line: otherwise a node that shares its GPUs differently from the configuration would be noticed too
late. A setting that changes nothing here is accepted; where that may surprise, with a warning.

Source: the documentation and the ``--help`` of NVIDIA's device plugin, version 0.20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from plugin.kubelet.resources import NVIDIA_RESOURCE, MigStrategy
from plugin.kubelet.shares import SharePreference, TimeSlicing
from plugin.nvidia.driver_files import HOST_ROOT, CdiHook, DriverRoot, find_cdi_hook
from plugin.nvidia.driver_ready import DriverReady, read_driver_ready
from plugin.nvidia.injection import (
    CDI_ANNOTATION_PREFIX,
    Feature,
    IdStrategy,
    ListStrategy,
    NvidiaInjection,
    parse_list_strategies,
)
from scrubber.domain.errors import InvalidConfiguration

if TYPE_CHECKING:
    from plugin.nvidia.config_file import ConfigFile
    from scrubber.config.yaml_document import Location, Value

__all__ = [
    "CDI_DIRECTORY",
    "DRIVER_ROOT_MOUNT",
    "HOST_MOUNT",
    "DiscoveryStrategy",
    "NvidiaOptions",
    "NvidiaPluginSettings",
    "NvidiaSettingsSource",
    "health_check_warning",
    "index_warning",
    "kubelet_dir_of",
    "options_from_flags",
    "read_config_file",
    "resolve_settings",
]

CDI_DIRECTORY = Path("/var/run/cdi")
DRIVER_ROOT_MOUNT = Path("/driver-root")
"""Where NVIDIA's manifests mount the driver's root in the plugin's container."""
HOST_MOUNT = Path("/host")
"""Where NVIDIA's manifests mount the host's root in the plugin's container; ours mount parts of it there."""


class DiscoveryStrategy(StrEnum):
    """How NVIDIA's plugin finds devices."""

    AUTO = "auto"
    NVML = "nvml"
    TEGRA = "tegra"


IPC_FLAG = "disable-ipc-discoverer"
"""The feature flag of NVIDIA's CDI generator that leaves out sockets of the driver's daemons."""
MET_FEATURE_FLAGS = frozenset(
    {"disable-nvsandboxutils", "disable-multiple-csv-devices", "no-additional-gids-for-device-nodes"}
)
"""Feature flags that turn something off which our specification never does."""
CDI_HOOKS = frozenset(
    {
        *("all", "chmod", "create-symlinks", "disable-device-node-modification", "enable-cuda-compat"),
        *("update-application-profile", "update-ldcache"),
    }
)
"""The hooks of NVIDIA's CDI generator, and the word for all of them."""


@dataclass(frozen=True, slots=True)
class NvidiaOptions:
    """The options of one source; None: not set there.

    Attributes:
        ignored: where the source has keys that are not known.
    """

    list_strategies: tuple[ListStrategy, ...] | None = None
    ids: IdStrategy | None = None
    pass_device_specs: bool | None = None
    driver_root: PurePosixPath | None = None
    dev_root: PurePosixPath | None = None
    driver_root_ctr_path: Path | None = None
    mig: MigStrategy | None = None
    annotation_prefix: str | None = None
    hook: str | None = None
    fail_on_init_error: bool | None = None
    gdrcopy: bool | None = None
    gds: bool | None = None
    mofed: bool | None = None
    sharing: TimeSlicing | None = None
    share_preference: SharePreference | None = None
    cdi_features: tuple[str, ...] | None = None
    disabled_cdi_hooks: tuple[str, ...] | None = None
    ignored: str | None = None

    def with_fallback(self, other: NvidiaOptions) -> NvidiaOptions:
        """Return these options, with ``other`` for those that are not set."""
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        fallback_values = {each.name: getattr(other, each.name) for each in fields(other)}
        return NvidiaOptions(
            **{name: fallback_values[name] if value is None else value for name, value in mine.items()}
        )


def options_from_flags(
    *,
    strategies: Sequence[str] | None = None,
    ids: str | None = None,
    pass_device_specs: bool | None = None,
    driver_root: str | None = None,
    dev_root: str | None = None,
    driver_root_ctr_path: str | None = None,
    mig: str | None = None,
    annotation_prefix: str | None = None,
    hook: str | None = None,
    fail_on_init_error: bool | None = None,
    features: Mapping[Feature, bool | None] | None = None,
    discovery: str | None = None,
    share_preference: str | None = None,
    cdi_features: Sequence[str] | None = None,
    disabled_cdi_hooks: Sequence[str] | None = None,
    imex_channels: Sequence[str] | None = None,
) -> NvidiaOptions:
    """Return the options from flags and environment variables. An empty string counts as not set.

    Raises:
        InvalidConfiguration: a value that does not exist or is not supported, or a path that does not begin with a slash.
    """
    requested = features or {}
    if discovery == DiscoveryStrategy.TEGRA:
        raise InvalidConfiguration("--device-discovery-strategy: tegra is not supported: the scrub service uses NVML.")
    if channels := _words(imex_channels):
        raise InvalidConfiguration(
            f"--imex-channel-ids: IMEX channels ({', '.join(channels)}) are not supported; remove the flag or "
            "IMEX_CHANNEL_IDS."
        )
    return NvidiaOptions(
        list_strategies=parse_list_strategies(strategies, "--device-list-strategy") if strategies else None,
        ids=IdStrategy(ids) if ids else None,
        pass_device_specs=pass_device_specs,
        driver_root=_absolute("--nvidia-driver-root", driver_root, PurePosixPath),
        dev_root=_absolute("--nvidia-dev-root", dev_root, PurePosixPath),
        driver_root_ctr_path=_absolute("--driver-root-ctr-path", driver_root_ctr_path, Path),
        mig=MigStrategy(mig) if mig else None,
        annotation_prefix=annotation_prefix or None,
        hook=_absolute("--nvidia-cdi-hook-path", hook, str),
        fail_on_init_error=fail_on_init_error,
        gdrcopy=requested.get(Feature.GDRCOPY),
        gds=requested.get(Feature.GDS),
        mofed=requested.get(Feature.MOFED),
        share_preference=SharePreference(share_preference) if share_preference else None,
        cdi_features=_words(cdi_features) or None,
        disabled_cdi_hooks=_words(disabled_cdi_hooks) or None,
    )


def _words(values: Sequence[str] | None) -> tuple[str, ...]:
    """Return words that are separated by commas, repeated, or both."""
    return tuple(dict.fromkeys(word for each in values or () for part in each.split(",") if (word := part.strip())))


def kubelet_dir_of(socket: str | None, directory: Path, default: Path) -> Path:
    """Return the kubelet's directory, from NVIDIA's ``--kubelet-socket`` or from our ``--kubelet-dir``.

    Args:
        socket: None: not set.
        directory: value of ``--kubelet-dir``, which is ``default`` if it is not set.

    Raises:
        InvalidConfiguration: the socket is not where a kubelet has it, or the two contradict each other.
    """
    if socket is None:
        return directory
    path = Path(socket)
    if not path.is_absolute() or path.parts[-2:] != ("device-plugins", "kubelet.sock"):
        raise InvalidConfiguration(
            f'--kubelet-socket: "{socket}" is not supported. Use the path of device-plugins/kubelet.sock in the kubelet\'s '
            "directory, or set that directory with --kubelet-dir."
        )
    found = path.parent.parent
    if directory not in (default, found):
        raise InvalidConfiguration(
            f"--kubelet-socket {socket} is not in --kubelet-dir {directory}. Remove one of them."
        )
    return found


_Place = TypeVar("_Place", PurePosixPath, Path, str)


def _absolute(flag: str, words: str | None, kind: Callable[[str], _Place]) -> _Place | None:
    if not words:
        return None
    if not words.startswith("/"):
        raise InvalidConfiguration(f'{flag}: "{words}" is not an absolute path. Use a path that begins with /.')
    return kind(words)


@dataclass(frozen=True, slots=True)
class NvidiaPluginSettings:
    """The settings for GPUs; on a simulated node only ``sharing`` has an effect.

    Attributes:
        hook: NVIDIA's program for a container's links; None where there is none.
        cdi_directory: where the CDI specification is written, if a strategy needs one.
        fail_on_init_error: exit with an error when the node cannot be advertised as configured; else wait until it can.
        disabled_health_checks, enabled_health_checks: values of ``DP_DISABLE_HEALTHCHECKS`` and
            ``DP_ENABLE_HEALTHCHECKS``.
        disabled_cdi_hooks: hooks that the CDI specification must not have; ``all``: none at all.
        ipc_sockets: whether it contains sockets of the driver's daemons.
        ignored: settings that have no effect here, for a warning each.
        host_root: where the plugin sees the host's root, or parts of it; None: the container runtime is not checked.
        refuse_unsuitable_runtime: whether the plugin exits if the container runtime is configured so that containers would
            start without a GPU; otherwise it logs that.
        pending: why the plugin cannot serve with these settings yet; empty when it can.
        file: the options of the configuration file that the settings were resolved from.
    """

    injection: NvidiaInjection = field(default_factory=NvidiaInjection)
    mig: MigStrategy = MigStrategy.NONE
    root: DriverRoot = field(default_factory=DriverRoot)
    hook: CdiHook | None = None
    cdi_directory: Path = CDI_DIRECTORY
    fail_on_init_error: bool = True
    disabled_health_checks: str = ""
    enabled_health_checks: str = ""
    sharing: TimeSlicing = field(default_factory=TimeSlicing)
    disabled_cdi_hooks: frozenset[str] = frozenset()
    ipc_sockets: bool = True
    ignored: tuple[str, ...] = ()
    host_root: Path | None = field(default=None, compare=False)
    refuse_unsuitable_runtime: bool = True
    pending: str = ""
    file: NvidiaOptions | None = field(default=None, compare=False)


class NvidiaSettingsSource:
    """Resolves the settings at the start, and again at each request: files may have changed since.

    Args:
        options: from the command line and the environment.
        config: NVIDIA's configuration file.
        driver_ready: file with which the GPU Operator's validator announces the driver; None: not used. While it is
            missing, what it said last stays valid.
        mounted_root: where the driver's root is expected.
        host_root: where the plugin sees the host's root; None: at :data:`HOST_MOUNT`, or at its own root.
        refuse_unsuitable_runtime: as in :class:`NvidiaPluginSettings`.
    """

    def __init__(
        self,
        options: NvidiaOptions,
        config: Path | None = None,
        *,
        driver_ready: Path | None = None,
        cdi_directory: Path = CDI_DIRECTORY,
        disabled_health_checks: str = "",
        enabled_health_checks: str = "",
        mounted_root: Path = DRIVER_ROOT_MOUNT,
        host_root: Path | None = None,
        refuse_unsuitable_runtime: bool = True,
    ) -> None:
        self._options = options
        self._config = config
        self._file = driver_ready
        self._cdi_directory = cdi_directory
        self._disabled_health_checks = disabled_health_checks
        self._enabled_health_checks = enabled_health_checks
        self._mounted_root = mounted_root
        self._host_root = host_root
        self._refuse_unsuitable_runtime = refuse_unsuitable_runtime
        self._driver: DriverReady | None = None

    def load(self) -> NvidiaPluginSettings:
        """Return the settings as all files are now.

        Raises:
            InvalidConfiguration: a file cannot be read, or the settings cannot work together.
        """
        return self._resolve(None if self._config is None else read_config_file(self._config))

    @property
    def follows_driver(self) -> bool:
        """Whether the place of the driver can change, which nothing announces."""
        return self._file is not None

    def resolve_again(self, settings: NvidiaPluginSettings, *, everything: bool) -> NvidiaPluginSettings:
        """Return the settings as all files are now (``everything``), or ``settings`` for the place of the driver now.

        Raises:
            InvalidConfiguration: as :meth:`load` and :meth:`follow_driver`.
        """
        if everything:
            return self.load()
        return self.follow_driver(settings) if self.follows_driver else settings

    def follow_driver(self, settings: NvidiaPluginSettings) -> NvidiaPluginSettings:
        """Return ``settings`` for the place where the driver is now; the configuration file is not read again.

        The hook stays if none is found now: its directory may be missing while the driver is replaced.

        Raises:
            InvalidConfiguration: the validator's file cannot be read, or the settings cannot work together.
        """
        found = self._resolve(settings.file)
        return found if found.hook else replace(found, hook=settings.hook)

    def _resolve(self, file: NvidiaOptions | None) -> NvidiaPluginSettings:
        options = self._options
        pending = ""
        if self._file is not None and options.driver_root is None:
            self._driver = read_driver_ready(self._file) or self._driver
            if self._driver is None:
                pending = (
                    f"{self._file} does not exist: the GPU Operator's validator has not found a working driver on "
                    "this node yet."
                )
            else:
                options = options.with_fallback(_driver_options(self._driver))
        settings = resolve_settings(
            options if file is None else options.with_fallback(file),
            cdi_directory=self._cdi_directory,
            disabled_health_checks=self._disabled_health_checks,
            enabled_health_checks=self._enabled_health_checks,
            mounted_root=self._mounted_root,
            host_root=self._host_root,
        )
        return replace(settings, pending=pending, refuse_unsuitable_runtime=self._refuse_unsuitable_runtime, file=file)


def _driver_options(driver: DriverReady) -> NvidiaOptions:
    """Return the options that follow from the file. Our pods need not mount the driver where NVIDIA's do."""
    mounted = driver.driver_root_ctr_path
    return NvidiaOptions(
        driver_root=driver.driver_root,
        dev_root=driver.dev_root,
        driver_root_ctr_path=mounted if mounted.is_dir() else Path(driver.driver_root),
    )


def resolve_settings(
    options: NvidiaOptions,
    config: Path | None = None,
    *,
    cdi_directory: Path = CDI_DIRECTORY,
    disabled_health_checks: str = "",
    enabled_health_checks: str = "",
    mounted_root: Path = DRIVER_ROOT_MOUNT,
    host_root: Path | None = None,
) -> NvidiaPluginSettings:
    """Return the effective settings.

    Args:
        options: from the command line and the environment.
        config: NVIDIA's configuration file.
        mounted_root: where the driver's root is expected unless an option names it; if it does not exist, the plugin
            uses the host's own paths.
        host_root: where the plugin sees the host's root; None: at :data:`HOST_MOUNT`, or at its own root.

    Raises:
        InvalidConfiguration: the file cannot be read, or the settings cannot work together.
    """
    if config is not None:
        options = options.with_fallback(read_config_file(config))
    host = options.driver_root or HOST_ROOT
    seen = options.driver_root_ctr_path or (mounted_root if mounted_root.is_dir() else Path(host))
    root = DriverRoot(host, seen)
    injection = NvidiaInjection(
        strategies=options.list_strategies or (ListStrategy.ENVVAR,),
        ids=options.ids or IdStrategy.UUID,
        pass_device_specs=bool(options.pass_device_specs),
        dev_root=options.dev_root or host,
        annotation_prefix=CDI_ANNOTATION_PREFIX if options.annotation_prefix is None else options.annotation_prefix,
        features=frozenset(each for each in Feature if getattr(options, each.value)),
    )
    hook = None
    if injection.needs_cdi:
        hosts = [host_root or HOST_MOUNT, *([root.local_path] if host == HOST_ROOT else [])]
        hook = CdiHook(options.hook) if options.hook else find_cdi_hook(hosts)
    sharing = options.sharing or TimeSlicing()
    if options.share_preference is not None:
        sharing = replace(sharing, preference=options.share_preference)
    return NvidiaPluginSettings(
        injection=injection,
        mig=options.mig or MigStrategy.NONE,
        root=root,
        hook=hook,
        cdi_directory=cdi_directory,
        fail_on_init_error=options.fail_on_init_error is not False,
        disabled_health_checks=disabled_health_checks,
        enabled_health_checks=enabled_health_checks,
        sharing=sharing,
        disabled_cdi_hooks=frozenset(options.disabled_cdi_hooks or ()),
        ipc_sockets=IPC_FLAG not in (options.cdi_features or ()),
        ignored=tuple(_ignored(options)),
        host_root=host_root or (HOST_MOUNT if HOST_MOUNT.is_dir() else Path("/")),
    )


def _ignored(options: NvidiaOptions) -> Iterator[str]:
    """Yield what the settings request and will not get."""
    features = [each for each in options.cdi_features or () if each not in {IPC_FLAG} | MET_FEATURE_FLAGS]
    if features:
        yield f"--cdi-feature-flags: {', '.join(features)}: not known, and without effect."
    hooks = [each for each in options.disabled_cdi_hooks or () if each not in CDI_HOOKS]
    if hooks:
        yield f"--cdi-disable-hooks: {', '.join(hooks)}: no such hook is known; known are {', '.join(sorted(CDI_HOOKS))}."
    if options.ignored:
        yield options.ignored


def health_check_warning(disabled: str, enabled: str = "") -> str:
    """Return a warning if ``DP_DISABLE_HEALTHCHECKS`` or ``DP_ENABLE_HEALTHCHECKS`` is set; empty when they are not."""
    if enabled and not disabled:
        return (
            f"DP_ENABLE_HEALTHCHECKS={enabled} has no effect: the scrub service checks health, and handles all known XIDs "
            "unless xids: ignore in its policy names them."
        )
    if not disabled:
        return ""
    return (
        f"DP_DISABLE_HEALTHCHECKS={disabled} has no effect on the plugin: the scrub service checks health. Set it for "
        "scrubber serve or, better, list the XIDs under xids: ignore in the policy."
    )


def index_warning(injection: NvidiaInjection) -> str:
    """Return a warning if containers get indices; empty when they do not."""
    if injection.ids is IdStrategy.UUID or injection.is_cdi_only:
        return ""
    return (
        "Containers get device indices, and NVIDIA's runtime renumbers the GPUs at every start: after a GPU is lost or "
        "added, an index means another GPU, which may belong to another tenant. Use --device-id-strategy uuid."
    )


def read_config_file(path: Path) -> NvidiaOptions:
    """Read NVIDIA's configuration file, version ``v1``; YAML or JSON.

    Raises:
        InvalidConfiguration: it cannot be read, or requests something unsupported; the message contains the line.
    """
    from plugin.nvidia.config_file import ConfigFile  # YAML takes a while to load, and most nodes have no such file
    from scrubber.config.yaml_document import parse_yaml, read_regular_file

    try:
        content = read_regular_file(path, "NVIDIA's configuration")
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        why = getattr(error, "strerror", None) or error
        raise InvalidConfiguration(f"--config-file {path} cannot be read: {why}.") from error
    file = ConfigFile(str(path), parse_yaml(content, str(path)))
    options = _Reader(file).read_options()
    if not file.ignored:
        return options
    return replace(options, ignored=f"{path}: keys that are not known have no effect: {', '.join(file.ignored)}.")


class _Reader:
    """One pass over the file."""

    def __init__(self, file: ConfigFile) -> None:
        self._file = file

    def read_options(self) -> NvidiaOptions:
        top = self._file.section((), self._file.root, {"version", "flags", "resources", "sharing", "imex"})
        version = top.get("version")
        if version not in (None, "", "v1"):
            raise self._file.configuration_error(("version",), f'is "{version}"; only v1 is supported')
        self._refuse_renaming(top.get("resources"))
        if self._file.section(("imex",), top.get("imex"), {"channelIDs", "required"}).get("channelIDs"):
            raise self._file.configuration_error(
                ("imex",), "requests IMEX channels, which this plugin does not support; remove it"
            )
        return self._flags(top.get("flags"), top.get("sharing"))

    def _flags(self, value: Value, sharing: Value) -> NvidiaOptions:
        from plugin.nvidia.config_file import read_sharing

        at: Location = ("flags",)
        known = {"migStrategy", "failOnInitError", "nvidiaDriverRoot", "nvidiaDevRoot", "plugin"}
        known |= {"gdrcopyEnabled", "gdsEnabled", "mofedEnabled", "deviceDiscoveryStrategy"}
        flags = self._file.section(at, value, known | {"gfd", "useNodeFeatureAPI", "mpsRoot"})
        if flags.get("deviceDiscoveryStrategy") not in (None, "", "auto", "nvml"):
            raise self._file.configuration_error(
                (*at, "deviceDiscoveryStrategy"), "must be auto or nvml: the scrub service uses NVML"
            )
        here = (*at, "plugin")
        known = {"passDeviceSpecs", "deviceListStrategy", "deviceIDStrategy", "cdiAnnotationPrefix", "nvidiaCTKPath"}
        plugin = self._file.section(
            here, flags.get("plugin"), known | {"containerDriverRoot", "sharedDevicesAllocationPolicy"}
        )
        return NvidiaOptions(
            list_strategies=self._strategies(here, plugin),
            ids=self._file.choice(here, plugin, "deviceIDStrategy", IdStrategy),
            pass_device_specs=self._file.boolean(here, plugin, "passDeviceSpecs"),
            driver_root=self._file.path(at, flags, "nvidiaDriverRoot", PurePosixPath),
            dev_root=self._file.path(at, flags, "nvidiaDevRoot", PurePosixPath),
            driver_root_ctr_path=self._file.path(here, plugin, "containerDriverRoot", Path),
            mig=self._file.choice(at, flags, "migStrategy", MigStrategy),
            annotation_prefix=self._file.text(here, plugin, "cdiAnnotationPrefix"),
            hook=self._file.path(here, plugin, "nvidiaCTKPath", str),
            fail_on_init_error=self._file.boolean(at, flags, "failOnInitError"),
            gdrcopy=self._file.boolean(at, flags, "gdrcopyEnabled"),
            gds=self._file.boolean(at, flags, "gdsEnabled"),
            mofed=self._file.boolean(at, flags, "mofedEnabled"),
            sharing=read_sharing(self._file, sharing),
            share_preference=self._file.choice(here, plugin, "sharedDevicesAllocationPolicy", SharePreference),
        )

    def _strategies(self, at: Location, section: Mapping[str, Value]) -> tuple[ListStrategy, ...] | None:
        value = section.get("deviceListStrategy")
        if value is None:
            return None
        words = value if isinstance(value, list) else [value]
        where = (*at, "deviceListStrategy")
        return parse_list_strategies([str(word) for word in words], self._file.origin(where))

    def _refuse_renaming(self, resources: Value) -> None:
        """Refuse entries that would rename a resource; NVIDIA's plugin silently ignores them."""
        for kind, entries in self._file.section(("resources",), resources, {"gpus", "mig"}).items():
            if not isinstance(entries, list | None):
                raise self._file.configuration_error(
                    ("resources", kind), "must be a list of entries with pattern and name"
                )
            for position, entry in enumerate(entries or []):
                where = ("resources", kind, position)
                known = self._file.section(where, entry, {"pattern", "name"})
                pattern, name = str(known.get("pattern")), str(known.get("name"))
                default_name = "gpu" if kind == "gpus" else f"mig-{pattern.replace('+', '.')}"
                domain = NVIDIA_RESOURCE.partition("/")[0]
                if (kind == "gpus" and pattern != "*") or name not in (default_name, f"{domain}/{default_name}"):
                    raise self._file.configuration_error(
                        where,
                        f"renames {pattern} to {name}, but this file cannot rename resources (NVIDIA's plugin ignores it "
                        "too). Remove it; --resource-name sets the name of the resource of whole GPUs",
                    )
