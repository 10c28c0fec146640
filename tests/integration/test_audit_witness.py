"""The recipes of docs/audit.md: heads kept outside the node show that its audit log was truncated or rewritten.

The page's own lines run, with programs in place of curl, journalctl and aws that answer with what a real service published.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scrubber.emulator.playground import Playground
from tests.integration import log_lines
from tests.integration.acting import QUICK, SOON, running, writer

DOCS = Path(__file__).parents[2] / "docs"
_, _, SECTION = (DOCS / "audit.md").read_text().partition("## Witnesses: three recipes\n")
PROMETHEUS, JOURNAL, STORE, FETCH, COMPARE = re.findall(
    r"^```sh\n(.*?)^```$", SECTION.partition("\n## ")[0], re.MULTILINE | re.DOTALL
)
HASHED = ("actor", "deviceID", "event", "fields", "scrubID", "sequence", "timestamp")
STAND_INS = {
    "curl": 'cat "$WITNESS/answer.json"',
    "journalctl": 'cat "$WITNESS/journal"',
    "aws": """\
if [ "$3" = - ]; then mkdir -p "$WITNESS/store" && cat > "$WITNESS/store/${4##*/}"
else mkdir -p "$5" && cp "$WITNESS"/store/* "$5"; fi""",
    "python3": f'exec {sys.executable} "$WITNESS/$1"',
    "scrubber": f'exec {sys.executable} -m scrubber.cli.main "$@"',
}


class Witness:
    """A machine outside the node, on which the page's lines run in ``directory``."""

    def __init__(self, directory: Path, socket_dir: Path) -> None:
        self.directory = directory
        programs = directory / "bin"
        programs.mkdir(parents=True)
        for name, script in STAND_INS.items():
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        (directory / "audit_heads.py").write_text((DOCS / "audit_heads.py").read_text())
        self._environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "WITNESS": str(directory),
            "NO_COLOR": "1",
            **dict.fromkeys(("PROMETHEUS", "NODE", "START", "END", "JOURNAL", "BUCKET"), "x"),
            "SCRUBBER_SOCKET_DIR": str(socket_dir),
        }

    async def run(self, script: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-o", "pipefail", "-c", script),
            cwd=self.directory,
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode()

    def heads(self) -> list[str]:
        return (self.directory / "heads").read_text().split()


def scraped(stage: Playground, moment: float) -> Iterator[dict[str, Any]]:
    """Yield the series of the head as Prometheus returns them after a scrape at ``moment``."""
    (line,) = [each for each in log_lines.lines(stage.service) if each["event"] == "metrics.serving"]
    with urllib.request.urlopen(f"http://{line['address']}/metrics") as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    for family in families:
        for sample in family.samples:
            if sample.name.startswith("scrubber_audit_head_"):
                labels = {"__name__": sample.name, "instance": "n1", **sample.labels}
                yield {"metric": labels, "values": [[moment, f"{sample.value:.9e}"]]}


def rewritten(export: str, changed: int) -> str:
    """Return the export with another event in row ``changed``, and a new chain from there on."""
    ends, *rows = map(json.loads, export.splitlines())
    before = ""
    for row in rows:
        if row["sequence"] >= changed:
            row["event"] = "nothing.happened" if row["sequence"] == changed else row["event"]
            row["previousHash"] = before
            text = before + json.dumps({name: row[name] for name in HASHED}, sort_keys=True, separators=(",", ":"))
            row["hash"] = hashlib.sha256(text.encode("ascii")).hexdigest()
        before = row["hash"]
    ends["head"] = {"sequence": rows[-1]["sequence"], "hash": rows[-1]["hash"]}
    return "".join(json.dumps(each) + "\n" for each in (ends, *rows))


def truncated(export: str, last: int) -> str:
    """Return the export without the rows after ``last`` and without a trace of them."""
    ends, *rows = map(json.loads, export.splitlines())
    kept = [row for row in rows if row["sequence"] <= last]
    ends["head"] = {"sequence": last, "hash": kept[-1]["hash"]}
    return "".join(json.dumps(each) + "\n" for each in (ends, *kept))


async def test_heads_of_each_witness_reveal_a_truncated_and_a_rewritten_audit_log() -> None:
    async with Playground(devices=1, memory="2MiB", policy=QUICK) as stage:
        arguments = list(stage.service.arguments)
        arguments[arguments.index("--metrics-address") + 1] = "127.0.0.1:0"
        stage.service.arguments = arguments
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        witness = Witness(stage.directory / "witness", stage.socket_dir)
        await running(stage, writer("a", "team-a"))
        answer = {"status": "success", "data": {"resultType": "matrix", "result": list(scraped(stage, 1.0))}}
        (witness.directory / "answer.json").write_text(json.dumps(answer))
        assert await witness.run(STORE) == (0, "")
        (witness.directory / "journal").write_text(stage.service.log.read_text())
        export = (await stage.run_command("audit", "export")).stdout
        for recipe in (PROMETHEUS, JOURNAL, FETCH):
            assert await witness.run(recipe) == (0, "")
            assert witness.heads(), recipe
            last = max(int(head.partition(":")[0]) for head in witness.heads())
            for text, exit_code, verdict in (
                (export, 0, "intact"),
                (truncated(export, last - 1), 1, "truncated"),
                (rewritten(export, last), 1, "rewritten"),
            ):
                (witness.directory / "audit.jsonl").write_text(text)
                code, out = await witness.run(COMPARE)
                assert (code, verdict in out) == (exit_code, True), out
                without_heads = await witness.run("scrubber audit verify --file audit.jsonl")
                assert without_heads[0] == 0, "only the witness shows it"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([], "no head"),
        ([{"metric": {"instance": "a"}, "value": [1, "7"]}], "no head"),
        ([{"metric": {"instance": each}, "value": [1, "7"]} for each in "ab"], "several nodes: a, b"),
    ],
)
async def test_answer_of_prometheus_without_one_complete_head_is_refused(result: list[Any], message: str) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(DOCS / "audit_heads.py")),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await program.communicate(json.dumps({"data": {"result": result}}).encode())
    assert program.returncode == 1
    assert message in err.decode()


async def test_heads_of_the_journal_are_those_that_the_service_published_and_no_text_of_a_tenant(
    tmp_path: Path,
) -> None:
    witness = Witness(tmp_path, tmp_path)
    published, forged = f"7:{'a' * 64}", f"7:{'b' * 64}"
    command = f'train "event": "audit.head-published" {forged}'
    lines = (
        {"event": "unauthorized.use.detected", "component": "service", "command": command},
        {"event": "audit.head-published", "component": "service", "head": published},
        {"event": "service.ready", "component": "service", "audit_head": f"3:{'c' * 64}"},
    )
    (tmp_path / "journal").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert await witness.run(JOURNAL) == (0, "")
    assert witness.heads() == [f"3:{'c' * 64}", published]


async def test_two_hashes_of_one_row_in_the_answer_of_prometheus_are_two_heads(tmp_path: Path) -> None:
    """A log that was truncated, and has grown to the same row again, must not hide the head from before."""
    witness = Witness(tmp_path, tmp_path)
    sequence = {"metric": {"__name__": "scrubber_audit_head_sequence"}, "values": [[1, "7"], [2, "7"], [3, "7"]]}
    parts = [
        {
            "metric": {"__name__": "scrubber_audit_head_hash", "part": str(part)},
            "values": [[1, "1"], [2, "2"], [3, "2"]],
        }
        for part in range(8)
    ]
    (tmp_path / "answer.json").write_text(json.dumps({"data": {"result": [sequence, *parts]}}))
    assert await witness.run(PROMETHEUS) == (0, "")
    assert witness.heads() == [f"7:{'00000001' * 8}", f"7:{'00000002' * 8}"]
