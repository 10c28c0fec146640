"""The settings that NVIDIA's device plugin has: from its flags, its environment variables and its configuration file.

A cluster that runs NVIDIA's plugin keeps what it has written. The command line wins over the environment, and that over
the file, one setting at a time. What the file holds and we cannot do is refused with its line, never passed over: a
node that shares its GPUs differently from what is written would be found out too late.

Source: the documentation and the ``--help`` of NVIDIA's device plugin, version 0.20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from plugin.driverfiles import DriverRoot, Hook, find_hook
from plugin.injection import CDI_PREFIX, Feature, IdStrategy, Injection, ListStrategy, list_strategies
from plugin.resources import NVIDIA, MigStrategy
from plugin.shares import Preference, Sharing
from scrubber.domain.errors import BadConfiguration

if TYPE_CHECKING:
    from plugin.config_file import ConfigFile
    from scrubber.config.yaml_lines import Location, Value

__all__ = [
    "CDI_DIRECTORY",
    "MOUNTED_ROOT",
    "NvidiaSettings",
    "Written",
    "from_words",
    "health_check_warning",
    "index_warning",
    "read_config",
    "settle",
]

CDI_DIRECTORY = Path("/var/run/cdi")
MOUNTED_ROOT = Path("/driver-root")
"""Where NVIDIA's manifests mount the driver's root in the plugin's container."""


@dataclass(frozen=True, slots=True)
class Written:
    """What somebody wrote in one place; None is not written there."""

    list_strategies: tuple[ListStrategy, ...] | None = None
    ids: IdStrategy | None = None
    pass_device_specs: bool | None = None
    driver_root: PurePosixPath | None = None
    dev_root: PurePosixPath | None = None
    driver_root_seen: Path | None = None
    mig: MigStrategy | None = None
    annotation_prefix: str | None = None
    hook: str | None = None
    fail_on_init_error: bool | None = None
    gdrcopy: bool | None = None
    gds: bool | None = None
    mofed: bool | None = None
    sharing: Sharing | None = None

    def over(self, other: Written) -> Written:
        """This, and where nothing is written here, ``other``."""
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        theirs = {each.name: getattr(other, each.name) for each in fields(other)}
        return Written(**{name: theirs[name] if value is None else value for name, value in mine.items()})


def from_words(
    *,
    strategies: Sequence[str] | None = None,
    ids: str | None = None,
    pass_device_specs: bool | None = None,
    driver_root: str | None = None,
    dev_root: str | None = None,
    driver_root_seen: str | None = None,
    mig: str | None = None,
    annotation_prefix: str | None = None,
    hook: str | None = None,
    fail_on_init_error: bool | None = None,
    features: Mapping[Feature, bool | None] | None = None,
) -> Written:
    """What flags and environment variables say. An empty text is not written.

    Raises:
        BadConfiguration: a strategy that does not exist, or a path that does not begin with a slash.
    """
    asked = features or {}
    return Written(
        list_strategies=list_strategies(strategies, "--device-list-strategy") if strategies else None,
        ids=IdStrategy(ids) if ids else None,
        pass_device_specs=pass_device_specs,
        driver_root=_absolute("--nvidia-driver-root", driver_root, PurePosixPath),
        dev_root=_absolute("--nvidia-dev-root", dev_root, PurePosixPath),
        driver_root_seen=_absolute("--driver-root-ctr-path", driver_root_seen, Path),
        mig=MigStrategy(mig) if mig else None,
        annotation_prefix=annotation_prefix or None,
        hook=_absolute("--nvidia-cdi-hook-path", hook, str),
        fail_on_init_error=fail_on_init_error,
        gdrcopy=asked.get(Feature.GDRCOPY),
        gds=asked.get(Feature.GDS),
        mofed=asked.get(Feature.MOFED),
    )


_Place = TypeVar("_Place", PurePosixPath, Path, str)


def _absolute(flag: str, words: str | None, kind: Callable[[str], _Place]) -> _Place | None:
    if not words:
        return None
    if not words.startswith("/"):
        raise BadConfiguration(f'{flag}: "{words}" is no place on the host; write a path that begins with /.')
    return kind(words)


