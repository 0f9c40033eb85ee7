"""`gaffer completion`: what a shell needs to complete commands, options and names of jobs."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options and names of jobs.

    \b
    bash, in ~/.bashrc:    eval "$(gaffer completion bash)"
    zsh, in ~/.zshrc:      eval "$(gaffer completion zsh)"
    fish, in ~/.config/fish/config.fish:    gaffer completion fish | source

    Jobs are those of the database, where one can be reached at once.
    """
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 — one for each choice
    click.echo(kind(click.get_current_context().find_root().command, {}, "gaffer", "_GAFFER_COMPLETE").source())
