"""The honest tenant: it fills the memory with what it writes, and its reports are true."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scrubber.adapters.sim import lease, tenant

SIZE = 1024 * 1024 + 4096


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the device of a container whose root is the working directory."""
    (tmp_path / "dev").mkdir()
    path = tmp_path / "dev" / "simgpu0"
    path.touch()
    os.truncate(path, SIZE)
    monkeypatch.chdir(tmp_path)
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {key: value for line in lines for key, value in line.items()}


def run(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scrubber.adapters.sim.tenant", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any("ready" in json.loads(line) for line in process.stdout)


def test_tenant_fills_the_first_visible_device_with_its_text(memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tenant.main(["--write", "secret "]) == 0
    assert memory.read_bytes() == (b"secret " * SIZE)[:SIZE]
    assert printed(capsys)["wrote_bytes"] == SIZE


def test_tenant_reads_the_text_left_by_its_predecessor(memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with memory.open("r+b") as file:
        file.seek(5000)
        file.write(b"the key is 42\0\0more")
    assert tenant.main(["--read"]) == 0
    assert printed(capsys) == {"residue_bytes": 17, "found": "the key is 42", "ready": True, "pid": os.getpid()}


def test_tenant_finds_nothing_in_a_clean_device(memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tenant.main(["--device", str(memory), "--read", "--write", "mine"]) == 0
    message = printed(capsys)
    assert (message["residue_bytes"], message["found"]) == (0, "")


def test_tenant_detects_damage_to_its_bytes(memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tenant.main(["--write", "mine", "--expect", "mine"]) == 0
    assert tenant.main(["--expect", "mine"]) == 0
    with memory.open("r+b") as file:
        file.seek(SIZE - 2)
        file.write(b"\0\0")
    assert tenant.main(["--expect", "mine"]) == 1
    assert printed(capsys)["wrong_bytes"] == 2


def test_tenant_exits_with_one_after_damage_while_holding_the_device(memory: Path) -> None:
    with run("--write", "mine", "--expect", "mine", "--hold", "forever") as process:
        until_ready(process)
        with memory.open("r+b") as file:
            file.write(b"M")
        process.terminate()
        assert process.wait() == 1


def test_tenant_exits_cleanly_on_sigterm_and_after_its_hold_time(memory: Path) -> None:
    with run("--write", "mine", "--expect", "mine", "--hold", "forever") as process:
        until_ready(process)
        assert lease.is_held(memory, memory.stat().st_ino)
        process.terminate()
        assert process.wait() == 0
    with run("--hold", "0.01") as process:
        assert process.wait() == 0


def test_tenant_can_crash_after_reporting_ready(memory: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with run("--write", "secret", "--sigkill", "--ready-file", str(ready)) as process:
        assert process.wait() == -signal.SIGKILL
        assert ready.read_text() == f"{process.pid}\n"
    assert memory.read_bytes().startswith(b"secret")


def test_tenant_can_change_the_size_of_the_device(memory: Path) -> None:
    with run("--resize", "100", "--write", "x") as process:
        assert process.wait() == 0
    assert memory.read_bytes() == b"x" * 100


def test_tenant_without_a_device_reports_the_missing_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tenant.main([]) == 2
    assert tenant.main(["--device", "nowhere"]) == 2
    assert "no device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tenant.main(["--write", ""])
