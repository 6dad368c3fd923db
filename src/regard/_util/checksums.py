"""Checksums of named tensors, independent of the library that holds them."""

import hashlib
import json
from collections.abc import Sequence


class TensorDigest:
    """The SHA-256 hash of named tensors. Add them sorted by name, so that equal tensors have equal hashes.

    about: a text that the hash also covers.

    >>> from regard._util.checksums import TensorDigest
    >>> digest = TensorDigest()
    >>> digest.add("bias", "torch.float32", (1,), bytes(4))
    >>> len(digest.hexdigest())
    64
    """

    def __init__(self, about: str = "") -> None:
        self._hash = hashlib.sha256(about.encode())

    def add(self, name: str, dtype: str, shape: Sequence[int], content: bytes | memoryview) -> None:
        """Add a tensor. dtype: its name in torch, such as "torch.float32"."""
        self._hash.update(json.dumps([name, dtype, list(shape)]).encode())
        self._hash.update(content)

    def hexdigest(self) -> str:
        """Return the hash as hexadecimal digits."""
        return self._hash.hexdigest()
