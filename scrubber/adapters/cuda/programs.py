"""Programs that see one device: forked from the CUDA zygote into a fixed environment that names that device.

Promise: nothing of the service's environment reaches CUDA. The pipe directory of MPS is an empty directory that only
the service may write to (if unset it would be ``/tmp``, where any user's MPS server may listen), compiled kernels are
cached where no tenant can put one, and no other device of the node is visible.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from scrubber.adapters.children.process import Child, Children
from scrubber.adapters.children.zygote_client import Zygote
from scrubber.domain.device import Device
from scrubber.domain.errors import Unavailable

__all__ = ["DIAGNOSIS_MODULE", "ERASER_MODULE", "ProgramLauncher", "make_private_directory"]

ERASER_MODULE = "scrubber.adapters.cuda.eraser"
DIAGNOSIS_MODULE = "scrubber.adapters.cuda.diagnosis"

_ZYGOTE_MODULE = "scrubber.adapters.cuda.zygote"
_NICE = 19
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_CACHE, _NO_MPS = "cuda-cache", "no-mps"


class ProgramLauncher:
    """Starts the programs; the zygote is started with the first program, or by :meth:`warm_up`.

    Args:
        state: a directory that only the service uses; two more are created in it.
        libraries: directories of the driver's libraries; empty when the loader finds them automatically.
        environment: additional variables, for the zygote and all that it forks.
        modules: the modules that can be started.
    """

    def __init__(
        self,
        children: Children,
        state: Path,
        *,
        libraries: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        modules: Sequence[str] = (ERASER_MODULE, DIAGNOSIS_MODULE),
    ) -> None:
        self._cache, self._no_mps = state / _CACHE, state / _NO_MPS
        found = {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {}
        self.zygote = Zygote(
            children,
            _ZYGOTE_MODULE,
            programs=modules,
            nice=_NICE,
            environment={**_ONE_THREAD, **found, **(environment or {})},
        )

    async def warm_up(self) -> None:
        """Load CuPy.

        Raises:
            Unavailable: it cannot be loaded; the message contains what to install.
        """
        await self.zygote.warm_up()

    async def start(self, module: str, device: Device) -> Child:
        """Start a child that runs ``module``, awaits a request, and sees ``device`` alone. It has touched nothing yet.

        Raises:
            Unavailable: no child can be started.
        """
        for directory in (self._cache, self._no_mps):
            make_private_directory(directory)
        try:
            left = os.listdir(self._no_mps)
        except OSError as error:
            raise Unavailable(f"{self._no_mps} cannot be listed, and it must be empty: {error.strerror}.") from error
        if left:
            raise Unavailable(
                f"{self._no_mps} must be empty and contains {left[0]!r}: a process may serve MPS in it. Remove it."
            )
        environment = {
            "CUDA_VISIBLE_DEVICES": device.id,
            "CUDA_MPS_PIPE_DIRECTORY": str(self._no_mps),
            "CUDA_CACHE_PATH": str(self._cache),
            "CUDA_MODULE_LOADING": "EAGER",
        }
        return await self.zygote.fork(module, device=device.id, environment=environment)

    async def died_with_zygote(self, child: Child) -> bool:
        """See :meth:`Zygote.died_with_zygote`."""
        return await self.zygote.died_with_zygote(child)

    async def close(self) -> None:
        """End the zygote, and with it what it forked; nothing can be started any more."""
        await self.zygote.close()


def make_private_directory(directory: Path) -> None:
    """Ensure that ``directory`` exists, is owned by this user, and is accessible to no other user.

    Raises:
        Unavailable: this cannot be ensured.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.stat(directory, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise Unavailable(f"{directory} is not a directory of this user, so no program gets it: remove it.")
        if found.st_mode & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise Unavailable(
            f"{directory} cannot be created, and no device is cleared without it: {error.strerror}."
        ) from error
