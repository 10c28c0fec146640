"""``scrubber doctor``: whether this node is set up so that what the service promises holds.

Most of it is outside the service: a container toolkit that lets any pod name itself a GPU undoes every hand-over. So
this looks for itself, works without the service, changes nothing, and says for each thing that is wrong what to do.

A check is a function of :class:`Node` in :data:`CHECKS`; to add one, write it and put it there.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from scrubber.cli.exits import Exit
from scrubber.cli.options import KubeletDirOption, OutputOption, SocketOption
from scrubber.cli.output import Answer, Output, emit
from scrubber.domain.errors import ScrubberError

__all__ = ["CHECKS", "Check", "Level", "Node", "ServiceSaid", "add_commands", "examine"]

ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
VOLUME_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
TOOLKIT_CONFIGS = (
    Path("/etc/nvidia-container-runtime/config.toml"),
    Path("/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"),  # as the GPU Operator installs it
)
TOOLKIT_PROGRAMS = ("nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-ctk")
TOOLKIT_PLACES = (Path("/usr/bin"), Path("/usr/local/bin"), Path("/usr/local/nvidia/toolkit"))

_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)*)\b")
_NO_SCRUB_ON_FREE = re.compile(r"RmDisableScrubOnFree\s*[=:]\s*(?:0x)?0*[1-9a-f]", re.IGNORECASE)

ToolkitConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--toolkit-config",
        envvar="SCRUBBER_TOOLKIT_CONFIG",
        metavar="FILE",
        help="The container toolkit's configuration.",
        show_default="where its packages and the GPU Operator put it",
    ),
]
NodeRootOption = Annotated[
    Path,
    typer.Option(
        "--node-root",
        envvar="SCRUBBER_NODE_ROOT",
        metavar="DIR",
        help="Where the node's root directory is seen from here; every path but --socket is taken below it.",
    ),
]


class Level(StrEnum):
    """What a check found. A warning is worth a look and breaks no promise."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found: ``remedy`` says what to do, and is empty when there is nothing to do."""

    name: str
    level: Level
    sentence: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class ServiceSaid:
    """What the service answered about itself; ``refusal`` is the sentence why it did not, and then the rest is empty."""

    refusal: str = ""
    version: str = ""
    backend: str = ""
    policy: str = ""
    enforcement: str = ""
    ledger: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """Where to look. ``toolkit_configs`` empty: in the usual places."""

    service: ServiceSaid
    root: Path = Path("/")
    kubelet_dir: Path = Path("/var/lib/kubelet")
    toolkit_configs: tuple[Path, ...] = ()

    def path(self, path: Path | str) -> Path:
        """``path`` of the node as it is seen from here."""
        return self.root / Path(path).relative_to("/")


# --- the checks ----------------------------------------------------------------------------------------------------


def service(node: Node) -> Iterator[Check]:
    """The service answers, keeps its record, and refuses what it must."""
    said = node.service
    if said.refusal:
        yield Check("service", Level.ERROR, said.refusal)  # it says what to do
        return
    if said.ledger != "ok":
        yield Check("service", Level.ERROR, f"The service hands nothing over: {said.ledger}")
        return
    sentence = f"Version {said.version} serves the {said.backend} backend under the policy {said.policy}."
    if said.enforcement != "enforce":
        remedy = "Set enforcement: enforce in the policy once its verdicts are what you expect."
        yield Check("service", Level.WARNING, f"{sentence} It only observes: no start is refused.", remedy)
        return
    yield Check("service", Level.OK, sentence)


def toolkit(node: Node) -> Iterator[Check]:
    """No unprivileged pod can give itself GPUs by an environment variable, and the plugin can still give them.

    The toolkit's own default is to let every pod do so: a missing line, and a missing file, mean yes.
    """
    given = [node.path(path) for path in node.toolkit_configs]
    found = [path for path in given or map(node.path, TOOLKIT_CONFIGS) if given or path.exists()]
    for path in found:
        yield from _toolkit_config(path)
    if not found:
        programs = [
            place / program
            for place in map(node.path, TOOLKIT_PLACES)
            for program in TOOLKIT_PROGRAMS
            if (place / program).exists()
        ]
        if programs:
            sentence = f"{programs[0]} is installed and has no configuration, so {_ANY_POD}."
            yield Check("toolkit-envvar", Level.ERROR, sentence, _refuse_envvar(node.path(TOOLKIT_CONFIGS[0])))
        else:
            yield Check("toolkit-envvar", Level.OK, "NVIDIA's container toolkit is not installed here.")


