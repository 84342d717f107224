"""`thinwire completion bash|zsh`: print a script that completes commands, options and run file keys."""

import argparse
import functools
import sys
from collections.abc import Mapping
from typing import Any

SHELLS = ("bash", "zsh")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("completion", help="print a script that completes commands in your shell")
    parser.add_argument(
        "shell", metavar="SHELL", choices=SHELLS, help='bash or zsh: eval "$(thinwire completion bash)"'
    )
    parser.set_defaults(run=functools.partial(run, commands.choices), parser=parser)


def run(commands: Mapping[str, argparse.ArgumentParser], args: argparse.Namespace) -> int:
    """`commands`: all commands of the program, by name."""
    # zsh can run bash's completions.
    start = "autoload -U +X bashcompinit && bashcompinit\n" if args.shell == "zsh" else ""
    sys.stdout.write(start + script(words(commands)))
    return 0


def words(commands: Mapping[str, argparse.ArgumentParser]) -> dict[str, list[str]]:
    """What may follow each command: options, actions, and `section.key=` for commands that accept it."""
    from node.run_file.loader import full_keys

    keys = [f"{key}=" for key in full_keys()]
    follow = {}
    for name, command in commands.items():
        actions = _actions(command)
        parsers = (command, *actions.values())
        options = [text for parser in parsers for text in parser._option_string_actions]
        takes_keys = any(action.dest == "overrides" for parser in parsers for action in parser._actions)
        follow[name] = sorted({*options, *actions, *(keys if takes_keys else [])})
    return follow


def script(follow: dict[str, list[str]]) -> str:
    """The bash script. It completes commands, then what may follow them, or else files."""
    cases = "\n".join(f'    {name}) words="{" ".join(after)}" ;;' for name, after in follow.items())
    return f"""_thinwire() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if ((COMP_CWORD == 1)); then words="{" ".join(follow)}"; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if ((${{#COMPREPLY[@]}} == 0)); then COMPREPLY=($(compgen -f -- "$current")); fi
  if [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o filenames -F _thinwire thinwire
"""


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}
