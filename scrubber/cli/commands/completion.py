"""``scrubber completion``: the scripts that make a shell complete this command with Tab."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from scrubber.cli.shell_completion import SCRIPTS

__all__ = ["Shell", "add_commands"]


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def add_commands(app: typer.Typer) -> None:
    app.command()(completion)


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="One of: bash, zsh, fish.", show_default=False)],
) -> None:
    """Print the completion script of a shell.

    The script completes commands, flags and their values, files, and the devices and certificates of a running service.
    To install it for every shell:

    \b
      bash  scrubber completion bash > /etc/bash_completion.d/scrubber
      zsh   scrubber completion zsh > /usr/share/zsh/site-functions/_scrubber
      fish  scrubber completion fish > ~/.config/fish/completions/scrubber.fish
    """
    print(SCRIPTS[shell])
