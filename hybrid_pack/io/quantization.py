"""How experts that are stored in another format than their tier's get there: the options, opened and explained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.formats.nf3 import GROUP
from hybrid_pack.io.calibration import Statistics, Wanted
from hybrid_pack.io.checkpoint import Checkpoint
from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.digest import blake3_digest, blake3_file
from hybrid_pack.io.hessians import open_hessians
from hybrid_pack.io.importance import open_importance
from hybrid_pack.quantize import Search
from hybrid_pack.quantize.book import nf3_book


@dataclass(frozen=True)
class QuantizeOptions:
    """How experts that are stored in another format than their tier's get there.

    Attributes:
        search: How scales are chosen.
        importance: File of mean squares of the matrices' input channels, for ``weighted`` and no other search.
        hessians: Folder of their second moments; the tail is then quantised by GPTQ.
        device: ``cpu``, or ``cuda`` for a GPU.
    """

    search: Search = "mse"
    importance: Path | None = None
    hessians: Path | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Quantization:
    """The options, with the files they name opened.

    Attributes:
        search: As in the options.
        importance: None without one.
        hessians: Likewise.
        importance_digest: Of its file.
        hessians_digest: Of the digests of its files.
        device: As in the options.
        statistics: By layer, what its experts use of importances and Hessians: a digest. Layers that use none are not
            in it.
    """

    search: Search
    importance: Statistics | None
    hessians: Statistics | None
    importance_digest: str | None
    hessians_digest: str | None
    device: str
    statistics: Mapping[int, str] = field(default_factory=dict)

    def require_unchanged(self, layer: int) -> None:
        """Hold the files that the experts of a layer were quantised with against what they were when they were read.

        Raises:
            DataError: One was written to since.
            EnvironmentFailure: It is gone.
        """
        for given in (self.importance, self.hessians):
            if given is not None:
                given.require_unchanged(layer)


def made_experts(source: Checkpoint, layers: Iterable[int], tiers: Iterable[str]) -> dict[int, list[int]]:
    """Experts of these tiers with a matrix that is not stored in the tier's format, by layer."""
    found: dict[int, list[int]] = {}
    for index in layers:
        layer = source.layers[index]
        for tier in tiers:
            target = "nf3" if tier == "tail" else str(layer.kept_format)
            for expert in layer.tail if tier == "tail" else layer.kept:
                if not all(m.native_to(target) for m in layer.experts[expert].matrices):
                    found.setdefault(index, []).append(expert)
    return found


def require_groups(source: Checkpoint, layers: Iterable[int]) -> None:
    """Columns of quantised down matrices are whole groups, which no padding can make of them.

    Raises:
        DataError: They are not.
    """
    made = made_experts(source, layers, ("kept", "tail")) if source.intermediate % GROUP else {}
    if made:
        layer, experts = next(iter(made.items()))
        raise DataError(
            f"layer {layer} expert {experts[0]} would have to be quantised in groups of {GROUP} columns",
            where=source.root,
            expected=f"an intermediate size that is a multiple of {GROUP}",
            found=source.intermediate,
            hint="--pad cannot fill up a group that the size cuts, since NF3 has no code for zero",
        )


def _require_levels(source: Checkpoint) -> None:
    """The quantiser takes the model's NF3 levels.

    Raises:
        DataError: It does not.
    """
    try:
        nf3_book(source.config.nf3_levels)
    except ValueError as error:
        raise DataError("nf3_levels", where=source.root / CONFIG, found=error) from None


def open_quantization(source: Checkpoint, layers: Iterable[int], options: QuantizeOptions) -> Quantization:
    """Open what the options name.

    Raises:
        UsageError: ``weighted`` without importances, or importances without it; a device that is none.
        DataError: They are not those of this checkpoint.
    """
    if (options.search == "weighted") != (options.importance is not None):
        given = "none" if options.importance is None else options.importance
        raise UsageError(
            "--search weighted and --importance go together",
            where="--search",
            found=f"search {options.search}, importance {given}",
        )
    layers = tuple(layers)
    made = made_experts(source, layers, ("kept", "tail"))
    if any(e in source.layers[i].tail for i, experts in made.items() for e in experts):
        _require_levels(source)
    channels = {"gate_up": source.hidden, "down": source.intermediate}
    importance = hessians = importance_digest = hessians_digest = None
    used: dict[int, dict[str, str]] = {}
    if options.importance is not None:
        searched = made if options.hessians is None else made_experts(source, layers, ("kept",))
        importance = open_importance(options.importance, Wanted(searched, channels))
        scanned = importance.scan()
        importance_digest = scanned.files[0] if scanned.files else blake3_file(options.importance)
        for layer, digest in scanned.layers.items():
            used.setdefault(layer, {})["importance"] = digest
    if options.hessians is not None:
        hessians = open_hessians(options.hessians, Wanted(made_experts(source, layers, ("tail",)), channels))
        scanned = hessians.scan()
        hessians_digest = blake3_digest(json.dumps(scanned.files).encode())
        for layer, digest in scanned.layers.items():
            used.setdefault(layer, {})["hessians"] = digest
    statistics = {layer: blake3_digest(json.dumps(digests).encode()) for layer, digests in used.items()}
    return Quantization(
        options.search, importance, hessians, importance_digest, hessians_digest, options.device, statistics
    )


