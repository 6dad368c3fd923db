"""Exceptions raised by regard.

    RegardError
    ├── ShapeError (ValueError)       incompatible shapes
    ├── MaskError (ValueError)        conflicting masks, or a mask that does not fit the call
    ├── DTypeError (TypeError)        wrong dtype or type
    ├── DeviceError (ValueError)      tensors on different devices
    ├── ArgumentError (ValueError)    other invalid values
    ├── StaleError (ValueError)       an input was modified in place before the weights were read
    └── MissingExtraError (ImportError)   an optional package is not installed

Each message states the actual value, the expected value and the fix.
"""


class RegardError(Exception):
    """Base class for all errors that regard raises.

    >>> import regard, torch
    >>> try:
    ...     regard.attention(torch.ones(2, 3), torch.ones(5, 4), torch.ones(5, 4))
    ... except regard.RegardError as error:
    ...     print(type(error).__name__)
    ShapeError
    """


class ShapeError(RegardError, ValueError):
    """Incompatible shapes.

    >>> import regard, torch
    >>> regard.attention(torch.ones(2, 3), torch.ones(5, 4), torch.ones(5, 4))
    Traceback (most recent call last):
    regard.errors.ShapeError: query has 3 features and key has 4; ...
    """


class MaskError(RegardError, ValueError):
    """Conflicting masks, or a mask that does not fit the call.

    >>> import regard, torch
    >>> regard.Causal() & regard.Causal(align="start")
    Traceback (most recent call last):
    regard.errors.MaskError: Causal() and Causal(align='start') align positions differently: ...
    """


class DTypeError(RegardError, TypeError):
    """Wrong dtype or type.

    >>> import regard, torch
    >>> regard.attention(torch.ones(2, 3, dtype=int), torch.ones(2, 3), torch.ones(2, 3))
    Traceback (most recent call last):
    regard.errors.DTypeError: query has dtype torch.int64; ...
    """


class DeviceError(RegardError, ValueError):
    """Tensors on different devices.

    >>> import regard, torch
    >>> regard.attention(torch.ones(2, 3), torch.ones(2, 3, device="meta"), torch.ones(2, 3))
    Traceback (most recent call last):
    regard.errors.DeviceError: query is on cpu and key on meta; ...
    """


class ArgumentError(RegardError, ValueError):
    """An argument has an invalid value.

    >>> import regard, torch
    >>> regard.Softmax(temperature=0)
    Traceback (most recent call last):
    regard.errors.ArgumentError: Softmax got temperature=0; ...
    """


class StaleError(RegardError, ValueError):
    """An input was modified in place, so the weights can no longer be recomputed.

    >>> import regard, torch
    >>> x = torch.ones(2, 3)
    >>> weights = regard.attend(x, x, x)[1]
    >>> x += 1
    >>> weights.dense()
    Traceback (most recent call last):
    regard.errors.StaleError: query was modified in place after attend(), ...
    """


class MissingExtraError(RegardError, ImportError):
    """An optional package is not installed. The message gives the pip command that installs it.

    >>> from regard._util.extras import missing
    >>> raise missing("matplotlib", "draw_mask")
    Traceback (most recent call last):
    regard.errors.MissingExtraError: draw_mask needs the package matplotlib, ... pip install "regard[plot]"
    """
