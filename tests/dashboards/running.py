"""A real Prometheus as a separate process, and the queries of a dashboard.

It listens on loopback only, stores its data in a directory of the caller, and ends when it is closed.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import yaml

from tests.dashboards.prometheus import binaries
from tests.ports import free_port

__all__ = ["SCRAPE", "Prometheus", "Series"]

SCRAPE: Final = 2
"""Seconds between two scrapes; the rules are evaluated each second."""

_HOST: Final = "127.0.0.1"
_DEADLINE: Final = 30.0


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels, and (time, value) of each point, oldest first."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


class Prometheus:
    """Runs within a ``with``; :meth:`start` and :meth:`close` do the same manually.

    Args:
        directory: for its configuration and its data.
        targets: job → instance → port on loopback.
        rules: rule files.
        listening: its port; an ephemeral one when None.
        options: further options of its command.
        deadline: seconds for its start, its end, and each query.
    """

    def __init__(
        self,
        directory: Path,
        targets: Mapping[str, Mapping[str, int]],
        rules: Sequence[Path],
        *,
        listening: int | None = None,
        options: Sequence[str] = (),
        deadline: float = _DEADLINE,
    ) -> None:
        self._options, self._deadline = options, deadline
        self._directory, self._targets, self._rules = directory, targets, rules
        self.port = listening or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("Prometheus is not running")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            RuntimeError: it ended or does not answer; its log is part of the message.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        configuration = self._directory / "prometheus.yml"
        configuration.write_text(yaml.safe_dump(self._configuration()))
        log = self._directory / "prometheus.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [
                    binaries().prometheus,
                    *(f"--config.file={configuration}", f"--storage.tsdb.path={self._directory / 'data'}"),
                    *(f"--web.listen-address={_HOST}:{self.port}", "--enable-feature=exemplar-storage"),
                    *self._options,
                ],
                env={**os.environ, "GOGC": "800"},  # it keeps little, and would collect garbage all the time
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        end = time.monotonic() + self._deadline
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"Prometheus does not answer:\n{log.read_text()}")
            time.sleep(0.05)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait(self._deadline)

    # -- queries ---------------------------------------------------------------------------------------------------

    def range(self, query: str, start: float, end: float, step: float = SCRAPE) -> list[Series]:
        """Return the result of ``query`` from ``start`` to ``end`` (seconds since the epoch), without empty series.

        Raises:
            ValueError: Prometheus refuses the query; contains its message.
        """
        data = self._query("query_range", query=query, start=start, end=end, step=step)
        return [Series(each["metric"], [(at, float(value)) for at, value in each["values"]]) for each in data["result"]]

    def at(self, query: str, moment: float) -> list[Series]:
        """Return the result of ``query`` at one moment. Raises as :meth:`range` does."""
        data = self._query("query", query=query, time=moment)
        return [Series(each["metric"], [(each["value"][0], float(each["value"][1]))]) for each in data["result"]]

    def now(self, query: str) -> list[Series]:
        """Return the current result of ``query``. Raises as :meth:`range` does."""
        return self.at(query, time.time())

    def exemplars(self, query: str, start: float, end: float) -> list[Mapping[str, str]]:
        """Return the labels of every exemplar of the series that ``query`` names."""
        data = self._query("query_exemplars", query=query, start=start, end=end)
        return [exemplar["labels"] for series in data for exemplar in series["exemplars"]]

    def _query(self, what: str, **parameters: object) -> Any:
        _, document = self._get(f"/api/v1/{what}?{urllib.parse.urlencode(parameters)}")
        answer = json.loads(document)
        if answer["status"] != "success":
            raise ValueError(f"{parameters['query']}: {answer['error']}")
        return answer["data"]

    def _ready(self) -> bool:
        try:
            return self._get("/-/ready")[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=self._deadline)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _configuration(self) -> dict[str, Any]:
        jobs = [
            {
                "job_name": job,
                "static_configs": [
                    {"targets": [f"{_HOST}:{port}"], "labels": {"instance": instance}}
                    for instance, port in instances.items()
                ],
            }
            for job, instances in self._targets.items()
        ]
        return {
            "global": {"scrape_interval": f"{SCRAPE}s", "scrape_timeout": f"{SCRAPE}s", "evaluation_interval": "1s"},
            "rule_files": [str(each) for each in self._rules],
            "scrape_configs": jobs,
        }
