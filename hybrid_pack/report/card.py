"""The model card, README.md: made from the manifest, and recognised later if nobody has edited it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hybrid_pack.io.bitmap import spans
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.manifest import MANIFEST
from hybrid_pack.report.data import TIERS, PackView, Tier
from hybrid_pack.report.frontmatter import Value, as_list, write_front_matter
from hybrid_pack.report.png import TIER_MAP
from hybrid_pack.report.text import counted, plain, size
from hybrid_pack.runnable import UNSERVED

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
LIBRARY = "hybrid-pack"
REPOSITORY = "ORG/NAME"
"""Stands for the Hub id in commands: nothing that a shell would take for a redirection."""

_MANIFEST_ROW = "this pack's manifest"
_DESCRIBED = re.compile(rf"^\| {_MANIFEST_ROW} \| `(blake3:[0-9a-f]{{64}})` \|[ \t]*\r?$", re.MULTILINE)
_END = re.compile(r"<!-- hybrid-pack card (blake3:[0-9a-f]{64}): [^\n]*-->\n\Z")


WARNING = """**Do not use `from_pretrained` of transformers for the model: it would run with random experts.**
transformers 5 has no quantisation method `hybrid_pack` and does not stop for that. It only warns
("Unknown quantization type, got hybrid_pack", "Hence, we will skip the quantization"), finds no weights of experts, and
fills these with random numbers ("newly initialized", `MISSING` in its load report). What it answers is noise."""
"""In the words of transformers 5.24 (``quantizers/auto.py``, ``utils/loading_report.py``)."""


def _end(body: str) -> str:
    digest = blake3_digest(body.encode())
    return f"<!-- hybrid-pack card {digest}: of all above. convert replaces this card unless it was edited. -->\n"


def is_ours(card: bytes) -> bool:
    """Whether a card was written here and not edited since, so that it may be replaced."""
    try:
        text = card.decode("utf-8")
    except UnicodeDecodeError:
        return False
    match = _END.search(text)
    return match is not None and match[1] == blake3_digest(text[: match.start()].encode())


def described(text: bytes) -> str | None:
    """The ``self_digest`` that a card, edited or not, names; None where it names none, or several.

    Args:
        text: Of a README.md.
    """
    named = set(_DESCRIBED.findall(text.decode("utf-8", errors="replace")))
    return named.pop() if len(named) == 1 else None


def marked(text: object) -> str:
    """A string from elsewhere as Markdown that means nothing but itself, in one line."""
    line = " ".join(plain(str(text)).split())
    line = re.sub(r"([\\`*_{}\[\]<>()#!|~&$@]|:(?=//))", r"\\\1", line)
    return re.sub(r"^(\d*)(?=[-+.])|(?<=www)(?=\.)", r"\1\\", line, flags=re.IGNORECASE)


def _base_models(view: PackView, front: Mapping[str, Value]) -> tuple[list[str], list[str]]:
    """(Hub ids this pack was made from, names that are none).

    The source, whose own card names what that was made from; where the source was a plain folder, what its card names.
    """
    if HUB_ID.fullmatch(view.name):
        return [view.name], []
    above = list(dict.fromkeys(as_list(front.get("base_model"))))
    return [a for a in above if HUB_ID.fullmatch(a)], [a for a in above if not HUB_ID.fullmatch(a)]


def _tags(view: PackView, front: Mapping[str, Value]) -> list[str]:
    formats = [kind.lower() for kind in view.kept_formats] + (["nf3"] if view.experts_tail else [])
    return list(dict.fromkeys([LIBRARY, "moe", *formats, "b12x", *map(plain, as_list(front.get("tags")))]))


def _front(view: PackView, front: Mapping[str, Value]) -> str:
    def one(key: str) -> str:
        value = front.get(key)
        return plain(value) if isinstance(value, str) else ""

    base, unknown = _base_models(view, front)
    text = write_front_matter(
        {
            "license": one("license"),
            "license_name": one("license_name"),
            "license_link": one("license_link"),
            "language": [plain(item) for item in as_list(front.get("language"))],
            "base_model": base[0] if len(base) == 1 else base,
            "base_model_relation": "quantized" if base else "",
            "library_name": LIBRARY,
            "pipeline_tag": one("pipeline_tag"),
            "tags": _tags(view, front),
        }
    )
    missing = [key for key, there in (("license", one("license")), ("base_model", base)) if not there]
    hints = []
    if unknown:
        hints.append(f"# no Hub id, so not taken over from the source's base_model: {plain(', '.join(unknown))}\n")
    if missing:
        hints.append(f"# not known here: {' and '.join(missing)}; add what the source has before publishing\n")
    return text.removesuffix("---\n") + "".join(hints) + "---\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sizes(view: PackView) -> str:
    rank = view.largest_rank
    experts = len(view.layers) * view.num_experts
    rows = [
        ("experts", f"{experts:,} in {counted(len(view.layers), 'layer')}, {view.bits_per_weight:.2f} bits a weight"),
        *(
            (view.tier_name(tier), f"{counted(view.experts(tier), 'expert')}, {size(rank.tier_bytes(tier))} a rank")
            for tier in TIERS
            if view.experts(tier)
        ),
        ("experts of a rank", size(rank.nbytes)),
        ("all other tensors", size(view.base_bytes)),
        ("whole pack", f"{size(view.total_bytes)} in {counted(view.files, 'file')}"),
    ]
    return _table(("", ""), rows)


def _serving(view: PackView, decoder: Mapping[str, Any]) -> str:
    """How vLLM serves it; nothing where it cannot, since it splits experts one way only and wants all layers'.

    A layer behind the decoder's is a draft's (MTP), which is asked for only where a user wants it.
    """
    tp, ep = view.tensor_parallel, view.expert_parallel
    if tp > 1 and ep > 1:
        return ""
    if (why_not := UNSERVED.get(str(decoder.get("model_type")))) is not None:
        return f"vLLM does not serve packs of this family yet: {why_not}.\n\n"
    number = decoder.get("num_hidden_layers")
    lacking = sorted(i for i in view.omitted if not isinstance(number, int) or i < number)
    if lacking:
        layers = f"layer{'s' if len(lacking) > 1 else ''} {spans(lacking)}"
        return f"It cannot be served: experts are not in it, those of {layers}.\n\n"
    options = f" --tensor-parallel-size {max(tp, ep)}" if tp * ep > 1 else ""
    options += " --enable-expert-parallel" if ep > 1 else ""
    slow = ""
    if view.not_b12x is not None:
        slow = f", and slowly, by its reference backend: {marked(view.not_b12x)}"
        options += " --enforce-eager"
    return f"""Stock vLLM serves it, with the plugin that `hybrid-pack[vllm]` brings{slow}:
```
pip install "hybrid-pack[vllm]"
hybrid-pack pull {REPOSITORY} --out pack
vllm serve pack{options}
```
"""


def _running(view: PackView, decoder: Mapping[str, Any], layer: int) -> tuple[str, str]:
    """(lines of Python, what follows them): how loaded experts are run, or that nothing runs them."""
    if view.not_run is not None:
        return "", f"**No runtime of this version runs these experts**: {marked(view.not_run)}.\n\n"
    return (
        f"moe = hybrid_pack.runtime.HybridMoE(loaded[{layer}], top_k={view.top_k}, max_tokens=8192)\n"
        f"y = moe(x, topk_weights, topk_ids)  # this rank's partial sum, bf16 [tokens, {view.hidden}]\n",
        _serving(view, decoder),
    )


def _loading(view: PackView, decoder: Mapping[str, Any]) -> str:
    tp, ep = view.tensor_parallel, view.expert_parallel
    folder = f"experts/tp{tp}-ep{ep}"
    split = f"tensor parallel {tp}" + (f" and expert parallel {ep}" if ep > 1 else "")
    layer = view.layers[0].layer
    calls, then = _running(view, decoder, layer)
    with_b12x = "" if view.not_run is not None or view.not_b12x is not None else "[b12x]"
    run = "" if view.not_run is not None else "; experts run as above"
    return f"""Put the id of this repository in place of `{REPOSITORY}`:
```
pip install "hybrid-pack{with_b12x}"
hybrid-pack pull {REPOSITORY} --rank 0 --out pack  # this rank's part and the other tensors, every digest checked
hybrid-pack verify pack --rank 0
```
```python
import hybrid_pack

pack = hybrid_pack.open_pack("pack", expect_tp={tp})
loaded = pack.load_rank(0, "cuda")  # one read, digests checked, nothing repacked
{calls}```
{then}* The experts are cut for **{split}**; another size needs another pack. Rank r reads
  `{folder}/rank-<r>` and the other tensors, nothing else: the folders of other ranks need not be there.
* Of transformers only tokenizer and configuration are of use here, and load as the source's do. The other tensors are
  plain safetensors with the source's names{run}.
* On a CPU, `pack.load_layer({layer}, rank=0, device="cpu").dequantize(expert)` gives an expert's weights."""