_ANY_POD = "any pod gets every GPU by setting NVIDIA_VISIBLE_DEVICES=all, past the kubelet and this service"


def _refuse_envvar(path: Path) -> str:
    return (
        f"Set {ENVVAR} = false in {path}, and have the plugin name devices by volume-mounts "
        f"({VOLUME_MOUNTS} = true) or by CDI (--device-list-strategy)."
    )


def _toolkit_config(path: Path) -> Iterator[Check]:
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is no TOML ({error})"
        sentence = f"{path} cannot be read: {why}. Whether any pod can give itself GPUs is unknown."
        yield Check("toolkit-envvar", Level.ERROR, sentence, "Mend the file, or call this as root.")
        return
    envvar, mounts = options.get(ENVVAR, True), options.get(VOLUME_MOUNTS, False)
    if envvar is not False:
        says = f"sets {ENVVAR} = {str(envvar).lower()}" if ENVVAR in options else f"does not set {ENVVAR} = false"
        sentence = f"{path} {says}, so {_ANY_POD}."
        yield Check("toolkit-envvar", Level.ERROR, sentence, _refuse_envvar(path))
    else:
        yield Check("toolkit-envvar", Level.OK, f"{path}: unprivileged pods cannot name GPUs by environment variable.")
        if mounts is not True:
            sentence = f"{path}: devices reach unprivileged containers by CDI only."
            remedy = (
                f"Nothing, if the plugin uses a cdi strategy; else set {VOLUME_MOUNTS} = true and give the plugin "
                "--device-list-strategy volume-mounts."
            )
            yield Check("toolkit-volume-mounts", Level.WARNING, sentence, remedy)
            return
    if mounts is True:
        sentence = f"{path}: the plugin can name devices by volume-mounts."
        yield Check("toolkit-volume-mounts", Level.OK, sentence)


def driver(node: Node) -> Iterator[Check]:
    """NVIDIA's kernel driver is loaded."""
    path = node.path("/proc/driver/nvidia/version")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if node.service.backend == "sim":
            yield Check("driver", Level.OK, "No NVIDIA driver is loaded; the simulated node needs none.")
            return
        level = Level.ERROR if node.service.backend == "nvidia" else Level.WARNING
        sentence = f"No NVIDIA driver is loaded ({path}: {error.strerror})."
        yield Check("driver", level, sentence, "Load it (modprobe nvidia), or wait for the GPU Operator's.")
        return
    version = _VERSION.search(text)
    if version is None:
        yield Check("driver", Level.WARNING, f"{path} names no version.", "Look at dmesg; reinstall the driver.")
        return
    yield Check("driver", Level.OK, f"NVIDIA's driver {version[1]} is loaded.")


def scrub_on_free(node: Node) -> Iterator[Check]:
    """The driver clears memory that is freed: our scrub is then the proof, not the only broom."""
    path = node.path("/proc/driver/nvidia/params")
    if not node.path("/proc/driver/nvidia/version").exists():
        return
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        sentence = f"{path} cannot be read ({error.strerror}): whether the driver clears freed memory is unknown."
        yield Check("scrub-on-free", Level.WARNING, sentence, "Call this as root.")
        return
    if _NO_SCRUB_ON_FREE.search(text):
        sentence = (
            "The driver was told not to clear freed memory (RmDisableScrubOnFree): what one process of a pod leaves, "
            "its next one reads, and every scrub finds residue."
        )
        remedy = "Remove RmDisableScrubOnFree from NVreg_RegistryDwords (/etc/modprobe.d), and reload the driver."
        yield Check("scrub-on-free", Level.WARNING, sentence, remedy)
        return
    yield Check("scrub-on-free", Level.OK, "The driver was not told to leave freed memory uncleared.")


