"""Errors of loading and launching a kernel."""

from __future__ import annotations

from tests.nvidia.hostgpu import MESSAGES

__all__ = ["CUDADriverError"]


class CUDADriverError(RuntimeError):
    """An error; ``status`` is the driver API's number, which equals the runtime's for all errors used here."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(MESSAGES.get(status, f"status {status}").replace("cudaError", "CUDA_ERROR_", 1))
