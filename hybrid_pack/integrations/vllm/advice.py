"""The command that makes a pack for other ranks, from what the manifest knows. Imports nothing of vLLM."""

from __future__ import annotations

from hybrid_pack.io.manifest import is_gated
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.sharding import legal_ep, legal_tp, padded_intermediate, why_not_ep, why_not_tp


def command_for(manifest: Manifest, tp: int, ep: int) -> str:
    """How to make a pack of the same model, with the same options, for other sizes.

    Args:
        manifest: Of the pack that does not fit.
        tp: Tensor-parallel size wanted.
        ep: Expert-parallel size wanted.

    Returns:
        The command, and what has to be put into it; for sizes that cannot be, why, and those that can.
    """
    sizes, gated = manifest.geometry, is_gated(manifest)
    hidden, intermediate = sizes.hidden_size, sizes.intermediate_size
    if (reason := why_not_ep(sizes.num_experts, ep)) is not None:
        return f"no pack can be for ep {ep}: {reason}; legal sizes: {_listed(legal_ep(sizes.num_experts))}"
    pad, note = sizes.intermediate_size_padded != intermediate, ""
    if (reason := why_not_tp(hidden, intermediate, tp, gated)) is not None:
        legal = _listed(legal_tp(hidden, intermediate, gated=gated))
        # A size that does not divide I is one at which vLLM cannot split the layer either.
        padded = None if intermediate % tp else padded_intermediate(hidden, intermediate, tp, gated)
        if padded is None:
            return f"no pack can be for tp {tp}: {reason}; legal sizes: {legal}"
        pad, note = True, f"; --pad makes the intermediate size {padded}, and tp {legal} need none"
    command = " ".join(["hybrid-pack convert SRC --out OUT", f"--tp {tp} --ep {ep}", *_options(manifest, pad=pad)])
    return (
        f"make one for these: `{command}` (SRC is {manifest.source.name}; and the --bit-map it was made with, if it "
        f"was given one{note})"
    )


def _options(manifest: Manifest, *, pad: bool) -> list[str]:
    """Options of ``convert`` that are not the defaults, as far as a manifest has them."""
    given = manifest.report.options
    flags = {
        f"--kept-format {given.kept_format}": given.kept_format is not None,
        f"--search {given.search}": given.search != "mse",
        "--importance FILE": given.importance is not None,
        "--hessians FOLDER": given.hessians is not None,
        "--requantize": given.requantize,
        f"--mx-bias {given.mx_bias}": given.mx_bias != 127,
        "--on-scale-mismatch requantize": bool(manifest.report.experts_requantized),
        "--pad": pad,
    }
    return [flag for flag, on in flags.items() if on]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"
