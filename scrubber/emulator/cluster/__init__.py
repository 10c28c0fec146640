"""An emulated control plane: a small API server on loopback, a scheduler and the controllers of DRA.

Promise: it mirrors Kubernetes 1.36 as a DRA driver sees it.
"""

from scrubber.emulator.cluster.access import ADMIN, Account
from scrubber.emulator.cluster.api import EmulatedApi
from scrubber.emulator.cluster.controllers import ControlPlane
from scrubber.emulator.cluster.faults import (
    Answer,
    ApiFault,
    ApiRequest,
    RequestLog,
    Silence,
    too_many_requests,
    unauthorized,
)
from scrubber.emulator.cluster.http import HttpResponse
from scrubber.emulator.cluster.resources import ResourceType, Selection
from scrubber.emulator.cluster.server import ApiServer
from scrubber.emulator.cluster.status import StatusError

__all__ = [
    "ADMIN",
    "Account",
    "Answer",
    "ApiFault",
    "ApiRequest",
    "ApiServer",
    "ControlPlane",
    "EmulatedApi",
    "HttpResponse",
    "RequestLog",
    "ResourceType",
    "Selection",
    "Silence",
    "StatusError",
    "too_many_requests",
    "unauthorized",
]
