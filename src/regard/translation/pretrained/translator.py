"""A translator for pretrained models. It selects its alignment head on first use."""

from typing import TYPE_CHECKING, Any

from regard.models.configs import Precision
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.pretrained.alignment_head import guess_alignment_head
from regard.translation.pretrained.loader import PretrainedFolder
from regard.translation.translator import Translator

if TYPE_CHECKING:
    from regard.models.transformer import Transformer


class PretrainedTranslator(Translator):
    """A translator loaded from a folder in Hugging Face format.

    model, folder: the model, and the settings and vocabularies in its folder.

    Its alignment head is guessed on first use; see `guess_alignment_head`. To select it with sentence pairs:
    `translator.alignment_head = select_alignment_head(translator.model, translator.tokens, pairs)`.
    """

    _head: AlignmentHead | None = None
    domain = None  # nothing is known about its training text

    def __init__(
        self, model: "Transformer", folder: PretrainedFolder, *, dtype: Precision | None = None
    ) -> None:
        self.folder = folder
        config: dict[str, Any] = {"pretrained": folder.layout.family}
        super().__init__(model, folder.tokens, config=config, dtype=dtype)
        self._head = None

    @property
    def alignment_head(self) -> AlignmentHead:
        """The layer and heads from which alignments are read."""
        if self._head is None:
            self._head = guess_alignment_head(self.model, self.tokens)
        return self._head

    @alignment_head.setter
    def alignment_head(self, head: AlignmentHead) -> None:
        self._head = head
