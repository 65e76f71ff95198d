"""The command line: ``dsv4 generate``, ``dsv4 serve-trace``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import click
import torch
from rich.console import Console

from dsv4 import checkpoint, trace
from dsv4.cache.groups import MOST_DRAFTS
from dsv4.engine import Engine
from dsv4.errors import RunError
from dsv4.options import REGIONS, Options
from dsv4.serve import load, report
from dsv4.serve.build import DEVICES, PRECISIONS, Deployment, ModelOptions, deployed, random_tensors
from dsv4.serve.destination import Destination
from dsv4.serve.sampling import Sampling
from dsv4.serve.server import Server
from dsv4.serve.tokenizer import single
from workspace.errors import WorkspaceError


class Refusal(click.ClickException):
    """A typed error of the package: a line that says what was refused, a line that says what to do; no traceback."""

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
            return super().invoke(ctx)
        except WorkspaceError as error:
            raise Refusal(error) from error


class Size(click.ParamType):
    """Bytes, with KiB, MiB or GiB if need be."""

    name = "bytes"
    units = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """An int of 1 or more."""
        text = str(value).strip().lower()
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = text[len(digits) :].strip()
        if not digits.isdecimal() or unit not in self.units or not int(digits):
            self.fail(f"{value!r} is no size: write 268435456, 256MiB or 2GiB", param, ctx)
        return int(digits) * self.units[unit]


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="workspace")
def main() -> None:
    """DeepSeek-V4 on workspaces: generate text, or serve a trace of requests, under any allocation strategy."""


POSITIVE = click.IntRange(min=1)

MODEL = (
    click.option("--workspace", "strategy", metavar="STRATEGY", help="Of scratch. Default: as configured."),
    click.option("--model", default="small", metavar="NAME|FILE", help="small, flash, pro or a config.json."),
    click.option(
        "--checkpoint", type=click.Path(path_type=Path), metavar="DIR", help="Weights instead of random ones."
    ),
    click.option("--layers", type=POSITIVE, help="The model's first layers only."),
    click.option("--experts", type=POSITIVE, help="The model's first routed experts only."),
    click.option("--weights-seed", type=int, default=0, help="Of random weights."),
    click.option("--device", type=click.Choice(DEVICES), default="cpu"),
    click.option("--threads", type=POSITIVE, default=1, help="Of an operator on the CPU; more for large models."),
    click.option(
        "--precision", type=click.Choice(list(PRECISIONS)), default="float32", help="Activations, and packed keys."
    ),
    click.option("--mode", type=click.Choice(list(REGIONS)), default="eager", help="Graphs that steps replay."),
    click.option("--micro-batches", type=click.IntRange(1, 2), default=1),
    click.option("--aux/--no-aux", "aux_streams", default=True, help="Side streams."),
    click.option(
        "--speculative", "drafts", type=click.IntRange(0, MOST_DRAFTS), default=0, help="Tokens guessed ahead."
    ),
    click.option("--memory", type=Size(), help="For workspace and caches together. Default: what all requests need."),
    click.option("--max-num-batched-tokens", type=POSITIVE, default=512, help="Tokens of a step."),
)
"""What `dsv4.serve.build.ModelOptions` is made of; commands add the limits that suit them."""


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `MODEL` to a command."""
    for option in reversed(MODEL):
        command = option(command)
    return command


def _deployed(options: dict[str, Any]) -> AbstractContextManager[Deployment]:
    """What the options of `MODEL` and a command's limits describe."""
    options = dict(options)
    torch.set_num_threads(options.pop("threads"))
    engine = Engine(**{name: options.pop(name) for name in attrs.fields_dict(Engine) if name in options})
    run = Options(**{name: options.pop(name) for name in ("mode", "micro_batches", "aux_streams")})
    return deployed(ModelOptions(engine=engine, run=run, **options))


PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
"""Control characters as characters that picture them."""


def shown(text: str) -> str:
    """A model's text for the standard output: a terminal must not take it for commands."""
    return text.translate(PICTURES) if sys.stdout.isatty() else text


def _say(deployment: Deployment, text: str, **how: Any) -> None:
    """Print, on the first of several ranks."""
    if deployment.ranks.rank == 0:
        click.echo(text, **how)