def persistenced(node: Node) -> Iterator[Check]:
    """Somebody keeps the driver's state while nobody uses a GPU."""
    if not node.path("/proc/driver/nvidia/version").exists():
        return
    path = node.path("/run/nvidia-persistenced/nvidia-persistenced.pid")
    try:
        pid = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        pid = 0
    if pid > 0 and node.path(f"/proc/{pid}").exists():
        sentence = f"nvidia-persistenced runs (PID {pid}); a reset has it let go of the GPU, and brings it back."
        yield Check("persistenced", Level.OK, sentence)
        return
    sentence = (
        "nvidia-persistenced does not run: unless persistence mode is on, the driver forgets a GPU's error counters and "
        "settings whenever nobody uses it, and every first use waits for it."
    )
    yield Check("persistenced", Level.WARNING, sentence, "systemctl enable --now nvidia-persistenced")


def kubelet(node: Node) -> Iterator[Check]:
    """The kubelet's directories that the service and the plugin read are there."""
    directory = node.path(node.kubelet_dir)
    if not directory.is_dir():
        sentence = f"There is no kubelet here: {directory} does not exist."
        yield Check("kubelet", Level.WARNING, sentence, "Give its directory with --kubelet-dir, or start it.")
        return
    # Where the plugin registers, and who has which device. The kubelet makes all of these itself.
    missing = [
        name
        for name in ("device-plugins", "plugins_registry", "pod-resources/kubelet.sock")
        if not (directory / name).exists()
    ]
    if missing:
        sentence = f"{directory} has no {', no '.join(missing)}."
        remedy = "Start the kubelet, or give its directory (its --root-dir) with --kubelet-dir."
        yield Check("kubelet", Level.WARNING, sentence, remedy)
        return
    yield Check("kubelet", Level.OK, f"The kubelet's directories are in {directory}.")


CHECKS: tuple[Callable[[Node], Iterator[Check]], ...] = (service, toolkit, driver, scrub_on_free, persistenced, kubelet)
"""Every check, in the order in which people read them."""


def examine(node: Node) -> tuple[Check, ...]:
    """What every check found about ``node``. Raises nothing: what cannot be looked at is a finding."""
    return tuple(found for check in CHECKS for found in check(node))


# --- the command ---------------------------------------------------------------------------------------------------


def add_commands(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    socket: SocketOption = Path("/run/scrubber"),
    toolkit_config: ToolkitConfigOption = None,
    kubelet_dir: KubeletDirOption = Path("/var/lib/kubelet"),
    node_root: NodeRootOption = Path("/"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Look for what would undo a hand-over on this node. Exits with 0 if all is well, 1 on an error, 5 on warnings only."""
    node = Node(
        service=asyncio.run(_service_said(socket)),
        root=node_root.absolute(),
        kubelet_dir=kubelet_dir.absolute(),
        toolkit_configs=() if toolkit_config is None else (toolkit_config.absolute(),),
    )
    checks = examine(node)
    emit(_answer(checks), output)
    raise typer.Exit(_exit_for(checks))


async def _service_said(socket: Path) -> ServiceSaid:
    from scrubber.api.client import ReadClient

    try:
        async with ReadClient(socket) as client:
            info = await client.info()
    except ScrubberError as error:
        return ServiceSaid(refusal=str(error))
    return ServiceSaid(
        version=info.version,
        backend=info.backend,
        policy=info.policy,
        enforcement=info.enforcement,
        ledger=info.ledger,
    )


def _worst(checks: Sequence[Check]) -> Level:
    levels = {check.level for check in checks}
    return next((level for level in (Level.ERROR, Level.WARNING) if level in levels), Level.OK)


def _exit_for(checks: Sequence[Check]) -> Exit:
    return {Level.OK: Exit.OK, Level.WARNING: Exit.WARNINGS, Level.ERROR: Exit.NEGATIVE}[_worst(checks)]


def _answer(checks: Sequence[Check]) -> Answer:
    return Answer(
        data={
            "verdict": _worst(checks).value,
            "checks": [
                {
                    "name": check.name,
                    "level": check.level.value,
                    "sentence": check.sentence,
                    "remedy": check.remedy or None,
                }
                for check in checks
            ],
        },
        names=[check.name for check in checks if check.level is not Level.OK],
        header=("LEVEL", "CHECK", "FOUND"),
        rows=[row for check in checks for row in _rows(check)],
    )


def _rows(check: Check) -> Iterator[tuple[str, str, str]]:
    yield (check.level.value, check.name, check.sentence)
    if check.remedy:
        yield ("", "", f"To do: {check.remedy}")
