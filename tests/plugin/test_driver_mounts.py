"""A driver container that restarts in place, with real mounts: the manifests' mount shows the plugin the new driver."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.gpus import install_driver
from tests.pods import only_with

PLUGIN = """
import io, json, sys
from pathlib import Path, PurePosixPath

from plugin.logs import create_logger
from plugin.nvidia.cdi import CdiPublisher
from plugin.nvidia.driver_files import DriverRoot
from plugin.nvidia.injection import ListStrategy, NvidiaInjection
from tests.gpus import gpu

directory = Path(sys.argv[1])

def publisher(name, seen):
    root = DriverRoot(PurePosixPath("/run/nvidia/driver"), directory / "container" / seen)
    log = create_logger("json", "info", io.StringIO())
    return CdiPublisher(
        directory / name, root=root, hook=None, injection=NvidiaInjection((ListStrategy.CDI_CRI,)), log=log
    )

publishers = {"parent": publisher("parent", "nvidia/driver"), "driver": publisher("driver", "driver")}
for line in sys.stdin:
    answer = {}
    for name, each in publishers.items():
        withheld = bool(each.publish([gpu(0)], "one"))
        text = (directory / name / "scrubber.dev-gpu.json").read_text()
        answer[name] = "withheld" if withheld else "new" if "nvidia-debugdump" in text else "old"
    print(json.dumps(answer), flush=True)
"""
"""Publishes twice for each line: for the mount of our manifest, and for one of the driver's root itself."""

HOST = """
set -e
directory=$1 python=$2 plugin=$3
cd "$directory"
mkdir -p host container/nvidia container/driver parent driver
mount -t tmpfs none host
mount --make-rshared host
mkdir -p host/nvidia/driver
mv first second host
mount --rbind host/first host/nvidia/driver
mkfifo commands answers
unshare --mount --propagation unchanged bash -c '
  set -e
  mount --rbind host/nvidia container/nvidia
  mount --make-rslave container/nvidia
  mount --rbind host/nvidia/driver container/driver
  mount --make-rslave container/driver
  directory=$PWD; cd "$0"
  exec "$1" -c "$2" "$directory"
' "$OLDPWD" "$python" "$plugin" < commands > answers &
exec 3> commands 4< answers
publish() { echo publish >&3; read -r line <&4; echo "$line"; }
publish
umount --lazy host/nvidia/driver
publish
mount --rbind host/second host/nvidia/driver
publish
exec 3>&-
wait
"""
"""Ends a driver container, and starts the next one with the same version; the plugin publishes before and after."""


def _can_mount() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run(["unshare", "--mount", "true"], check=False).returncode


CAN_MOUNT = _can_mount()
if not CAN_MOUNT:
    print("NOT TESTED HERE: mounts of a driver container (no mount namespace can be made)", file=sys.__stderr__)


@only_with(CAN_MOUNT)
def test_driver_container_that_restarts_is_followed_through_a_mount_of_its_parent_directory_only(
    tmp_path: Path,
) -> None:
    for name in ("first", "second"):
        install_driver(tmp_path / name)
    (tmp_path / "second/usr/bin/nvidia-debugdump").touch()
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", HOST, "bash"]
    found = subprocess.run(
        [*command, str(tmp_path), sys.executable, PLUGIN],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr.decode(errors="replace")
    before, without, after = map(json.loads, found.stdout.splitlines())
    assert before == {"parent": "old", "driver": "old"}
    assert without == {"parent": "withheld", "driver": "old"}
    assert after == {"parent": "new", "driver": "old"}
