"""Which optimizers may update flat pieces of parameters, and why others may not.

Every rank's optimizer sees one flat piece of each parameter, never its shape nor the whole of it.
The result is that of the whole parameters if, and only if, an element's update depends on nothing
but that element, its gradient, its state, and numbers that are the same for all (step, lr, betas).
"""

from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

KNOWN = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, ASGD, Rprop)
"""The elementwise optimizers of torch."""

NOT_ELEMENTWISE = {
    **dict.fromkeys(("lamb", "fusedlamb", "lars"), "it scales by norms of whole parameters"),
    **dict.fromkeys(("adafactor", "muon", "shampoo", "soap"), "it works on whole matrices"),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "it scales by the parameters' full shapes"),
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), "it reduces gradients by itself"),
    "lbfgs": "it searches along a line through all parameters at once",
    "sparseadam": "it takes sparse gradients, and flat buffers are dense",
}
"""Names in lower case, and why no optimizer of that name can work on pieces."""


def check_elementwise(optimizer: Optimizer, *, elementwise: bool) -> None:
    """Refuse an optimizer whose update of a flat piece is not that of the whole parameter.

    torch's elementwise classes are known. A class of anyone else, a subclass of torch's too (it may
    override ``step``), passes on the caller's word. One that has a name of ``NOT_ELEMENTWISE`` in
    its own or a base's passes on nobody's. Nothing is built, changed or sent.

    Args:
        optimizer: the user's, before or after it was re-pointed.
        elementwise: the caller's word, ``initialize(elementwise=)``.

    Raises:
        ValueError: the class is not elementwise or not known to be; or a param group is
            ``differentiable``.
    """
    found = _refusal(type(optimizer))
    if found is not None:
        name, reason = found
        raise ValueError(
            f"initialize(optimizer=): expected an elementwise optimizer, got {name}: {reason}. "
            "Every rank updates flat pieces of the parameters only, whatever elementwise says. "
            "Use AdamW or another elementwise one."
        )
    if not (elementwise or is_of_torch(type(optimizer))):
        cls = type(optimizer)
        raise ValueError(
            f"initialize(optimizer=): expected a class of torch.optim that is known to be "
            f"elementwise, got {cls.__module__}.{cls.__qualname__}. Every rank updates flat pieces "
            "of the parameters. If the update of each element depends on nothing but that "
            "element's gradient and state, pass initialize(elementwise=True); if it reads shapes, "
            "norms or other elements, use another optimizer."
        )
    for position, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(
                f"initialize(optimizer=): expected differentiable=False, got True in param group "
                f"{position}. Masters are copied into the model outside of autograd, so no "
                "gradient could flow through step(). Leave it out."
            )


def is_of_torch(cls: type) -> bool:
    """One of ``KNOWN``, or a subclass that torch defines."""
    return issubclass(cls, KNOWN) and cls.__module__.partition(".")[0] == "torch"


def _refusal(cls: type) -> tuple[str, str] | None:
    """The name under which a class, or a base of it, is refused, and the reason."""
    for one in cls.__mro__:
        # A lambda is no LAMB.
        name = one.__name__.lower().replace("lambda", "")
        # The longest name first: OneBitLamb is not refused for its norms.
        for part in sorted(NOT_ELEMENTWISE, key=len, reverse=True):
            if part in name:
                return one.__name__, NOT_ELEMENTWISE[part]
    return None
