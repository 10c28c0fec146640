"""Observations that the plugin's parts report before the metrics exist are not lost."""

from plugin.observers import DeferredObserver, NullObserver


class RecordingObserver(NullObserver):
    def __init__(self) -> None:
        self.facts: list[tuple[object, ...]] = []

    def on_service_status(self, up: bool) -> None:
        self.facts.append(("service", up))

    def on_registration_status(self, resource: str, registered: bool) -> None:
        self.facts.append(("registered", resource, registered))

    def on_call_finished(self, method: str, code: str, seconds: float) -> None:
        self.facts.append(("answered", method, code, seconds))


def test_deferred_observer_replays_every_observation_once_and_in_order() -> None:
    deferred, recording = DeferredObserver(), RecordingObserver()
    deferred.on_service_status(up=True)
    deferred.on_registration_status("a/b", registered=True)
    deferred.forward_to(recording)
    deferred.on_call_finished("Allocate", "OK", 0.5)
    assert recording.facts == [("service", True), ("registered", "a/b", True), ("answered", "Allocate", "OK", 0.5)]


def test_only_a_successful_registration_ends_the_wait_for_the_first_one() -> None:
    deferred = DeferredObserver()
    deferred.on_registration_status("a/b", registered=False)
    assert not deferred.registered_once.is_set()
    deferred.on_registration_status("a/b", registered=True)
    assert deferred.registered_once.is_set()
