"""Examples for each command: the end of its ``--help``.

A test checks this table: every command has an example, each example is a valid command line, and none is too wide.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EXAMPLES", "epilog"]

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "devices": (
        "scrubber devices",
        "scrubber devices -o wide",
        "scrubber devices --watch",
        "scrubber devices 0 3 -o json",
    ),
    "device": (
        "scrubber device 0",
        "scrubber device GPU-1f3a --limit 100",
    ),
    "history": (
        "scrubber history --device 0 --since 2h",
        "scrubber history --tenant team-a --outcome failed",
        "scrubber history --event health. --event unauthorized. --since 24h",
        "scrubber history --all -o json",
    ),
    "reset-plan": ("scrubber reset-plan 3",),
    "doctor": (
        "scrubber doctor",
        "scrubber doctor -o json",
        "scrubber doctor --policy ./new.yaml",
    ),
    "scrub": (
        "scrubber scrub 0",
        "scrubber scrub 0 1 --path fast --timeout 30s",
        "scrubber scrub --all-idle --no-wait",
    ),
    "reset": ('scrubber reset 3 --reason "XID 79, ticket 4711"',),
    "quarantine": (
        'scrubber quarantine 3 --reason "fan is loud, ticket 4711"',
        'scrubber quarantine 4 5 6 7 --reason "power supply B fails, ticket 4712"',
    ),
    "unquarantine": ('scrubber unquarantine 3 --reason "fan replaced, ticket 4711"',),
    "break-glass": (
        'scrubber break-glass 3 --duration 30m --reason "outage, ticket 4711"',
        'scrubber break-glass 3 --end --reason "outage is over"',
    ),
    "yield": ('scrubber yield --reason "driver upgrade, ticket 4711"',),
    "resume": (
        'scrubber resume --reason "driver is back, ticket 4711"',
        'scrubber resume --all --reason "the label was forgotten, ticket 4711"',
    ),
    "baseline show": (
        "scrubber baseline show",
        "scrubber baseline show 3 -o json",
    ),
    "baseline accept": ('scrubber baseline accept 3 --reason "new firmware, ticket 4711"',),
    "certificate list": ("scrubber certificate list",),
    "certificate show": (
        "scrubber certificate show cert-0f3a9c51be22",
        "scrubber certificate show --device 0",
    ),
    "certificate export": ("scrubber certificate export --device 0 > certificate.json",),
    "certificate key": ("scrubber certificate key > node.pem",),
    "certificate verify": (
        "scrubber certificate verify certificate.json --key node.pem",
        "scrubber certificate export --device 0 | scrubber certificate verify -",
    ),
    "audit verify": (
        "scrubber audit verify",
        'scrubber audit verify --head "$(cat saved-head.txt)"',
        "scrubber audit verify --file audit.jsonl",
    ),
    "audit export": ("scrubber audit export > audit.jsonl",),
    "audit head": ("scrubber audit head > saved-head.txt",),
    "policy check": ("scrubber policy check ./policy.yaml",),
    "policy show": (
        "scrubber policy show strict",
        "scrubber policy show ./policy.yaml -o json",
    ),
    "policy explain": (
        "scrubber policy explain default --hand-over other-tenant --hygiene clean",
        "scrubber policy explain ./policy.yaml --xid 79",
    ),
    "policy xids": ("scrubber policy xids default",),
    "backend check": (
        "scrubber backend check --config /etc/scrubber/my-device.yaml",
        "scrubber backend check --config ./my-device.yaml --erase 0 --yes",
    ),
    "serve": (
        "scrubber serve --backend nvidia --policy strict",
        "scrubber serve --backend sim --sim-dir /tmp/node --socket-dir /tmp/run",
    ),
    "plugin": (
        "scrubber plugin",
        "scrubber plugin --mig-strategy mixed --node-name node-7",
    ),
    "run": (
        "scrubber run --count 1 nvidia-smi",
        "scrubber run --device 0 --device 1 --user alice python train.py",
    ),
    "prolog": (
        "scrubber prolog",
        "scrubber prolog --wait 2m",
    ),
    "epilog": (
        "scrubber epilog",
        "scrubber epilog --wait 1m",
    ),
    "dra": (
        "scrubber dra --node-name node-7",
        "scrubber dra --node-name node-7 --kubeconfig /etc/scrubber/kubeconfig",
    ),
    "version": (
        "scrubber version",
        "scrubber version --service",
    ),
    "completion": (
        "source <(scrubber completion bash)",
        "scrubber completion fish | source",
    ),
    "demo": (
        "scrubber demo",
        "scrubber demo --keep-files --dir /tmp/node",
        "scrubber demo --keep-running",
        "scrubber demo --backend command",
    ),
    "sim create": ("scrubber sim create --dir /tmp/node --devices 4 --memory 64MiB",),
    "sim split": ("scrubber sim split --dir /tmp/node --device 0 --instances 2",),
    "sim merge": ("scrubber sim merge --dir /tmp/node --device 0",),
    "sim fault": (
        "scrubber sim fault --dir /tmp/node --device 2 --xid 79",
        "scrubber sim fault --dir /tmp/node --device 1 --firmware 96.00.89",
        "scrubber sim fault --dir /tmp/node --driver-absent",
    ),
    "sim clear": (
        "scrubber sim clear --dir /tmp/node",
        "scrubber sim clear --dir /tmp/node --device 2 --condition xid",
    ),
    "sim reboot": ("scrubber sim reboot --dir /tmp/node",),
    "sim tenant": ('scrubber sim tenant --device /dev/simgpu0 --write "secret" --read',),
}
"""By the words of the command: lines for a shell."""


def epilog(name: str) -> str | None:
    """Return the end of the help of the command ``name``; None if it has no examples."""
    lines = EXAMPLES.get(name, ())
    if not lines:
        return None
    title = "Examples:" if len(lines) > 1 else "Example:"
    # The backspace makes the formatter keep the lines unchanged.
    return "\n".join(("\b", title, *(f"  {line}" for line in lines)))
