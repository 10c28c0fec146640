"""``scrubber sim``: create a simulated node, change its shape, inject and clear faults, and act as a tenant on it.

These commands write the node's files, as hardware and tenants would: they need no service, and send no requests.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scrubber.cli.app import App
from scrubber.cli.options import NoHeadersOption, OutputOption, seconds, size
from scrubber.cli.render.output import CommandResult, OutputFormat, print_note, print_result
from scrubber.domain.formatting import format_size

if TYPE_CHECKING:
    from scrubber.adapters.sim.layout import SimNode

__all__ = ["app"]

app = App(
    "Create and control a simulated node.\n\nEvery GPU is a file: its bytes are the memory, and processes that have it open "
    "are holders."
)

DirOption = Annotated[
    Path,
    typer.Option(
        "--dir", envvar="SCRUBBER_SIM_DIR", metavar="DIR", help="Directory of the simulated node.", show_default=False
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="UUID, unique prefix of a UUID, or index.",
        show_default=False,
    ),
]
AnyDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="UUID, unique prefix of a UUID, or index.",
        show_default="every device of the node",
    ),
]


class SimResetOutcome(StrEnum):
    OK = "ok"
    FAIL = "fail"


@app.command()
def create(
    directory: DirOption,
    devices: Annotated[int, typer.Option(metavar="N", help="Number of GPUs.")] = 4,
    memory: Annotated[
        int,
        typer.Option(metavar="SIZE", parser=size, help="Memory of each GPU.", show_default="256MiB"),
    ] = 256 * 1024 * 1024,
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Create a simulated node, and print the commands to use it."""
    from scrubber.adapters.sim import shape

    was_there = directory.is_dir() and any(directory.iterdir())
    print_result(_answer(shape.create(directory, devices, memory)), output, no_headers=no_headers)
    if output.is_table:
        if was_there:
            print_note(f"The simulated node in {directory} exists already; it was not changed.")
        for line in _next_commands(directory.absolute()):
            print(line, file=sys.stderr)


@app.command()
def split(
    directory: DirOption,
    device: DeviceOption,
    instances: Annotated[int, typer.Option(metavar="N", help="Number of instances.")] = 2,
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Split a GPU into instances, as MIG does.

    The GPU must have no holders. While it is split, only its instances are handed over.
    """
    from scrubber.adapters.sim import layout, shape

    shape.split(directory, device, instances)
    print_result(_answer(layout.load_node(directory)), output, no_headers=no_headers)


@app.command()
def merge(
    directory: DirOption,
    device: DeviceOption,
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Merge the instances of a GPU.

    The instances must have no holders.
    """
    from scrubber.adapters.sim import layout, shape

    shape.merge(directory, device)
    print_result(_answer(layout.load_node(directory)), output, no_headers=no_headers)


@app.command()
def fault(
    directory: DirOption,
    device: AnyDeviceOption = None,
    xid: Annotated[
        int | None,
        typer.Option(metavar="N", help="Raise an XID; its condition lasts until it is cleared."),
    ] = None,
    ecc: Annotated[int | None, typer.Option(metavar="N", help="Add uncorrected ECC errors.")] = None,
    lost: Annotated[bool, typer.Option("--lost", help="The device fell off the bus.")] = False,
    stuck: Annotated[bool, typer.Option("--driver-timeout", help="Driver calls for the device hang.")] = False,
    slow_clear: Annotated[
        float | None,
        typer.Option(metavar="TIME", parser=seconds, help="Minimum duration of clearing."),
    ] = None,
    wont_clear: Annotated[bool, typer.Option("--clear-fails", help="Cleared bytes reappear.")] = False,
    reset: Annotated[SimResetOutcome | None, typer.Option(help="Result of resets from now on.")] = None,
    driver_absent: Annotated[
        bool,
        typer.Option("--driver-absent", help="The node has no driver."),
    ] = False,
    ghost: Annotated[
        bool, typer.Option("--untraceable-holder", help="The device is held, but no process can be found.")
    ] = False,
    unkillable: Annotated[
        bool, typer.Option("--holder-unkillable", help="Holders of the device cannot be killed.")
    ] = False,
    temperature: Annotated[int | None, typer.Option(metavar="N", help="Temperature in degrees Celsius.")] = None,
    recovery: Annotated[
        str | None,
        typer.Option(
            metavar="ACTION",
            help="Action that the driver requests: none, reset, reboot, drain-p2p, drain-and-reset, imex, "
            "bus-reset, system-reboot; absent: the driver does not report one.",
        ),
    ] = None,
    condition: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODE[=VALUE]",
            help="Condition that the driver reports, with its value: pcie-width='x8 of x16'. May be repeated.",
        ),
    ] = None,
    counter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="Set a lifetime counter of the device, such as retired_pages. It survives resets and sim clear.",
        ),
    ] = None,
    firmware: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Change the version of the VBIOS, such as 96.00.89.",
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=10_000_000, help="How often the XID is raised; requires --device."),
    ] = 1,
    rate: Annotated[
        float,
        typer.Option(metavar="N", min=0.001, max=100_000, help="Repeated XIDs per second."),
    ] = 1000.0,
) -> None:
    """Inject faults into a device, into all devices, or into the driver.

    They take effect at once, also while the service and tenants run.
    """
    from scrubber.adapters.sim import control
    from scrubber.adapters.sim.xid_storm import raise_xids
    from scrubber.domain.errors import InvalidRequest

    if repeat > 1 and (xid is None or device is None):
        raise InvalidRequest("--repeat needs the device and the XID to raise; pass --device and --xid too.")
    control.add_faults(
        directory,
        device,
        xid=xid,
        ecc=ecc,
        lost=lost,
        stuck=stuck,
        slow_clear=slow_clear,
        wont_clear=wont_clear,
        reset=None if reset is None else reset.value,
        driver_absent=driver_absent,
        ghost=ghost,
        unkillable=unkillable,
        temperature=temperature,
        recovery=recovery,
        firmware=firmware,
        conditions=dict(_parse_condition(each) for each in condition or ()),
        counters=dict(_parse_counter(each) for each in counter or ()),
    )
    if repeat > 1 and xid is not None and device is not None:
        raise_xids(directory, device, [xid], repeat=repeat - 1, rate=rate)


