"""The command backend fulfils the contract of every backend with the sample program, and survives hostile ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from scrubber.adapters.command.executable import ownership_problem
from scrubber.domain.errors import (
    BrokenCommand,
    DeviceBusy,
    DeviceLost,
    DriverTimeout,
    ResetInProgress,
    Unavailable,
    Unreadable,
)
from scrubber.domain.telemetry import Snapshot
from scrubber.ports import contract
from scrubber.ports.device import EraseProgress, EraseReport
from tests.adapters.backend_contract import BackendContract, request
from tests.adapters.command_rig import Commands, commands, hostile, write_program
from tests.adapters.diagnostics_contract import DiagnosticsContract


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Commands]:
    async with commands(tmp_path, telemetry="3s") as found:
        yield found


class TestCommandBackend(BackendContract):
    """The contract, with the sample program over plain files."""


class TestCommandDiagnostics(DiagnosticsContract):
    """The contract of diagnostics, with the only check of the sample program."""

    checks = ("memory-pattern",)

    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[Commands]:
        async with commands(tmp_path) as found:
            found.device, found.other = await found.backend.inventory.devices()
            yield found


# --- programs that misbehave -------------------------------------------------------------------------------------------


async def ask(directory: Path, body: str, *, telemetry: str = "20s") -> Snapshot:
    async with commands(directory, hostile(directory, body), telemetry=telemetry) as rig:
        (device,) = await rig.backend.inventory.devices()
        return await rig.backend.telemetry.snapshot(device)


BROKEN = {
    "answer(); answer()": "not one JSON object (Extra data",
    "print('[1, 2]')": "no JSON object",
    r"print('no\x7f\x1b[m')": r'it printed "no\u007f\u001b[m\n", which is not one JSON object (Expecting value',
    "print('y' * 1000)": f'it printed "{"y" * 60}"..., which',
    "pass": "no JSON object",
    "os.close(1)": "no JSON object",
    "sys.exit(1)": "status 1",
    "sys.exit('all is well')": "It logged: all is well",
    "os.kill(os.getpid(), 9)": "signal 9",
    "request['id'] = 'other'; answer()": "id is 'other'",
    "request['apiVersion'] = 'v2'; answer()": 'apiVersion must be "backend.scrubber.dev/v1"',
    "answer(errors={'x': 1})": "error code 'x'",
    "answer(eccUncorrected=-1)": "eccUncorrected is -1",
    "answer(eccUncorrected=True)": "eccUncorrected is True",
    "answer(conditions={'Broken!': ''})": "condition 'Broken!'",
    "answer(recoveryAction='pray')": "recoveryAction is 'pray'",
    "answer(message='no', code='no'); sys.exit(10)": "code is 'no'",
    "answer(code='lost'); sys.exit(10)": "message is missing",
}


@pytest.mark.parametrize(("body", "message"), BROKEN.items())
async def test_program_that_answers_wrongly_is_reported_as_broken_and_no_device_is_at_fault(
    tmp_path: Path, body: str, message: str
) -> None:
    with pytest.raises(BrokenCommand) as raised:
        await ask(tmp_path, body)
    assert message in str(raised.value)
    assert str(tmp_path / "hostile") in str(raised.value)


async def test_output_without_end_is_cut_off_at_one_mebibyte(tmp_path: Path) -> None:
    with pytest.raises(BrokenCommand, match="more than 1048576 bytes"):
        await ask(tmp_path, "while True: sys.stdout.write('x' * (1 << 20))")


async def test_answers_by_exit_status_are_errors_of_the_device_only_where_the_program_says_so(tmp_path: Path) -> None:
    for body, error in {
        "answer(message='gone', code='lost'); sys.exit(10)": DeviceLost,
        "answer(message='hangs', code='timeout'); sys.exit(10)": DriverTimeout,
        "answer(message='bad', code='failed'); sys.exit(10)": Unreadable,
        "answer(message='in use'); sys.exit(11)": DeviceBusy,
        "answer(message='not now'); sys.exit(12)": Unavailable,
    }.items():
        (tmp_path / error.__name__).mkdir()
        with pytest.raises(error) as raised:
            await ask(tmp_path / error.__name__, body)
        assert type(raised.value) is error


SLEEP = f"987.{os.getpid()}"
SPAWN = f"subprocess.Popen(['sleep', '{SLEEP}'], start_new_session=True, close_fds=False)\n"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@pytest.mark.parametrize("body", [STUBBORN + "time.sleep(987)", SPAWN + "time.sleep(987)"])
async def test_run_that_hangs_ends_at_its_deadline_with_all_its_processes(tmp_path: Path, body: str) -> None:
    with pytest.raises(
        DriverTimeout, match=r"within 1 s and was killed; .* its limit \(deadlines.telemetry in the file"
    ):
        await ask(tmp_path, body, telemetry="1s")
    assert not sleepers()


async def test_processes_that_a_run_leaves_behind_are_killed(tmp_path: Path) -> None:
    await ask(tmp_path, SPAWN + SPAWN.replace("start_new_session=True, ", "") + "answer()")
    assert not sleepers()


async def test_detached_process_is_found_by_the_lock_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    body = SPAWN + "(here / 'started').touch()\ntime.sleep(987)"
    async with commands(tmp_path, hostile(tmp_path, body)) as rig:
        (device,) = await rig.backend.inventory.devices()
        task = asyncio.create_task(rig.backend.eraser.erase(device, request(), lambda _: None))
        await until_exists(tmp_path / "node" / "started", task)
        pid = await rig.backend.eraser.find_orphan(device)
        assert pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unreadable):
            await task
        assert await rig.backend.eraser.find_orphan(device) is None
    assert not sleepers()


async def test_run_leaves_no_cgroup_and_creates_none_outside_of_the_kernels(tmp_path: Path) -> None:
    body = "(here / 'seen').write_text(f'{os.getppid()} {Path(\"/proc/self/cgroup\").read_text()}')\nanswer()"
    await ask(tmp_path, body)
    parent, _, lines = (tmp_path / "node" / "seen").read_text().partition(" ")
    own = next((line[3:] for line in lines.split("\n") if line.startswith("0::")), "")
    if own.endswith(f"/scrubber-command-{parent}"):
        assert not any(Path(f"{mount}{own}").exists() for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        assert not list(Path("/sys/fs/cgroup").glob("scrubber-command-*"))


async def test_cancelled_run_leaves_no_process(tmp_path: Path) -> None:
    body = SPAWN + "(here / 'started').touch()\ntime.sleep(987)"
    async with commands(tmp_path, hostile(tmp_path, body)) as rig:
        (device,) = await rig.backend.inventory.devices()
        task = asyncio.create_task(rig.backend.eraser.erase(device, request(), lambda _: None))
        await until_exists(tmp_path / "node" / "started", task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await rig.backend.eraser.find_orphan(device) is None
    assert not sleepers()


async def until_exists(file: Path, task: asyncio.Task[EraseReport]) -> None:
    """Return once the program of ``task`` has created ``file``."""
    async with asyncio.timeout(30):
        while not file.exists():
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)


def sleepers() -> list[int]:
    """Return the processes of :data:`SPAWN` that still run."""
    found = []
    for each in os.listdir("/proc"):
        with suppress(OSError):
            if each.isdecimal() and Path(f"/proc/{each}/cmdline").read_bytes() == f"sleep\0{SLEEP}\0".encode():
                found.append(int(each))
    return found


async def test_device_is_not_queried_while_the_command_works_on_it(tmp_path: Path) -> None:
    body = "(here / verb).touch()\ntime.sleep(987)"
    async with commands(tmp_path, hostile(tmp_path, body)) as rig:
        (device,) = await rig.backend.inventory.devices()
        task = asyncio.create_task(rig.backend.eraser.erase(device, request(), lambda _: None))
        await until_exists(tmp_path / "node" / "erase", task)
        with pytest.raises(ResetInProgress, match=r"the command works on it \(erase\)"):
            await rig.backend.telemetry.snapshot(device)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


ERASES = {
    "answer(totalBytes=1, clearedBytes=1)": "the inventory has 1024",
    "answer(totalBytes=1024, clearedBytes=1000)": "notCovered does not name the rest",
    "answer(totalBytes=1024, clearedBytes=2000)": "more bytes were cleared",
    "answer(totalBytes=1024)": "clearedBytes is missing",
    "answer(totalBytes=1024, clearedBytes=1024, verifiedBytes=1.5)": "verifiedBytes is 1.5",
}


@pytest.mark.parametrize(("body", "message"), ERASES.items())
async def test_report_that_contradicts_itself_is_no_report(tmp_path: Path, body: str, message: str) -> None:
    async with commands(tmp_path, hostile(tmp_path, body)) as rig:
        (device,) = await rig.backend.inventory.devices()
        with pytest.raises(BrokenCommand, match=message):
            await rig.backend.eraser.erase(device, request(), lambda _: None)


async def test_absent_numbers_of_a_report_stay_absent_and_are_named(tmp_path: Path) -> None:
    body = "answer(totalBytes=1024, clearedBytes=1000, notCovered=['24 bytes of firmware'])"
    async with commands(tmp_path, hostile(tmp_path, body)) as rig:
        (device,) = await rig.backend.inventory.devices()
        report = await rig.backend.eraser.erase(device, request(), lambda _: None)
    assert (report.verified_bytes, report.residue_bytes, report.not_covered_bytes) == (None, None, 24)
    assert report.not_covered == ("memory: 24 bytes of firmware", "memory: not read back after clearing")


@pytest.mark.parametrize("done", ["Infinity", str(2**63)])
async def test_progress_that_no_message_can_carry_is_ignored(tmp_path: Path, done: str) -> None:
    """A program's nonsense about its progress ends neither its run nor the process that supervises it."""
    body = f"""os.write(3, b'{{"phase": "clear", "done": {done}, "total": {done}}}\\n{{"phase": "clear", "done": 1, "total": 1}}\\n')
answer(totalBytes=1024, clearedBytes=1024)"""
    progress: list[EraseProgress] = []
    async with commands(tmp_path, hostile(tmp_path, body)) as rig:
        (device,) = await rig.backend.inventory.devices()
        report = await rig.backend.eraser.erase(device, request(), progress.append)
    assert report.cleared_bytes == 1024
    assert progress == [EraseProgress("clear", 1, 1)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("answer(totalBytes=0, clearedBytes=0)", "no memory to clear, and notCovered does not say what remains on it"),
        ("answer(totalBytes=1, clearedBytes=1)", "totalBytes is 1, and the inventory has 0"),
    ],
)
async def test_device_without_memory_is_not_reported_as_cleared(tmp_path: Path, body: str, message: str) -> None:
    async with commands(tmp_path, without_memory(tmp_path, body)) as rig:
        (device,) = await rig.backend.inventory.devices()
        with pytest.raises(BrokenCommand, match=message):
            await rig.backend.eraser.erase(device, request(), lambda _: None)


