"""A pod with too many processes to list: its own device waits for it, and no other is affected."""

from __future__ import annotations

import shlex
from pathlib import Path

from scrubber.emulator.playground import gpu_pod_spec, tenant_argv
from tests.integration.acting import SOON, found_by, history, reader, running, staged

CROWD = 4500
"""More than the 4,096 processes of a pod that are inspected one by one."""
BOMB = f"mkfifo never && exec 3<>never; n=0; while [ $n -lt {CROWD} ]; do {{ read -r line <&3; }} & n=$((n+1)); done; exec "
POLICY = """\
name: impatient
limits: {leftoverGracePeriod: 1s}
"""


async def test_a_fork_bomb_in_a_pod_takes_no_device_out_of_service(tmp_path: Path) -> None:
    policy = tmp_path / "impatient.yaml"
    policy.write_text(POLICY)
    async with staged(devices=2, policy=str(policy)) as stage:
        argv = ("sh", "-c", BOMB + shlex.join(tenant_argv("--write", "bomb", "--hold", "forever")))
        bomb = await running(stage, gpu_pod_spec("bomb", "team-a", argv))
        assert len(stage.pod_processes(bomb)) > CROWD
        for number in range(3):
            other = await stage.kubelet.run(reader(f"other-{number}", "team-b"))
            assert await found_by(other) == ""
            await stage.kubelet.delete(other, grace=0)
        await stage.kubelet.delete(bomb, force=True, linger=3600.0)
        await stage.wait_for_devices(lambda devices: {each.state for each in devices} == {"clean"}, SOON)
        assert stage.pod_processes(bomb) == []
        assert await history(stage, "health.quarantined") == []
        (ended,) = await history(stage, "leftover.pod.killed")
        assert ended["pod_uid"] == bomb.uid
