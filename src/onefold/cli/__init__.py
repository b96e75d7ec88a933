"""The command line: ``onefold demo``. Importing it does no work and loads no optional extra."""

import typer

from onefold.cli.demo import run_demo

app = typer.Typer(
    name="onefold",
    help="ZeRO-0/1/2/3 data parallelism for PyTorch: many backwards in a step, one reduction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def _main() -> None:
    """Keeps ``demo`` a subcommand while it is the only one."""


app.command("demo")(run_demo)
