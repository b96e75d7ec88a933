"""The command line. Importing it does no work and loads no optional extra."""

import typer

from onefold.cli.demo import run_demo
from onefold.cli.export import run_export
from onefold.cli.inspect import run_inspect

app = typer.Typer(
    name="onefold",
    help="ZeRO-0/1/2/3 data parallelism for PyTorch: many backwards in a step, one reduction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


app.command("demo")(run_demo)
app.command("inspect")(run_inspect)
app.command("export")(run_export)
