"""Fuzz the product's parsers and entry points; exit status 1 when an input violates an oracle.

``--record FILE`` appends each run; runs of the same commit are summed, and continue with other seeds from the corpus in
``build/fuzz``. ``--replay FILE`` applies one input.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.guided import STATUS, read_counts
from tests.fuzz.mutation import minimise
from tests.fuzz.record import Run, read_runs, report
from tests.fuzz.table import all_targets, module_of
from tests.fuzz.target import Target
from tests.tested_commit import tested_commit

_ROOT = Path(__file__).parents[2]
_BUILD = _ROOT / "build" / "fuzz"
_MEMORY = 1024
"""MiB of resident memory that a process may have."""
_GROWTH = 64 * 2**20
"""Bytes by which a process may grow after its first inputs: libFuzzer's own corpus, and no more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument(
        "--inputs", type=int, help="for each target, together with the recorded ones (default: its goal)"
    )
    parser.add_argument("--minutes", type=float, help="of all targets together, instead of a number of inputs")
    parser.add_argument("--seed", type=int, help="default: the number of recorded runs of the target, plus 1")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="append each run, and continue those of this commit"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="apply one input to the target")
    parser.add_argument("--list", action="store_true", help="print the names of the targets")
    options = parser.parse_args(argv)
    known = {each.name: each for each in all_targets()}
    if unknown := set(options.target or ()) - known.keys():
        parser.error(f"no target is called {', '.join(sorted(unknown))}; --list prints them")
    chosen = [known[name] for name in options.target or known]
    if options.list:
        print(*known, sep="\n")
        return 0
    if options.replay is not None:
        if len(chosen) != 1:
            parser.error("--replay needs one --target")
        print("accepted" if chosen[0].check(options.replay.read_bytes()) else "refused")
        return 0
    if find_spec("atheris") is None:
        parser.error("atheris is not installed: it has no packages for this platform; run this on Linux on x86-64")
    return _fuzz(chosen, options)


def _fuzz(chosen: Sequence[Target], options: argparse.Namespace) -> int:
    commit = tested_commit()
    runs = read_runs(options.record) if options.record else []
    failed = False
    for target in chosen:
        earlier = [each for each in runs if each.target == target.name and each.commit == commit]
        if options.minutes is not None:
            limit = f"-max_total_time={max(1, round(options.minutes * 60 / len(chosen)))}"
        else:
            left = (options.inputs or target.goal) - sum(each.inputs for each in earlier)
            if left <= 0:
                continue
            limit = f"-runs={left}"
        seed = options.seed if options.seed is not None else len(earlier) + 1
        run = _run(target, commit, seed, limit)
        runs.append(run)
        failed = failed or bool(run.finding)
        if options.record:
            options.record.parent.mkdir(parents=True, exist_ok=True)
            with options.record.open("a") as file:
                file.write(str(run))
        rate = run.inputs / max(run.cpu_seconds, 1e-9)
        print(
            f"{target.name}: {run.inputs:,} inputs ({run.accepted:,} accepted), {rate:,.0f} per CPU second, "
            f"{run.reached} of {run.lines} lines{f': FINDING: {run.finding}' if run.finding else ''}",
            file=sys.stderr,
            flush=True,
        )
    print(report(runs, chosen, commit))
    return int(failed)


@dataclass(frozen=True, slots=True)
class _Folders:
    """What is kept of a target between runs."""

    corpus: Path
    findings: Path
    words: Path

    @classmethod
    def of(cls, target: Target) -> _Folders:
        top = _BUILD / target.name
        folders = cls(top / "corpus", top / "findings", top / "words")
        for each in (folders.corpus, folders.findings):
            each.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(target.seeds):
            (folders.corpus / f"seed-{number}").write_bytes(seed)
        quoted = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words)
        folders.words.write_text("".join(f'"{each}"\n' for each in quoted))
        return folders


def _run(target: Target, commit: str, seed: int, limit: str) -> Run:
    folders = _Folders.of(target)
    known = set(folders.findings.iterdir())
    with tempfile.NamedTemporaryFile(prefix="fuzz-") as status:
        status.write(bytes(STATUS.size))
        status.flush()
        command = [sys.executable, "-m", "tests.fuzz.guided", module_of(target.name), target.name, status.name]
        command += [limit, f"-seed={seed}", f"-timeout={target.seconds}", f"-rss_limit_mb={_MEMORY}"]
        command += [f"-max_len={target.longest}", f"-artifact_prefix={folders.findings}/", "-len_control=0"]
        command += [*([f"-dict={folders.words}"] if target.words else []), "-print_final_stats=1", str(folders.corpus)]
        with (folders.corpus.parent / "log").open("wb") as log:
            ended = subprocess.run(command, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
        inputs, accepted, cpu, first, last = read_counts(Path(status.name))
    finding = "" if ended.returncode == 0 else _finding(target, folders, known)
    if not finding and last - first > _GROWTH:
        finding = f"memory grew by {(last - first) >> 20} MiB over {inputs} inputs"
    reached, lines = _lines(target, folders)
    return Run(
        target=target.name,
        commit=commit,
        seed=seed,
        inputs=inputs,
        accepted=accepted,
        cpu_seconds=round(cpu / 1e9, 3),
        grown_bytes=last - first,
        reached=reached,
        lines=lines,
        finding=finding,
    )


def _finding(target: Target, folders: _Folders, known: Set[Path]) -> str:
    """Return how the input that was saved is repeated, minimised if it raises an error.

    Args:
        known: the files of earlier findings.
    """
    log = folders.corpus.parent / "log"
    newest = next(iter(set(folders.findings.iterdir()) - known), None)
    if newest is None:
        return f"the process ended: {log}"
    if newest.name.startswith("crash-"):
        data = newest.read_bytes()
        if (how := _failure(target, data)) is not None:
            newest = newest.with_suffix(".min")
            newest.write_bytes(minimise(data, lambda each: _failure(target, each) == how))
    return f"python -m tests.fuzz --target {target.name} --replay {newest.relative_to(_ROOT)}"


def _failure(target: Target, data: bytes) -> tuple[type[BaseException], str, int] | None:
    """Return the kind and the place of the error that an input causes; None when there is none."""
    try:
        target.check(data)
    except Exception as error:  # noqa: BLE001 - any error is a finding
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        assert place is not None  # it was raised
        return type(error), place.tb_frame.f_code.co_filename, place.tb_lineno
    return None


def _lines(target: Target, folders: _Folders) -> tuple[int, int]:
    command = [sys.executable, "-m", "tests.fuzz.lines", module_of(target.name), target.name]
    inputs = sorted(str(each) for each in folders.corpus.iterdir())[:2000]
    traced = subprocess.run([*command, *inputs], cwd=_ROOT, capture_output=True, text=True, check=False)
    with suppress(ValueError):
        reached, lines = map(int, traced.stdout.split()[-2:])
        return reached, lines
    return 0, 0


if __name__ == "__main__":
    sys.exit(main())
