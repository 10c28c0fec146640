"""No test requires an event within less than a second of real time.

A busy machine occasionally stalls for a second, and one test that fails by chance blocks every change. A short deadline
is permitted where it has to expire: no event that the test waits for has to come before it. Each such place is in
:data:`MEANT_TO_EXPIRE`, with the reason. Otherwise use the usual long timeout, virtual time
(:mod:`tests.simulation.timeline`), or :func:`tests.ahead.advance_until`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

MEANT_TO_EXPIRE: tuple[tuple[str, str, str], ...] = (
    # Children of the service, and programs that it runs.
    (
        "test_children*",
        r'"do": "hang"|, hangs, deadline=|, question, deadline=0\.05',
        "The child hangs over that question.",
    ),
    ("test_children", r'call\(\{"do": "tell"\}, 0\.02\)', "The child sends half an answer, and never the rest."),
    (
        "test_children*",
        r'"do": "tell"\}, deadline=0\.2\)',
        "No request is sent while the last child lives, which no signal ends.",
    ),
    ("test_children*", r"kill_timeout=0\.05, send_signal=lambda", "No signal ends the child."),
    ("test_sim_eraser", r"kill_timeout=0\.05, send_signal=lambda", "No signal ends the child."),
    ("test_nvidia_events_contract", r"kill_timeout=0\.1, send_signal=lambda", "No signal ends the child."),
    (
        "test_nvidia_reset",
        r"kill_timeout = 0\.05|^children = Children\(kill_timeout=0\.05\)$",
        "No signal ends the child.",
    ),
    (
        "test_nvidia_reset",
        r"NvidiaSmi\(DriverPaths\(machine\.root\), Children\(kill_timeout=0\.05\)\)$",
        "What keeps the output open never closes it.",
    ),
    ("test_nvidia_reset", r'run\(gpus, subject, 0\.5\)|"Device 0", 0\.5\)', "The reset hangs."),
    ("test_nvidia_smi_standin", r"stuck\.wait\(0\.3\)", "The reset hangs."),
    ("test_nvidia_reset", r"resetter\.reset\(device, 0\.2\)|query\(device, deadline=0\.05\)", "The driver hangs."),
    ("backend_contract", r"resetter\.reset\(device, 0\.2\)", "The driver hangs."),
    ("test_nvml_standin", r"answers_within\(0\.2\)", "The driver hangs."),
    ("test_sim_holders", r"walk_timeout=0\.05", "The child that is to walk hangs."),
    ("test_nvidia_holders", r"walk_deadline=0\.05", "The child that is to walk hangs."),
    ("test_sim_eraser", r"__init__\(start_timeout=0\.05\)", "The child never reports that it is ready."),
    ("test_eraser_report", r"silence_timeout=0\.05\)", "The eraser never sends a report."),
    ("test_sim_eraser", r"terminate_orphan\(device, 0\.2\)", "The lock is held by a process that is not ended."),
    ("test_sim_eraser", r'setattr\(orphans, "_GRACE", 0\.1\)', "The orphan is stopped, and never ends by itself."),
    (
        "test_containers_cgroup",
        r", leftovers, 0\.1\) == leftovers",
        "It begins with the signal, which ends no process.",
    ),
    ("test_children", r'echo": (echo|1)\}, (deadline=)?0\.02\)', "Nothing else runs until the answer has arrived."),
    ("test_process_stall", r"\bSHORT\b", "Nothing else runs until the awaited message has arrived."),
    # The plugin and its service.
    ("test_agent_pause", r"replace\(QUICK, restart=0\.01\)", "The pause before the failed task is started again."),
    ("test_cluster_observer", r"grace=0\.0?5", "It begins when the service has gone."),
    ("test_watch_lines", r"grace=0\.05", "It begins when the service has gone."),
    ("test_calls", r"grace=0\.3|grace=0\.05, heartbeat=0\.05", "It begins when the service has gone, or hangs."),
    ("test_upstream", r"grace=0\.[35]", "It begins when the other side has gone, or hangs."),
    ("test_calls", r"reserve=0\.2", "An allocation is answered whether or not it was reported to the service."),
    ("plugin/test_*", r"service_away=0\.\d", "The service has gone; no test brings it back during a call."),
    ("test_upstream", r"vendor_away=0\.2", "The other side has gone; no test brings it back during a call."),
    ("test_upstream", r"heartbeat=0\.2, probe=1\.0", "Silence after which the vendor's plugin is probed."),
    ("test_upstream", r"pause=0\.5", "The time that a plugin which hung is left alone."),
    ("test_upstream", r"closing=0\.1", "Registrations in progress are cancelled, and there is none."),
    ("vendor_plugin", r"server\.stop\(0\.1\)", "Calls in progress are cancelled: the plugin ends."),
    (
        "plugin/test_*",
        r"watcher_fallback=0\.(05|1)",
        "No plugin registers; the registry is polled until it answers.",
    ),
    ("test_metrics_contract", r"stream=0\.02", "The kubelet opens no stream."),
    (
        "test_registration",
        r"stream=0\.3",
        "The plugin registers again and waits twice as long, until the stream comes.",
    ),
    ("test_resource_mapping", r"timeout=0\.01", "The service never answers."),
    ("test_nvsentinel", r"restart=0\.01\)$", "A pause before the same is done again."),
    ("plugin/test_agent_pause", r"restart=0\.01\)\):$", "A pause before the same is done again."),
    ("test_cluster_reporter", r"first_snapshot=0\.01", "No service ever connects."),
    ("test_cluster_reporter", r"shutdown=0\.05", "The last update is not accepted."),
    ("test_cluster_reporter", r"heartbeat=0\.01|^restart=0\.01", "A pause before the same is done again."),
    ("test_cluster_client", r'"node-1", deadline=0\.05\)', "The API server never answers."),
    ("test_cluster_client", r"together\.wait\(0\.05\)", "No other thread may come meanwhile."),
    ("test_kubelet_adapter", r"deadline=0\.2\)", "The kubelet never answers."),
    ("test_doctor", r"seconds=0\.3", "No server accepts the connection."),
    ("test_callers", r"idle_timeout=0\.05\) as front", "The connection never sends anything."),
    ("test_metrics_tls", r"deadline=0\.2\)", "The request never comes to its end."),
    ("test_metrics_tls", r"companions=1, timeout=0\.1", "No companion may connect: the wait times out."),
    (
        "test_nvidia_holders",
        r"look_budget=0\.02",
        "An interrupted inspection continues in the next walk, until the holder is found.",
    ),
    # The kubelet emulator.
    ("test_allocation", r"sync_loop_health=0\.001", "The main loop is held until that was noticed."),
    ("test_containers", r"log_directory_removal=0\.02", "The pod is no more."),
    ("test_containers", r"delete\(running, grace=0\.05\)", "The container does not end by itself."),
    ("test_containers", r"linger=0\.01", "It begins when the pod has been deleted."),
    ("test_registration", r"resource_removal=0\.05", "It begins when the stream has ended."),
    ("test_registration", r"dial_back=0\.2", "No server listens on the socket."),
    ("test_container_start", r"pre_start_deadline=0\.05", "Three starts hang; one more that is late is retried."),
    ("test_containers", r"RUNNING, 0\.01\)|== 1, 0\.01\)", "The condition is never met."),
    # Other tests.
    ("test_terminal", r"seconds=0\.05\)", "It is never shown."),
    ("test_gpu_check_dry", r'part\("part", 0\.01, endless\)', "The part never ends."),
    ("test_scrub_updates", r"timeout=0\.01", "The scrub does not end."),
    ("test_clock", r"timeout\(0\.001\)", "The body sleeps for a minute."),
    ("test_confirmation", r"wait\(0\.001\)", "A pause between two checks."),
    ("test_metrics_tls", r"waited\.wait\(0\.01\)", "A pause between two checks."),
    ("test_nvidia_holders", r"confirm_seconds=0\.02,", "A pause between two checks."),
    ("test_sim_holders", r"confirm_seconds=0\.05\)", "A pause between two checks."),
    ("test_soak_judge", r"grace=0\.3|dying_for=0\.1", "A figure in what a soak has recorded."),
)
"""Module, pattern of a line, and why no event that the test waits for has to come before that deadline."""

NAMED = re.compile(
    "timeout|deadline|limit|dying_for|linger|patience|grace|silence|settle|confirm|stabilize|idle_period|probe|absent|away|"
    "reserve|farewell|shutdown|first_snapshot|wait|within|closing|stream|register|fallback|delay|dial_back|removal|health|"
    "heartbeat|rest|pause|budget|hang"
)
"""Parts of names of parameters or attributes that specify how long something may take."""

WAITING = frozenset({
    "acquire", "answers_within", "ask", "call", "changed", "communicate", "delete", "end", "erase", "get", "hand_over",
    "hear", "join", "kill_cgroups", "part", "poll", "query_kubelet", "query_service", "receive", "request", "reset",
    "resume", "result", "run", "select", "setattr", "settled", "shows", "stall_tolerant_timeout", "stop", "terminate",
    "terminate_orphan", "timeout", "timeout_at", "until", "wait", "wait_for", "wait_for_change", "wait_until",
    "wait_until_idle", "wait_until_ready",
})  # fmt: skip
"""Functions with an argument that specifies how long something may take."""

Constants = Mapping[str, float]


def value_of(node: ast.expr, constants: Constants) -> float | None:
    """Return the number that ``node`` represents, as far as that is known without running it."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return constants.get(name)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as op, right=right):
            one, other = value_of(left, constants), value_of(right, constants)
            if one is None or other is None or (isinstance(op, ast.Div) and not other):
                return None
            return one * other if isinstance(op, ast.Mult) else one / other
    return None


