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
    """Sizes that do not fit each other.

    >>> import regard, torch
    >>> regard.attention(torch.ones(2, 3), torch.ones(5, 4), torch.ones(5, 4))
    Traceback (most recent call last):
    regard.errors.ShapeError: query has 3 features and key has 4; ...
    """


class MaskError(RegardError, ValueError):
    """Masks that contradict each other, or do not fit the call.

    >>> import regard, torch
    >>> regard.Causal() & regard.Causal(align="start")
    Traceback (most recent call last):
    regard.errors.MaskError: Causal() and Causal(align='start') count positions from different ends: ...
    """


class DTypeError(RegardError, TypeError):
    """A tensor of the wrong kind, or something that is no tensor at all.

    >>> import regard, torch
    >>> regard.attention(torch.ones(2, 3, dtype=int), torch.ones(2, 3), torch.ones(2, 3))
    Traceback (most recent call last):
    regard.errors.DTypeError: query is of torch.int64; ...
    """


class DeviceError(RegardError, ValueError):
    """Tensors that live on different devices.

    >>> import regard, torch
    >>> regard.attention(torch.ones(2, 3), torch.ones(2, 3, device="meta"), torch.ones(2, 3))
    Traceback (most recent call last):
    regard.errors.DeviceError: query is on cpu and key on meta; ...
    """


class ArgumentError(RegardError, ValueError):
    """Any other value that cannot be right.

    >>> import regard, torch
    >>> regard.Softmax(temperature=0)
    Traceback (most recent call last):
    regard.errors.ArgumentError: Softmax got temperature=0; ...
    """


class StaleError(RegardError, ValueError):
    """A kept tensor was changed in place, so that what it said can no longer be told.

    >>> import regard, torch
    >>> x = torch.ones(2, 3)
    >>> weights = regard.attend(x, x, x)[1]
    >>> x += 1
    >>> weights.dense()
    Traceback (most recent call last):
    regard.errors.StaleError: the query that these weights were made of was changed in place afterwards, ...
    """