def _measured(view: PackView) -> str:
    parts = []
    quantized = {(entry.layer, expert) for entry in view.quantized for expert in entry.sqnr_db}
    moved = len(view.layers) * view.num_experts - len(quantized) - len(view.requantized) - view.experts_cast
    if moved:
        parts.append(
            f"{counted(moved, 'expert')} moved as stored: `hybrid-pack verify --source` compares codes bit for bit."
        )
    if view.experts_cast:
        parts.append(f"{counted(view.experts_cast, 'expert')} brought to the tier's format without loss.")
    if quantized:
        parts.append(
            f"{counted(len(quantized), 'expert')} quantised while packing. SQNR is 10 log10 of the sum of squares of "
            f"the source's weights over that of the differences, whatever the method weighs"
            f"{_GPTQ if any(e.gptq_to_rtn is not None for e in view.quantized) else ''}:\n\n{_errors(view)}"
        )
    if view.requantized:
        layer, expert, worst = max(view.requantized, key=lambda entry: entry[2])
        parts.append(
            f"{counted(len(view.requantized), 'expert')} with gate and up scales brought to one second scale; the "
            f"worst relative error of a scale is {worst:.2g}, layer {layer} expert {expert}."
        )
    # The first plural is what is counted.
    parts += [
        f"{number:,} {what if number > 1 else re.sub(r's(?= )', '', what, count=1)}."
        for what, number in view.counts
        if number
    ]
    return "\n".join(f"* {part}" for part in parts)


_GPTQ = "; GPTQ to nearest is its error on the Hessians over that of rounding to nearest, the median of layers"


def _errors(view: PackView) -> str:
    rows = []
    improved = any(e.gptq_to_rtn is not None for e in view.quantized)
    for tier in TIERS:
        for key in sorted({(e.method, e.sources) for e in view.quantized if e.tier == tier}):
            entries = [e for e in view.quantized if (e.tier, e.method, e.sources) == (tier, *key)]
            found = sorted(db for e in entries for db in e.sqnr_db.values() if db is not None)
            numbers = [f"{value:.2f}" for value in (found[0], median(found), found[-1])] if found else ["exact"] * 3
            experts = sum(len(e.sqnr_db) for e in entries)
            layers = spans(sorted({e.layer for e in entries}))
            cells = [view.tier_name(tier), key[0], ", ".join(map(marked, key[1])), layers, f"{experts:,}", *numbers]
            if improved:
                ratios = [e.gptq_to_rtn for e in entries if e.gptq_to_rtn is not None]
                cells.append(f"{median(ratios):.2f}" if ratios else "–")
            rows.append(cells)
    head = ["tier", "method", "from", "layers", "experts", "worst dB", "median dB", "best dB"]
    head += ["GPTQ to nearest"] if improved else []
    return "\n".join(f"  {line}" for line in _table(head, rows).splitlines())


def _source(view: PackView) -> str:
    rows = [
        ("source", marked(view.name)),
        ("its weights", f"{size(view.source_bytes)} in {counted(view.source_files, 'file')}"),
        *((f"its {what}", f"`{digest}`") for what, digest in view.source_digests),
        (_MANIFEST_ROW, f"`{view.self_digest}`"),
        ("made by", marked(view.made_by)),
        ("layout", f"`{view.abi}`"),
    ]
    return _table(("", ""), rows)


def _tier_names(view: PackView) -> str:
    names: dict[Tier, str] = {
        "kept": f"dark blue cells are kept in {' or '.join(view.kept_formats)} (4 bits)",
        "tail": "light ones are the NF3 tail (3 bits)",
    }
    return "; ".join(names[tier] for tier in TIERS if view.experts(tier))


def model_card(view: PackView, config: Mapping[str, Any], front: Mapping[str, Value]) -> str:
    """Text of README.md.

    Args:
        view: Of the finished pack.
        config: Its config.json.
        front: From ``read_front_matter`` of the source's card; empty where that has none.
    """
    decoder = config.get("text_config")
    decoder = {**config, **decoder} if isinstance(decoder, dict) else config
    title = view.name.rpartition("/")[2]
    architecture = f"`{kind}`, " if re.fullmatch(r"\w{1,64}", kind := str(decoder.get("model_type", ""))) else ""
    notes = [*view.differs, *view.notes]
    body = f"""{_front(view, front)}
# {marked(title)}, packed for {counted(view.tensor_parallel * view.expert_parallel, "rank")}

The routed experts of {marked(view.name)}, converted once and offline by hybrid-pack into one file for each rank and
layer, in the layout that the kernels of b12x 1.1.0 read: {architecture}hidden size {view.hidden}, expert size
{view.intermediate}, {counted(view.num_experts, "expert")}, top-{view.top_k}.

![Tier map: {counted(len(view.layers), "layer")} by {counted(view.num_experts, "expert")}]({TIER_MAP})

A row is a layer, a column an expert: {_tier_names(view)}. `hybrid-pack report pack` makes a page with more.

## Sizes
{_sizes(view)}

## How to load it
{WARNING}

{_loading(view, decoder)}

## What was measured
{_measured(view)}
"""
    if notes:
        body += "\n## Notes\n" + "\n".join(f"* {marked(note)}" for note in notes) + "\n"
    body += f"""
## Source and digests
{_source(view)}

Every byte of every file but this one is covered by a digest in `{MANIFEST}`; `hybrid-pack verify pack --source SRC`
proves the experts against the source.

"""
    return body + _end(body)
