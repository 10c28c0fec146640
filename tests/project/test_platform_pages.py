"""The pages of the platforms: one form, the same objects from values and kustomization, and a row of doctor for each."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

import scrubber
from plugin.nvidia.driver_files import DriverRoot, find_driver_files
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.doctor.platforms import PLAIN, PLATFORMS
from tests.deployed import DEPLOY, ROOT, Workload, apply_patches, environment_of
from tests.project.test_chart import Objects, built, rendered
from tests.project.test_deploy import parsed

PAGES = sorted(path for path in (ROOT / "docs/platforms").glob("*.md") if path.name != "README.md")
FORM = [
    "What differs on the node",
    "Install",
    "What was read",
    "What was tried",
    "Unsupported, and why",
    "Not known",
]
BLOCK = re.compile(
    r"^( *)```yaml\n\1# (my-values\.yaml|kustomization\.yaml of your own)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL
)


def blocks(page: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the values and the kustomizations of a page, in pairs."""
    found = [(kind, yaml.safe_load(text)) for _, kind, text in BLOCK.findall(page.read_text())]
    kinds = [kind for kind, _ in found]
    assert kinds == ["my-values.yaml", "kustomization.yaml of your own"] * (len(kinds) // 2)
    contents = [content for _, content in found]
    return list(zip(contents[::2], contents[1::2], strict=True))


PAIRS = [
    pytest.param(*pair, id=f"{page.stem}-{number}")
    for page in (*PAGES, ROOT / "docs/gpu-operator.md")
    for number, pair in enumerate(blocks(page))
]


def by_kustomize(kustomization: dict[str, Any]) -> Objects:
    """Return what the kustomization of a page builds, with its image."""
    (overlay,) = (DEPLOY.parent / each.removeprefix("gpu-scrubber/") for each in kustomization["resources"])
    components = [each.rpartition("/")[2] for each in kustomization.get("components", [])]
    objects = built(overlay, *components)
    apply_patches(list(objects.values()), kustomization.get("patches", []))
    (image,) = kustomization["images"]
    assert image["newTag"] == scrubber.__version__
    text = json.dumps([*objects.values()]).replace('"scrubber:', f'"{image["newName"]}:')
    return {(each["kind"], each["metadata"]["name"]): each for each in json.loads(text)}


@pytest.mark.parametrize(("values", "kustomization"), PAIRS)
def test_values_and_kustomization_of_a_page_give_the_same_objects(
    values: dict[str, Any], kustomization: dict[str, Any]
) -> None:
    assert rendered(values) == by_kustomize(kustomization)


@pytest.mark.parametrize(("values", "_kustomization"), PAIRS)
def test_programs_accept_the_variables_of_a_page(
    values: dict[str, Any], _kustomization: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = rendered(values)
    for name in ("scrubber", "scrubber-plugin"):
        pod = objects["DaemonSet", name]["spec"]["template"]["spec"]
        of = Workload(pod, pod["containers"][0], objects["DaemonSet", name])
        names = [each["name"] for each in of.container["env"]]
        assert len(names) == len({*names})
        read_by_doctor_only = {"SCRUBBER_DEPLOY_LABEL"}
        environment = {key: each for key, each in environment_of(of).items() if key not in read_by_doctor_only}
        parsed(of.container["args"], monkeypatch, environment)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_the_same_form_and_says_that_the_platform_was_not_tried(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == FORM
    assert blocks(page)
    tried = text.partition("## What was tried\n")[2].partition("\n## ")[0]
    assert tried.strip().startswith("One node" if page.stem == "plain-driver" else "Nothing on")
    assert "simulated backend" in tried


def test_index_summary_and_doctor_name_every_page() -> None:
    names = {page.name for page in PAGES}
    index = (ROOT / "docs/platforms/README.md").read_text()
    deploying = (ROOT / "docs/deploying.md").read_text()
    summary = deploying.partition("\n## Platforms\n")[2].partition("\n## ")[0]
    assert {name for name in names if f"({name})" in index} == names
    assert {name for name in names if f"(platforms/{name})" in summary} == names
    assert {each.page for each in (*PLATFORMS, PLAIN)} == {f"docs/platforms/{name}" for name in names}


@pytest.mark.parametrize(("name", "library", "inside"), [("gke", "lib64", "/lib64"), ("talos", "usr/lib", "/usr/lib")])
def test_driver_laid_out_as_a_page_says_is_found_below_the_root_that_its_values_name(
    name: str, library: str, inside: str, tmp_path: Path
) -> None:
    values, _ = blocks(ROOT / f"docs/platforms/{name}.md")[0]
    variables = {each["name"]: each["value"] for each in values["plugin"]["env"]}
    (tmp_path / library).mkdir(parents=True)
    for file in ("libcuda.so.580.95.05", "libnvidia-ml.so.580.95.05"):
        (tmp_path / library / file).touch()
    (tmp_path / library / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.95.05")
    files = find_driver_files(DriverRoot(PurePosixPath(variables["NVIDIA_DRIVER_ROOT"]), tmp_path))
    assert {f"{inside}/libcuda.so.580.95.05", f"{inside}/libnvidia-ml.so.580.95.05"} == set(files.libraries)
    assert DriverPaths.below(tmp_path).library_directories() == (str(tmp_path / library),)
