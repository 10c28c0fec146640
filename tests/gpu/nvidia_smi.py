"""The output of NVIDIA's own tool, for comparison."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from scrubber.adapters.nvidia.driver_paths import DriverPaths

__all__ = ["BYTES_PER_MIB", "QueryUnsupported", "Smi"]

BYTES_PER_MIB = 1 << 20
_SECONDS = 30.0


class QueryUnsupported(Exception):
    """The tool does not exist, or does not answer such a query."""


class Smi:
    """``nvidia-smi``, used only for queries, never for changes."""

    def __init__(self, places: DriverPaths, environment: Mapping[str, str]) -> None:
        self._program = places.find_program("nvidia-smi")
        self._environment = {"PATH": os.defpath, "LANG": "C.UTF-8", **environment}

    async def gpus(self) -> dict[str, tuple[str, int, str]]:
        """Return model, memory in MiB and driver version of each GPU, by UUID.

        Raises:
            NotAsked: it gives no answer.
        """
        rows = (await self._query("uuid,name,memory.total,driver_version")).splitlines()
        try:
            fields = [[field.strip() for field in row.split(",")] for row in rows if row.strip()]
            return {uuid: (name, int(memory.removesuffix(" MiB")), driver) for uuid, name, memory, driver in fields}
        except ValueError as error:
            raise QueryUnsupported(f"nvidia-smi answers what is not understood: {rows[:1]}.") from error

    async def health(self, uuid: str) -> str:
        """Return what a polling script would query before a hand-over, in one call.

        Raises:
            NotAsked: it gives no answer.
        """
        return await self._query("memory.used,temperature.gpu", uuid)

    async def _query(self, fields: str, uuid: str | None = None) -> str:
        if self._program is None:
            raise QueryUnsupported("nvidia-smi is not installed.")
        which = () if uuid is None else (f"--id={uuid}",)
        process = await asyncio.create_subprocess_exec(
            *(str(self._program), f"--query-gpu={fields}", "--format=csv,noheader", *which),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
        )
        try:
            async with asyncio.timeout(_SECONDS):
                stdout, _ = await process.communicate()
        except BaseException:
            process.kill()
            await process.wait()
            raise
        text = stdout.decode(errors="replace")
        if process.returncode != 0:
            output = text.strip().splitlines()
            raise QueryUnsupported(f"nvidia-smi ended with {process.returncode}: {output[-1] if output else 'silent'}")
        return text
