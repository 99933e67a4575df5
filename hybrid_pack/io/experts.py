"""Expert matrices located from headers: one tensor for each, or slabs of tensors that hold all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hybrid_pack.errors import DataError
from hybrid_pack.formats.source import Header, SourceFormat, Unsupported, detect
from hybrid_pack.io.config import CONFIG, LATENT_WIDTH, ModelConfig
from hybrid_pack.io.names import Family
from hybrid_pack.io.safetensors import TensorHeader
from hybrid_pack.io.shards import Located

UNUSED_FIELDS = frozenset({"input_scale", "input_global_scale", "k_scale", "v_scale"})
"""Activation scales: W4A16 kernels do not use them, so they are dropped, present or not."""
BIAS = "bias"
INTERLEAVED = frozenset({"gpt_oss"})
"""Model types that put gate in the even and up in the odd rows of ``gate_up_proj``."""

Fields = dict[str, Located]
SCALAR_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


@dataclass(frozen=True)
class RowView:
    """Which rows of what is stored are a matrix: row i is stored row ``first_row + i * row_step``.

    Attributes:
        first_row: Stored row of row 0.
        row_step: 2 where gate and up alternate, else 1.
        transposed: Stored as [K, N], with the scales as [scales of a row, N]; packed codes of one byte are still
            neighbours along K.
    """

    first_row: int = 0
    row_step: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Matrix:
    """One stored expert matrix.

    Attributes:
        name: Tensor name without its field; with the expert in brackets where one tensor holds all of a layer.
        format: How it is stored.
        codes: The codes. Gate and up that lie in each other's rows have the same ones.
        scales: The scales; None where the format has none.
        second: NVFP4's second-level scale.
        rows: N.
        columns: K.
        view: Which of the stored rows they are.
    """

    name: str
    format: SourceFormat
    codes: Located
    scales: Located | None
    second: Located | None
    rows: int
    columns: int
    view: RowView = RowView()

    @property
    def stored_rows(self) -> int:
        """Rows of what ``codes`` holds: ``rows``, or those of gate and up together."""
        return self.codes.header.nbytes // self.format.code_bytes(self.columns)

    @property
    def tensors(self) -> tuple[Located, ...]:
        """Codes and scales: what is read to have it."""
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    @property
    def plain(self) -> bool:
        """Whether its stored bytes are its rows in order, as every reader of the format expects them."""
        form = self.format
        return self.view == RowView() and form.scale_bias == 127 and not form.second_reciprocal

    def native_to(self, target: str) -> bool:
        """Whether it is stored in the target format, so that codes and scales are moved, not computed."""
        return self.format.native and self.format.name == target


@dataclass(frozen=True)
class Expert:
    """The matrices of an expert: gate and up [I, H], down [H, I].

    Attributes:
        gate: None where the experts have none.
        up: Up.
        down: Down.
        biases: Biases, which stay in the base tensors.
    """

    gate: Matrix | None
    up: Matrix
    down: Matrix
    biases: tuple[Located, ...] = ()

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Gate, up, down; up and down where there is no gate."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    @property
    def tensors(self) -> tuple[Located, ...]:
        """Codes and scales of all matrices, each once."""
        return tuple(dict.fromkeys(at for matrix in self.matrices for at in matrix.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(at.header.nbytes for at in self.tensors)

    @property
    def stored(self) -> str:
        """Its format in words: ``nvfp4``, or ``mxfp4+bf16`` where its matrices differ."""
        return "+".join(dict.fromkeys(matrix.format.name for matrix in self.matrices))


@dataclass
class LayerTensors:
    """The tensors of one layer's experts.

    Attributes:
        family: How they are named.
        experts: Fields by expert and role.
        stacks: Fields by role of tensors that hold all experts.
    """

    family: Family
    experts: dict[int, dict[str, Fields]] = field(default_factory=dict)
    stacks: dict[str, Fields] = field(default_factory=dict)

    def located(self) -> Iterator[Located]:
        """All of them but biases, which are base tensors anyway."""
        for roles in (self.stacks, *self.experts.values()):
            for fields in roles.values():
                yield from (at for name, at in fields.items() if name != BIAS)


def _module(name: str, role_name: str) -> str:
    """A tensor's name up to its projection."""
    head, _, _ = name.rpartition(f".{role_name}")
    return f"{head}.{role_name}"