def deadlines(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield every expression that specifies how long something may take."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                for keyword in node.keywords:
                    if keyword.arg and (NAMED.search(keyword.arg) or (keyword.arg == "seconds" and name in WAITING)):
                        yield keyword.value
                if name in WAITING:
                    yield from node.args
            case ast.arguments():
                positional = [*node.posonlyargs, *node.args]
                defaults = [None] * (len(positional) - len(node.defaults)) + list(node.defaults) + node.kw_defaults
                for argument, default in zip([*positional, *node.kwonlyargs], defaults, strict=True):
                    if default is not None and NAMED.search(argument.arg):
                        yield default
            case ast.Assign(targets=[ast.Attribute(attr=name)]) if NAMED.search(name):
                yield node.value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as default) if NAMED.search(name):
                yield default


def constants_of(tree: ast.Module) -> dict[str, float]:
    """Return the module's own numbers, by name."""
    found: dict[str, float] = {}
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=given)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as given)
            ):
                number = value_of(given, found)
                if number is not None:
                    found[name] = number
    return found


def short_deadlines(source: str, tree: ast.Module, elsewhere: Constants) -> list[str]:
    """Return the lines of ``source`` with a deadline below a second; ``elsewhere``: other modules' numbers, by name."""
    constants = {**elsewhere, **constants_of(tree)}
    numbers = ((each.lineno, value_of(each, constants)) for each in deadlines(tree))
    lines = source.splitlines()
    return [
        lines[number - 1].strip()
        for number in sorted({line for line, seconds in numbers if seconds is not None and 0 < seconds < 1})
    ]


