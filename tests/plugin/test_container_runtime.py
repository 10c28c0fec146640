"""Container runtimes that would start a container without its GPU: which configurations are refused, and which are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from plugin.nvidia.container_runtime import check_injection
from plugin.nvidia.injection import parse_list_strategies
from tests.gpus import gpu, install_driver, seen
from tests.plugin.test_injection import ends, next_line, node, plugin
from tests.plugin_collaborators import FakeKubelet, FakeService, device, snapshot

CONTAINERD = "etc/containerd/config.toml"
OPERATORS = "etc/containerd/conf.d/99-nvidia.toml"
CRIO = "etc/crio/crio.conf.d/99-nvidia.toml.conf"
TOOLKIT = "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"

V2 = """\
version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "/usr/local/nvidia/toolkit/nvidia-container-runtime"
"""
V2_CDI = V2.replace("[plugins", '[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n[plugins', 1)
V3 = """\
version = 3
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "runc"
"""
NVIDIA_DEFAULT = """\
version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "gpu"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.gpu.options]
BinaryName = "/usr/bin/nvidia-container-runtime.cdi"
"""
NO_CDI = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n"
WHOLE_HOST = {"etc/containers/policy.json": "{}", "usr/share/file": ""}
"""Files that show that all of ``/etc`` and ``/usr`` is visible on a node with CRI-O."""
CRIO_OF_OPENSHIFT = {
    "etc/crio/crio.conf.d/00-default": """\
[crio]
internal_wipe = true
[crio.api]
stream_address = "127.0.0.1"
[crio.runtime]
selinux = true
conmon_cgroup = "pod"
default_runtime = "crun"
cgroup_manager = "systemd"
hooks_dir = ["/etc/containers/oci/hooks.d", "/run/containers/oci/hooks.d"]
drop_infra_ctr = true
[crio.runtime.runtimes.crun]
runtime_root = "/run/crun"
allowed_annotations = ["io.containers.trace-syscall", "io.kubernetes.cri-o.Devices"]
[crio.runtime.workloads.openshift-builder]
activation_annotation = "io.openshift.builder"
[crio.metrics]
enable_metrics = true
""",
    "etc/crio/crio.conf.d/99-nvidia.conf": """\
[crio]
  [crio.runtime]
    [crio.runtime.runtimes]
      [crio.runtime.runtimes.nvidia]
        runtime_path = "/usr/local/nvidia/toolkit/nvidia-container-runtime"
        runtime_type = "oci"