def _part(at: Located, label: str, shape: tuple[int, ...], begin: int, nbytes: int) -> Located:
    """Bytes of a tensor as a tensor of its own."""
    header = at.header
    start = header.begin + begin
    return Located(at.path, TensorHeader(f"{header.name}[{label}]", header.dtype, shape, start, start + nbytes))


def _slab(at: Located, expert: int, count: int) -> Located:
    """One expert's part of a tensor that holds all of a layer; a scalar is everyone's."""
    shape = at.header.shape
    if shape in SCALAR_SHAPES and (count > 1 or shape == ()):
        return at
    if shape[0] != count:
        raise DataError(
            "a tensor of all experts of a layer", where=at, expected=f"{count} experts by {CONFIG}", found=list(shape)
        )
    size = at.header.nbytes // count
    return _part(at, str(expert), shape[1:], expert * size, size)


def _second(where: str, module: str, found: SourceFormat, fields: Fields) -> Located | None:
    if found.second_field is None:
        return None
    second = fields.get(found.second_field)
    if second is None:
        raise DataError(
            f"{where}: {module}.{found.second_field} is missing",
            where=fields[found.codes_field].path,
            expected="the F32 second-level scale of NVFP4",
            hint="the export is incomplete; export it again",
        )
    if second.header.dtype != "F32" or second.header.shape not in SCALAR_SHAPES:
        raise DataError(
            f"{where}: not a second-level scale",
            where=second,
            expected="F32 [] or [1]",
            found=f"{second.header.dtype} {list(second.header.shape)}",
        )
    return second


def _header(at: Located, transposed: bool) -> Header:
    shape = at.header.shape
    return at.header.dtype, (shape[1], shape[0]) if transposed and len(shape) == 2 else shape


def _matrix(where: str, module: str, fields: Fields, mx_bias: int, transposed: bool = False) -> Matrix | Unsupported:
    """The matrix whose fields these are, rows in stored order."""
    weights = {name: at for name, at in fields.items() if name != BIAS}
    result = detect({name: _header(at, transposed) for name, at in weights.items()}, mx_bias)
    if isinstance(result, Unsupported):
        return result
    found, rows, columns = result
    used = [f for f in (found.codes_field, found.scale_field, found.second_field) if f is not None]
    left = sorted(set(weights) - {*used} - UNUSED_FIELDS)
    codes = weights[found.codes_field]
    if left:
        raise DataError(
            f"{where} has a field that {found.name} has not",
            where=weights[left[0]],
            expected=", ".join(sorted(used)),
            found=left[0],
        )
    if transposed and codes.header.dtype == "F4":
        return Unsupported("F4 codes of two rows share a byte where columns come first")
    scales = None if found.scale_field is None else weights[found.scale_field]
    second = _second(where, module, found, weights)
    return Matrix(module, found, codes, scales, second, rows, columns, RowView(transposed=transposed))