def in_real_time() -> dict[Path, str]:
    """Return the sources of the tests except those of the simulated cluster, where time is virtual."""
    sources = {path: path.read_text() for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)}
    return {
        path: source
        for path, source in sources.items()
        if path.parent.name != "simulation"
        and "gpu" not in path.relative_to(TESTS).parts
        and "tests.simulation" not in source
    }


def imported(tree: ast.Module, constants: Mapping[str, Constants]) -> dict[str, float]:
    """Return the numbers that a module imports from other test modules, by name. ``constants``: module → its own."""
    found = dict[str, float]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            theirs = constants.get(node.module or "", {})
            found |= {each.asname or each.name: theirs[each.name] for each in node.names if each.name in theirs}
    return found


@functools.cache
def found() -> dict[Path, list[str]]:
    sources = in_real_time()
    trees = {path: ast.parse(source) for path, source in sources.items()}
    constants = {
        ".".join(path.relative_to(TESTS.parent).with_suffix("").parts): constants_of(tree)
        for path, tree in trees.items()
    }
    lines = {path: short_deadlines(sources[path], tree, imported(tree, constants)) for path, tree in trees.items()}
    return {path: each for path, each in lines.items() if each}


def test_every_deadline_below_one_second_is_listed_as_meant_to_expire() -> None:
    unknown = [
        f"{path.relative_to(TESTS.parent)}: {line}"
        for path, lines in found().items()
        for line in lines
        if not any(path.match(f"{module}.py") and re.search(pattern, line) for module, pattern, _ in MEANT_TO_EXPIRE)
    ]
    assert unknown == [], "needs the common patience, or a line here that says why nothing has to come before it"


