"""The text of the amdgpu driver's files, and what a malformed or a foreign one means."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.amd.kernel_files import (
    KfdProcess,
    error_counts,
    fdinfo_memory,
    kfd_processes,
    optional_number,
    retired_pages,
    topology_nodes,
)
from tests.amd.machine import write

GPU = 4711


@pytest.mark.parametrize(
    "entry",
    [
        "812/{}",  # one entry for a process
        "pid:812-id:3/{}",  # newer drivers: one for each of its contexts
        "812/context_2/{}",
    ],
)
def test_process_with_memory_on_the_gpu_is_found_in_every_layout(tmp_path: Path, entry: str) -> None:
    write(tmp_path / "proc" / entry.format(f"vram_{GPU}"), "4096")
    assert kfd_processes(tmp_path, GPU) == (KfdProcess(812, 4096),)


def test_contexts_of_one_process_count_together(tmp_path: Path) -> None:
    for context in ("pid:812-id:1", "pid:812-id:2"):
        write(tmp_path / "proc" / context / f"vram_{GPU}", "4096")
    assert kfd_processes(tmp_path, GPU) == (KfdProcess(812, 8192),)


def test_process_with_only_a_queue_uses_the_queues_gpu(tmp_path: Path) -> None:
    write(tmp_path / "proc/812/queues/0/gpuid", str(GPU))
    write(tmp_path / "proc/813/queues/0/gpuid", "1")
    assert kfd_processes(tmp_path, GPU) == (KfdProcess(812, 0),)


def test_missing_list_of_processes_does_not_mean_that_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        kfd_processes(tmp_path, GPU)
    (tmp_path / "proc").mkdir()
    assert kfd_processes(tmp_path, GPU) == ()


@pytest.mark.parametrize("directory", ["812", "812/queues"])
def test_process_that_ends_while_it_is_read_is_not_listed_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    write(tmp_path / "proc/812/queues/0/gpuid", str(GPU))
    write(tmp_path / "proc/813" / f"vram_{GPU}", "4096")

    def ending(list_directory: Callable[..., Any]) -> Callable[..., Any]:
        def listed(path: Any) -> Any:
            if path == tmp_path / "proc" / directory:
                shutil.rmtree(tmp_path / "proc/812")
            return list_directory(path)

        return listed

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, ending(getattr(os, name)))
    assert kfd_processes(tmp_path, GPU) == (KfdProcess(813, 4096),)


@pytest.mark.parametrize("file", [f"vram_{GPU}", "queues/0/gpuid"])
def test_use_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path, file: str) -> None:
    (tmp_path / "proc/812" / file).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        kfd_processes(tmp_path, GPU)


def test_process_with_no_memory_and_no_queue_on_the_gpu_does_not_use_it(tmp_path: Path) -> None:
    write(tmp_path / "proc/812" / f"vram_{GPU}", "0")
    write(tmp_path / "proc/812/vram_1", "4096")
    assert kfd_processes(tmp_path, GPU) == ()


@pytest.mark.parametrize(
    ("text", "number"),
    [("7\n", 7), ("0x1002\n", 0x1002), ("010\n", 10)]
    + [(text, None) for text in ("", "0o17", "1_0", "-1", "+1", "0x", "0x1_0", "٣", "seven")],
)
def test_number_in_a_file_is_decimal_or_hexadecimal_and_nothing_else(
    tmp_path: Path, text: str, number: int | None
) -> None:
    write(tmp_path / "value", text)
    assert optional_number(tmp_path / "value") == number


@pytest.mark.parametrize(
    ("version", "architecture"), [(90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (110003, "gfx1103")]
)
def test_architecture_is_named_as_compilers_name_it(tmp_path: Path, version: int, architecture: str) -> None:
    write(tmp_path / "topology/nodes/1/gpu_id", "7")
    write(tmp_path / "topology/nodes/1/properties", f"gfx_target_version {version}\nlocation_id 3073\ndomain 1\n")
    (node,) = topology_nodes(tmp_path)
    assert (node.architecture, node.pci_address, node.partition) == (architecture, "0001:0c:00.0", 1)


def test_processors_in_the_topology_are_not_gpus_and_nodes_are_in_numeric_order(tmp_path: Path) -> None:
    for number, gpu_id in ((0, 0), (2, 22), (10, 10)):
        write(tmp_path / f"topology/nodes/{number}/gpu_id", str(gpu_id))
        write(tmp_path / f"topology/nodes/{number}/properties", "")
    assert [(node.position, node.gpu_id) for node in topology_nodes(tmp_path)] == [(0, 22), (1, 10)]


def test_error_counters_are_read_by_block_and_kind(tmp_path: Path) -> None:
    write(tmp_path / "umc_err_count", "ue: 2\nce: 7\nde: 1\n")
    write(tmp_path / "gfx_err_count", "ue: 0\nce: 0\n")
    assert error_counts(tmp_path) == {"gfx": {"ue": 0, "ce": 0}, "umc": {"ue": 2, "ce": 7, "de": 1}}


def test_bad_pages_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    write(tmp_path / "pages", "0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : P\n0x3 : 0x1000 : R\n")
    assert retired_pages(tmp_path / "pages") == {"R": 2, "P": 1, "F": 0}
    assert retired_pages(tmp_path / "none") is None


def test_memory_of_a_client_with_several_descriptors_counts_once(tmp_path: Path) -> None:
    number = os.stat("/dev/null").st_rdev
    for descriptor, client, size in (("3", 11, "2048 KiB"), ("4", 11, "2048 KiB"), ("5", 12, "1 MiB")):
        fd = tmp_path / "812/fd" / descriptor
        fd.parent.mkdir(parents=True, exist_ok=True)
        fd.symlink_to("/dev/null")
        text = f"pos:\t0\ndrm-driver:\tamdgpu\ndrm-client-id:\t{client}\ndrm-memory-vram:\t{size}\n"
        write(tmp_path / "812/fdinfo" / descriptor, text)
    (tmp_path / "812/fd/6").symlink_to("/dev/zero")
    write(tmp_path / "812/fdinfo/6", "drm-client-id:\t99\ndrm-memory-vram:\t4096 KiB\n")
    assert fdinfo_memory(tmp_path, 812, frozenset({number})) == 3 << 20
    assert fdinfo_memory(tmp_path, 9999, frozenset({number})) == 0