def _half(matrix: Matrix, index: int) -> Matrix:
    """Gate (0) or up (1) of a matrix with gate's rows, then up's: bytes of its own where they can be cut out."""
    rows, form = matrix.rows // 2, matrix.format
    first = index * rows
    if matrix.view.transposed or (form.row_group > 1 and rows % form.row_group):
        return replace(matrix, rows=rows, view=replace(matrix.view, first_row=first))
    label = f"{first}:{first + rows}"
    size = matrix.codes.header.nbytes // 2
    shape = (rows, *matrix.codes.header.shape[1:])
    codes, scales = _part(matrix.codes, label, shape, index * size, size), matrix.scales
    if scales is not None and form.row_group:
        size = scales.header.nbytes // 2
        shape = (scales.header.shape[0] // 2, *scales.header.shape[1:])
        scales = _part(scales, label, shape, index * size, size)
    return replace(matrix, codes=codes, scales=scales, rows=rows)


def _gate_up(where: str, matrix: Matrix, biased: bool, config: ModelConfig) -> tuple[Matrix, Matrix] | Unsupported:
    """Gate and up of a matrix that holds both."""
    interleaved = matrix.format.codes_field == "blocks" or config.model_type in INTERLEAVED
    if biased and not interleaved:
        return Unsupported(
            f"{matrix.name} has biases and is of model type {config.model_type!r}: whether its gate and up rows "
            "alternate is known of gpt_oss alone"
        )
    if matrix.rows % 2:
        raise DataError(f"{where}: gate and up together", where=matrix.codes, expected="even rows", found=matrix.rows)
    if not interleaved:
        return _half(matrix, 0), _half(matrix, 1)
    views = (replace(matrix.view, first_row=i, row_step=2) for i in range(2))
    gate, up = (replace(matrix, rows=matrix.rows // 2, view=view) for view in views)
    return gate, up


def _from_roles(
    where: str,
    family: Family,
    roles: Mapping[str, Fields],
    config: ModelConfig,
    mx_bias: int,
    suffix: str,
    turned: bool,
) -> Expert | Unsupported:
    missing = [role for role in family.roles if role not in roles]
    if missing:
        at = next(iter(next(iter(roles.values())).values()))
        raise DataError(f"{where} has no {missing[0]} matrix", where=at.path, found=f"only {', '.join(roles)}")
    matrices: dict[str, Matrix] = {}
    for role, name in family.projections:
        fields = roles[role]
        module = _module(next(iter(fields.values())).header.name, name) + suffix
        matrix = _matrix(where, module, fields, mx_bias, turned)
        if isinstance(matrix, Unsupported):
            read = " (its shapes turned to [N, K])" if turned else ""
            return Unsupported(f"{module}{read}: {matrix.reason}", matrix.wide)
        if role == "gate_up":
            pair = _gate_up(where, matrix, BIAS in fields, config)
            if isinstance(pair, Unsupported):
                return pair
            matrices["gate"], matrices["up"] = pair
        else:
            matrices[role] = matrix
    biases = tuple(fields[BIAS] for fields in roles.values() if BIAS in fields)
    expert = Expert(matrices.get("gate"), matrices["up"], matrices["down"], biases)
    _sizes(where, expert, config)
    return expert


_WIDTH_KEYS = f"the width of experts is the first there is of {', '.join((*LATENT_WIDTH, 'hidden_size'))}"


def _sizes(where: str, expert: Expert, config: ModelConfig) -> None:
    """Every expert of every layer has the sizes config.json gives."""
    width, inner = config.hidden, config.intermediate
    for matrix in expert.matrices:
        rows, columns = (width, inner) if matrix is expert.down else (inner, width)
        if (matrix.rows, matrix.columns) != (rows, columns):
            raise DataError(
                f"{where}: the stored matrix and {CONFIG} disagree on its size",
                where=matrix.codes,
                expected=f"[{rows}, {columns}] by the config",
                found=f"[{matrix.rows}, {matrix.columns}] ({matrix.format.name})",
                hint=_WIDTH_KEYS if (matrix.rows if matrix is expert.down else matrix.columns) != width else None,
            )


def _turned(stacks: Mapping[str, Fields], config: ModelConfig) -> bool:
    """Whether tensors of all experts are [E, K, N], as Llama-4 has them, and not [E, N, K].

    Gate and up together have 2*I rows, down has H. One of the two sizes differs from the columns, whatever H and I are,
    so that both tensors together always tell.
    """
    plain = turned = True
    for role, rows in (("gate_up", 2 * config.intermediate), ("down", config.hidden)):
        fields = stacks.get(role, {})
        codes = next((fields[name] for name in ("weight", "weight_packed") if name in fields), None)
        if codes is not None and len(codes.header.shape) == 3:
            plain, turned = plain and codes.header.shape[1] == rows, turned and codes.header.shape[2] == rows
        else:
            turned = False
    return turned and not plain


def experts_of(layer: int, tensors: LayerTensors, config: ModelConfig, mx_bias: int) -> Iterator[
    tuple[int, Expert | Unsupported]
]:  # fmt: skip
    """Every expert of a layer, by id.

    Args:
        layer: Decoder layer.
        tensors: Its tensors.
        config: Of the model.
        mx_bias: Bias of compressed-tensors' E8M0 scales.

    Raises:
        DataError: An expert, a matrix or a field is missing, or has another size than the config says.
    """
    if not tensors.family.fused:
        for expert in sorted(tensors.experts):
            where = f"layer {layer} expert {expert}"
            yield expert, _from_roles(where, tensors.family, tensors.experts[expert], config, mx_bias, "", False)
        return
    turned = "gate_up" in tensors.family.roles and _turned(tensors.stacks, config)
    for expert in range(config.num_experts):
        roles = {
            role: {name: _slab(at, expert, config.num_experts) for name, at in fields.items()}
            for role, fields in tensors.stacks.items()
        }
        where = f"layer {layer} expert {expert}"
        yield expert, _from_roles(where, tensors.family, roles, config, mx_bias, f"[{expert}]", turned)
