"""Tab completion in real shells: each of them runs here with the script that the command prints."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import PermissionDenied
from tests import forkserver
from tests.cli.stage import Service, serving
from tests.cli.terminal import Terminal, terminal

ROOT = Path(__file__).parents[2]
PROMPT = "READY>"
EMPTY_LINE = "\x15"
TIMEOUT = "20"
"""Seconds. The offered completions must not depend on the load of the machine."""
BASH = (
    f"PS1='{PROMPT} '; bind 'set enable-bracketed-paste off'; bind 'set show-all-if-ambiguous on'; "
    "bind 'set page-completions off'; source <(scrubber completion bash)"
)
ZSH = (
    f"PROMPT='{PROMPT} '; unsetopt prompt_sp prompt_cr; autoload -Uz compinit; compinit -D -u; "
    "source <(scrubber completion zsh)"
)


class Reticent(Service):
    """A service that can be made not to answer.

    Attributes:
        spared: seconds left of the deadline when the client disconnected.
    """

    silent = False
    spared = 0.0

    async def ListDevices(self, request: Any, context: Any) -> pb.ListDevicesResponse:
        found = await super().ListDevices(request, context)
        if self.silent:
            try:
                await asyncio.Event().wait()
            finally:
                self.spared = context.time_remaining()
                self.left.set()
        return found


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Reticent]:
    async with serving(short_tmp, Reticent()) as service:
        assert isinstance(service, Reticent)
        yield service


@dataclass
class Shell:
    """A shell at its prompt."""

    session: Terminal

    async def completes(self, begun: str, whole: str) -> None:
        """Assert that Tab completes ``begun`` to ``whole``, including trailing blanks; leaves an empty line."""
        self.session.type(f"{begun}\tX")
        await self.session.shows(f"{whole}X")
        self.session.type(EMPTY_LINE)

    async def offers(self, begun: str, *words: str) -> None:
        """Assert that Tab shows each of ``words``, which were not there before; leaves an empty line."""
        assert not any(word in self.session.screen.text for word in words)
        self.session.type(f"{begun}\t")
        for word in words:
            await self.session.shows(word)
        self.session.type(EMPTY_LINE)


@asynccontextmanager
async def shell(program: str, *words: str, first: str, directory: Path, **more: str) -> AsyncIterator[Shell]:
    """Provide ``program`` at its prompt after the command ``first``."""
    async with terminal(
        *words, program=(program,), columns=200, environment={**surroundings(directory), **more}
    ) as session:
        session.type(f"{first}; echo LOA''DED\n")
        await session.shows("LOADED")
        yield Shell(session)


def surroundings(directory: Path) -> Mapping[str, str]:
    """Return an environment in which ``scrubber`` is this version, and ``directory`` has the sockets of its service."""
    launcher = directory / "bin" / "scrubber"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m scrubber.cli.main "$@"\n')
    launcher.chmod(0o755)
    return {
        "PATH": f"{launcher.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(directory),
        "TERM": "dumb",
        "SCRUBBER_SOCKET_DIR": str(directory),
        "_SCRUBBER_COMPLETE_TIMEOUT": TIMEOUT,
    }


class TestBash:
    async def test_bash_completes_commands_options_values_and_files(self, short_tmp: Path) -> None:
        (short_tmp / "policies").mkdir()
        async with shell("bash", "--norc", "-i", first=f"{BASH}; cd", directory=short_tmp) as bash:
            await bash.completes("scrubber unq", "scrubber unquarantine ")
            await bash.completes("scrubber sim cr", "scrubber sim create ")
            await bash.completes("scrubber devices --outp", "scrubber devices --output ")
            await bash.completes("scrubber devices -o js", "scrubber devices -o json ")
            await bash.completes("scrubber devices --output=js", "scrubber devices --output=json ")
            await bash.completes("scrubber serve --sim-dir poli", "scrubber serve --sim-dir policies/")
            await bash.completes("scrubber serve --sim-dir=poli", "scrubber serve --sim-dir=policies/")
            await bash.completes("scrubber policy check poli", "scrubber policy check policies/")
            await bash.offers("scrubber policy show ", "default", "strict", "trusted")
            await bash.completes("scrubber history --event scrub.f", "scrubber history --event scrub.finished ")
            await bash.completes("scrubber history --event=heal", "scrubber history --event=health.")

    async def test_bash_offers_the_devices_of_the_service(self, service: Reticent, short_tmp: Path) -> None:
        async with shell("bash", "--norc", "-i", first=BASH, directory=short_tmp) as bash:
            await bash.offers("scrubber scrub ", "SIM-GPU-aa", "SIM-GPU-bb")
            await bash.completes("scrubber scrub SIM-GPU-b", "scrubber scrub SIM-GPU-bb ")


class TestZsh:
    async def test_zsh_completes_commands_options_values_and_files(self, short_tmp: Path) -> None:
        (short_tmp / "policies").mkdir()
        async with shell("zsh", "-f", "-i", first=f"{ZSH}; cd", directory=short_tmp) as zsh:
            await zsh.completes("scrubber unq", "scrubber unquarantine ")
            await zsh.completes("scrubber sim cr", "scrubber sim create ")
            await zsh.completes("scrubber devices --outp", "scrubber devices --output ")
            await zsh.completes("scrubber devices -o js", "scrubber devices -o json ")
            await zsh.completes("scrubber devices --output=js", "scrubber devices --output=json ")
            await zsh.offers("scrubber policy show ", "default", "strict", "trusted", "policies/")
            await zsh.offers("scrubber s", "serve", "Run the scrub service.")
            await zsh.completes("scrubber serve --sim-dir poli", "scrubber serve --sim-dir policies/")
            await zsh.completes("scrubber serve --sim-dir=poli", "scrubber serve --sim-dir=policies/")

    async def test_zsh_offers_the_devices_of_the_service_with_their_state(
        self, service: Reticent, short_tmp: Path
    ) -> None:
        async with shell("zsh", "-f", "-i", first=ZSH, directory=short_tmp) as zsh:
            await zsh.offers("scrubber scrub ", "clean, SIM-GPU-aa", "quarantined, index 1")
            await zsh.completes("scrubber scrub SIM-GPU-b", "scrubber scrub SIM-GPU-bb ")

    async def test_zsh_loads_the_completion_from_its_function_path(self, short_tmp: Path) -> None:
        found = "mkdir functions; scrubber completion zsh > functions/_scrubber; fpath=($PWD/functions $fpath)"
        first = f"cd; {found}; {ZSH.rpartition(';')[0]}"
        async with shell("zsh", "-f", "-i", first=first, directory=short_tmp) as zsh:
            await zsh.completes("scrubber unq", "scrubber unquarantine ")
            await zsh.completes("scrubber devices -o js", "scrubber devices -o json ")


class TestFish:
    """Tab shows the output of ``complete --do-complete``, which is the same engine without a terminal."""

    async def test_fish_completes_commands_options_values_and_files(self, short_tmp: Path) -> None:
        (short_tmp / "policies").mkdir()
        assert await fish(short_tmp, "scrubber unq") == [
            "unquarantine\tReturn a quarantined device to service, after probation.",
        ]
        assert await fish(short_tmp, "scrubber sim cr") == [
            "create\tCreate a simulated node, and print the commands to use it."
        ]
        assert await fish(short_tmp, "scrubber devices --outp") == [
            "--output\tOutput format. One of: table, wide, json, yaml, name."
        ]
        assert await fish(short_tmp, "scrubber devices -o js") == ["json"]
        assert await fish(short_tmp, "scrubber devices --output=js") == ["--output=json"]
        assert [each.split("\t")[0] for each in await fish(short_tmp, "scrubber serve --sim-dir poli")] == ["policies/"]
        assert [each.split("\t")[0] for each in await fish(short_tmp, "scrubber serve --sim-dir=poli")] == [
            "--sim-dir=policies/"
        ]
        assert {"default", "strict", "trusted"} <= set(await fish(short_tmp, "scrubber policy show "))
        assert await fish(short_tmp, "scrubber history --event health.healthy --event break-g") == [
            "break-glass.\tall events with this prefix",
            "break-glass.ended",
            "break-glass.started",
        ]

    async def test_fish_offers_the_devices_of_the_service_with_their_state(
        self, service: Reticent, short_tmp: Path
    ) -> None:
        assert await fish(short_tmp, "scrubber scrub ") == [
            "0\tclean, SIM-GPU-aa",
            "1\tquarantined, SIM-GPU-bb",
            "SIM-GPU-aa\tclean, index 0",
            "SIM-GPU-bb\tquarantined, index 1",
        ]


async def fish(directory: Path, begun: str) -> list[str]:
    """Return the completions of fish for the line ``begun``, sorted: values, each with its description after a tab."""
    code = "scrubber completion fish | source; complete --do-complete $argv[1]"
    process = await asyncio.create_subprocess_exec(
        *("fish", "--no-config", "-c", code, begun),
        cwd=directory,
        env={**os.environ, **surroundings(directory)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return sorted(out.decode().splitlines())


async def answers(directory: Path, *words: str, **environment: str) -> list[list[str]]:
    """Return the fields of each line of the answer to a shell."""
    process = await forkserver.start(
        *("scrubber.cli.main", *words),
        env={**os.environ, **surroundings(directory), "_SCRUBBER_COMPLETE": "complete_zsh", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    return [line.split("\t") for line in out.decode().splitlines() if line]


async def values(directory: Path, *words: str, **environment: str) -> list[str]:
    return [each[1] for each in await answers(directory, *words, **environment) if each[0] == "plain"]


class TestCandidates:
    async def test_option_is_offered_once_and_its_value_is_no_argument(
        self, service: Reticent, short_tmp: Path
    ) -> None:
        flags = await values(short_tmp, "device", "--limit", "5", "-ojson", "-")
        assert sorted(flags) == ["--help", "--no-headers", "--socket-dir", "-h"]
        assert "0" in await values(short_tmp, "device", "--limit", "5", "")
        assert await values(short_tmp, "device", "--limit", "5", "0", "") == [], "there is no second device"
        assert await values(short_tmp, "scrub", "0", "") != [], "there is one here"

    async def test_word_after_a_double_dash_is_no_option(self, service: Reticent, short_tmp: Path) -> None:
        assert await values(short_tmp, "device", "--", "--") == []
        assert "0" in await values(short_tmp, "device", "--", "")

    async def test_nothing_is_offered_after_an_unknown_command(self, short_tmp: Path) -> None:
        assert await answers(short_tmp, "devcies", "") == []
        assert await answers(short_tmp, "sim", "creat", "--dir", "") == []

    async def test_service_is_contacted_at_the_socket_given_on_the_command_line(
        self, service: Reticent, short_tmp: Path
    ) -> None:
        elsewhere = {"SCRUBBER_SOCKET_DIR": str(short_tmp / "nowhere")}
        assert await values(short_tmp, "device", "", **elsewhere) == []
        assert "0" in await values(short_tmp, "device", "--socket-dir", str(short_tmp), "", **elsewhere)
        assert "0" in await values(short_tmp, "device", f"--socket-dir={short_tmp}", "", **elsewhere)

    async def test_offered_certificates_are_those_of_devices(self, service: Reticent, short_tmp: Path) -> None:
        assert await answers(short_tmp, "certificate", "show", "") == [["plain", "c-7", "of device 0, clean"]]
        assert "SIM-GPU-bb" in await values(short_tmp, "certificate", "show", "--device", "")

    async def test_outcomes_of_events_are_offered(self, short_tmp: Path) -> None:
        assert await values(short_tmp, "history", "--outcome", "f") == ["failed"]
        assert await values(short_tmp, "history", "--outcome=f") == ["--outcome=failed"]

    async def test_unresponsive_service_is_not_waited_for(self, service: Reticent, short_tmp: Path) -> None:
        service.silent = True
        assert await answers(short_tmp, "device", "", _SCRUBBER_COMPLETE_TIMEOUT="2") == []
        async with asyncio.timeout(int(TIMEOUT)):
            await service.left.wait()
        assert service.spared > 1, "a command that asks the same waits for ten seconds"

    async def test_refusal_by_the_service_is_ignored(self, service: Reticent, short_tmp: Path) -> None:
        service.error = PermissionDenied("Not you.")
        assert await answers(short_tmp, "device", "") == []

    async def test_candidates_with_shell_metacharacters_are_never_offered(
        self, service: Reticent, short_tmp: Path
    ) -> None:
        service.devices = [
            pb.Device(id="$(reboot)", index="0", state="cl\x1b[2Jean\tx\ny"),
            pb.Device(id="a b", index="`id`", state="clean"),
            pb.Device(id="GPU-1;ls", index="2\n", state="clean"),
            pb.Device(id="MIG-GPU-1/1/0", index="0:1", state="clean"),
        ]
        found = await answers(short_tmp, "device", "")
        assert [each[1] for each in found] == ["0", "0:1", "MIG-GPU-1/1/0"]
        assert found[0] == ["plain", "0", "cl\N{REPLACEMENT CHARACTER}[2Jean x y, $(reboot)"]

    async def test_bash_completes_the_part_after_the_last_word_break(self, short_tmp: Path) -> None:
        async def bash(line: str, breaks: str = "=:") -> list[str]:
            return await values(
                short_tmp, _SCRUBBER_COMPLETE="complete_bash", _SCRUBBER_LINE=line, _SCRUBBER_BREAKS=breaks
            )

        assert await bash("scrubber devices --output=") == ["table", "wide", "json", "yaml", "name"]
        assert await bash("scrubber devices --output=js") == ["json"]
        assert await bash("scrubber devices --output=js", breaks=" ") == ["--output=json"]
        assert await bash("scrubber serve --metrics-address 127.0.0.1:9464 --policy st") == ["strict"]
        assert await bash("scrubber quarantine 0 --reason 'a b' --sock") == ["--socket-dir"]
        assert await bash("scrubber quarantine 0 --reason 'a b") == []
        assert "devices" in await bash("scrubber ")
        assert "devices" in await bash("scrubber")

    async def test_offered_policies_are_the_bundled_ones(self, short_tmp: Path) -> None:
        shipped = {each.stem for each in (ROOT / "policies").glob("*.yaml")} - {"infrastructure", "xid"}
        for words in (("policy", "show", ""), ("serve", "--policy", ""), ("policy", "check", "default", "")):
            found = await answers(short_tmp, *words)
            assert {each[1] for each in found if each[0] == "plain"} == shipped
            assert ["file", "", ""] in found
