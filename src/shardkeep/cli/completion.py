"""Completion scripts for bash and zsh, generated from the parser, so that they offer what it accepts."""

import argparse
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from shardkeep.cli.parser import FLAGS, make_parser

# Metavars that say what a value is. Arguments without an option's name are paths unless they have choices.
_FILE = "FILE"
_LISTS = {"FLAGS": (*FLAGS, "any")}  # several of these, separated by commas
_STEPS = ("latest", "best")  # what RUN@ can be followed by, beside a number


@dataclass(frozen=True)
class _Argument:
    """An option, or an argument that has no name."""

    names: tuple[str, ...]
    metavar: str
    about: str
    takes_value: bool
    repeats: bool
    optional: bool
    choices: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """What a value that is a list is made of."""
        return _LISTS.get(self.metavar, ())

    @property
    def is_path(self) -> bool:
        return not self.choices and (not self.names or self.metavar == _FILE)


@dataclass(frozen=True)
class _Command:
    """A command, or the program itself, whose name is empty here."""

    name: str
    about: str
    options: tuple[_Argument, ...]
    operands: tuple[_Argument, ...]

    @property
    def takes_steps(self) -> bool:
        """Whether its paths can be steps of runs: those commands have an option for the metric of RUN@best."""
        return any("--metric" in option.names for option in self.options)


def completion_script(shell: str) -> str:
    """The script that makes a shell, "bash" or "zsh", complete the words of the `shardkeep` command."""
    parser = make_parser()
    (below,) = (action for action in _actions(parser) if isinstance(action.choices, dict))
    parsers = cast(dict[str, argparse.ArgumentParser], below.choices)
    commands = [_command(name, parser) for name, parser in parsers.items()]
    return {"bash": _bash, "zsh": _zsh}[shell](_command("", parser), commands)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # pyright: ignore[reportPrivateUsage]  (argparse has no public list of them)


def _command(name: str, parser: argparse.ArgumentParser) -> _Command:
    about = (parser.description or "").partition("\n")[0].rstrip(".")
    found = [_argument(action) for action in _actions(parser) if not isinstance(action.choices, dict)]
    options, operands = ([one for one in found if bool(one.names) == named] for named in (True, False))
    return _Command(name, about, tuple(options), tuple(operands))


def _argument(action: argparse.Action) -> _Argument:
    return _Argument(
        names=tuple(action.option_strings),
        metavar=str(action.metavar or action.dest),
        about=(action.help or "") % vars(action),  # as argparse shows it
        takes_value=action.nargs != 0,
        repeats=action.nargs == "+" or isinstance(action.default, list),
        optional=action.nargs == "?",
        choices=tuple(map(str, action.choices or ())),
    )


_BASH = """\
# Completion of the shardkeep command for bash, as `shardkeep completion bash` prints it.
_shardkeep() {{
    # $2 is what bash replaces: after "=" or "@" only a part of the word.
    local current=$2 previous=$3 command= word words= start=
    COMPREPLY=()
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        if [[ $word != -* ]]; then command=$word; break; fi
    done
    if [[ $previous == = ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    case "$command $previous" in
{values}
    esac
    if [[ -z $words && $current == -* ]]; then
        case $command in
{options}
        esac
    elif [[ -z $words ]]; then
        case $command in
{operands}
        esac
    fi
    # If nothing is in COMPREPLY, bash completes the names of files.
    if [[ -n $words ]]; then
        if [[ -z $start ]]; then compopt +o default 2>/dev/null; fi
        COMPREPLY=($(compgen -P "$start" -W "$words" -- "${{current#"$start"}}"))
    fi
}}
complete -o default -F _shardkeep shardkeep
"""


def _bash(program: _Command, commands: Sequence[_Command]) -> str:
    everything = [program, *commands]
    taking = [(command, option) for command in everything for option in command.options if option.takes_value]
    values = [(f"'{command.name} {name}'", _bash_value(one)) for command, one in taking for name in one.names]
    operands = [(command.name, _bash_operands(command)) for command in commands]
    return _BASH.format(
        values=_cases(values, 8),
        options=_cases(((command.name or "''", _words(_names(command))) for command in everything), 12),
        operands=_cases([("''", _words(command.name for command in commands)), *operands], 12),
    )


