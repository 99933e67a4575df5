"""Keeps a draft model's layers apart from those of the model it drafts for. Imports nothing of vLLM."""

from __future__ import annotations

from hybrid_pack.errors import DataError

_HINT = "this vLLM numbers the draft's layers anew; serve without --speculative-config"


def is_draft(tag: str) -> bool:
    """Whether vLLM is making a draft model, by its ``compilation.backends.model_tag``.

    That is ``backbone`` for the model itself and for parts of it something of their own (``self_decoder``); for drafts
    it is one of ``eagle_head`` (MTP too), ``dspark_head``, ``dflash_head``, ``medusa_head`` and ``draft_model``.
    """
    return tag.endswith("_head") or tag == "draft_model"


class Decoder:
    """The decoder layers of the model that is served, as they are made.

    Args:
        layers: How many there are; None where the config is that of a draft model with a folder of its own.
    """

    def __init__(self, layers: int | None) -> None:
        self.layers = layers
        self._made: dict[int, str] = {}

    def require_own(self, number: int, prefix: str, draft: bool) -> None:
        """Refuse experts that would be given another layer's.

        MTP layers that come after the decoder's, as DeepSeek's and GLM's do, are their own.

        Args:
            number: Of the layer, as the name says.
            prefix: vLLM's name of the experts.
            draft: Whether a draft model is being made.

        Raises:
            DataError: A draft's layer has the number of one of the decoder's, or two modules have the same number.
        """
        if draft and self.layers is not None and number < self.layers:
            raise DataError(
                "a draft model asks for experts by the number of a decoder layer", where=prefix,
                expected=f"layer {self.layers} or one after it", found=f"layer {number}", hint=_HINT,
            )  # fmt: skip
        if self._made.setdefault(number, prefix) != prefix:
            raise DataError(
                "two modules ask for the experts of one layer", where=prefix, expected=self._made[number],
                found=f"layer {number} again", hint=_HINT,
            )  # fmt: skip
