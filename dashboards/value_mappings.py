"""Colours and numbers of states, the same on every board.

Green is clean, blue in use, yellow being scrubbed or suspect, orange dirty, purple recovering or on probation, red
quarantined, dark red condemned. Grafana draws a state as a number with a text and a colour; the numbers are defined
here and are in no metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.models import dashboard as model

from dashboards.queries import selector

__all__ = [
    "ADVERTISEMENT",
    "COMMON_COLOURS",
    "HEALTH",
    "HYGIENE",
    "KIND_COLOURS",
    "PATH_COLOURS",
    "STATES",
    "STATE_COLOURS",
    "STEP_COLOURS",
    "Colour",
    "State",
    "below_zero_mapping",
    "binary_state_query",
    "boolean_mapping",
    "health_mapping",
    "hygiene_mapping",
    "label_text",
    "objective_mapping",
    "recovery_mapping",
    "severity_mapping",
    "state_mapping",
    "state_number_query",
    "text_mapping",
    "verdict_mapping",
]


class Colour:
    """Names in Grafana's palette, which has a shade for the dark and one for the light theme."""

    CLEAN = "green"
    IN_USE = "blue"
    SCRUBBING = "yellow"
    SUSPECT = "super-light-yellow"
    DIRTY = "orange"
    RECOVERING = "dark-purple"
    PROBATION = "super-light-purple"
    QUARANTINED = "red"
    CONDEMNED = "dark-red"
    NEUTRAL = "text"
    INFO = "semi-dark-blue"


@dataclass(frozen=True, slots=True)
class State:
    """One state of a device.

    Attributes:
        number: its value in Grafana.
        text: its displayed text.
        matchers: matchers of the ``scrubber_device_state`` series in this state.
    """

    number: int
    text: str
    colour: str
    matchers: tuple[str, ...] = ()


HYGIENE: Final[Sequence[State]] = (
    State(1, "clean", Colour.CLEAN, ('hygiene="clean"',)),
    State(2, "in use", Colour.IN_USE, ('hygiene="in-use"',)),
    State(3, "scrubbing", Colour.SCRUBBING, ('hygiene="scrubbing"',)),
    State(4, "dirty", Colour.DIRTY, ('hygiene="dirty"',)),
)

_OUT: Final[Sequence[State]] = (
    State(25, "recovering", Colour.RECOVERING, ('health="recovering"',)),
    State(26, "on probation", Colour.PROBATION, ('health="probation"',)),
    State(27, "quarantined", Colour.QUARANTINED, ('health="quarantined"',)),
    State(28, "condemned", Colour.CONDEMNED, ('health="condemned"',)),
)

HEALTH: Final[Sequence[State]] = (
    State(20, "healthy", Colour.CLEAN, ('health="healthy"',)),
    State(21, "suspect", Colour.SUSPECT, ('health="suspect"',)),
    *_OUT,
)

STATES: Final[Sequence[State]] = (
    *(State(each.number, each.text, each.colour, (*each.matchers, 'health="healthy"')) for each in HYGIENE),
    *(
        State(each.number + 10, f"{each.text}, suspect", Colour.SUSPECT, (*each.matchers, 'health="suspect"'))
        for each in HYGIENE
    ),
    *_OUT,
)
"""Hygiene and health combined: out of service takes precedence over hygiene."""

ADVERTISEMENT: Final[Sequence[State]] = (
    State(40, "not advertised", Colour.QUARANTINED),
    State(41, "advertised", Colour.CLEAN),
)

_HYGIENE_COLOURS: Final[Mapping[str, str]] = {
    "clean": Colour.CLEAN,
    "in-use": Colour.IN_USE,
    "scrubbing": Colour.SCRUBBING,
    "dirty": Colour.DIRTY,
}

_OUT_COLOURS: Final[Mapping[str, str]] = {
    "recovering": Colour.RECOVERING,
    "probation": Colour.PROBATION,
    "quarantined": Colour.QUARANTINED,
    "condemned": Colour.CONDEMNED,
}

STATE_COLOURS: Final[Mapping[str, str]] = {**_HYGIENE_COLOURS, **_OUT_COLOURS}
"""For the label ``state`` of the recording rule ``instance:scrubber_devices:by_state``."""

COMMON_COLOURS: Final[Mapping[str, str]] = {
    "passed": Colour.CLEAN,
    "granted": Colour.CLEAN,
    "fast path": Colour.CLEAN,
    "slow path": Colour.IN_USE,
    "blocked": Colour.SCRUBBING,
    "abandoned": Colour.DIRTY,
    "failed": Colour.QUARANTINED,
    "refused": Colour.DIRTY,
    "healthy": Colour.CLEAN,
    "unhealthy": Colour.QUARANTINED,
}
"""For terms that mean the same in every panel."""

