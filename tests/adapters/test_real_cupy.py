"""The real CuPy, on a machine without a driver: what the project relies on, and what its stand-in imitates."""

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests/nvidia/standin"
CALLERS = [
    path
    for directory in ("scrubber/adapters/cuda", "tests/gpu", "bench/gpu")
    for path in sorted((ROOT / directory).rglob("*.py"))
]

# Prints as JSON what the CuPy on its path offers. It is a separate process: the tests' process must import neither
# CuPy.
PROGRAM = """
import inspect, json, re, sys
import cupy
from operator import attrgetter

def status(call):
    try:
        call()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return error.status
    return 0

def parameters(found):
    try:
        return list(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        text = re.search(r"[(](.*?)[)]", (found.__doc__ or "").split("\\n")[0])
        words = text[1].split(",") if text else []
        return [re.split(r"[ =]", word.split("=")[0].strip())[-1] for word in words if word.strip() not in ("", "*")]

def exists(name):
    try:
        return attrgetter(name)(cupy)
    except AttributeError:
        return None

runtime = cupy.cuda.runtime
names = json.load(sys.stdin)
found = {name: exists(name) for name in names}
print(json.dumps({
    "version": cupy.__version__,
    "missing": [name for name, value in found.items() if value is None],
    "numbers": {name: value for name, value in found.items() if isinstance(value, int)},
    "parameters": {name: parameters(value) for name, value in found.items() if callable(value)},
    "messages": {status: str(runtime.CUDARuntimeError(status)) for status in (1, 2, 3, 21, 35, 46, 100, 101, 214, 600, 700, 716,
                                                                     719, 803, 999)},
    "statuses": {
        "getDeviceCount": status(runtime.getDeviceCount),
        "malloc": status(lambda: runtime.malloc(16)),
        "memGetInfo": status(runtime.memGetInfo),
        "Stream": status(lambda: cupy.cuda.Stream(non_blocking=True)),
        "Event": status(cupy.cuda.Event),
        "deviceGetAttribute": status(lambda: runtime.deviceGetAttribute(16, 0)),
        "hostAlloc": status(lambda: runtime.hostAlloc(16, 0)),
        "get_function": status(lambda: cupy.RawModule(path="/nonexistent.ptx").get_function("x")),
    },
    "driver": runtime.driverGetVersion(),
}))
"""


def cupy_facts(names: list[str], *path: Path) -> dict[str, Any]:
    environment = {"PATH": os.defpath, "PYTHONPATH": ":".join(map(str, path)), "CUPY_CACHE_DIR": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def chain(node: ast.expr) -> list[str]:
    """Return the names in ``a.b.c``; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (front := chain(node.value)):
        return [*front, node.attr]
    return []


def uses(path: Path) -> Iterator[str]:
    """Yield every name of CuPy that a file mentions, below ``cupy``: ``cuda.runtime.malloc``."""
    tree = ast.parse(path.read_text("utf-8"))
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "cupy":
                    known[alias.asname or "cupy"] = alias.name if alias.asname else "cupy"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cupy":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (names := chain(node)) and names[0] in known:
            dotted = ".".join([known[names[0]], *names[1:]])
            if dotted != "cupy":
                yield dotted.removeprefix("cupy.")


def standin_names() -> list[str]:
    """Return what the stand-in offers, apart from what its own modules import."""
    tree = ast.parse((STANDIN / "cupy/cuda/runtime.py").read_text("utf-8"))
    runtime = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else []:
            runtime += [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
    kernel = (
        "num_regs attributes local_size_bytes shared_size_bytes max_threads_per_block max_dynamic_shared_size_bytes"
    )
    return [
        *["RawKernel", "RawModule", "RawModule.get_function", "uint8", "uint32", "uint64", "int32", "int64", "intp"],
        *(f"RawKernel.{name}" for name in kernel.split()),
        *[
            "cuda.driver.CUDADriverError",
            "cuda.runtime.CUDARuntimeError",
            "cuda.get_elapsed_time",
            "cuda.Stream",
            "cuda.Event",
        ],
        *(f"cuda.Stream.{name}" for name in ("synchronize", "done", "record")),
        *(f"cuda.Event.{name}" for name in ("synchronize", "done", "record")),
        *(f"cuda.runtime.{name}" for name in runtime if name != "context" and not name.startswith("_")),
    ]


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    return cupy_facts(standin_names())


@pytest.fixture(scope="module")
def standin() -> dict[str, Any]:
    return cupy_facts(standin_names(), STANDIN, ROOT)


def test_real_cupy_imports_without_a_driver_and_reports_the_missing_driver(real: dict[str, Any]) -> None:
    """The zygote is started on every node, and distinguishes a missing driver from a broken one by status 35."""
    assert "standin" not in real["version"]
    assert real["driver"] == 0
    assert set(real["statuses"].values()) == {35}, real["statuses"]


def test_standin_defines_nothing_that_real_cupy_lacks(real: dict[str, Any], standin: dict[str, Any]) -> None:
    assert "standin" in standin["version"]
    assert real["missing"] == standin["missing"] == []


def test_standin_constants_equal_those_of_real_cupy(real: dict[str, Any], standin: dict[str, Any]) -> None:
    assert standin["numbers"] == real["numbers"]
    assert "cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin" in real["numbers"]


def test_runtime_functions_have_the_same_parameters_in_standin_and_real_cupy(
    real: dict[str, Any], standin: dict[str, Any]
) -> None:
    names = [name for name in real["parameters"] if name.startswith(("cuda.runtime.", "cuda.get_"))]
    compared = {name: real["parameters"][name] for name in names if not name.endswith("Error")}
    assert {name: standin["parameters"][name] for name in compared} == compared
    assert compared["cuda.runtime.memsetAsync"] == ["ptr", "value", "size", "stream"]


@pytest.mark.parametrize("name", ["cuda.Stream", "cuda.Event", "RawModule"])
def test_objects_of_the_standin_can_be_constructed_alike_in_real_cupy(
    real: dict[str, Any], standin: dict[str, Any], name: str
) -> None:
    assert set(standin["parameters"][name]) <= set(real["parameters"][name])


def test_failures_without_a_driver_are_the_same_in_standin_and_real_cupy(
    real: dict[str, Any], standin: dict[str, Any]
) -> None:
    assert standin["messages"] == real["messages"]
    assert standin["statuses"] == real["statuses"]
    assert standin["driver"] == real["driver"]


def test_every_cupy_name_in_product_code_exists_in_real_cupy_and_in_the_standin() -> None:
    names = sorted({name for path in CALLERS for name in uses(path)})
    assert names, "nothing of CuPy is used any more"
    assert cupy_facts(names)["missing"] == []
    assert cupy_facts(names, STANDIN, ROOT)["missing"] == []


def test_search_for_cupy_names_finds_known_names(tmp_path: Path) -> None:
    source = tmp_path / "one.py"
    source.write_text(
        inspect.cleandoc(
            """
            import cupy
            from cupy.cuda import runtime, Stream as Lane
            def work():
                cupy.RawModule(path="x").get_function("y")
                runtime.malloc(1); Lane(non_blocking=True); cupy.cuda.Event()
            """
        )
    )
    assert {"RawModule", "cuda.runtime.malloc", "cuda.Stream", "cuda.Event"} <= set(uses(source))
