"""Every command of ``scrubber``, and the application that Typer runs."""

from __future__ import annotations

from typing import Any

from scrubber.cli.app import App
from scrubber.cli.lazy import CommandEntry, HelpSection, LazyGroup

__all__ = ["Commands", "app"]


class Commands(LazyGroup):
    """Every command, in the order of the summary."""

    entries = (
        CommandEntry("devices", "devices", HelpSection.INSPECT, "List the devices of the node."),
        CommandEntry("device", "device", HelpSection.INSPECT, "Show details and history of a device."),
        CommandEntry("history", "history", HelpSection.INSPECT, "Show the audit history."),
        CommandEntry("reset-plan", "reset", HelpSection.INSPECT, "Show what a reset would do and what blocks it."),
        CommandEntry("doctor", "doctor", HelpSection.INSPECT, "Check the node for problems."),
        CommandEntry("scrub", "scrub", HelpSection.OPERATE, "Scrub idle devices, or join running scrubs."),
        CommandEntry("reset", "reset", HelpSection.OPERATE, "Reset an idle device and scrub it."),
        CommandEntry("quarantine", "quarantine", HelpSection.OPERATE, "Take devices out of service."),
        CommandEntry(
            "unquarantine",
            "quarantine",
            HelpSection.OPERATE,
            "Return a quarantined device to service, after probation.",
        ),
        CommandEntry(
            "break-glass",
            "break_glass",
            HelpSection.OPERATE,
            "Temporarily bypass all checks for a device (audited).",
        ),
        CommandEntry(
            "yield", "yielding", HelpSection.OPERATE, "Release the driver and take every device out of service."
        ),
        CommandEntry("resume", "yielding", HelpSection.OPERATE, "Take the driver back after a yield."),
        CommandEntry("baseline", "baseline", HelpSection.OPERATE, "Show or accept the expected state of a device."),
        CommandEntry("certificate", "certificate", HelpSection.VERIFY, "Show, export and verify certificates."),
        CommandEntry("audit", "audit", HelpSection.VERIFY, "Verify and export the audit log."),
        CommandEntry("policy", "policy", HelpSection.VERIFY, "Validate, show and explain policies."),
        CommandEntry("backend", "backend", HelpSection.VERIFY, "Check the program of a command backend."),
        CommandEntry("serve", "serve", HelpSection.RUN, "Run the scrub service."),
        CommandEntry("plugin", "plugin", HelpSection.RUN, "Run the device plugin."),
        CommandEntry("dra", "dra", HelpSection.RUN, "Run the driver for dynamic resource allocation."),
        CommandEntry("run", "run", HelpSection.RUN, "Run a command on clean devices."),
        CommandEntry("prolog", "job", HelpSection.RUN, "Grant a Slurm job its GPUs, once they are clean."),
        CommandEntry("epilog", "job", HelpSection.RUN, "Report the end of a Slurm job, so that its GPUs are scrubbed."),
        CommandEntry("completion", "completion", HelpSection.RUN, "Print the completion script of a shell."),
        CommandEntry("version", "version", HelpSection.RUN, "Print the version."),
        CommandEntry("demo", "demo", HelpSection.TRY, "Run the demo scenario."),
        CommandEntry("sim", "sim", HelpSection.TRY, "Create and control a simulated node."),
    )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, with ``--version``, which users try first, as a synonym of ``version``."""
        return super().parse_args(ctx, ["version"] if args == ["--version"] else args)


app = App(
    "Proves that a GPU is clean before a Kubernetes node hands it to the next tenant.\n\n"
    "Exit codes: 0 success; 1 failed, or no verdict; 2 usage error; 3 refused, or busy; 4 timed out, the operation "
    "continues; 5 warnings only; 130 interrupted.",
    cls=Commands,
    epilog="To see everything on a simulated node, run: scrubber demo. For the flags, environment variables and examples of "
    "a command, run: scrubber COMMAND --help. To enable Tab completion, see: scrubber completion --help.",
)


@app.callback()
def _root_callback() -> None: ...