""",
}
"""The node's own file, whose name has no suffix, and that of NVIDIA's container toolkit."""
CDI_ELSEWHERE = '[crio.runtime]\ncdi_spec_dirs = ["/etc/cdi", "/run/cdi-of-others"]\n'
ACCEPTS = "accept-nvidia-visible-devices-as-volume-mounts = true\n"


def write(host: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (host / name).parent.mkdir(parents=True, exist_ok=True)
        (host / name).write_text(text)


@pytest.mark.parametrize(
    ("strategies", "files"),
    [
        ("envvar", {CONTAINERD: NVIDIA_DEFAULT}),
        ("envvar", {CONTAINERD: V3, OPERATORS: NVIDIA_DEFAULT}),
        ("envvar", {CONTAINERD: V2.replace('"runc"', '"nvidia"')}),
        ("volume-mounts", {CONTAINERD: NVIDIA_DEFAULT, TOOLKIT: ACCEPTS}),
        ("volume-mounts", {CONTAINERD: NVIDIA_DEFAULT, "etc/nvidia-container-runtime/config.toml": ACCEPTS}),
        ("cdi-cri", {CONTAINERD: V3}),
        ("cdi-annotations", {CONTAINERD: V2_CDI}),
        ("envvar,cdi-cri", {CONTAINERD: V3}),
        ("envvar,cdi-annotations", {CONTAINERD: f"imports = []\n{NVIDIA_DEFAULT}", OPERATORS: NO_CDI}),
        ("cdi-annotations,cdi-cri", {"etc/crio/crio.conf": ""}),
        ("cdi-annotations,cdi-cri", CRIO_OF_OPENSHIFT),
        ("cdi-cri", {"etc/crio/crio.conf": CDI_ELSEWHERE, CRIO: '[crio.runtime]\ncdi_spec_dirs = ["/run/cdi/"]\n'}),
        ("cdi-cri", {CONTAINERD: V3, OPERATORS: "[plugins.cri]\ncdi_spec_dirs = ['/var/run/cdi']\n"}),
        ("envvar", {CRIO: '[crio.runtime]\ndefault_runtime = "nvidia"\n'}),
        ("envvar", {"etc/crio/crio.conf.d/deeper/nvidia": '[crio.runtime]\ndefault_runtime = "nvidia"\n'}),
        ("envvar", {CRIO: "", "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": "{}"}),
        ("cdi-cri", {CONTAINERD: 'disabled_plugins = ["cri"]', "etc/crio/crio.conf": ""}),
    ],
)
def test_strategy_that_the_runtime_supports_is_accepted(
    tmp_path: Path, strategies: str, files: Mapping[str, str]
) -> None:
    write(tmp_path, files)
    found = check_injection(parse_list_strategies([strategies], "test"), tmp_path)
    assert (found.error, found.unknown) == ("", "")


@pytest.mark.parametrize(
    ("strategies", "files", "words"),
    [
        ("envvar", {CONTAINERD: V2}, ('default runtime in /etc/containerd/config.toml is "runc"', "with envvar, only")),
        ("envvar", {CONTAINERD: "version = 3"}, ('config.toml is "runc"',)),
        ("volume-mounts", {CONTAINERD: V3, TOOLKIT: ACCEPTS}, ("with volume-mounts, only NVIDIA's runtime",)),
        (
            "envvar,volume-mounts",
            {CRIO: "", **WHOLE_HOST},
            ("with envvar", "with volume-mounts", '/etc/crio/crio.conf is "crun"'),
        ),
        ("volume-mounts", {CONTAINERD: NVIDIA_DEFAULT, TOOLKIT: ""}, (f"does not set {ACCEPTS.strip()}",)),
        ("cdi-cri,cdi-annotations", {CONTAINERD: NO_CDI}, ("turns CDI off: set enable_cdi = true",)),
        ("cdi-cri", {CONTAINERD: V3, OPERATORS: NO_CDI}, ("turns CDI off",)),
        ("envvar,cdi-cri", {CONTAINERD: NO_CDI}, ("with envvar", "turns CDI off")),
        (
            "envvar,cdi-cri",
            {CONTAINERD: "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\ncdi_spec_dirs = ['/etc/cdi']\n"},
            ("with envvar", "/etc/containerd/config.toml sets cdi_spec_dirs without /var/run/cdi"),
        ),
        (
            "envvar",
            {"var/lib/rancher/k3s/agent/etc/containerd/config.toml": V2},
            ("/var/lib/rancher/k3s/agent/etc/containerd/config.toml is",),
        ),
    ],
)
def test_strategy_with_which_containers_would_start_without_a_gpu_is_an_error_that_says_what_to_configure(
    tmp_path: Path, strategies: str, files: Mapping[str, str], words: tuple[str, ...]
) -> None:
    write(tmp_path, files)
    found = check_injection(parse_list_strategies([strategies], "test"), tmp_path)
    assert found.unknown == ""
    assert found.error.startswith("Containers would start without a GPU: ")
    assert "Use --device-list-strategy cdi-cri" in found.error
    for each in words:
        assert each in found.error


@pytest.mark.parametrize(
    ("strategies", "files", "words"),
    [
        ("envvar", {}, "no configuration of containerd or CRI-O is visible below"),
        ("envvar", {CONTAINERD: 'disabled_plugins = ["io.containerd.grpc.v1.cri"]'}, "no configuration of containerd"),
        (
            "envvar",
            {CONTAINERD: V2, "etc/crio/crio.conf": ""},
            "there are several runtimes: /etc/containerd/config.toml, ",
        ),
        ("cdi-cri", {CONTAINERD: V2}, "does not set enable_cdi, which is off by default in containerd 1.7"),
        (
            "volume-mounts",
            {CONTAINERD: NVIDIA_DEFAULT},
            "config.toml is not visible to the plugin; it has to set accept-nv",
        ),
        ("cdi-cri", {CONTAINERD: "version = "}, "is not TOML: "),
        (
            "cdi-cri",
            {CONTAINERD: V3.replace("/etc/containerd", "/srv/conf")},
            "imports /srv/conf/conf.d/*.toml, which is not",
        ),
        ("envvar,cdi-cri", {CONTAINERD: V2}, "does not set enable_cdi"),
        ("envvar", {CRIO: ""}, "the directories of CRI-O's hooks are not visible"),
        ("envvar", {CRIO: '[crio.runtime]\nhooks_dir = ["/srv/hooks"]', **WHOLE_HOST}, "CRI-O's hooks are not visible"),
        (
            "envvar",
            {CONTAINERD: "version = 3", OPERATORS: NVIDIA_DEFAULT},
            "does not import conf.d/*.toml, which some versions",
        ),
        (
            "envvar",
            {CONTAINERD: '[plugins.cri.containerd.default_runtime]\nruntime_engine = "nvidia-container-runtime"'},
            "in the deprecated section default_runtime",
        ),
    ],
)
def test_configuration_that_does_not_answer_is_no_error(
    tmp_path: Path, strategies: str, files: Mapping[str, str], words: str
) -> None:
    write(tmp_path, files)
    found = check_injection(parse_list_strategies([strategies], "test"), tmp_path)
    assert found.error == ""
    assert found.unknown.startswith("Whether containers get their GPUs was not checked: ")
    assert words in found.unknown


def test_directory_that_the_runtime_does_not_read_is_an_error_that_names_the_file_and_what_to_add(
    tmp_path: Path,
) -> None:
    write(tmp_path, CRIO_OF_OPENSHIFT | {"etc/crio/crio.conf.d/50-cdi": CDI_ELSEWHERE})
    found = check_injection(parse_list_strategies(["cdi-annotations,cdi-cri"], "test"), tmp_path)
    assert found.error == (
        "No container with a GPU would start: /etc/crio/crio.conf.d/50-cdi sets cdi_spec_dirs without /var/run/cdi, where "
        "the plugin writes its specification: add that directory, or set one of the others with --cdi-dir."
    )


@pytest.mark.parametrize(("directory", "read"), [("/run/cdi", True), ("/etc/cdi", True), ("/srv/cdi", False)])
def test_directory_of_the_plugins_specification_must_be_one_that_the_runtime_reads(
    tmp_path: Path, directory: str, read: bool
) -> None:
    write(tmp_path, CRIO_OF_OPENSHIFT)
    found = check_injection(parse_list_strategies(["cdi-cri"], "test"), tmp_path, Path(directory))
    assert (found.error == "") is read


def test_unreadable_configuration_is_no_error(tmp_path: Path) -> None:
    (tmp_path / CONTAINERD).mkdir(parents=True)
    found = check_injection(parse_list_strategies(["envvar"], "test"), tmp_path)
    assert (found.error, "cannot be read: Is a directory" in found.unknown) == ("", True)


# -- as a process ------------------------------------------------------------------------------------------------------

TWO = node(seen(gpu(0)), seen(gpu(1)))


async def test_plugin_exits_with_what_to_configure_and_registers_nothing(short_tmp: Path) -> None:
    write(short_tmp / "host", {CONTAINERD: V2})
    flags = ("--host-root-ctr-path", str(short_tmp / "host"), "--device-list-strategy", "volume-mounts")
    async with FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", TWO):
        async with plugin(short_tmp, *flags) as process:
            status, output = await ends(process)
            assert status == 2
            assert output.startswith(
                "Error: Containers would start without a GPU: with volume-mounts, only NVIDIA's runtime"
            )
        assert kubelet.requests == []


async def test_runtime_check_that_only_warns_leaves_the_decision_to_the_operator(short_tmp: Path) -> None:
    write(short_tmp / "host", {CONTAINERD: V2})
    flags = ("--host-root-ctr-path", str(short_tmp / "host"), "--runtime-check=warn")
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, *flags) as process,
    ):
        warned = await next_line(process, "injection.unchecked")
        assert warned["message"].startswith("Containers would start without a GPU: ")
        assert (await kubelet.new_registration()).healthy == {gpu(0).id, gpu(1).id}


async def test_runtime_whose_configuration_is_not_visible_is_logged_once_and_stops_nothing(short_tmp: Path) -> None:
    install_driver(short_tmp / "driver")
    flags = ("--device-list-strategy", "cdi-cri", "--cdi-dir", str(short_tmp / "cdi"))
    places = ("--driver-root-ctr-path", str(short_tmp / "driver"), "--host-root-ctr-path", str(short_tmp / "host"))
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO) as service,
        plugin(short_tmp, *flags, *places) as process,
    ):
        assert f"below {short_tmp}/host" in (await next_line(process, "injection.unchecked"))["message"]
        registered = await kubelet.new_registration()
        service.show(node(seen(gpu(0)), seen(gpu(1)), seen(gpu(2)), version=2))
        await kubelet.until(lambda: gpu(2).id in registered.healthy)
        process.terminate()
        assert process.stderr is not None
        assert b"injection.unchecked" not in await process.stderr.read()


async def test_runtime_is_not_checked_for_devices_of_other_vendors(short_tmp: Path) -> None:
    write(short_tmp / "host", {CONTAINERD: V2})
    flags = ("--host-root-ctr-path", str(short_tmp / "host"))
    simulated = FakeService(short_tmp / "s", snapshot(device(0)))
    async with FakeKubelet(short_tmp) as kubelet, simulated, plugin(short_tmp, *flags):
        assert (await kubelet.new_registration()).healthy == {"sim-0"}
