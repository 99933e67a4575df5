"""What the base tensors of a pack are stored as, told from their headers. Imports nothing of vLLM.

A checkpoint's quantisation config is wrong in both directions in the wild (lists a module that is BF16, excludes one
that is FP8), so headers decide how a layer is loaded, and the config only says how vLLM shall run that format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from hybrid_pack.errors import DataError
from hybrid_pack.formats import e8m0
from hybrid_pack.formats.source import FP8_BLOCK, FormatName, Header, SourceFormat, Unsupported, detect
from hybrid_pack.integrations.vllm.prefixes import layer_of, stack_of, stored_names
from hybrid_pack.io.shards import read_shards

PLAIN = frozenset({"bf16", "f16", "f32"})
INTEGERS: Mapping[str, str] = {"I8": "8-bit integers", "I32": "integers packed in words"}
"""Names of formats that nothing of ours reads, by the dtype of their codes: compressed-tensors stores matrices so."""
_CODES = ("weight", "weight_packed", "blocks")
_OF_THE_CACHE = frozenset({"k_scale", "v_scale", "q_scale", "kv_scale", "output_scale", "prob_scale"})
_FP8_INDEXER = ".indexer.wk"


@dataclass(frozen=True)
class Stored:
    """How the matrices of one of vLLM's modules are stored, all in the same way.

    Attributes:
        names: Modules of the checkpoint, several where vLLM fuses them.
        form: Their format.
        fields: Headers of their tensors by field, such as ``weight_scale``: what any of them has, as the first that has
            it. Scales of the KV cache, which some store beside the matrices, are not the layer's.
        every: The fields that all of them have.
    """

    names: tuple[str, ...]
    form: SourceFormat
    fields: Mapping[str, Header]
    every: frozenset[str]

    @property
    def plain(self) -> bool:
        """Whether it is not quantised."""
        return self.form.name in PLAIN


class BaseTensors:
    """Headers of the base tensors by the names vLLM has for them.

    Args:
        headers: (dtype, shape) of every base tensor by its name in the checkpoint.
        mx_bias: Bias of compressed-tensors' MXFP4 scales, as the conversion was told.

    Attributes:
        indexer_keys: Formats of the sparse indexer's ``wk`` that vLLM dequantises while it loads, each with what it
            looks for in the name of the scale.
    """

    def __init__(self, headers: Mapping[str, Header], mx_bias: int = e8m0.BIAS) -> None:
        self._raw, self._mx_bias = dict(headers), mx_bias
        self._modules = _by_module(self._raw)
        self._mapped = 0
        self._claimed: set[str] = set()
        self._stacks: set[str] = set()
        self._made: set[str] = set()
        self.indexer_keys: Mapping[str, str] = {"fp8_block": "weight_scale_inv"}

    @classmethod
    def read(cls, root: Path, mx_bias: int = e8m0.BIAS) -> BaseTensors:
        """Read the headers of a pack's base files; a pack of nothing but experts has none."""
        if not any(root.glob("*.safetensors")):
            return cls({}, mx_bias)
        return cls({name: (t.header.dtype, t.header.shape) for name, t in read_shards(root).tensors.items()}, mx_bias)

    def digest(self) -> str:
        """Names the way everything is stored: a hash of all names, dtypes and shapes, and of the bias."""
        lines = sorted(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in self._raw.items())
        lines.append(f"bias {self._mx_bias}")
        return sha256("\n".join(lines).encode()).hexdigest()

    def rename(self, mappers: Sequence[Any]) -> None:
        """Follow the renaming of vLLM's models (``WeightsMapper``), one after the other, each once."""
        for mapper in mappers[self._mapped :]:
            self._raw = dict(mapper.apply_dict(self._raw))
            self._modules = _by_module(self._raw)
        self._mapped = len(mappers)

    def names(self, prefix: str) -> list[str]:
        """Tensors stored below a module."""
        return [name for name in self._raw if name.startswith(f"{prefix}.")]

    def forms(self, prefix: str) -> set[str]:
        """Formats of the matrices below a module; ``unknown`` for those that are none of ours."""
        below = (fields for name, fields in self._modules.items() if name.startswith(f"{prefix}."))
        found = [detect(fields, self._mx_bias) for fields in below]
        return {"unknown" if isinstance(form, Unsupported) else name_of(form[0]) for form in found}

    def experts(self, prefix: str) -> list[dict[str, Header]]:
        """Headers of the tensors of each matrix below a module whose parts have numbers: ``experts.7.up_proj``."""
        names = {name: name.removeprefix(f"{prefix}.").partition(".")[0] for name in self._modules if name != prefix}
        numbered = [name for name, part in names.items() if name.startswith(f"{prefix}.") and part.isdecimal()]
        return [{key: h for key, h in self._modules[name].items() if key not in _OF_THE_CACHE} for name in numbered]

    def stored(self, prefix: str, packed: Mapping[str, Sequence[str]]) -> Stored | None:
        """How a module is stored; None where nothing is stored under its name or its parts'.

        Raises:
            DataError: In a way that cannot be read, or its parts in different ways.
        """
        names = [name for name in (prefix, *stored_names(prefix, packed)) if name in self._modules]
        names = names[:1] if names[:1] == [prefix] else names
        self._claimed.update(names)
        for name in (prefix, *names):
            self.note(name)
        forms = {name: _form(name, self._modules[name], self._mx_bias) for name in names}
        if not forms:
            return None
        if len({(form.name, form.codes_field, form.scale_field) for form in forms.values()}) > 1:
            found = ", ".join(f"{name} is {form.name}" for name, form in forms.items())
            raise DataError("stored in different ways, and vLLM fuses them into one", where=prefix, found=found)
        parts = [
            {key: header for key, header in self._modules[name].items() if key not in _OF_THE_CACHE} for name in names
        ]
        merged = {key: header for part in reversed(parts) for key, header in part.items()}
        return Stored(tuple(names), forms[names[0]], merged, frozenset.intersection(*map(frozenset, parts)))

    def note(self, prefix: str) -> None:
        """Say that vLLM makes a module, and so has all that it is in."""
        parts = prefix.split(".")
        self._made.update(".".join(parts[:n]) for n in range(len(parts)))

    def require_built(self, prefix: str) -> None:
        """``require_claimed`` for what is complete when vLLM makes a certain module, before weights are loaded.

        Models are made layer by layer, and the head after them. Where the experts of a layer are made, the layers
        before it are complete; where the head is made, all layers beside those with experts are. A head inside a layer,
        as the MTP layers of DeepSeek have it, may come before the rest of it.

        Args:
            prefix: Of the experts, or of the head.

        Raises:
            DataError: There is one.
        """
        self.note(prefix)
        if (stack := stack_of(prefix)) is not None:
            self._stacks.add(stack)
        self.require_claimed(tuple(self._stacks), layer_of(prefix))

    def require_claimed(self, stacks: tuple[str, ...] = ("",), before: int | None = None) -> None:
        """Refuse quantised modules that no layer of vLLM's was made for, in modules that vLLM has.

        vLLM would take their codes for weights, or leave its own uninitialised. What it leaves out on purpose lies in
        modules that it does not have either: layers of other pipeline stages, MTP layers where nothing is drafted,
        indexers of layers that use another's.

        Args:
            stacks: Only modules whose names begin with one of these.
            before: Only those of layers with a lower number.

        Raises:
            DataError: There is one.
        """
        for name, fields in self._modules.items():
            number = layer_of(name)
            if not name.startswith(stacks) or (before is not None and (number is None or number >= before)):
                continue
            if name in self._claimed or name.rpartition(".")[0] not in self._made or ".experts." in f"{name}.":
                continue
            found = _detected(fields, self._mx_bias)
            if isinstance(found, Unsupported) or found.name in PLAIN:
                continue
            if name.endswith(_FP8_INDEXER) and self._reads_indexer(found, fields):
                continue
            raise DataError(
                "this vLLM can load it only unquantised", where=name, expected="BF16", found=name_of(found),
                hint="dequantise it in the source and convert again",
            )  # fmt: skip

    def _reads_indexer(self, form: SourceFormat, fields: Mapping[str, Header]) -> bool:
        """Whether vLLM's DeepSeek dequantises the indexer's keys while it loads.

        It takes whatever has two dimensions for scales of square blocks, whole ones.
        """
        name = self.indexer_keys.get(form.name)
        if name is None or form.scale_field is None or name not in form.scale_field:
            return False
        scale, codes = fields[form.scale_field][1], fields[form.codes_field][1]
        if form.name == "fp8_row":
            return len(scale) == 1
        return len(scale) == 2 and not any(size % FP8_BLOCK for size in codes)