def _bash_value(option: _Argument) -> str:
    """What to do after an option that takes a value."""
    if option.parts:
        return f"{_words(option.parts)}; if [[ $current == *,* ]]; then start=${{current%,*}},; fi"
    if option.choices:
        return _words(option.choices)
    return "return" if option.is_path else "compopt +o default 2>/dev/null; return"  # bash 3 has no compopt


def _bash_operands(command: _Command) -> str:
    if command.takes_steps:
        return f"if [[ $current == *@* ]]; then start=${{current%@*}}@ {_words(_STEPS)}; fi"
    choices = [choice for operand in command.operands for choice in operand.choices]
    return _words(choices) if choices else ""


def _words(words: Iterable[str]) -> str:
    return f"words={shlex.quote(' '.join(words))}"


def _names(command: _Command) -> list[str]:
    return [name for option in command.options for name in option.names]


def _cases(cases: Iterable[tuple[str, str]], indent: int) -> str:
    """The branches of a `case`, with one pattern for all that have the same commands."""
    patterns: dict[str, list[str]] = {}
    for pattern, commands in cases:
        patterns.setdefault(commands, []).append(pattern)
    return _indented((f"{'|'.join(every)}) {commands} ;;" for commands, every in patterns.items() if commands), indent)


_ZSH = """\
#compdef shardkeep
# Completion of the shardkeep command for zsh, as `shardkeep completion zsh` prints it.
_shardkeep_step() {{
    _files || {{ compset -P '*@' && compadd {steps}; }}
}}
_shardkeep() {{
    local context state state_descr line ret=1
    local -A opt_args
    local -a commands=(
{names}
    )
    _arguments -C \\
{program} \\
        '1: :->command' '*:: :->operands' && ret=0
    case $state in
        command) _describe -t commands command commands && ret=0 ;;
        operands)
            case $words[1] in
{commands}
            esac ;;
    esac
    return ret
}}
if [[ $funcstack[1] == _shardkeep ]]; then _shardkeep "$@"; else compdef _shardkeep shardkeep; fi
"""


def _zsh(program: _Command, commands: Sequence[_Command]) -> str:
    return _ZSH.format(
        steps=" ".join(_STEPS),
        names=_indented((shlex.quote(f"{command.name}:{command.about}") for command in commands), 8),
        program=_indented([" ".join(spec for option in program.options for spec in _zsh_option(option))], 8),
        commands=_indented((_zsh_command(command) for command in commands), 16),
    )


def _zsh_command(command: _Command) -> str:
    specs = [spec for option in command.options for spec in _zsh_option(option)]
    for place, operand in enumerate(command.operands, 1):
        at = "*" if operand.repeats else f"{place}:" if operand.optional else str(place)
        specs.append(shlex.quote(f"{at}:{operand.metavar}:{_zsh_value(operand, command.takes_steps)}"))
    joined = " \\\n        ".join(specs)
    return f"{command.name})\n    _arguments \\\n        {joined} && ret=0 ;;"


def _zsh_option(option: _Argument) -> list[str]:
    about = "".join(f"\\{char}" if char in "\\[]:" else char for char in option.about)
    before = "*" if option.repeats else f"({' '.join(option.names)})"
    after = f":{option.metavar}:{_zsh_value(option)}" if option.takes_value else ""
    return [shlex.quote(f"{before}{name}{'=' if after else ''}[{about}]{after}") for name in option.names]


def _zsh_value(argument: _Argument, steps: bool = False) -> str:
    if argument.is_path:
        return "_shardkeep_step" if steps else "_files"
    if argument.parts:
        return f"_values -s , {argument.metavar} {' '.join(argument.parts)}"
    return f"({' '.join(argument.choices)})" if argument.choices else " "


def _indented(lines: Iterable[str], by: int) -> str:
    return "\n".join(" " * by + line for whole in lines for line in whole.splitlines())