async def test_report_about_a_device_without_memory_names_what_remains_on_it(tmp_path: Path) -> None:
    body = "answer(totalBytes=0, clearedBytes=0, notCovered=['registers'])"
    async with commands(tmp_path, without_memory(tmp_path, body)) as rig:
        (device,) = await rig.backend.inventory.devices()
        report = await contract.check_erasure(rig.backend.eraser, rig.backend.holders, device, request())
    assert (report.total_bytes, report.cleared_bytes, report.not_covered) == (0, 0, ("memory: registers",))


def without_memory(directory: Path, body: str) -> Path:
    """Write a program whose only device has no memory."""
    program = hostile(directory, body)
    return write_program(program, program.read_text().replace('"memoryBytes": 1024', '"memoryBytes": 0'))


async def test_program_gets_a_fixed_environment_and_no_descriptor_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not forked: what reaches the program depends on how the service starts its child.
    monkeypatch.setattr(asyncio, "create_subprocess_exec", asyncio.subprocess.create_subprocess_exec)
    monkeypatch.setenv("SECRET", "token")
    body = (
        "fds = sorted(int(each) for each in os.listdir('/proc/self/fd'))\n"
        "(here / 'seen').write_text(json.dumps([sorted(os.environ), fds[:5], os.getcwd(), os.getsid(0) == os.getpid()]))\n"
        "answer()"
    )
    await ask(tmp_path, body)
    names, descriptors, directory, leads = json.loads((tmp_path / "node" / "seen").read_text())
    assert set(names) - {"LC_CTYPE"} == {"HOME", "LANG", "PATH", "SIMULATED_NODE"}
    assert descriptors == [0, 1, 2, 3, 4]
    assert (directory, leads) == ("/", True)


