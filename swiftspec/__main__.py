"""Command `swiftspec`, also `python -m swiftspec`: dispatches to the sub-commands.

It imports no heavy module at the top level, so that `swiftspec --help` is fast.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

SUBCOMMANDS = {
    "chat": "Chat with a model in the terminal.",
    "serve": "Serve OpenAI's and Anthropic's HTTP APIs, and a page that shows the draft tree.",
    "generate": "Print one answer to a prompt.",
    "worker": "Run one model for clients on other machines or devices (gRPC).",
    "profile": "Measure the fastest settings for a pair of models on this machine.",
    "quantize": "Write a model with its weights rounded to int4.",
    "doctor": "Show what this machine has, and what would be slow and why.",
    "replay": "Serve the page for a recorded trace, without a model.",
}
LAB_MODULES = {  # modules with the `main` of the sub-commands that serve nothing
    "profile": "swiftspec.lab.profile",
    "quantize": "swiftspec.lab.quantize",
    "doctor": "swiftspec.lab.doctor",
}
OTHER_COMMANDS = {  # commands of Ollama and vLLM, and former ones of SwiftSpec: what does the same here
    "run": "use `swiftspec chat MODEL`, or `swiftspec generate MODEL --prompt TEXT`",
    "pull": "a model is downloaded when it is first used, as by `swiftspec chat ORG/NAME`",
    "list": "use `hf cache ls`",
    "ls": "use `hf cache ls`",
    "bench": "use `swiftspec profile MODEL --draft-model DRAFT`",
    "pair": "use `python -m bench.pair TARGET` in SwiftSpec's source directory",
    "exactness": "use `python -m bench.exactness` in SwiftSpec's source directory",
    "complete": "use `swiftspec generate MODEL --raw --prompt TEXT`",
}
USAGE_EXIT_CODE = 2
INTERRUPT_EXIT_CODE = 130


def help_page() -> str:
    """Returns the text of `swiftspec --help`."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: swiftspec COMMAND [flags]",
            "       swiftspec COMMAND --help",
            "",
            "Low-latency speculative decoding: a small draft model proposes tokens, the target model verifies them.",
            "",
            "commands:",
            *lines,
            "",
            "  -h, --help     Show this page.",
            "  --version      Show the version.",
            "",
            "Without a command, `swiftspec [flags]` is `python -m swiftspec.serve [flags]`: a server with --port, else",
            "one answer to a prompt, else a chat.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default `sys.argv[1:]`) and returns the exit code: 2 for an unknown sub-command, 0
    after --help, otherwise that of the sub-command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("-h", "--help") or (not arguments and sys.stdin is not None and sys.stdin.isatty()):
        print(help_page())
        return 0
    if name in ("", "--version") or name.startswith("-"):
        from swiftspec.serve.__main__ import main as serve_main

        return serve_main(arguments)
    if name not in SUBCOMMANDS:
        print(f"swiftspec: error: unknown command {name[:80]!r} ({_command_hint(name[:80])})", file=sys.stderr)
        return USAGE_EXIT_CODE
    return run_subcommand(name, rest)


def _command_hint(name: str) -> str:
    """Returns what the user may have meant with an unknown command."""
    if name in OTHER_COMMANDS:
        return OTHER_COMMANDS[name]
    near = difflib.get_close_matches(name, SUBCOMMANDS, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    return "for a chat with this model: `swiftspec chat MODEL`" if "/" in name else "--help lists the commands"


def run_subcommand(name: str, argv: Sequence[str]) -> int:
    """Imports and runs a sub-command. Returns its exit code."""
    if name in LAB_MODULES:
        try:
            module = import_module(LAB_MODULES[name])
        except KeyboardInterrupt:  # torch takes a second to import; later the command handles the signal
            return INTERRUPT_EXIT_CODE
        return module.main(argv, prog=f"swiftspec {name}")
    from swiftspec.serve.__main__ import main as serve_main

    if name in ("worker", "replay"):
        return serve_main([name, *argv])
    return serve_main(argv, subcommand=name)


def command() -> NoReturn:
    """Runs `main` and exits the process with the code that it returns; entry point of the console script."""
    code = main()
    from swiftspec.serve.__main__ import exit_process

    exit_process(code)


if __name__ == "__main__":
    command()
