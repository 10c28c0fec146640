"""The audit trail of a service at work: verified from outside, with heads that left the node, and after its end."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from scrubber.emulator.stage import Stage
from tests.integration import log_lines
from tests.integration.acting import SOON, found_by, reader, running, staged, writer

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()


def logged(stage: Stage, event: str) -> list[dict[str, Any]]:
    return [line for line in log_lines.lines(stage.service) if line["event"] == event]


async def test_heads_that_left_the_node_are_found_in_the_trail_of_the_running_service() -> None:
    async with staged(devices=2) as stage:
        (ready,) = logged(stage, "service.ready")
        first = await stage.command("audit", "head")
        pod = await running(stage, writer("a", "team-a"))
        second = await stage.command("audit", "head", "-o", "name")
        await stage.kubelet.delete(pod)
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        heads = [ready["audit_head"], first.out.strip(), second.out.strip()]
        flags = [word for head in heads for word in ("--head", head)]
        ended = await stage.command("audit", "verify", *flags, "-o", "json")
        assert (ended.status, ended.err) == (0, "")
        report = json.loads(ended.out)
        assert (report["verdict"], report["source"]) == ("intact", "service")
        assert [each["standing"] for each in report["kept"]] == ["found"] * 3
        assert report["rows"] == report["head"]["sequence"] > int(heads[2].partition(":")[0])


async def test_the_trail_is_the_same_from_the_service_from_its_directory_and_from_a_file() -> None:
    async with staged(devices=1) as stage:
        await running(stage, writer("a", "team-a"))
        state = str(stage.directory / "state")
        busy = await stage.command("audit", "verify", "--ledger", state)
        assert busy.status == 3, busy.err
        head = (await stage.command("audit", "head")).out.strip()
        live = await stage.command("audit", "export")
        assert (live.status, live.err) == (0, "")
        assert await stage.service.stop(SOON) == 0

        ended = await stage.command("audit", "verify", "--ledger", state, "--head", head, "-o", "json")
        assert (ended.status, json.loads(ended.out)["verdict"]) == (0, "intact")
        stopped = await stage.command("audit", "export", "--ledger", state)
        rows = live.out.splitlines()[1:]
        assert stopped.out.splitlines()[1 : 1 + len(rows)] == rows, "what was told once stays as it was told"

        file = stage.directory / "trail.jsonl"
        file.write_text(stopped.out)
        verified = await stage.command("audit", "verify", "--file", str(file), "--head", head)
        assert (verified.status, verified.err) == (0, "")
        (check,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        independent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-W", "ignore", "-c", check, str(file), head), stdout=PIPE, stderr=PIPE
        )
        out, err = await independent.communicate()
        assert (independent.returncode, err) == (0, b"")
        assert out.startswith(b"intact: ")


async def test_history_is_narrowed_to_a_tenant_and_an_outcome() -> None:
    async with staged(devices=2) as stage:
        await running(stage, writer("a", "team-a"))
        await running(stage, writer("b", "team-b"))

        async def asked(*words: str) -> list[dict[str, Any]]:
            ended = await stage.command("history", *words, "-o", "json")
            assert (ended.status, ended.err) == (0, "")
            items: list[dict[str, Any]] = json.loads(ended.out)["items"]
            return items

        (granted,) = await asked("--tenant", "team-a", "--outcome", "granted")
        assert (granted["name"], granted["fields"]["pod"]) == ("handover.granted", "a")
        passed = await asked("--outcome", "passed", "--device", granted["device"])
        assert passed
        assert {each["device"] for each in passed} == {granted["device"]}
        assert {each["fields"]["outcome"] for each in passed} == {"passed"}
        assert await asked("--tenant", "team-c") == []
        assert await asked("--outcome", "failed") == []