async def test_node_that_does_not_exist_is_a_mistake_of_the_inventory_and_no_fault_of_the_device(
    tmp_path: Path,
) -> None:
    program = hostile(tmp_path, "answer()")
    write_program(program, program.read_text().replace('str(here / "devices/0/memory")', '"/dev/no-such-node"'))
    async with commands(tmp_path, program) as rig:
        (device,) = await rig.backend.inventory.devices()
        with pytest.raises(BrokenCommand) as raised:
            await rig.backend.holders.list_holders(device)
    assert str(raised.value) == (
        "/dev/no-such-node, which the inventory names as a node of device dev-0, cannot be opened: No such file or "
        "directory; correct `nodes`, or check that the driver has created it."
    )


# --- the program's file ------------------------------------------------------------------------------------------------


async def test_changed_program_is_listed_again_before_it_touches_a_device(tmp_path: Path) -> None:
    program = hostile(tmp_path, "answer()")
    async with commands(tmp_path, program) as rig:
        (device,) = await rig.backend.inventory.devices()
        before = await rig.backend.inventory.identity()
        assert device.claimed_by.startswith("command sha256:")
        program.write_text(program.read_text() + "# changed\n")
        with pytest.raises(BrokenCommand, match="has changed; its devices are listed again"):
            await rig.backend.telemetry.snapshot(device)
        (again,) = await rig.backend.inventory.devices()
        assert again.claimed_by != device.claimed_by
        assert (await rig.backend.inventory.identity()).driver != before.driver
        await rig.backend.telemetry.snapshot(again)


