"""The audit log of a running service: verified from outside, with heads saved off the node, and after its end."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from scrubber.emulator.playground import Playground
from tests.integration import log_lines
from tests.integration.acting import SOON, found_by, reader, running, staged, writer

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()


def logged(stage: Playground, event: str) -> list[dict[str, Any]]:
    return [line for line in log_lines.lines(stage.service) if line["event"] == event]


async def test_exported_audit_heads_are_found_in_the_audit_log_of_the_running_service() -> None:
    async with staged(devices=2) as stage:
        (ready,) = logged(stage, "service.ready")
        first = await stage.run_command("audit", "head")
        pod = await running(stage, writer("a", "team-a"))
        second = await stage.run_command("audit", "head", "-o", "name")
        await stage.kubelet.delete(pod)
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        heads = [ready["audit_head"], first.stdout.strip(), second.stdout.strip()]
        flags = [word for head in heads for word in ("--head", head)]
        ended = await stage.run_command("audit", "verify", *flags, "-o", "json")
        assert (ended.returncode, ended.stderr) == (0, "")
        report = json.loads(ended.stdout)
        assert (report["verdict"], report["source"]) == ("intact", "service")
        assert [each["status"] for each in report["savedHeads"]] == ["found"] * 3
        assert report["rowCount"] == report["head"]["sequence"] > int(heads[2].partition(":")[0])


async def test_audit_log_is_the_same_from_the_service_the_state_directory_and_an_exported_file() -> None:
    async with staged(devices=1) as stage:
        await running(stage, writer("a", "team-a"))
        state = str(stage.directory / "state")
        busy = await stage.run_command("audit", "verify", "--ledger-dir", state)
        assert busy.returncode == 3, busy.stderr
        head = (await stage.run_command("audit", "head")).stdout.strip()
        live = await stage.run_command("audit", "export")
        assert (live.returncode, live.stderr) == (0, "")
        assert await stage.service.stop(SOON) == 0

        ended = await stage.run_command("audit", "verify", "--ledger-dir", state, "--head", head, "-o", "json")
        assert (ended.returncode, json.loads(ended.stdout)["verdict"]) == (0, "intact")
        stopped = await stage.run_command("audit", "export", "--ledger-dir", state)
        rows = live.stdout.splitlines()[1:]
        assert stopped.stdout.splitlines()[1 : 1 + len(rows)] == rows, "exported rows do not change"

        file = stage.directory / "audit.jsonl"
        file.write_text(stopped.stdout)
        verified = await stage.run_command("audit", "verify", "--file", str(file), "--head", head)
        assert (verified.returncode, verified.stderr) == (0, "")
        (check,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        independent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-W", "ignore", "-c", check, str(file), head), stdout=PIPE, stderr=PIPE
        )
        out, err = await independent.communicate()
        assert (independent.returncode, err) == (0, b"")
        assert out.startswith(b"intact: ")


async def test_history_is_filtered_by_tenant_and_outcome() -> None:
    async with staged(devices=2) as stage:
        await running(stage, writer("a", "team-a"))
        await running(stage, writer("b", "team-b"))

        async def history_rows(*words: str) -> list[dict[str, Any]]:
            ended = await stage.run_command("history", *words, "-o", "json")
            assert (ended.returncode, ended.stderr) == (0, "")
            items: list[dict[str, Any]] = json.loads(ended.stdout)["items"]
            return items

        (granted,) = await history_rows("--tenant", "team-a", "--outcome", "granted")
        assert (granted["event"], granted["fields"]["pod"]) == ("handover.granted", "a")
        passed = await history_rows("--outcome", "passed", "--device", granted["deviceID"])
        assert passed
        assert {each["deviceID"] for each in passed} == {granted["deviceID"]}
        assert {each["fields"]["outcome"] for each in passed} == {"passed"}
        assert await history_rows("--tenant", "team-c") == []
        assert await history_rows("--outcome", "failed") == []
