"""Runs ``python -m tests.clustercheck`` against an emulated API server, with the role that its page documents."""

from __future__ import annotations

import asyncio
import json
import re
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scrubber.emulator.cluster import Account, ApiServer
from tests import forkserver

PAGE = Path(__file__).parents[1] / "docs" / "cluster-check.md"
ROLE = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1])
ACCOUNT = Account("auditor", ROLE["rules"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished check."""

    code: int
    output: str
    errors: str
    report: dict[str, Any]
    """Empty if it wrote none."""

    @property
    def results(self) -> dict[str, str]:
        return {each["scenario"]: each["result"] for each in self.report["scenarios"]}

    def scenario(self, name: str) -> dict[str, Any]:
        (found,) = [each for each in self.report["scenarios"] if each["scenario"] == name]
        return dict(found)


class Checker:
    """The command, with a kubeconfig file of one account."""

    def __init__(self, server: ApiServer, directory: Path, account: Account = ACCOUNT) -> None:
        self._directory = directory
        self.kubeconfig = server.write_kubeconfig(directory / "check.kubeconfig", server.add_account(account))
        self._report = directory / "cluster-check.json"

    async def start(self, *flags: str) -> Process:
        return await forkserver.start(
            *("tests.clustercheck", "--kubeconfig", str(self.kubeconfig)),
            *("--report", str(self._report), "--poll", "0.3", *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
        )

    async def outcome(self, process: Process) -> Outcome:
        try:
            output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        report = json.loads(self._report.read_text()) if self._report.exists() else {}
        return Outcome(process.returncode or 0, output.decode(), errors.decode(), report)

    async def run(self, *flags: str) -> Outcome:
        return await self.outcome(await self.start(*flags))


def scenarios(names: Sequence[str]) -> list[str]:
    """Return the flags that select scenarios."""
    return [word for name in names for word in ("--scenario", name)]