async def test_answer_of_a_program_that_changes_while_it_runs_does_not_count(tmp_path: Path) -> None:
    """The digest in a certificate would be that of another program than the one that answered."""
    program = hostile(tmp_path, "with open(__file__, 'a') as own:\n    own.write('# changed')\nanswer()")
    async with commands(tmp_path, program) as rig:
        (device,) = await rig.backend.inventory.devices()
        with pytest.raises(BrokenCommand, match="changed while it ran"):
            await rig.backend.telemetry.snapshot(device)


async def test_program_that_names_one_holder_hides_no_other(tmp_path: Path) -> None:
    program = hostile(tmp_path, "answer()")
    named = "answer(pids=json.loads((here / 'named').read_text()), complete=True)"
    write_program(program, program.read_text().replace("answer(pids=[], complete=True)", named))
    async with commands(tmp_path, program) as rig:
        (device,) = await rig.backend.inventory.devices()
        with rig.hold(device) as shown, rig.hold(device) as hidden:
            (tmp_path / "node" / "named").write_text(f"[{shown}]")
            report = await rig.backend.holders.list_holders(device)
    assert {each.pid for each in report.holders} == {shown, hidden}


@pytest.mark.parametrize("mode", [0o775, 0o757])
async def test_program_that_others_may_write_does_not_run(tmp_path: Path, mode: int) -> None:
    program = hostile(tmp_path, "answer()")
    program.chmod(mode)
    async with commands(tmp_path, program) as rig:
        with pytest.raises(BrokenCommand, match="writable by others"):
            await rig.backend.inventory.devices()


def test_program_below_a_directory_that_others_may_write_does_not_run(tmp_path: Path) -> None:
    program = hostile(tmp_path, "answer()")
    tmp_path.chmod(0o777)
    assert ownership_problem(program, os.geteuid()) == (
        f"{tmp_path} is writable by others, who could replace the program; run: chmod go-w {tmp_path}"
    )


def test_program_of_another_user_does_not_run(tmp_path: Path) -> None:
    program = hostile(tmp_path, "answer()")
    if os.geteuid() == 0:
        os.chown(program, 65534, 65534)
        problem = ownership_problem(program)
    else:
        problem = ownership_problem(program, 65534)
    assert "could replace the program; run: chown root" in str(problem)


def test_program_behind_a_link_that_another_user_may_replace_does_not_run(tmp_path: Path) -> None:
    """The directory of the second link is neither above the configured path nor above the program."""
    program = hostile(tmp_path, "answer()")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "second").symlink_to(program)
    first = tmp_path / "first"
    first.symlink_to("theirs/../theirs/second")
    assert ownership_problem(first, os.geteuid()) is None
    theirs.chmod(0o777)
    assert f"{theirs} is writable by others" in str(ownership_problem(first, os.geteuid()))


def test_program_behind_another_users_link_in_a_sticky_directory_does_not_run() -> None:
    link = Path("/tmp") / f"link-{os.urandom(8).hex()}"  # which is sticky
    link.symlink_to("/usr/bin/env")
    try:
        assert ownership_problem(link, os.geteuid()) is None
        if os.geteuid() == 0:
            os.lchown(link, 65534, 65534)
        assert str(ownership_problem(link)).endswith(f"who could replace the program; run: chown -h root {link}")
    finally:
        link.unlink()


def test_link_that_leads_to_itself_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be found" in str(ownership_problem(tmp_path / "loop"))


def test_relative_missing_and_plain_files_are_no_programs(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    assert "not an absolute path" in str(ownership_problem(Path("tool")))
    assert "cannot be found" in str(ownership_problem(tmp_path / "missing"))
    assert "not an executable file" in str(ownership_problem(tmp_path / "text"))
