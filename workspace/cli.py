"""The command line: ``workspace sweep``, ``workspace config``, ``workspace strategies``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from workspace import native
from workspace.config import FIELDS, load_config
from workspace.errors import ConfigError, WorkspaceError
from workspace.sweep.table import FULL_WIDTH
from workspace.sweep.workload import MODES

SCHEDULES = 2
"""Schedules of a cell with ``--execute``: what keeps a whole sweep within two minutes."""

AUX = {"on": (True,), "off": (False,), "both": (True, False)}


class Refusal(click.ClickException):
    """A typed error as its problem and remedy, without a traceback."""

    exit_code = 2

    def __init__(self, error: WorkspaceError) -> None:
        super().__init__(error.problem)
        self.error = error

    def show(self, file: Any = None) -> None:
        """Print to the standard error stream (or `file`)."""
        click.echo(f"Error: {self.error.problem}", err=True, file=file)
        if self.error.remedy:
            click.echo(f"Remedy: {self.error.remedy}", err=True, file=file)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            native.check()
            return super().invoke(ctx)
        except WorkspaceError as error:
            raise Refusal(error) from error


def _console() -> Console:
    """A terminal as wide as it is; a file or a pipe wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, FULL_WIDTH))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="workspace")
def main() -> None:
    """Scratch tensors for model code: the settings, the strategies, and what each costs on real requests."""


def _overrides(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    for pair, (key, equals, _) in zip(pairs, split, strict=True):
        if not equals or not key:
            raise ConfigError(f"--set {pair} has no value", "write --set KEY=VALUE, as in --set in_flight=2")
    return {key: value for key, _, value in split}


@main.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with the settings.")
@click.option("--set", "overrides", multiple=True, callback=_overrides, metavar="KEY=VALUE")
def config(file: Path | None, overrides: dict[str, str]) -> None:
    """Show each setting, its value and where the value comes from, and which form of the steady path runs."""
    from workspace import registry

    loaded = load_config(file, overrides=overrides, override_source="command line")
    for name in {loaded.config.strategy, *loaded.config.owners.values()}:
        registry.strategy(name)
    table = Table("setting", "value", "source", "meaning", box=None, pad_edge=False)
    for key, field in FIELDS.items():
        value = getattr(loaded.config, key)
        shown = Text("none" if value is None or value == {} else str(value))
        table.add_row(key, shown, Text(loaded.sources[key]), field.metadata["about"])
    _console().print(table)
    _console().print(f"\nThe steady path runs in {native.form()}.", highlight=False)


@main.command()
def strategies() -> None:
    """List the strategies, one line each."""
    from workspace import registry

    table = Table("strategy", "safe", "what it does", box=None, pad_edge=False)
    for name, entry in registry.strategies().items():
        if entry.unusable:
            table.add_row(name, "?", Text(f"cannot be used: {entry.unusable}"))
        else:
            table.add_row(name, "yes" if entry.safe else "no", Text(entry.summary))
    console = _console()
    console.print(table)
    for line in registry.overlooked():
        console.print(line, markup=False, highlight=False)


@main.command()
@click.option("--strategy", "names", multiple=True, help="Strategy to replay; repeatable. Default: all.")
@click.option("--model", default="", metavar="NAME|FILE", help="Preset or config.json.")
@click.option("--trace", type=click.Path(path_type=Path), help="CSV of requests. Default: a generated one.")
@click.option("--driver", type=click.Choice(["simulated", "cuda"]), default="simulated", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True, help="Of each cell.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), help="Repeatable. Default: all.")
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(min=0),
    help="Size of the steps that --driver cuda times, 0 for those of a request trace; repeatable. "
    "Default: 2, 64, 512, 2048, 8192 and 0.",
)
@click.option("--micro-batches", multiple=True, type=click.IntRange(min=1), default=(1, 2), show_default=True)
@click.option("--aux", type=click.Choice(list(AUX)), default="on", show_default=True, help="Side streams.")
@click.option(
    "--workload",
    default="dsv4",
    show_default=True,
    help="A registered name, or MODULE:CLASS: docs/workload.md.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Worker processes.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("sweep-results"), show_default=True)
@click.option(
    "--execute",
    "schedules",
    is_flag=False,
    flag_value=SCHEDULES,
    default=0,
    type=click.IntRange(min=0),
    metavar="[N]",
    help=f"Compute real numbers, too, under N seeded schedules a cell; {SCHEDULES} if N is left out.",
)
@click.option("--nvtx", is_flag=True, help="With --driver cuda: an NVTX range around each lease, for a profiler.")
@click.option("--allow-refused", is_flag=True, help="A refused cell is no failure.")
@click.pass_context
def sweep(context: click.Context, /, **options: Any) -> None:
    """Replay a request trace under every strategy: bytes, fences, host cost and the clock check's verdict."""
    from workspace.sweep.command import run
    from workspace.sweep.plan import Replay

    replay = Replay(**{key: options.pop(key) for key in attrs.fields_dict(Replay)})
    aux_streams = AUX[options.pop("aux")]
    context.exit(run(_console(), replay, aux_streams=aux_streams, **options))


if __name__ == "__main__":
    main()
