"""The import rules are executable, and each is tested: a rule that cannot fail would be useless.

A small package of empty modules replaces the real one. It keeps every contract; then one forbidden import per rule is
added to it, and the contract of the rule must name exactly that import.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
LINTER = Path(sys.executable).with_name("lint-imports")

SIBLINGS = ("amd", "cgroups", "clock", "cuda", "journald", "kubelet", "ledger", "nvidia", "sim")
LEAF = "scrubber.adapters.kernel_text"
SHARED = tuple(
    f"scrubber.adapters.{name}"
    for name in ("deadlines", "idle_memory", "inotify", "locks", "procwalk", "shared_walks", "signal_stream", "walker")
)
CHILD_MODULES = (
    "scrubber.adapters.amd.diagnosis",
    "scrubber.adapters.amd.driver",
    "scrubber.adapters.amd.eraser",
    "scrubber.adapters.children.child",
    "scrubber.adapters.children.zygote_server",
    "scrubber.adapters.cuda.diagnosis",
    "scrubber.adapters.cuda.eraser",
    "scrubber.adapters.cuda.zygote",
    "scrubber.adapters.nvidia.driver",
    "scrubber.adapters.nvidia.events",
    "scrubber.adapters.nvidia.zygote",
    "scrubber.adapters.sim.driver",
    "scrubber.adapters.sim.eraser",
    "scrubber.adapters.sim.zygote",
)
TOO_HEAVY_FOR_A_CHILD = ("asyncio", "grpc", "multiprocessing", "prometheus_client", "pydantic", "structlog")
HOUSE = (
    "plugin.cluster.client",
    "plugin.kubelet.server",
    "scrubber.emulator.kubelet",
    "scrubber.api.client",
    "scrubber.api.server",
    "scrubber.observability.tracing",
    "scrubber.backends",
    "scrubber.cli.main",
    "scrubber.config.policy",
    "scrubber.daemon",
    "scrubber.doctor.checks",
    "scrubber.domain.handover",
    "scrubber.engine.node",
    "scrubber.ports.device",
    "scrubber.backend_check",
    "scrubber.completion",
    "scrubber.durability",
    "scrubber.composite_backend",
    "scrubber.process_owners",
    "scrubber.stop_deadline",
    "scrubber.wire.podresources_pb2",
    *(f"scrubber.adapters.{name}.{name}" for name in SIBLINGS),
    "scrubber.adapters.nvidia.backend",
    *CHILD_MODULES,
    LEAF,
    *SHARED,
)
ALLOWED = {
    "plugin.cluster.client": ("httpx2", "lightkube", "msgspec"),
    "plugin.kubelet.server": (
        "scrubber.api.client",
        "scrubber.observability.tracing",
        "scrubber.wire.podresources_pb2",
    ),
    "scrubber.adapters.cuda.cuda": ("scrubber.adapters.children.child", "cupy"),
    "scrubber.adapters.cgroups.cgroups": (LEAF,),
    "scrubber.adapters.kubelet.kubelet": ("scrubber.wire.podresources_pb2", "scrubber.ports.device"),
    "scrubber.adapters.nvidia.nvidia": ("scrubber.adapters.children.child", "pynvml"),
    "scrubber.adapters.nvidia.backend": ("scrubber.adapters.cuda.cuda",),
    "scrubber.adapters.sim.sim": ("scrubber.adapters.children.child", LEAF, "asyncio"),
    "scrubber.api.server": ("scrubber.engine.node", "grpc"),
    "scrubber.observability.tracing": ("opentelemetry", "scrubber.ports.device"),
    "scrubber.cli.main": ("scrubber.api.client", "scrubber.daemon", "plugin.kubelet.server"),
    "scrubber.adapters.walker": ("scrubber.adapters.children.child", "scrubber.adapters.procwalk"),
    "scrubber.adapters.shared_walks": (
        "asyncio",
        "scrubber.adapters.children.request_pool",
        "scrubber.adapters.walker",
    ),
    "scrubber.backends": (
        "scrubber.adapters.nvidia.backend",
        "scrubber.adapters.sim.sim",
    ),
    "scrubber.daemon": (
        "scrubber.backends",
        "scrubber.adapters.sim.sim",
        "scrubber.api.server",
        "scrubber.observability.tracing",
        "scrubber.engine.node",
    ),
    "scrubber.engine.node": ("scrubber.ports.device", "scrubber.domain.handover"),
    "scrubber.ports.device": ("scrubber.domain.handover",),
}
FORBIDDEN = (
    ("layers", "scrubber.domain.handover", "scrubber.ports.device"),
    ("layers", "scrubber.completion", "scrubber.engine.node"),
    ("layers", "scrubber.durability", "scrubber.engine.node"),
    ("layers", "scrubber.domain.handover", "scrubber.wire.podresources_pb2"),
    ("layers", "scrubber.ports.device", "scrubber.engine.node"),
    ("layers", "scrubber.engine.node", "scrubber.adapters.ledger.ledger"),
    ("layers", "scrubber.engine.node", "scrubber.config.policy"),
    ("layers", "scrubber.engine.node", "scrubber.observability.tracing"),
    ("layers", "scrubber.observability.tracing", "scrubber.config.policy"),
    ("layers", "scrubber.config.policy", "scrubber.api.client"),
    ("layers", "scrubber.api.server", "scrubber.daemon"),
    ("layers", "scrubber.daemon", "plugin.kubelet.server"),
    ("layers", "scrubber.backends", "scrubber.daemon"),
    ("layers", "scrubber.backend_check", "scrubber.backends"),
    ("layers", "scrubber.composite_backend", "scrubber.backends"),
    ("layers", "scrubber.adapters.nvidia.nvidia", "scrubber.backends"),
    ("layers", "scrubber.emulator.kubelet", "scrubber.cli.main"),
    ("layers", "scrubber.doctor.checks", "scrubber.cli.main"),
    ("layers", "scrubber.daemon", "scrubber.emulator.kubelet"),
    ("layers", "plugin.kubelet.server", "scrubber.emulator.kubelet"),
    *(
        ("domain-is-plain", "scrubber.domain.handover", library)
        for library in ("google", "grpc", "prometheus_client", "pydantic", "structlog", "tenacity", "yaml")
    ),
    ("adapters-do-not-decide", "scrubber.adapters.ledger.ledger", "scrubber.engine.node"),
    *(
        ("adapters-are-strangers", f"scrubber.adapters.{one}.{one}", f"scrubber.adapters.{other}.{other}")
        for one, other in zip(SIBLINGS, (*SIBLINGS[1:], SIBLINGS[0]), strict=True)
    ),
    ("who-has-children", "scrubber.adapters.ledger.ledger", "scrubber.adapters.children.child"),
    ("who-has-children", "scrubber.adapters.cgroups.cgroups", "scrubber.adapters.walker"),
    ("who-has-children", "scrubber.adapters.deadlines", "scrubber.adapters.children.child"),
    *(("who-has-children", LEAF, shared) for shared in SHARED),
    ("who-has-children", LEAF, "scrubber.adapters.cgroups.cgroups"),
    *(("children-are-light", child, library) for child in CHILD_MODULES for library in TOO_HEAVY_FOR_A_CHILD),
    ("plugin-asks", "plugin.kubelet.server", "scrubber.adapters.sim.sim"),
    ("plugin-asks", "plugin.kubelet.server", "scrubber.api.server"),
    ("plugin-asks", "plugin.kubelet.server", "scrubber.daemon"),
    ("plugin-asks", "plugin.kubelet.server", "scrubber.engine.node"),
    ("plugin-asks", "plugin.kubelet.server", "scrubber.cli.main"),
    ("command-line-asks", "scrubber.cli.main", "scrubber.engine.node"),
    ("command-line-asks", "scrubber.cli.main", "scrubber.api.server"),
    ("wire-stays-outside", "scrubber.api.server", "scrubber.wire.podresources_pb2"),
    ("nvml-in-one-place", "scrubber.daemon", "pynvml"),
    ("nvml-in-one-place", "plugin.kubelet.server", "pynvml"),
    ("nvml-in-one-place", "scrubber.adapters.cuda.cuda", "pynvml"),
    ("cuda-in-one-place", "scrubber.daemon", "cupy"),
    ("cuda-in-one-place", "scrubber.adapters.sim.eraser", "cupy"),
    ("kubernetes-in-one-place", "scrubber.engine.node", "lightkube"),
    ("signatures-in-one-place", "scrubber.daemon", "cryptography"),
    ("signatures-in-one-place", "scrubber.engine.node", "cryptography"),
    ("traces-in-one-place", "scrubber.daemon", "opentelemetry"),
    ("traces-in-one-place", "scrubber.engine.node", "opentelemetry"),
    ("traces-in-one-place", "plugin.kubelet.server", "opentelemetry"),
    *(("kubernetes-in-one-place", "plugin.kubelet.server", library) for library in ("httpx2", "lightkube", "msgspec")),
)


def contracts() -> dict[str, str]:
    """Return the contracts of pyproject.toml: id → name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["id"]: contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]}


