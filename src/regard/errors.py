"""What regard raises.

    RegardError
    ├── ShapeError (ValueError)       sizes that do not fit each other
    ├── MaskError (ValueError)        masks that contradict each other or do not fit the call
    ├── DTypeError (TypeError)        a tensor of the wrong kind, or something that is no tensor
    ├── DeviceError (ValueError)      tensors on different devices
    ├── ArgumentError (ValueError)    any other value that cannot be right
    └── StaleError (ValueError)       kept tensors that were changed afterwards

Each message names what it saw, what it needed, and the cure.
"""


class RegardError(Exception):
    """Every error that regard raises on purpose.

    >>> import regard, torch
    >>> try:
    ...     regard.attention(torch.ones(2, 3), torch.ones(5, 4), torch.ones(5, 4))
    ... except regard.RegardError as error:
    ...     print(type(error).__name__)
    ShapeError
    """


class ShapeError(RegardError, ValueError):
    """Sizes that do not fit each other."""


class MaskError(RegardError, ValueError):
    """Masks that contradict each other, or do not fit the call."""


class DTypeError(RegardError, TypeError):
    """A tensor of the wrong kind, or something that is no tensor at all."""


class DeviceError(RegardError, ValueError):
    """Tensors that live on different devices."""


class ArgumentError(RegardError, ValueError):
    """Any other value that cannot be right."""


class StaleError(RegardError, ValueError):
    """A kept tensor was changed in place, so that what it said can no longer be told."""