@dataclass(frozen=True, slots=True)
class NvidiaSettings:
    """What the plugin does with GPUs; on a simulated node nothing of it matters but ``sharing``.

    Attributes:
        hook: NVIDIA's program for a container's links; None where there is none.
        cdi_directory: where our CDI specification is written, if a strategy needs one.
        fail_on_init_error: end with a sentence when the node cannot be advertised as asked; else wait until it can.
        disabled_health_checks: what ``DP_DISABLE_HEALTHCHECKS`` says.
    """

    injection: Injection = field(default_factory=Injection)
    mig: MigStrategy = MigStrategy.NONE
    root: DriverRoot = field(default_factory=DriverRoot)
    hook: Hook | None = None
    cdi_directory: Path = CDI_DIRECTORY
    fail_on_init_error: bool = True
    disabled_health_checks: str = ""
    sharing: Sharing = field(default_factory=Sharing)


def settle(
    written: Written,
    config: Path | None = None,
    *,
    cdi_directory: Path = CDI_DIRECTORY,
    disabled_health_checks: str = "",
    mounted_root: Path = MOUNTED_ROOT,
) -> NvidiaSettings:
    """The settings in force.

    Args:
        written: on the command line or in the environment.
        config: NVIDIA's configuration file.
        mounted_root: where the driver's root is expected unless somebody says otherwise; if nothing is there, the
            plugin sees the host's own paths.

    Raises:
        BadConfiguration: the file cannot be read, or the settings cannot work together.
    """
    if config is not None:
        written = written.over(read_config(config))
    host = written.driver_root or PurePosixPath("/")
    seen = written.driver_root_seen or (mounted_root if mounted_root.is_dir() else Path(host))
    root = DriverRoot(host, seen)
    injection = Injection(
        strategies=written.list_strategies or (ListStrategy.ENVVAR,),
        ids=written.ids or IdStrategy.UUID,
        pass_device_specs=bool(written.pass_device_specs),
        dev_root=written.dev_root or host,
        annotation_prefix=CDI_PREFIX if written.annotation_prefix is None else written.annotation_prefix,
        features=frozenset(each for each in Feature if getattr(written, each.value)),
    )
    hook = None
    if injection.by_cdi:
        hook = Hook(written.hook) if written.hook else find_hook(root)
    return NvidiaSettings(
        injection=injection,
        mig=written.mig or MigStrategy.NONE,
        root=root,
        hook=hook,
        cdi_directory=cdi_directory,
        fail_on_init_error=written.fail_on_init_error is not False,
        disabled_health_checks=disabled_health_checks,
        sharing=written.sharing or Sharing(),
    )


def health_check_warning(disabled: str) -> str:
    """What to tell somebody who has set ``DP_DISABLE_HEALTHCHECKS``; empty when nothing is set."""
    if not disabled:
        return ""
    return (
        f"DP_DISABLE_HEALTHCHECKS={disabled} changes nothing in the plugin: the scrub service judges health. Set it for "
        "scrubber serve, or better, list the XIDs under xids: ignore in the policy."
    )


def index_warning(injection: Injection) -> str:
    """What to tell somebody whose containers are given indices; empty when none is."""
    if injection.ids is IdStrategy.UUID or injection.only_cdi:
        return ""
    return (
        "Containers are told indices, and NVIDIA's runtime counts GPUs anew at every start: once one is lost or added, an "
        "index is another GPU's, which may be somebody else's. Choose --device-id-strategy uuid."
    )


def read_config(path: Path) -> Written:
    """NVIDIA's configuration file, version ``v1``; YAML or JSON.

    Raises:
        BadConfiguration: it cannot be read, or asks for what is not done here; the sentence has the line.
    """
    from plugin.config_file import ConfigFile  # YAML takes a while to load, and most nodes have no such file
    from scrubber.config.yaml_lines import file_content, read_yaml

    try:
        content = file_content(path, "NVIDIA's configuration")
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        why = getattr(error, "strerror", None) or error
        raise BadConfiguration(f"--config-file {path} cannot be read: {why}.") from error
    return _Reader(ConfigFile(str(path), read_yaml(content, str(path)))).written()


