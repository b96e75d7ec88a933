"""One row of the table of keys: what becomes of a key that a config gives."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

AUTO = "auto"
"""What stands in a JSON for a value that another tool is to fill in."""


class Rule(Enum):
    """What happens to a key that is given."""

    HONOURED = "honoured"
    ALWAYS = "always"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table.

    Attributes:
        rule: the disposition.
        text: HONOURED: what is expected; ALWAYS: why nothing follows; REFUSED: why it is refused.
        kind: bool, int, number, str or any: the values an ALWAYS key takes; section: a mapping.
        off: values that ask for nothing; null and "auto" always do, except where HONOURED.
        field: HONOURED: the field of ``Config`` (a dotted one is inside an ``Entry`` or the like).
        derivable: HONOURED: "auto" can be derived, so it counts as not given.
        spellings: HONOURED: from what the JSON may say (strings in lower case) to what the field
            says; None there counts as not given. Without it the field has the JSON's own value.
        names: section: the dotted names inside it; None if its contents are not looked at.
        switches: section: the names that turn it on; with none, being there turns it on.
    """

    rule: Rule
    text: str
    kind: str = "any"
    off: tuple[object, ...] = (False,)
    field: str = ""
    derivable: bool = False
    spellings: Mapping[object, object] | None = None
    names: frozenset[str] | None = None
    switches: tuple[str, ...] = ()

    def is_off(self, value: object) -> bool:
        """Tell whether a value asks for nothing."""
        return value is None or value == AUTO or any(value == off for off in self.off)

    def takes(self, value: object) -> bool:
        """Tell whether a value is of this key's kind; a float such as 5e8 is an int in JSON."""
        if self.kind in ("bool", "str"):
            return isinstance(value, bool if self.kind == "bool" else str)
        if self.kind not in ("int", "number"):
            return True
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        fits = whole if self.kind == "int" else isinstance(value, int | float)
        return fits and not isinstance(value, bool)

    def meaning(self, value: object) -> object:
        """Return what the field says for a value of the JSON.

        Raises:
            KeyError: the value is not among ``spellings``.
        """
        if self.spellings is None:
            return value
        if not isinstance(value, str | bool):  # True is no other way to write 1
            raise KeyError(value)
        return self.spellings[value.lower() if isinstance(value, str) else value]


def always(text: str, kind: str = "bool") -> Key:
    """Return the row of a key that is accepted without effect."""
    return Key(Rule.ALWAYS, text, kind)


def refused(text: str, *off: object) -> Key:
    """Return the row of a key that is refused unless its value is one of ``off``."""
    return Key(Rule.REFUSED, text, off=off or (False,))


def honoured(
    field: str,
    text: str,
    spellings: Mapping[object, object] | None = None,
    *,
    derivable: bool = False,
) -> Key:
    """Return the row of a key that sets a field of ``Config``."""
    return Key(Rule.HONOURED, text, field=field, derivable=derivable, spellings=spellings)


def section(key: Key, names: str | None, *switches: str) -> Key:
    """Return the row of a section whose keys share the fate of ``key``."""
    known = None if names is None else frozenset(names.split())
    return replace(key, kind="section", names=known, switches=switches)


def rows(prefix: str, names: str, key: Key) -> dict[str, Key]:
    """Return the same row for several keys of one section."""
    return {f"{prefix}.{name}" if prefix else name: key for name in names.split()}
