"""``scrubber run``: run a command on clean devices, without Kubernetes.

The command is a job: it lasts as long as a process is in its cgroup. This process enters the cgroup before it requests devices
and then becomes the command, so the devices are released however either of them ends, and exit status and signals are the
command's own.
"""

from __future__ import annotations

import os
import pwd
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Annotated, NoReturn

import typer

from scrubber.cli.client_run import run as run_requests
from scrubber.cli.client_run import start_job
from scrubber.cli.options import JobDeviceOption, SocketOption, seconds
from scrubber.cli.render.output import print_error
from scrubber.domain.errors import InvalidConfiguration, InvalidRequest, PermissionDenied

__all__ = ["CGROUP_PARENT_VARIABLE", "DEVICES_VARIABLE", "add_commands"]

DEVICES_VARIABLE = "SCRUBBER_DEVICES"
CGROUP_PARENT_VARIABLE = "SCRUBBER_CGROUP_PARENT"

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit codes of a shell for a command that cannot be executed, and for one that does not exist."""
_ATTEMPTS = 100
_LEAF = "command"
"""A process may not be in the job's own cgroup: container runtimes create cgroups with controllers beside it (cgroups(7))."""

CommandArgument = Annotated[
    list[str],
    typer.Argument(metavar="COMMAND", help="Command with its arguments.", show_default=False),
]
CountOption = Annotated[
    int | None,
    typer.Option("--count", min=1, metavar="N", help="Number of devices, if none is named.", show_default="1"),
]
UserOption = Annotated[
    str | None,
    typer.Option(
        "--user",
        metavar="NAME",
        help="Run the command as this user, the tenant of the devices.",
        show_default="the caller",
    ),
]
WaitOption = Annotated[
    float,
    typer.Option(
        "--wait",
        metavar="TIME",
        parser=seconds,
        help="How long to wait for free devices, for their scrubs and for the service.",
        show_default="5m",
    ),
]
CgroupRootOption = Annotated[
    Path | None,
    typer.Option(
        "--cgroup-root",
        envvar="SCRUBBER_CGROUP_ROOT",
        metavar="DIR",
        help="Mount point of the cgroup hierarchy; the same as that of the service.",
        show_default="detected",
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command("run", context_settings={"allow_interspersed_args": False})(run_command)


def run_command(
    command: CommandArgument,
    devices: JobDeviceOption = None,
    count: CountOption = None,
    user: UserOption = None,
    wait: WaitOption = 300.0,
    cgroup_root: CgroupRootOption = None,
    socket: SocketOption = Path("/run/scrubber"),
) -> None:
    """Run a command on clean devices.

    Needs root. Without a kubelet, this hands devices over, and releases them when the command has ended. The devices are named in SCRUBBER_DEVICES, and NVIDIA's in CUDA_VISIBLE_DEVICES. They are scrubbed once no process
    of the command is left, also in the background. Start containers with --cgroup-parent "$SCRUBBER_CGROUP_PARENT", so that
    they count as part of it.

    Exits with the status of the command, with 126 or 127 if it cannot be executed, or as other commands if no device is handed over.
    """
    if devices and count is not None:
        raise InvalidRequest("Pass either --device or --count.")
    if os.geteuid() != 0:
        raise PermissionDenied("scrubber run must be started by root, who alone may create the cgroup of the command.")
    account = _account(user)
    id = token_hex(6)
    slice_ = _enter_cgroup(id, cgroup_root)
    inherited = _open_descriptors()
    granted = run_requests(_start(socket, id, account, devices or (), 0 if devices else count or 1, wait))
    for each in _open_descriptors() - inherited:
        with suppress(OSError):
            os.set_inheritable(each, False)
    variables = _variables(granted, slice_)
    if user is not None:
        _become(account)
        variables |= {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    _execute(command, {**os.environ, **variables})


async def _start(
    socket: Path, id: str, account: pwd.struct_passwd, devices: Sequence[str], count: int, wait: float
) -> Sequence[str]:
    from scrubber.api import scrubber_pb2 as pb

    job = pb.Job(manager="run", id=id, user=account.pw_name, user_id=account.pw_uid)
    return [each.id for each in (await start_job(socket, job, devices, count=count, wait=wait)).devices]


def _account(user: str | None) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(os.getuid()) if user is None else pwd.getpwnam(user)
    except KeyError:
        raise InvalidRequest(f"There is no user {user or os.getuid()} on this node.") from None


def _enter_cgroup(id: str, cgroup_root: Path | None) -> str:
    """Move this process into a new cgroup for the job ``id``; return the name of the cgroup.

    Raises:
        InvalidConfiguration: there is no cgroup hierarchy that can be written to.
    """
    from scrubber.adapters.cgroups import discover_root
    from scrubber.adapters.cgroups.job_paths import RUN_SLICE, run_directory

    root = cgroup_root or discover_root()
    if root is None:
        raise InvalidConfiguration("No cgroup hierarchy was found; pass its directory with --cgroup-root.")
    for ended in _directories(root / RUN_SLICE):
        for each in (ended / _LEAF, ended):
            with suppress(OSError):  # the kernel removes no cgroup that has a process
                each.rmdir()
    directory = run_directory(root, id)
    for left in reversed(range(_ATTEMPTS)):
        try:
            (directory / _LEAF).mkdir(parents=True, exist_ok=True)
            (directory / _LEAF / "cgroup.procs").write_text("0")
        except FileNotFoundError:
            if not left:
                raise
            continue  # another scrubber run has just removed it as an empty one
        except OSError as error:
            raise InvalidConfiguration(
                f"The cgroup {directory} cannot be created ({error.strerror}); pass a hierarchy that can be written to with "
                "--cgroup-root, to the service as well."
            ) from error
        break
    return directory.name


def _directories(parent: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (each for each in parent.iterdir() if each.is_dir())


def _open_descriptors() -> set[int]:
    return {int(each) for each in os.listdir("/proc/self/fd")}


def _variables(devices: Sequence[str], cgroup: str) -> dict[str, str]:
    variables = {DEVICES_VARIABLE: ",".join(devices), CGROUP_PARENT_VARIABLE: cgroup}
    if all(each.startswith(("GPU-", "MIG-")) for each in devices):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return variables


def _become(account: pwd.struct_passwd) -> None:
    os.initgroups(account.pw_name, account.pw_gid)
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)


def _execute(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGINT):  # Python changes both, and an ignored signal stays ignored
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        print_error(f"{command[0]} cannot be executed: {error.strerror}.")
        raise typer.Exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE) from error