@main.command()
@click.option("--prompt", required=True, metavar="TEXT")
@click.option("--max-new-tokens", type=POSITIVE, default=64)
@click.option("--temperature", type=float, default=0.0, help="0: the likeliest token.")
@click.option("--top-p", type=float, default=1.0, help="Draw from the likeliest tokens that reach this probability.")
@click.option("--seed", type=int, default=0, help="Of the draws.")
@click.option("--stop", "stops", multiple=True, metavar="TEXT", help="One token that ends the text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on behind the token that ends a text.")
@click.option("--token-ids", is_flag=True, help="Print the tokens' ids, one a line, in place of their text.")
@click.option("--max-model-len", type=POSITIVE, default=4096, help="Prompt and generated tokens at most.")
@model_options
def generate(
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stops: tuple[str, ...],
    ignore_eos: bool,
    token_ids: bool,
    **options: Any,
) -> None:
    """Continue a text, printed as it comes."""
    Sampling(max_new_tokens, temperature, top_p, seed)  # refused before anything is built
    with _deployed(options | {"max_num_seqs": 1}) as one:
        if one.note:
            _say(one, one.note, err=True)
        stop_tokens = {single(one.tokenizer, stop) for stop in stops}
        if not ignore_eos:
            stop_tokens.add(one.config.eos_token_id)
        server = Server(one.model)
        sampling = Sampling(max_new_tokens, temperature, top_p, seed, frozenset(stop_tokens))
        generation = server.submit(one.tokenizer.encode(prompt), sampling)
        text = one.tokenizer.text()
        for token in server.stream(generation):
            _say(one, str(token) if token_ids else shown(text.add([token])), nl=token_ids)
        if not token_ids:
            _say(one, shown(text.end()))
        if one.model.drafts:
            found = server.acceptance
            _say(one, f"{found.right} of {found.guessed} guessed tokens were right", err=True)


@main.command("serve-trace")
@click.option("--trace", "file", type=click.Path(path_type=Path), help="CSV of requests. Default: a generated one.")
@click.option("--requests", "count", type=POSITIVE, default=32, help="The first so many of the trace.")
@click.option("--speed-up", type=float, default=1.0, help="Of the arrivals.")
@click.option("--seed", type=int, default=0, help="Of the generated trace and of the prompts.")
@click.option("--json", "output", metavar="FILE", help="Write the report there, too, once it is whole.")
@click.option("--max-num-seqs", type=POSITIVE, default=8, help="Requests that run at once.")
@click.option("--max-model-len", type=POSITIVE, default=1024, help="Longer requests shorten the whole trace.")
@model_options
def serve_trace(file: Path | None, count: int, speed_up: float, seed: int, output: str | None, **options: Any) -> None:
    """Serve the requests of a trace as they arrive: times to tokens, throughput, peak bytes."""
    destination = None if output is None else Destination(output)
    requests = (trace.read(file) if file else trace.generate(seed, count))[:count]
    shortened, factor = load.scaled(requests, options["max_model_len"])
    with _deployed(options) as one:
        if one.ranks.size > 1:
            raise RunError(
                f"serve-trace on {one.ranks.size} ranks, whose clocks decide what each step holds", "start one process"
            )
        arrivals = f"arriving {speed_up:g} times as fast, lengths divided by {factor:.3g}"
        click.echo(f"trace: {file or 'generated'}; requests: {len(requests)}, {arrivals}")
        server = Server(one.model)
        served, seconds = load.serve(server, shortened, speed_up=speed_up, seed=seed)
        found = report.report(served, seconds, server, one)
    console = Console()
    for table in report.tables(found):
        console.print(table)
        console.print()
    for place, problem in found.problems.items():
        click.echo(f"request {place}: {problem}", err=True)
    if destination:
        settings = options | {"trace": str(file or "generated"), "speed_up": speed_up, "length_divisor": factor}
        destination.write(json.dumps(found.record() | {"settings": settings}, indent=2, default=str) + "\n")
    if found.problems:
        raise SystemExit(1)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--model", default="small", metavar="NAME|FILE", help="small, flash, pro or a config.json.")
@click.option("--layers", type=POSITIVE, help="The model's first layers only.")
@click.option("--experts", type=POSITIVE, help="The model's first routed experts only.")
@click.option("--weights-seed", type=int, default=0)
@click.option("--format", type=click.Choice(["deepseek", "transformers"]), default="deepseek", help="Whose names.")
@click.option("--quantised", is_flag=True, help="FP8 matrices and experts as the model's expert_dtype says.")
def save(folder: Path, format: str, quantised: bool, **options: Any) -> None:
    """Write random weights as a checkpoint FOLDER, for --checkpoint."""
    tensors = random_tensors(ModelOptions(**options))
    try:
        checkpoint.save(folder, tensors, tensors.config, format, quantised=quantised)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}", "pass a folder with room in it") from error
    click.echo(f"wrote {folder}: {len(tensors)} tensors, random by seed {tensors.seed}")
