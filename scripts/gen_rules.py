"""Generates the rules of ``dashboards/rules`` in the formats for loading.

    python scripts/gen_rules.py                                      # the committed PrometheusRule; a test compares it
    python scripts/gen_rules.py --runbooks https://… --out DIR       # all formats, with the address of your runbooks

The rules are written once, as Prometheus' own files. In the tree a ``runbook_url`` is the path of the page;
``--runbooks`` replaces it with the address of pages hosted elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
RULES = _ROOT / "dashboards" / "rules"
PROMETHEUS_RULE = _ROOT / "deploy" / "kubernetes" / "metrics" / "prometheusrule.yaml"

_FILES = ("recording.yaml", "alerts.yaml")
_LINK = "runbook_url: docs/runbooks/"
_HEAD = """\
# Made by scripts/gen_rules.py from dashboards/rules; change it there.
# Prometheus' operator takes rules whose labels its ruleSelector names: add yours.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: scrubber
  namespace: scrubber-system
  labels: {app.kubernetes.io/name: scrubber}
spec:
  groups:
"""


def prometheus_files(runbooks: str | None = None) -> Mapping[str, str]:
    """Return the files for Prometheus, by name.

    Args:
        runbooks: base address of the pages, such as ``https://…/docs/runbooks``; None keeps their paths in this
            repository.
    """
    texts = {name: (RULES / name).read_text(encoding="utf-8") for name in _FILES}
    if runbooks is None:
        return texts
    return {name: text.replace(_LINK, f"runbook_url: {runbooks.rstrip('/')}/") for name, text in texts.items()}


def prometheus_rule(runbooks: str | None = None) -> str:
    """Return the same groups as one PrometheusRule object for the Prometheus Operator."""
    groups = (text.partition("\ngroups:\n")[2] for text in prometheus_files(runbooks).values())
    lines = "".join(groups).splitlines()
    return _HEAD + "".join(f"  {line}".rstrip() + "\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, and print their paths."""
    parser = argparse.ArgumentParser(description="Writes the rules in the forms in which they are loaded.")
    parser.add_argument("--runbooks", metavar="BASE", help="where the pages of docs/runbooks are kept")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write all forms here, and leave the tree alone")
    asked = parser.parse_args(arguments)
    if (asked.runbooks is None) is not (asked.out is None):
        parser.error("--runbooks and --out go together: the rules in the tree name the pages by their paths")
    wanted = {PROMETHEUS_RULE: prometheus_rule()}
    if asked.out is not None:
        wanted = {asked.out / name: text for name, text in prometheus_files(asked.runbooks).items()}
        wanted[asked.out / PROMETHEUS_RULE.name] = prometheus_rule(asked.runbooks)
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