def name_of(form: SourceFormat) -> str:
    """A format's name, and the bias of its scales where it is none that vLLM knows."""
    return form.name if form.scale_bias == e8m0.BIAS else f"{form.name} with bias {form.scale_bias}"


def _by_module(headers: Mapping[str, Header]) -> dict[str, dict[str, Header]]:
    modules: dict[str, dict[str, Header]] = {}
    for name, header in headers.items():
        module, _, field = name.rpartition(".")
        modules.setdefault(module, {})[field] = header
    return {name: fields for name, fields in modules.items() if _has_matrix(fields)}


def _has_matrix(fields: Iterable[str]) -> bool:
    return any(name in fields for name in _CODES)


def _form(name: str, fields: Mapping[str, Header], mx_bias: int) -> SourceFormat:
    if "weight" in fields and len(fields["weight"][1]) != 2 and fields["weight"][0] in ("BF16", "F16", "F32"):
        return SourceFormat("bf16", "weight", None, None, 0, row_group=0)  # a norm or a convolution
    found = _detected(fields, mx_bias)
    if isinstance(found, Unsupported):
        raise DataError(f"stored in a way that cannot be read: {found.reason}", where=name)
    return found


def _detected(fields: Mapping[str, Header], mx_bias: int) -> SourceFormat | Unsupported:
    """A format of ours, or integers."""
    found = detect(fields, mx_bias)
    if not isinstance(found, Unsupported):
        return found[0]
    codes = next((name for name in _CODES if name in fields), "")
    name = INTEGERS.get(fields[codes][0]) if codes else None
    # No expert is stored so; the name is one more of those that only the plugin's base tensors have.
    return found if name is None else SourceFormat(cast("FormatName", name), codes, "weight_scale", None, 0)
