"""The shells' side of Tab completion: their scripts, and the lines that this command answers them.

Typer finds the completions of a partial line, from the commands and the parameters' completers. Its own scripts are not
used, because they give up guarantees of this one:

- No shell evaluates what is offered. Typer's zsh script passes names and descriptions to ``eval``.
- A value is completed after ``--flag=`` in bash, too, and files are offered only where a value is a file.
- Descriptions are plain text. Typer's load rich to format them, which takes longer than the rest of an answer.

An answer is a line for each completion: type (``plain``, ``file`` or ``dir``), value and description, separated by tabs.
Invariant: no value contains a character that is special to a shell.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer._click.shell_completion import CompletionItem, ShellComplete, add_completion_class

from scrubber.cli.render.output import printable

__all__ = ["SCRIPTS", "enable_completion"]

_SHELL_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._/:=-]*")


class _Shell(ShellComplete):
    """A shell that passes the words after the command's name as arguments; the last one is incomplete."""

    def source_vars(self) -> dict[str, Any]:
        return {}

    def source(self) -> str:
        return self.source_template

    def get_completion_args(self) -> tuple[list[str], str]:
        *args, incomplete = sys.argv[1:] or [""]
        return args, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        return "\t".join((item.type, item.value, printable(" ".join((item.help or "").split()))))

    def complete(self) -> str:
        args, incomplete = self.get_completion_args()
        try:
            found = self.get_completions(args, incomplete)
        except typer.BadParameter:  # after an unknown command
            return ""
        return "\n".join(map(self.format_completion, _whole_words(found, incomplete)))


def _whole_words(found: list[CompletionItem], incomplete: str) -> Iterator[CompletionItem]:
    """Yield those that are safe in a shell, each as the whole word: with ``--flag=`` where that has been typed."""
    flag, equals, _ = incomplete.partition("=")
    before = flag + equals if equals and flag.startswith("-") else ""
    for each in found:
        if each.type != "plain":
            yield each
        elif _SHELL_SAFE.fullmatch(before + each.value):
            yield CompletionItem(before + each.value, help=each.help)


class _Bash(_Shell):
    """Bash splits words differently, so it passes its whole line."""

    name = "bash"
    source_template = r"""# bash completion of scrubber. Load it with: source <(scrubber completion bash)
_scrubber_completion() {
    local program=${1/#\~/$HOME} type value description
    COMPREPLY=()
    while IFS=$'\t' read -r type value description; do
        case $type in
            plain) COMPREPLY+=("$value") ;;
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
        esac
    done < <(_SCRUBBER_COMPLETE=complete_bash _SCRUBBER_LINE="${COMP_LINE:0:COMP_POINT}" \
        _SCRUBBER_BREAKS=$COMP_WORDBREAKS "$program" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then
        compopt -o nospace
    fi
}
complete -o nosort -F _scrubber_completion scrubber"""

    def get_completion_args(self) -> tuple[list[str], str]:
        *args, incomplete = _split(os.environ.get("_SCRUBBER_LINE", ""))[1:] or [""]
        return args, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        # Bash replaces only what follows the last of these in the incomplete word.
        breaks = os.environ.get("_SCRUBBER_BREAKS", "")
        _, incomplete = self.get_completion_args()
        cut = 1 + max((incomplete.rfind(each) for each in "=:" if each in breaks), default=-1)
        return super().format_completion(CompletionItem(item.value[cut:], item.type, item.help))


class _Zsh(_Shell):
    name = "zsh"
    source_template = r"""#compdef scrubber
# zsh completion of scrubber. Load it with: source <(scrubber completion zsh), after compinit.
_scrubber() {
    local type value description
    local -a found
    local files=
    while IFS=$'\t' read -r type value description; do
        case $type in
            plain) found+=("${value//:/\\:}${description:+:$description}") ;;
            file|dir) files=$type ;;
        esac
    done < <(_SCRUBBER_COMPLETE=complete_zsh "${(Q)words[1]/#\~/$HOME}" "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" \
        2>/dev/null)
    local result=1
    if (( ${#found} )); then
        _describe -V scrubber found && result=0
    fi
    if [[ -n $files ]]; then
        compset -P '--[^=]#='
        if [[ $files == file ]]; then _files && result=0; else _files -/ && result=0; fi
    fi
    return result
}
if [[ ${funcstack[1]} == _scrubber ]]; then
    _scrubber "$@"
else
    compdef _scrubber scrubber
fi"""


class _Fish(_Shell):
    name = "fish"
    source_template = r"""# fish completion of scrubber. Load it with: scrubber completion fish | source
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
    for line in (_SCRUBBER_COMPLETE=complete_fish $words[1] $words[2..-1] "$last" 2>/dev/null)
        set -l fields (string split \t -- $line)
        switch $fields[1]
            case plain
                echo -- $fields[2]\t$fields[3]
            case file
                __scrubber_paths __fish_complete_path
            case dir
                __scrubber_paths __fish_complete_directories
        end
    end
end
complete --command scrubber --no-files --arguments '(__scrubber_complete)'"""


_SHELLS = (_Bash, _Zsh, _Fish)
SCRIPTS: Mapping[str, str] = {each.name: each.source_template for each in _SHELLS}
"""The script of each shell, by the shell's name."""


def enable_completion() -> None:
    """Make Typer answer requests of these shells."""
    for each in _SHELLS:
        add_completion_class(each, each.name)


def _split(line: str) -> list[str]:
    """Return the words of an incomplete line, the last one empty if it has not begun."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:  # an unclosed quotation
        return [*words, lexer.token]
    return [*words, ""] if not line or line[-1].isspace() else words