def build(house: Path, imports: Mapping[str, tuple[str, ...]]) -> None:
    """Write the small package under ``house``; its modules import only what ``imports`` specifies."""
    shutil.copy(ROOT / "pyproject.toml", house)
    for module in HOUSE:
        path = house.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"import {name}\n" for name in imports.get(module, ())))
        for package in path.relative_to(house).parents[:-1]:
            (house / package / "__init__.py").touch()


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINTER, "--no-logo", "--no-cache"],
        cwd=directory,
        env=os.environ | {"COLUMNS": "400", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def broken_rules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the linter's output for a package with every forbidden import: contract name → its message."""
    house = tmp_path_factory.mktemp("broken")
    planted: dict[str, tuple[str, ...]] = {}
    for _, importer, imported in FORBIDDEN:
        planted[importer] = (*planted.get(importer, ()), imported)
    build(house, planted)
    verdict = lint(house)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    broken = verdict.stdout.partition("Broken contracts\n")[2]
    headed = re.split(r"^(.+)\n-+\n", broken, flags=re.MULTILINE)
    return dict(zip(headed[1::2], headed[2::2], strict=True))


def test_project_keeps_every_import_rule() -> None:
    verdict = lint(ROOT)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def test_sample_project_keeps_every_import_rule(tmp_path: Path) -> None:
    build(tmp_path, ALLOWED)
    verdict = lint(tmp_path)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert f"Contracts: {len(contracts())} kept, 0 broken." in verdict.stdout


@pytest.mark.parametrize(("contract", "importer", "imported"), FORBIDDEN)
def test_forbidden_import_breaks_its_import_rule(
    broken_rules: dict[str, str], contract: str, importer: str, imported: str
) -> None:
    assert re.search(rf"\b{importer} -> {imported}\b", broken_rules[contracts()[contract]])


def test_every_import_rule_has_a_test() -> None:
    assert {contract for contract, _, _ in FORBIDDEN} == contracts().keys()


def test_adapter_missing_from_the_layers_breaks_the_import_rules(tmp_path: Path) -> None:
    build(tmp_path, {})
    (tmp_path / "scrubber/adapters/stranger.py").touch()
    verdict = lint(tmp_path)
    assert verdict.returncode == 1
    assert "scrubber.adapters.stranger" in verdict.stdout


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("scrubber", "plugin", include_external_packages=True, cache_dir=None)


def test_every_package_belongs_to_a_layer(graph: grimp.ImportGraph) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (contract["layers"] for contract in settings["contracts"] if contract["id"] == "layers")
    named = {name for layer in layers for name in re.findall(r"[\w.]+", layer)}
    assert graph.find_children("scrubber") | {"plugin"} == named


def test_the_domain_imports_the_standard_library_only(graph: grimp.ImportGraph) -> None:
    domain = graph.find_descendants("scrubber.domain") | {"scrubber.domain"}
    imported = {name for module in domain for name in graph.find_modules_directly_imported_by(module)}
    assert {name.partition(".")[0] for name in imported - domain} <= sys.stdlib_module_names


@pytest.mark.parametrize("module", CHILD_MODULES)
def test_child_process_imports_no_event_loop_and_no_server(module: str) -> None:
    """The linter reads import statements; the packages above a module run as well, and only running shows those."""
    child = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert not set(TOO_HEAVY_FOR_A_CHILD) & set(child.stdout.split())