def _parse_condition(written: str) -> tuple[str, str]:
    """Parse ``CODE`` or ``CODE=VALUE``."""
    code, _, value = written.partition("=")
    return code, value


def _parse_counter(written: str) -> tuple[str, int]:
    """Parse ``NAME=N``."""
    name, _, number = written.partition("=")
    if not (number.isascii() and number.isdecimal()):
        raise typer.BadParameter(
            f'"{written}" is not NAME=N; write a counter such as retired_pages=3.', param_hint="--counter"
        )
    return name, int(number)


@app.command()
def clear(
    directory: DirOption,
    device: AnyDeviceOption = None,
    condition: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Clear only this fault, named like the flag of sim fault (xid, lost, ...) or by its code "
            "(pcie-width, ...). May be repeated.",
            show_default="all faults",
        ),
    ] = None,
) -> None:
    """Clear injected faults.

    The memory and the lifetime counters are not changed.
    """
    from scrubber.adapters.sim import control

    control.clear_faults(directory, device, condition or None)


@app.command()
def reboot(directory: DirOption) -> None:
    """Simulate a reboot of the node.

    The node gets another boot id, and its driver is loaded again; the memory keeps its contents. No service may serve the
    node, and its devices must have no holders.
    """
    from scrubber.adapters.sim.reboot import reboot as act

    act(directory)


def _tenant_flag(name: str, text: str, metavar: str | None = None, parser: Callable[[str], Any] | None = None) -> Any:
    return typer.Option(f"--{name}", metavar=metavar, parser=parser, help=text)


@app.command()
def tenant(
    device: Annotated[
        Path | None, _tenant_flag("device", "Path of the device. Default: the first dev/simgpu* below . or /.", "PATH")
    ] = None,
    resize: Annotated[int | None, _tenant_flag("resize", "Change the size of the device's file.", "SIZE", size)] = None,
    read: Annotated[bool, _tenant_flag("read", "Print how many bytes are not zero, and the first text.")] = False,
    expect: Annotated[
        str | None,
        _tenant_flag("expect", "Fail unless this text fills the memory; with --write, checked at the end.", "TEXT"),
    ] = None,
    write: Annotated[str | None, _tenant_flag("write", "Fill the memory with this text.", "TEXT")] = None,
    in_flight: Annotated[
        bool, _tenant_flag("in-flight", "Hold the device only by a descriptor in flight between sockets.")
    ] = False,
    mmap: Annotated[bool, _tenant_flag("mmap", "Hold the device only by a memory mapping.")] = False,
    leave_leftover: Annotated[
        bool, _tenant_flag("leave-leftover", "Leave a process behind that holds the device.")
    ] = False,
    ready_file: Annotated[
        Path | None, _tenant_flag("ready-file", "File to write when everything up to here is done.", "PATH")
    ] = None,
    hold: Annotated[
        str | None, _tenant_flag("hold", "Keep running for this time, or until SIGTERM.", "SECONDS|forever")
    ] = None,
    sigkill: Annotated[bool, _tenant_flag("sigkill", "Exit by SIGKILL.")] = False,
) -> None:
    """Act as a tenant: use a device as the programs of pods do.

    Prints each result as a line of JSON. Exits with 1 if the memory does not match --expect.
    """
    from scrubber.adapters.sim import tenant as program

    values = {
        "device": device,
        "resize": resize,
        "expect": expect,
        "write": write,
        "ready-file": ready_file,
        "hold": hold,
    }
    switches = {
        "read": read,
        "in-flight": in_flight,
        "mmap": mmap,
        "leave-leftover": leave_leftover,
        "sigkill": sigkill,
    }
    argv = [f"--{name}={value}" for name, value in values.items() if value is not None]
    argv += [f"--{name}" for name, enabled in switches.items() if enabled]
    raise typer.Exit(program.main(argv))


def _answer(node: SimNode) -> CommandResult:
    split_up = {each.device.id for each in node.devices if each.has_instances}
    return CommandResult(
        data=[
            {
                "metadata": {"name": each.device.id},
                "index": each.device.index,
                "memoryBytes": each.device.memory_bytes,
                "memoryFile": str(each.memory),
                "parent": each.device.parent,
                "split": each.device.id in split_up,
            }
            for each in node.devices
        ],
        names=[each.device.id for each in node.devices],
        header=("INDEX", "DEVICE", "MEMORY", "FILE"),
        rows=[
            (
                each.device.index,
                each.device.id,
                "split" if each.device.id in split_up else format_size(each.device.memory_bytes),
                str(each.memory),
            )
            for each in node.devices
        ],
        kind="SimDevice",
    )


def _next_commands(directory: Path) -> Iterator[str]:
    """Yield the lines of the commands that serve the node in ``directory`` and list its devices.

    State and sockets are beside the node: the default directories may need root, and may be those of this node's service.
    """
    state, sockets = ("--state-dir", f"{directory}.state"), ("--socket-dir", f"{directory}.run")
    yield f"Next: scrubber serve --backend sim --sim-dir {shlex.quote(str(directory))} \\"
    yield f"        {shlex.join((*state, *sockets))}"
    yield f"Then: {shlex.join(('scrubber', 'devices', *sockets))}"