class _Reader:
    """One pass over the file."""

    def __init__(self, file: ConfigFile) -> None:
        self._file = file

    def written(self) -> Written:
        top = self._file.section((), self._file.whole, {"version", "flags", "resources", "sharing", "imex"})
        version = top.get("version")
        if version not in (None, "v1"):
            raise self._file.complaint(("version",), f'is "{version}"; only v1 is read')
        self._refuse_renaming(top.get("resources"))
        if self._file.section(("imex",), top.get("imex"), {"channelIDs", "required"}).get("channelIDs"):
            raise self._file.complaint(
                ("imex",), "asks for IMEX channels, which this plugin does not hand out; remove it"
            )
        return self._flags(top.get("flags"), top.get("sharing"))

    def _flags(self, value: Value, sharing: Value) -> Written:
        from plugin.sharing_config import read_sharing

        at: Location = ("flags",)
        known = {"migStrategy", "failOnInitError", "nvidiaDriverRoot", "nvidiaDevRoot", "plugin"}
        known |= {"gdrcopyEnabled", "gdsEnabled", "mofedEnabled", "deviceDiscoveryStrategy"}
        flags = self._file.section(at, value, known | {"gfd", "useNodeFeatureAPI", "mpsRoot"})
        if flags.get("deviceDiscoveryStrategy") not in (None, "", "auto", "nvml"):
            raise self._file.complaint(
                (*at, "deviceDiscoveryStrategy"), "must be auto or nvml: the scrub service uses NVML"
            )
        here = (*at, "plugin")
        known = {"passDeviceSpecs", "deviceListStrategy", "deviceIDStrategy", "cdiAnnotationPrefix", "nvidiaCTKPath"}
        plugin = self._file.section(
            here, flags.get("plugin"), known | {"containerDriverRoot", "sharedDevicesAllocationPolicy"}
        )
        return Written(
            list_strategies=self._strategies(here, plugin),
            ids=self._file.choice(here, plugin, "deviceIDStrategy", IdStrategy),
            pass_device_specs=self._file.truth(here, plugin, "passDeviceSpecs"),
            driver_root=self._file.path(at, flags, "nvidiaDriverRoot", PurePosixPath),
            dev_root=self._file.path(at, flags, "nvidiaDevRoot", PurePosixPath),
            driver_root_seen=self._file.path(here, plugin, "containerDriverRoot", Path),
            mig=self._file.choice(at, flags, "migStrategy", MigStrategy),
            annotation_prefix=self._file.text(here, plugin, "cdiAnnotationPrefix"),
            hook=self._file.path(here, plugin, "nvidiaCTKPath", str),
            fail_on_init_error=self._file.truth(at, flags, "failOnInitError"),
            gdrcopy=self._file.truth(at, flags, "gdrcopyEnabled"),
            gds=self._file.truth(at, flags, "gdsEnabled"),
            mofed=self._file.truth(at, flags, "mofedEnabled"),
            sharing=read_sharing(
                self._file, sharing, self._file.choice(here, plugin, "sharedDevicesAllocationPolicy", Preference)
            ),
        )

    def _strategies(self, at: Location, section: Mapping[str, Value]) -> tuple[ListStrategy, ...] | None:
        value = section.get("deviceListStrategy")
        if value is None:
            return None
        words = value if isinstance(value, list) else [value]
        where = (*at, "deviceListStrategy")
        return list_strategies([str(word) for word in words], self._file.origin(where))

    def _refuse_renaming(self, resources: Value) -> None:
        """Entries that say what holds anyway are fine; NVIDIA's plugin passes over the others, which nobody notices."""
        for kind, entries in self._file.section(("resources",), resources, {"gpus", "mig"}).items():
            if not isinstance(entries, list | None):
                raise self._file.complaint(("resources", kind), "must be a list of patterns and names")
            for position, entry in enumerate(entries or []):
                where = ("resources", kind, position)
                known = self._file.section(where, entry, {"pattern", "name"})
                pattern, name = str(known.get("pattern")), str(known.get("name"))
                usual = "gpu" if kind == "gpus" else f"mig-{pattern.replace('+', '.')}"
                domain = NVIDIA.partition("/")[0]
                if (kind == "gpus" and pattern != "*") or name not in (usual, f"{domain}/{usual}"):
                    raise self._file.complaint(
                        where,
                        f"calls {pattern} {name}: resources are not renamed by this file (NVIDIA's plugin ignores that "
                        "too). Remove it; --resource-name names the resource of whole GPUs",
                    )
