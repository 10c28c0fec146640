"""What loading and launching a kernel fails with."""

from __future__ import annotations

from tests.nvidia.hostgpu import MESSAGES

__all__ = ["CUDADriverError"]


class CUDADriverError(RuntimeError):
    """``status`` is the number of the driver's interface, which is the runtime's in all that is used here."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(MESSAGES.get(status, f"status {status}").replace("cudaError", "CUDA_ERROR_", 1))
