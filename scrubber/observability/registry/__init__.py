"""The registry: declares every event and every metric of both daemons once, with its description.

Codes of errors and findings carry their descriptions where they are declared: :class:`scrubber.domain.codes.ErrorCode`
and :class:`scrubber.domain.evidence.FindingCode`.

To add an event, add its declaration to the section of :data:`scrubber.observability.registry.events.EVENTS_BY_SECTION`
that fits, then record or log it. To add a metric, add a constant to
:mod:`scrubber.observability.registry.service_metrics` or :mod:`~scrubber.observability.registry.plugin_metrics`, and
create the metric from it with :mod:`scrubber.observability.metrics.create`. Then run ``make reference``, which writes
the tables of ``docs/logs.md``, ``docs/metrics.md`` and ``docs/codes.md``.

``tests/observability/test_event_registry.py`` and ``test_metric_registry.py`` compare the registry with the sources, and
``test_reference_pages.py`` compares it with the pages.
"""
