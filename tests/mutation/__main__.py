"""Tests the tests of modules that decide and record, by mutations: ``python -m tests.mutation [--each N] [--seed S] [MODULE]``.

Each mutant has one small change. In a process forked for it, only the tests of its module run, until one fails, which
*kills* the mutant. The record, ``bench/results/mutation.txt``, has a line for each mutant. A recorded mutant is not tried
again, so a longer run continues where a shorter one ended. For each survivor, add a test, or a reason at the end of its line.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import sys
from collections.abc import Iterable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import grpc
import hypothesis
import pytest
import pytest_asyncio

from tests.mutation.mutants import Mutant, mutants
from tests.tested_commit import tested_commit

_ROOT = Path(__file__).parents[2]
_RECORD = _ROOT / "bench/results/mutation.txt"
_CPU_SECONDS = 120
_LOADED = (grpc, hypothesis, pytest_asyncio)
"""Loaded before a mutant is: none of them imports what is mutated."""

_TESTS: Mapping[str, tuple[str, ...]] = {
    "scrubber/domain/handover.py": ("tests/domain/test_handover.py", "tests/property/test_handover.py", "tests/model"),
    "scrubber/domain/pods.py": (
        "tests/domain/test_pods.py",
        "tests/domain/test_claims.py",
        "tests/domain/test_jobs.py",
    ),
    "scrubber/engine/grant.py": (
        "tests/engine/test_grant.py",
        "tests/engine/test_fast_path.py",
        "tests/engine/test_stale_observations.py",
        "tests/engine/test_shared_start.py",
        "tests/engine/test_claims.py",
        "tests/engine/test_release.py",
    ),
    "scrubber/engine/device/controller.py": (
        "tests/engine/test_withheld.py",
        "tests/engine/test_reported_faults.py",
        "tests/engine/test_quarantine_timing.py",
        "tests/engine/test_requests.py",
        "tests/engine/test_operator_actions.py",
        "tests/engine/test_publisher.py",
        "tests/engine/test_overrides.py",
    ),
    "scrubber/adapters/ledger/sqlite.py": (
        "tests/adapters/test_ledger.py",
        "tests/adapters/test_ledger_damage.py",
        "tests/adapters/test_ledger_storage.py",
        "tests/adapters/test_ledger_reserve.py",
        "tests/adapters/test_ledger_queries.py",
        "tests/adapters/test_ledger_measurements.py",
    ),
    "scrubber/adapters/procwalk/process.py": (
        "tests/adapters/test_procwalk.py",
        "tests/adapters/test_procwalk_resume.py",
        "tests/adapters/test_procfs.py",
    ),
    "plugin/gate.py": ("tests/plugin/test_gate.py", "tests/plugin/test_calls.py"),
}
"""Module → its tests, the quickest first."""


class _Finder(MetaPathFinder, Loader):
    """Loads one module from a changed tree."""

    def __init__(self, module: str, mutant: Mutant) -> None:
        self._name = module.removesuffix(".py").replace("/", ".")
        self._file = str(_ROOT / module)
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._file, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.tree, self._file, "exec"), module.__dict__)  # noqa: S102 - the product's own code


def _run(tests: Iterable[str], finder: _Finder | None) -> str:
    """Run ``tests`` in a process of their own; return what became of them, in a word or two."""
    child = os.fork()  # noqa: TID251 - no thread exists here
    if child == 0:
        status = 3
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
            if finder is not None:
                sys.meta_path.insert(0, finder)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            arguments = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=300", "-W", "ignore", *tests]
            status = int(pytest.main(arguments))
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    results = {0: "passed", pytest.ExitCode.TESTS_FAILED: "failed", pytest.ExitCode.INTERRUPTED: "not importable"}
    return results.get(code, f"ended with {code}")


def _known() -> dict[str, str]:
    lines = _RECORD.read_text().splitlines() if _RECORD.exists() else []
    return {line.partition(" | ")[0]: line for line in lines if " | " in line}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("module", nargs="*", help="part of the path of a module; default: all")
    parser.add_argument("--each", type=int, default=15, help="mutants of each module (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=24)
    options = parser.parse_args()
    known = _known()
    commit = tested_commit()
    for module, tests in _TESTS.items():
        if options.module and not any(part in module for part in options.module):
            continue
        everything = list(mutants((_ROOT / module).read_text()))
        chosen = Random(options.seed).sample(everything, min(options.each, len(everything)))
        new = [each for each in chosen if f"{module} {each.change}" not in known]
        if new and _run(tests, None) != "passed":
            print(f"{module}: its tests fail without a mutant")
            return 1
        for mutant in new:
            name = f"{module} {mutant.change}"
            found = _run(tests, _Finder(module, mutant))
            known[name] = f"{name} | {'SURVIVED' if found == 'passed' else f'killed ({found})'} | {commit}"
            print(known[name], flush=True)
            _RECORD.write_text("\n".join(sorted(known.values())) + "\n")
        print(f"{module}: {len(chosen)} of {len(everything)} mutants", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