PATH_COLOURS: Final[Mapping[str, str]] = {
    "fast path, median": "light-green",
    "fast path, p95": "semi-dark-green",
    "fast path, p99": "semi-dark-green",
    "slow path, median": "light-blue",
    "slow path, p95": "semi-dark-blue",
    "slow path, p99": "semi-dark-blue",
}
"""Light for the typical case, darker for the slow one; the darkest shades are hard to see on a dark theme."""

KIND_COLOURS: Final[Mapping[str, str]] = {
    "same-container": "super-light-blue",
    "same-pod": "light-blue",
    "same-tenant": "blue",
    "other-tenant": "purple",
    "unknown": Colour.NEUTRAL,
}
"""The less related two containers are, the darker; unknown is neutral."""

STEP_COLOURS: Final[Mapping[str, str]] = {
    "holders": "light-orange",
    "reset": "dark-purple",
    "memory": "blue",
    "on-chip": "super-light-blue",
    "diagnostics": "super-light-purple",
    "settings": "super-light-yellow",
    "health": "green",
}


def state_number_query(
    states: Sequence[State], *matchers: str, by: Sequence[str] = ("cluster", "job", "instance", "device")
) -> str:
    """Return a query for the number of each device's state."""
    alternatives = " or ".join(
        f"{selector('scrubber_device_state', *each.matchers, *matchers)} * {each.number}" for each in states
    )
    return f"max by ({', '.join(by)}) ({alternatives})"


def binary_state_query(metric: str, states: Sequence[State], *matchers: str, by: Sequence[str]) -> str:
    """Return a query that maps a metric of 0 and 1 to the numbers of two consecutive states."""
    return f"max by ({', '.join(by)}) ({selector(metric, *matchers)}) + {states[0].number}"


def state_mapping(states: Sequence[State]) -> model.ValueMapping:
    """Return the mapping of the numbers of ``states`` to text and colour."""
    return model.ValueMap(
        options={
            str(each.number): model.ValueMappingResult(text=each.text, color=each.colour, index=place)
            for place, each in enumerate(states)
        }
    )


def boolean_mapping(yes: str, no: str, *, bad: str = Colour.QUARANTINED) -> model.ValueMapping:
    """Return the mapping of a metric of 1 and 0, where 1 is good."""
    return state_mapping((State(1, yes, Colour.CLEAN), State(0, no, bad)))


def hygiene_mapping() -> model.ValueMapping:
    """Return the text colours of the label ``hygiene`` in a table."""
    return text_mapping(_HYGIENE_COLOURS)


def health_mapping() -> model.ValueMapping:
    """Return the background colours of the label ``health`` in a table; healthy has none."""
    return text_mapping({"healthy": "transparent", "suspect": Colour.SUSPECT, **_OUT_COLOURS})


def severity_mapping() -> model.ValueMapping:
    """Return the colours of the label ``severity`` of a finding."""
    return text_mapping(
        {"note": Colour.NEUTRAL, "warning": Colour.SCRUBBING, "blocking": Colour.DIRTY, "fault": Colour.QUARANTINED}
    )


def verdict_mapping() -> model.ValueMapping:
    """Return the colours of the label ``verdict`` of a step."""
    return text_mapping({"passed": Colour.CLEAN, "failed": Colour.QUARANTINED, "not-covered": Colour.SCRUBBING})


def objective_mapping() -> model.ValueMapping:
    """Return the texts of the label ``slo``."""
    texts = {"handover": "hand-over within 10 s", "scrub": "scrub without a failure"}
    return model.ValueMap(options={slo: model.ValueMappingResult(text=text) for slo, text in texts.items()})


def below_zero_mapping(text: str) -> model.ValueMapping:
    """Return the mapping of all negative numbers to a text, for shares of which the size does not matter then."""
    return model.RangeMap(
        options=model.DashboardRangeMapOptions(
            from_val=None, to=-1e-16, result=model.ValueMappingResult(text=text, color=Colour.QUARANTINED)
        )
    )


def recovery_mapping() -> model.ValueMapping:
    """Return the colours of the label ``recovery_method``: of those that need an operator."""
    return text_mapping({"operator": Colour.DIRTY, "reboot": Colour.DIRTY})


def label_text(value: str) -> str:
    """Return a label's value as words."""
    return value.replace("-", " ")


def text_mapping(colours: Mapping[str, str]) -> model.ValueMapping:
    """Return the mapping of label values to words and colours."""
    return model.ValueMap(
        options={
            word: model.ValueMappingResult(text=label_text(word), color=colour, index=place)
            for place, (word, colour) in enumerate(colours.items())
        }
    )