EXPECTED_DB: Mapping[tuple[str, str], float] = {
    ("nf3", "mse"): 15.8, ("nf3", "absmax"): 14.9,
    ("nvfp4", "mse"): 21.8, ("nvfp4", "absmax"): 20.4,
    ("mxfp4", "mse"): 19.1, ("mxfp4", "absmax"): 18.8,
}  # fmt: skip
"""SQNR of normally distributed weights, sigma 0.02: ``benchmarks/results/quantise.json``. MXFP4 by absmax has 18.6 to
18.9, by where sigma lies between two powers of two."""
FROM_COARSE_DB: Mapping[tuple[str, str, str], float | None] = {
    ("mxfp4", "mxfp8", "mse"): 18.6, ("mxfp4", "mxfp8", "absmax"): 18.6,
    ("nf3", "mxfp4", "mse"): None, ("nf3", "mxfp4", "absmax"): None, ("mxfp4", "nvfp4", "absmax"): None,
}  # fmt: skip
"""The same where it is another from this format, by tier, format and search. None: sigma, and how it was rounded to
that format, make more than 0.3 of a difference (14.0 to 15.3, 15.6 to 16.3, 17.8 to 19.2)."""
ORIGINAL_DB: Mapping[tuple[str, str, str], float] = {
    ("nf3", "nvfp4", "mse"): 14.4, ("nf3", "nvfp4", "absmax"): 13.8,
    ("nf3", "mxfp4", "mse"): 14.0, ("nf3", "mxfp4", "absmax"): 13.4,
    ("mxfp4", "nvfp4", "mse"): 16.8, ("mxfp4", "nvfp4", "absmax"): 16.7,
}  # fmt: skip
"""Against the normally distributed weights that four bits were made from, by tier, format and search. Within 0.3 over
two octaves of sigma, where they were made by absmax: NVFP4 with the largest weight over 2688; MXFP4 rounded down, up or
to nearest."""


def statistics_notes(quantization: Quantization) -> list[str]:
    """How many experts use what their layer shares."""
    return [line for given in (quantization.importance, quantization.hessians) if given for line in given.notes]


def expectations(source: Checkpoint, layers: Iterable[int], quantization: Quantization) -> list[str]:
    """What will be quantised, from what, and what error that should mean; said before the work starts."""
    found: dict[tuple[str, str, bool], Counter[str]] = {}
    for index in layers:
        layer = source.layers[index]
        for tier, ids in (("nf3", layer.tail), (str(layer.kept_format), layer.kept)):
            for expert in ids:
                names: set[str] = {m.format.name for m in layer.experts[expert].matrices}
                if names != {tier}:
                    worst = next((name for name in ("mxfp4", "nvfp4") if name in names - {tier}), "")
                    counts = found.setdefault((tier, worst, tier in names), Counter())
                    counts["+".join(sorted(names)).upper()] += 1
    return [_expectation(*key[:2], counts, quantization) for key, counts in sorted(found.items())]


def _against_source(tier: str, names: Iterable[str], search: str) -> float | None:
    """SQNR to expect of experts in these formats; None where it is not known well enough.

    Matrices that are moved have no error, and no figure is for experts of which they are a part.
    """
    usual = EXPECTED_DB.get((tier, search))
    expected = {None if name == tier else FROM_COARSE_DB.get((tier, name, search), usual) for name in names}
    return expected.pop() if len(expected) == 1 else None


def _expectation(tier: str, four_bit: str, counts: Counter[str], quantization: Quantization) -> str:
    number = counts.total()
    kinds = " or ".join(counts)
    if len(counts) > 3:
        what = {False: "formats", True: "mixtures"}
        whats = " and ".join(what[mixed] for mixed in sorted({"+" in kind for kind in counts}))
        kinds = f"{len(counts)} {whats}, such as {next(iter(counts))}"
    subject = f"{number} experts become" if number > 1 else "1 expert becomes"
    method = "GPTQ" if tier == "nf3" and quantization.hessians is not None else f"search {quantization.search}"
    text = f"{subject} {tier.upper()} from {kinds}"
    if (tier, four_bit) == ("nvfp4", "mxfp4"):
        return f"{text}: exactly where their scales allow, else quantised ({method})"
    search = "" if method == "GPTQ" else quantization.search  # GPTQ's error depends on the Hessians
    names = {name for kind in counts for name in kind.lower().split("+")}
    expected = _against_source(tier, names, search)
    text += f" ({method})" + ("" if expected is None else f": about {expected} dB")
    if not four_bit:
        return text
    origin = f"the weights the {four_bit.upper()} was made from"
    advice = "convert the original checkpoint if you have it"
    original = ORIGINAL_DB.get((tier, four_bit, search)) if names == {four_bit} else None
    if original is None:
        return f"{text}, with more error against {origin}: {advice}"
    against = f", but about {original}" if expected is not None else f": about {original} dB"
    return f"{text}{against} against {origin}: {advice}"
