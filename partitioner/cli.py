"""The command ``partition``. The only file that prints or exits."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from partitioner.errors import EXIT_DONE, EXIT_INFEASIBLE, EXIT_OUR_FAULT, PartitionerError, UsageError

if TYPE_CHECKING:
    from partitioner.pipeline import Request

INTERRUPTED = 130
DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32",
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
}  # fmt: skip


class _DefaultVerb(click.Group):
    """``partition MODEL ...`` is ``partition plan MODEL ...``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((a for a in args if not a.startswith("-")), None)
        asks_itself = args and args[0] in ("--help", "-h", "--version", "--debug")
        if args and not asks_itself and first not in self.commands:
            args = ["plan", *args]
        return super().parse_args(ctx, args)


def _pairs(name: str, values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for text in values:
        key, equals, value = text.rpartition("=")
        if not equals or not key or not value:
            raise UsageError(f"{name} {text!r} is not of the form name=value")
        pairs.append((key, value))
    return tuple(pairs)


def _dims(values: Sequence[str]) -> dict[str, int]:
    dims = {}
    for key, text in _pairs("--dim", values):
        if not text.isdigit() or not int(text):
            raise UsageError(f"--dim {key}={text}: {text!r} is not a whole number above zero")
        dims[key] = int(text)
    return dims


def _request(model: str, pass_names: str | None, given: dict[str, Any]) -> Request:
    """The options of ``partition plan`` as what the pipeline takes."""
    from partitioner.config import resolve_cluster
    from partitioner.pipeline import DEFAULT_GAP, Request
    from partitioner.program import Recipe

    cluster, defaults = resolve_cluster(
        file=given["cluster_file"],
        **{key: given[key] for key in ("gpus", "gpu", "gpus_per_node", "memory", "host_memory")},
        **{key: given[key] for key in ("intra_bandwidth", "inter_bandwidth")},
    )
    recipe = Recipe(
        batch=given["batch"],
        seq=given["seq"],
        compute_dtype=DTYPES[given["dtype"]],
        reduce_dtype=DTYPES[given["reduce_dtype"]],
        optimizer=given["optimizer"],
        loss=given["loss"],
        dims=_dims(given["dims"]),
    )
    return Request(
        spec=model,
        cluster=cluster,
        recipe=recipe,
        pins=_pairs("--pin", given["pins"]),
        gap=DEFAULT_GAP if given["gap"] is None else given["gap"],
        passes=tuple(n.strip() for n in pass_names.split(",") if n.strip()) if pass_names else None,
        defaults=defaults,
    )


@click.group(
    cls=_DefaultVerb,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="partition MODEL ... is short for partition plan MODEL ...; partition plan --help lists its options.",
)
@click.version_option(package_name="gatherpoint")
def cli() -> None:
    """Plan fully sharded training (FSDP2 / ZeRO-3): exact plans, generated code, and proof, without a GPU.

    \b
    partition examples/onnx/tiny_llama.onnx --gpus 8
    partition examples/models/llama.py:llama3_8b --gpus 64 --gpu h100-sxm-80gb -o llama_8b
    partition verify llama_8b --ranks 2
    """


@cli.command(
    epilog="Exit codes: 0 a plan was made, 2 wrong use, 3 nothing fits (the report says what would), 1 our fault."
)
@click.argument("model", metavar="MODEL")
@click.option("--gpus", type=int, help="How many GPUs in all.")
@click.option("--gpu", help="Kind of GPU: see partition hardware.  [default: h100-sxm-80gb]")
@click.option("--gpus-per-node", type=int, help="GPUs that share a node's fast links.  [default: 8, or all if fewer]")
@click.option("--memory", help="Budget of one GPU, such as 80GiB.  [default: capacity less a reserve]")
@click.option("--host-memory", help="Host memory of a node for offloaded state.  [default: 1TiB]")
@click.option("--intra-bandwidth", help="One GPU's link inside the node, one way, such as 450GB/s.")
@click.option("--inter-bandwidth", help="One GPU's share of the network, one way, such as 50GB/s.")
@click.option(
    "--cluster", "cluster_file", type=click.Path(path_type=Path), help="TOML file with these options as keys."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Sequences or samples per GPU and micro-batch.",
)
@click.option(
    "--seq",
    type=click.IntRange(min=1),
    help="Tokens per sequence.  [default: the factory's own; 4096 for ONNX, or all its positions]",
)
@click.option("--dim", "dims", multiple=True, metavar="NAME=VALUE", help="Size of a symbolic dimension of the model.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="bf16",
    show_default=True,
    help="Gathered parameters and activations.",
)
@click.option(
    "--reduce-dtype", type=click.Choice(list(DTYPES)), default="fp32", show_default=True, help="Gradient reduction."
)
@click.option("--optimizer", type=click.Choice(["adamw", "sgd"]), default="adamw", show_default=True)
@click.option(
    "--loss",
    type=click.Choice(["auto", "output", "mean", "cross_entropy", "mse"]),
    default="auto",
    show_default=True,
    help="Loss, if forward does not return one.",
)
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="UNIT=CHOICE",
    help="Fix a unit, module or parameter to reshard, keep or replicate.",
)
@click.option(
    "--gap", type=click.FloatRange(min=0, max=1), help="Relative gap at which the solver may stop.  [default: 0.01]"
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder to write: plan, code, weights.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON on stdout.")
@click.option(
    "--passes", "pass_names", metavar="NAMES", help="Run these passes only, comma separated; 'list' shows them."
)
@click.option("--print-ir-after", multiple=True, metavar="NAME", help="Print the graph after a pass, to stderr.")
@click.option("--print-ir-after-all", is_flag=True, help="Print the graph after every pass, to stderr.")
def plan(
    model: str,
    out: Path | None,
    as_json: bool,
    pass_names: str | None,
    print_ir_after: tuple[str, ...],
    print_ir_after_all: bool,
    **given: Any,
) -> int:
    """Plan MODEL: model.onnx, model.pt2, path/to/file.py:factory or package.module:factory.

    \b
    partition model.onnx --gpus 8
    partition models.py:llama --gpus 64 --gpus-per-node 8 --memory 72GiB --json
    partition models.py:llama --gpus 8 --pin layers.0=keep -o out
    """
    if pass_names == "list":
        return _list_passes(as_json)
    from partitioner.emit.outcome import check_folder, write_outcome
    from partitioner.pipeline import check_pass_names, plan_model
    from partitioner.report.text import render

    check_pass_names(print_ir_after)
    request = _request(model, pass_names, given)
    if out is not None:
        check_folder(out)
    errors = Console(stderr=True)

    def show_ir(name: str, program: Any) -> None:
        if print_ir_after_all or name in print_ir_after:
            from partitioner.printer import print_program

            click.echo(f"// after {name}\n{print_program(program)}", err=True)

    with errors.status("reading the model") if errors.is_terminal else nullcontext() as status:
        update: Callable[[str], None] = status.update if status is not None else lambda _: None
        outcome = plan_model(request, progress=update, observer=show_ir)
        if out is not None and outcome.plan.status != "infeasible":
            update(f"writing {out}")
            write_outcome(out, outcome.plan, outcome.program)
    if as_json:
        click.echo(outcome.plan.to_json(timings=True), nl=False)
    else:
        console = Console()
        console.print(render(outcome.plan), highlight=False)
        if out is not None and outcome.plan.status != "infeasible":
            console.print(f"\nWrote {out}: next, partition verify {out} --ranks 2", highlight=False, markup=False)
        elif outcome.plan.status != "infeasible":
            console.print("\nNothing was written; add -o OUT for the plan and the code.", highlight=False, markup=False)
    return EXIT_INFEASIBLE if outcome.plan.status == "infeasible" else EXIT_DONE


@cli.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Processes to start on this machine."
)
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="Dtype to compute in."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout.")
def verify(out: Path, ranks: int, dtype: str, as_json: bool) -> int:
    """Train one step of OUT on real gloo processes; compare loss and every gradient with the unsharded model.

    \b
    partition verify llama_8b --ranks 4
    """
    from partitioner.parity import verify_folder
    from partitioner.report.parity import render_parity

    errors = Console(stderr=True)
    with errors.status("starting processes") if errors.is_terminal else nullcontext() as status:
        update: Callable[[str], None] = status.update if status is not None else lambda _: None
        report = verify_folder(out, ranks, dtype=DTYPES[dtype], progress=update)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        Console().print(render_parity(report), highlight=False)
    return EXIT_DONE if report.equal else EXIT_OUR_FAULT


