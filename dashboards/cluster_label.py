"""Another name for the label ``cluster`` in rules and boards, for installations that name their clusters by another label.

The boards' variable, and the column of their tables, remain "cluster".
"""

from __future__ import annotations

import argparse
import re
from typing import Any, Final

__all__ = ["CLUSTER", "parse_label", "rename_in_board", "rename_in_promql"]

CLUSTER: Final = "cluster"

_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_GROUPING: Final = re.compile(r"\b(?:by|on|group_left|group_right) \([^()]*\)")
_MATCHER: Final = re.compile(r'\bcluster(?=(?:=~|!~|!=|=)")')
_LABEL_VALUES: Final = re.compile(r"(?<=, )cluster(?=\)$)")
_TEMPLATE: Final = re.compile(r"(?<=\$labels\.)cluster\b|(?<={{)cluster(?=}})|(?<=__field\.labels\.)cluster\b")


def parse_label(text: str) -> str:
    """Return ``text`` if it is the name of a label that the rules do not use otherwise.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    if not _NAME.fullmatch(text) or text.startswith("__") or text in {"job", "instance", "device", "tenant", "le"}:
        raise argparse.ArgumentTypeError(f"{text!r} cannot name the label of a cluster, such as k8s_cluster")
    return text


def rename_in_promql(text: str, label: str) -> str:
    """Return PromQL, or a text that contains it, with ``label`` instead of ``cluster``; also in templates of alerts."""
    text = _GROUPING.sub(lambda found: re.sub(r"\bcluster\b", label, found[0]), text)
    return _TEMPLATE.sub(label, _MATCHER.sub(label, text))


def rename_in_board(document: Any, label: str) -> Any:
    """Return a board's JSON with ``label`` instead of ``cluster``."""
    if isinstance(document, list):
        return [rename_in_board(each, label) for each in document]
    if isinstance(document, str):
        return _LABEL_VALUES.sub(label, rename_in_promql(document, label))
    if not isinstance(document, dict):
        return document
    renamed = {key: rename_in_board(value, label) for key, value in document.items()}
    if renamed.get("id") == "organize":  # names its columns by labels
        for each in renamed["options"].values():
            if CLUSTER in each:
                each[label] = each.pop(CLUSTER)
    return renamed
