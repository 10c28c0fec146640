"""What the plugin's parts tell before there are metrics is not lost."""

from plugin.observing import Deferred, Nobody


class Told(Nobody):
    def __init__(self) -> None:
        self.facts: list[tuple[object, ...]] = []

    def service(self, up: bool) -> None:
        self.facts.append(("service", up))

    def registered(self, resource: str, now: bool) -> None:
        self.facts.append(("registered", resource, now))

    def answered(self, method: str, code: str, seconds: float) -> None:
        self.facts.append(("answered", method, code, seconds))


def test_an_observer_that_is_made_late_is_told_everything_once_and_in_its_order() -> None:
    deferred, told = Deferred(), Told()
    deferred.service(up=True)
    deferred.registered("a/b", now=True)
    deferred.pass_on_to(told)
    deferred.answered("Allocate", "OK", 0.5)
    assert told.facts == [("service", True), ("registered", "a/b", True), ("answered", "Allocate", "OK", 0.5)]


def test_only_a_registration_that_holds_ends_the_wait_for_the_first_one() -> None:
    deferred = Deferred()
    deferred.registered("a/b", now=False)
    assert not deferred.any_registration.is_set()
    deferred.registered("a/b", now=True)
    assert deferred.any_registration.is_set()
