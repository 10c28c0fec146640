"""``scrubber completion``: shell scripts that complete this command with Tab.

The scripts only transfer words: the command itself computes the completions (:mod:`scrubber.cli.completing`), as lines
with a kind, a value and a description, separated by tabs. Invariant: no value is ever evaluated by a shell.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

__all__ = ["SCRIPTS", "Shell", "add_commands"]


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_BASH = r"""# bash completion of scrubber. Load it with: source <(scrubber completion bash)
_scrubber_completion() {
    local program=${1/#\~/$HOME} kind value description
    COMPREPLY=()
    while IFS=$'\t' read -r kind value description; do
        case $kind in
            word) COMPREPLY+=("$value") ;;
            files) compopt -o default ;;
            directories) compopt -o dirnames ;;
        esac
    done < <(_SCRUBBER_COMPLETE=bash _SCRUBBER_LINE="${COMP_LINE:0:COMP_POINT}" \
        _SCRUBBER_BREAKS=$COMP_WORDBREAKS "$program" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then
        compopt -o nospace
    fi
}
complete -o nosort -F _scrubber_completion scrubber
"""

_ZSH = r"""#compdef scrubber
# zsh completion of scrubber. Load it with: source <(scrubber completion zsh), after compinit.
_scrubber() {
    local kind value description
    local -a found
    local files=
    while IFS=$'\t' read -r kind value description; do
        case $kind in
            word) found+=("${value//:/\\:}${description:+:$description}") ;;
            files|directories) files=$kind ;;
        esac
    done < <(_SCRUBBER_COMPLETE=zsh "${(Q)words[1]/#\~/$HOME}" "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    local result=1
    if (( ${#found} )); then
        _describe -V scrubber found && result=0
    fi
    if [[ -n $files ]]; then
        compset -P '--[^=]#='
        if [[ $files == files ]]; then _files && result=0; else _files -/ && result=0; fi
    fi
    return result
}
if [[ ${funcstack[1]} == _scrubber ]]; then
    _scrubber "$@"
else
    compdef _scrubber scrubber
fi
"""

_FISH = r"""# fish completion of scrubber. Load it with: scrubber completion fish | source
function __scrubber_paths
    set -l flag (string match --regex -- '^--[^=]*=' (commandline --current-token))
    set -l path (string replace --regex -- '^--[^=]*=' '' (commandline --current-token))
    for found in ($argv[1] "$path")
        echo -- "$flag$found"
    end
end
function __scrubber_complete
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    set -l last (commandline --cut-at-cursor --current-token)
    for line in (_SCRUBBER_COMPLETE=fish $words[1] $words[2..-1] "$last" 2>/dev/null)
        set -l fields (string split \t -- $line)
        switch $fields[1]
            case word
                echo -- $fields[2]\t$fields[3]
            case files
                __scrubber_paths __fish_complete_path
            case directories
                __scrubber_paths __fish_complete_directories
        end
    end
end
complete --command scrubber --no-files --arguments '(__scrubber_complete)'
"""

SCRIPTS: Mapping[Shell, str] = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


def add_commands(app: typer.Typer) -> None:
    app.command()(completion)


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)],
) -> None:
    """Print the completion script of a shell.

    It completes commands, flags and their values, files, and the devices and certificates of the service that runs here,
    where it may be asked. To have it in every shell:

    \b
      bash  scrubber completion bash > /etc/bash_completion.d/scrubber
      zsh   scrubber completion zsh > /usr/share/zsh/site-functions/_scrubber
      fish  scrubber completion fish > ~/.config/fish/completions/scrubber.fish
    """
    print(SCRIPTS[shell], end="")
