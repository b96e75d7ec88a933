"""``python -m onefold.cli`` is ``onefold``."""

from onefold.cli import app

app(prog_name="onefold")