def test_every_listed_short_deadline_still_exists() -> None:
    places = found()
    unused = [
        (module, pattern)
        for module, pattern, _ in MEANT_TO_EXPIRE
        if not any(path.match(f"{module}.py") and re.search(pattern, line) for path in places for line in places[path])
    ]
    assert unused == []


@pytest.mark.parametrize(
    "line",
    [
        "await asyncio.wait_for(answer, 0.5)",
        "await asyncio.wait_for(answer, timeout=0.5)",
        "async with asyncio.timeout(0.5): pass",
        "async with asyncio.timeout(1 / 4): pass",
        "async with asyncio.timeout(SHORT): pass",
        "async with asyncio.timeout(2 * SHORT): pass",
        "thread.join(0.2)",
        "urllib.request.urlopen(url, timeout=0.9)",
        "subprocess.run(command, timeout=0.1)",
        "await stub.Allocate(request, timeout=0.25)",
        "times = WatchTimes(probe=0.2)",
        "times = replace(TIMES, reserve=0.2)",
        "here.kill_limit = 0.05",
        "monkeypatch.setattr(module, '_HANGS', 0.3)",
        "async def until(holds, deadline=0.5): pass",
        "async def until(holds, *, deadline: float = 0.5): pass",
        "class Times:\n    grace: float = 0.3",
    ],
)
def test_short_deadline_is_detected_however_it_is_written(line: str) -> None:
    source = f"SHORT = 0.3\nasync def test() -> None:\n    {line.replace(chr(10), chr(10) + '    ')}\n"
    assert short_deadlines(source, ast.parse(source), {}) == [line.splitlines()[-1].strip()]


@pytest.mark.parametrize(
    "line",
    [
        "await asyncio.sleep(0.01)",
        "await asyncio.wait_for(answer, SOON)",
        "await asyncio.wait_for(answer, 0)",
        "await asyncio.wait_for(answer, timeout=20)",
        "times = WatchTimes(retry=0.02)",
        "result = StepResult(step, verdict, 0.25)",
        "event('handover.granted', seconds=0.5)",
        "async with asyncio.timeout(0.1 * SOON): pass",
        "flag = wait(True)",
    ],
)
def test_pauses_figures_and_long_deadlines_are_not_detected_as_short_deadlines(line: str) -> None:
    source = f"SOON = 30.0\nasync def test() -> None:\n    {line}\n"
    assert short_deadlines(source, ast.parse(source), {}) == []


@pytest.mark.parametrize(("seconds", "short"), [(0.5, True), (30.0, False)])
def test_short_deadline_imported_from_another_module_is_detected(seconds: float, short: bool) -> None:
    source = "from tests.elsewhere import SOON as MOMENT\nawait asyncio.wait_for(answer, MOMENT)\n"
    tree = ast.parse(source)
    elsewhere = imported(tree, {"tests.elsewhere": {"SOON": seconds}})
    assert short_deadlines(source, tree, elsewhere) == [source.splitlines()[1]] * short
