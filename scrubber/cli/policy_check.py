"""The validation of policies: the work of ``scrubber policy check``."""

from __future__ import annotations

from collections.abc import Sequence

from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.render.output import CommandResult, OutputFormat, print_error, print_result
from scrubber.config.policy_file import load_policy
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.policy import Policy

__all__ = ["check_policies"]


def check_policies(policies: Sequence[str], output: OutputFormat, *, no_headers: bool) -> ExitCode:
    """Validate policy files, or bundled policies, and print the results; return the exit code."""
    good: list[tuple[str, Policy]] = []
    invalid = False
    for written in policies:
        try:
            good.append((written, load_policy(written)))
        except InvalidConfiguration as error:
            print_error(str(error))
            invalid = True
    data = [{"file": written, "name": policy.name, "digest": policy.digest} for written, policy in good]
    rows = [(written, policy.name, policy.digest[:16]) for written, policy in good]
    if good:
        names = [policy.name for _, policy in good]
        result = CommandResult(data, names, ("POLICY", "NAME", "DIGEST"), rows, kind="PolicyCheck")
        print_result(result, output, no_headers=no_headers)
    return ExitCode.USAGE if invalid else ExitCode.OK
