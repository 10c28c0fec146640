"""The record of a device's compute mode before its fence, as a killed service or another program left it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrubber.adapters.cuda.fence import ComputeModeFence
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable

DEVICE = Device("GPU-1", "0", "m", 1)


class Gpu:
    """Records which mode was restored."""

    mode: str | None = None

    async def unfence(self, device: Device, compute_mode: str) -> None:
        self.mode = compute_mode


@pytest.mark.parametrize("record", [b"", b"default" + b" " * 70 + b"x\n", b"de\xffault\n", b"a b\n", b"default\n1\n"])
async def test_record_that_is_not_one_word_restores_no_mode_and_stays(tmp_path: Path, record: bytes) -> None:
    (tmp_path / "fences").mkdir()
    path = tmp_path / "fences" / DEVICE.id
    path.write_bytes(b"default\n")
    gpu = Gpu()
    fence = ComputeModeFence(gpu, tmp_path)  # type: ignore[arg-type]
    await fence.disable(DEVICE)
    assert (gpu.mode, path.exists()) == ("default", False)
    path.write_bytes(record)
    gpu.mode = None
    with pytest.raises(Unreadable, match="set it manually"):
        await fence.disable(DEVICE)
    assert (gpu.mode, path.read_bytes()) == (None, record)
