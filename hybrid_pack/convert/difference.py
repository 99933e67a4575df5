"""In which respect a pack or an unfinished conversion is of another source or other options, in words a user knows."""

from __future__ import annotations

from typing import Any

from hybrid_pack.io.bitmap import spans

STATISTICS = frozenset({"importance", "hessians"})
"""Options whose files are known by what each layer uses of them."""

_SOURCE = {
    "source_config": "the source's config.json or hf_quant_config.json has changed",
    "source_index": "the source's index has changed",
    "source_files": "the source's safetensors files have changed",
    "source_times": "a safetensors file of the source was written to, by its modification time",
    "bit_map": "the bit map has changed",
}
_OPTIONS = {
    "tensor_parallel": "--tp",
    "expert_parallel": "--ep",
    "layers": "--layers",
    "on_scale_mismatch": "--on-scale-mismatch",
    "device": "--device",
}
_OTHERS = {
    "format_version": "the version of the pack format",
    "abi": "the version of the layouts",
    "intermediate": "the intermediate size, which --pad makes larger,",
}


def _value(value: Any) -> str:
    if value is None or value is False:
        return "not given"
    if value is True:
        return "given"
    return spans(value) if isinstance(value, list) else str(value)


def _option(name: str, theirs: Any, ours: Any) -> str:
    if name.strip("-") in STATISTICS:  # digests
        if None not in (theirs, ours):
            return f"what {name} gives has changed"
        theirs, ours = theirs is not None, ours is not None
    return f"{name} was {_value(theirs)}, now {_value(ours)}"


def difference(key: str, theirs: Any, ours: Any) -> str:
    """What differs in an entry of ``Plan.fingerprint`` or its like; of several things the first that does.

    Args:
        key: Of the fingerprint.
        theirs: What is recorded; None where an earlier version recorded nothing.
        ours: What is asked for now.
    """
    if key in _SOURCE:
        return _SOURCE[key]
    if key in ("options", "kept_formats"):
        known = theirs if isinstance(theirs, dict) else {}
        name = next(name for name in ours if known.get(name) != ours[name])
        if key == "options":
            return _option(f"--{name.replace('_', '-')}", known.get(name), ours[name])
        return f"{_option('--kept-format', known.get(name), ours[name])} in layer {name}"
    what = _OPTIONS.get(key) or _OTHERS[key]
    return f"{what} was {_value(theirs)}, now {_value(ours)}"