@cli.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the catalogue as JSON on stdout.")
def hardware(name: str | None, as_json: bool) -> int:
    """List the GPUs and links that plans can be made for, or one of them with its sources."""
    from partitioner.report.hardware import hardware_dict, render_hardware

    if as_json:
        click.echo(json.dumps(hardware_dict(name), indent=2))
    else:
        Console().print(render_hardware(name), highlight=False)
    return EXIT_DONE


def _list_passes(as_json: bool) -> int:
    from partitioner.pipeline import pass_table

    rows = pass_table()
    if as_json:
        click.echo(json.dumps([{"stage": a, "name": b, "summary": c} for a, b, c in rows], indent=2))
    for stage, name, text in () if as_json else rows:
        click.echo(f"{stage:8} {name:18} {text}")
    return EXIT_DONE


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON on stdout.")
def passes(as_json: bool) -> int:
    """List the passes in the order in which they run."""
    return _list_passes(as_json)


def _report(error: PartitionerError) -> int:
    click.echo(f"partition: {error.what}", err=True)
    if error.hint:
        click.echo(f"  {error.hint}", err=True)
    return error.exit_code


def main(args: Sequence[str] | None = None) -> None:
    """Entry point: run, and turn every outcome into an exit code."""
    try:
        code = cli.main(args=None if args is None else list(args), prog_name="partition", standalone_mode=False)
    except PartitionerError as error:
        code = _report(error)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("partition: interrupted; nothing was written", err=True)
        code = INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout has gone, as with | head
        code = EXIT_DONE
    except Exception as error:
        traceback.print_exc()
        click.echo(
            f"partition: internal error, {type(error).__name__}: {error}\n  please report it with the lines above",
            err=True,
        )
        code = EXIT_OUR_FAULT
    sys.exit(code)
