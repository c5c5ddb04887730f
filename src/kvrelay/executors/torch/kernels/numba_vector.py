"""Vector code for the inner loops of attention and products, written as LLVM IR where Numba's loops do not vectorise
well.

Each intrinsic takes flat arrays with element offsets and keeps its accumulators in registers across a loop. Sizes that
are constants arrive as ``constant_marker`` types. Elements are float32, or bfloat16 as uint16. LLVM splits the vectors
on machines with narrower registers. Sums run in a fixed order, so equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.executors.torch.kernels.numba_math import EXP_LOWEST, EXP_TERMS, LN_2, LOG2_E

LANES = 16
_FEATURES = get_host_cpu_features()
HAS_AVX512 = bool(_FEATURES.get("avx512f"))
_LESSER = "AVX2" if _FEATURES.get("avx2") else "a CPU without AVX2, several times slower"
INSTRUCTIONS = "AVX-512" if HAS_AVX512 else _LESSER
"""For the log."""
ADDS_PAIRS = HAS_AVX512 and bool(_FEATURES.get("avx512bf16"))
# Where there is AMX, which Numba does not reach, oneDNN's bfloat16 products are many times faster.
MULTIPLIES_BFLOAT16 = ADDS_PAIRS and not _FEATURES.get("amx-bf16")
# Vectors of 16 that accumulators may take: of AVX-512's 32 registers, or of AVX2's 16, each half as wide.
_ACCUMULATORS = 24 if HAS_AVX512 else 6
_LINE_BYTES = 64
# Inputs that one turn of a product's loop adds up.
_UNROLLED = 4
_FLOAT, _HALF, _WORD = ir.FloatType(), ir.IntType(16), ir.IntType(32)


class _Bfloat16(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's type, which llvmlite lacks."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


_Bfloat16._create_instance()


class _Array(NamedTuple):
    """An array as an intrinsic gets it: its type, and LLVM's value."""

    type: Any
    value: Any

    @property
    def is_half(self) -> bool:
        return bool(self.type.dtype == types.uint16)

    @property
    def holds_pairs(self) -> bool:
        return bool(self.type.dtype == types.uint32)


class _Emitter:
    """Emits loads, products and stores of vectors of ``lanes`` float32."""

    def __init__(self, context: Any, builder: Any, lanes: int) -> None:
        self._context = context
        self.builder = builder
        self._vector = ir.VectorType(_FLOAT, lanes)
        self._lanes = lanes
        self._fused = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(self._vector, [self._vector] * 3), f"llvm.fmuladd.v{lanes}f32"
        )

    def pointer(self, array: _Array, offset: Any) -> Any:
        data = self._context.make_array(array.type)(self._context, self.builder, array.value).data
        return self.builder.gep(data, [offset])

    def at(self, pointer: Any, offset: Any) -> Any:
        index = offset if isinstance(offset, ir.Value) else ir.Constant(ir.IntType(64), offset)
        return self.builder.gep(pointer, [index])

    def bits(self, pointer: Any) -> Any:
        """As a pointer to float32, whatever 32 bits are there."""
        return self.builder.bitcast(pointer, _FLOAT.as_pointer())

    def load(self, pointer: Any, is_half: bool) -> Any:
        """The vector at ``pointer``, widened if it is bfloat16."""
        builder = self.builder
        if not is_half:
            return builder.load(builder.bitcast(pointer, self._vector.as_pointer()), align=4)
        halves = builder.load(builder.bitcast(pointer, ir.VectorType(_HALF, self._lanes).as_pointer()), align=2)
        words = ir.VectorType(_WORD, self._lanes)
        shift = ir.Constant(words, [16] * self._lanes)
        return builder.bitcast(builder.shl(builder.zext(halves, words), shift), self._vector)

    def store(self, value: Any, pointer: Any, is_half: bool = False) -> None:
        """``value``, or its nearest bfloat16 (ties to even, NaN stays NaN)."""
        builder = self.builder
        if not is_half:
            builder.store(value, builder.bitcast(pointer, self._vector.as_pointer()), align=4)
            return
        words = ir.VectorType(_WORD, self._lanes)

        def number(constant: int) -> Any:
            return ir.Constant(words, [constant] * self._lanes)

        bits = builder.bitcast(value, words)
        odd = builder.and_(builder.lshr(bits, number(16)), number(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, number(0x7FFF))), number(16))
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), number(0x7FC0), rounded)
        halves = ir.VectorType(_HALF, self._lanes)
        builder.store(builder.trunc(rounded, halves), builder.bitcast(pointer, halves.as_pointer()), align=2)

    def broadcast(self, pointer: Any) -> Any:
        return self.spread(self.builder.load(pointer))

    def spread(self, value: Any) -> Any:
        builder = self.builder
        single = builder.insert_element(ir.Constant(self._vector, ir.Undefined), value, ir.Constant(_WORD, 0))
        mask = ir.Constant(ir.VectorType(_WORD, self._lanes), [0] * self._lanes)
        return builder.shuffle_vector(single, single, mask)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._fused, [a, b, c])

    def constant(self, value: float | np.float32) -> Any:
        return ir.Constant(self._vector, [float(value)] * self._lanes)

    def add_pairs(self, a: Any, b: Any, c: Any) -> Any:
        """c plus, in each lane, the products of the two bfloat16 in it of ``a`` and ``b``."""
        pairs = ir.VectorType(_Bfloat16(), 2 * self._lanes)
        function = ir.FunctionType(self._vector, [self._vector, pairs, pairs])
        add = cgutils.get_or_insert_function(self.builder.module, function, "llvm.x86.avx512bf16.dpbf16ps.512")
        return self.builder.call(add, [c, self.builder.bitcast(a, pairs), self.builder.bitcast(b, pairs)])

    def store_half(self, value: Any, pointer: Any) -> None:
        """As ``store``, by the CPU's own instruction: numbers below 1e-38 become 0."""
        halves = ir.VectorType(_Bfloat16(), self._lanes)
        kind = ir.FunctionType(halves, [self._vector])
        narrow = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512")
        place = self.builder.bitcast(pointer, halves.as_pointer())
        self.builder.store(self.builder.call(narrow, [value]), place, align=2)

    def zero(self) -> Any:
        return self.constant(0.0)

    def larger(self, a: Any, b: Any) -> Any:
        """The larger of each lane; b's if one is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def fold(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Every lane of the result is the combination of all lanes, in a fixed order."""
        width = self._lanes // 2
        while width:
            order = ir.Constant(ir.VectorType(_WORD, self._lanes), [i ^ width for i in range(self._lanes)])
            vector = combine(vector, self.builder.shuffle_vector(vector, vector, order))
            width //= 2
        return vector

    def transposed(self, square: list[Any]) -> list[Any]:
        """The columns of as many vectors as they have lanes."""
        size = len(square)
        step = 1
        while step < size:
            for i in (row for row in range(size) if not row & step):
                a, b = square[i], square[i + step]
                upper = [lane if not lane & step else lane - step + size for lane in range(size)]
                lower = [lane + step if not lane & step else lane + size for lane in range(size)]
                square[i], square[i + step] = (
                    self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, size), lanes))
                    for lanes in (upper, lower)
                )
            step *= 2
        return square

    def exp_negative(self, x: Any) -> Any:
        """e**x of lanes up to 0, as ``numba_math.exp_negative`` computes it."""
        builder, words = self.builder, ir.VectorType(_WORD, self._lanes)
        y = self.larger(self.constant(EXP_LOWEST), x)
        n = builder.fptosi(self.fused(y, self.constant(LOG2_E), self.constant(-0.5)), words)
        f = self.fused(builder.sitofp(n, self._vector), self.constant(-LN_2), y)
        p = self.constant(EXP_TERMS[0])
        for term in EXP_TERMS[1:]:
            p = self.fused(p, f, self.constant(term))
        p = self.fused(builder.fmul(p, f), f, builder.fadd(f, self.constant(1.0)))
        exponent = builder.shl(
            builder.add(n, ir.Constant(words, [127] * self._lanes)), ir.Constant(words, [23] * self._lanes)
        )
        return builder.fmul(p, builder.bitcast(exponent, self._vector))

    def variable(self, value: Any) -> Any:
        """A variable that LLVM keeps in a register."""
        slot = cgutils.alloca_once(self.builder, self._vector)
        self.builder.store(value, slot)
        return slot

    def sums(self, vectors: list[Any]) -> Any:
        """One lane for each of ``vectors`` (1, 2, 4, ... of them), the sum of its lanes.

        Each vector is added up by halves, whatever the number of vectors, but all in one go: at each step a pair of
        vectors becomes one that holds both their halves' sums.
        """
        share = self._lanes
        while len(vectors) > 1 or share > 1:
            share //= 2
            runs = [range(i, i + share) for i in range(0, _width(vectors[0]) * 2, share)]
            if len(vectors) > 1:
                vectors = [self._add_runs(a, b, runs) for a, b in zip(vectors[::2], vectors[1::2])]
            else:
                vectors = [self._add_runs(vectors[0], vectors[0], runs[: len(runs) // 2])]
        return vectors[0]

    def _add_runs(self, a: Any, b: Any, runs: list[range]) -> Any:
        """The even runs of lanes of a and b one after the other, plus the odd ones."""
        even, odd = (
            self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))
            for lanes in ([i for run in half for i in run] for half in (runs[::2], runs[1::2]))
        )
        return self.builder.fadd(even, odd)


def _width(vector: Any) -> int:
    return int(vector.type.count)


def _keys_at_once(rows: int, lanes: int) -> int:
    """How many keys' products of all rows fit into registers: a power of two."""
    at_once = 8
    while at_once > 1 and (at_once * rows > _ACCUMULATORS + 4 or at_once > lanes):
        at_once //= 2
    return at_once


def _number(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _lanes(width: int) -> int:
    return gcd(width, LANES)


Emitters = Callable[[int], _Emitter]
"""``emitter(lanes)``: of the code that an intrinsic writes."""


def _argument(kind: Any, value: Any) -> Any:
    """Numbers are LLVM's values, a marker is the constant that its type carries."""
    if not isinstance(kind, types.Array):
        return value
    return int(kind.dtype.size) if isinstance(kind.dtype, types.Record) else _Array(kind, value)


def _vector_code(write: Callable[..., Any], result: Any = types.void) -> Any:
    """The intrinsic whose code ``write(emitter, *arguments)`` emits; it returns what the intrinsic does, if that is not
    void. Numbers become int64 or float32 before."""

    @intrinsic  # type: ignore[untyped-decorator]
    @wraps(write)
    def typed(typing_context: Any, *given: Any) -> Any:
        numbers = {types.Integer: types.int64, types.Float: types.float32}
        kinds = [next((own for kind, own in numbers.items() if isinstance(each, kind)), each) for each in given]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emitter = partial(_Emitter, context, builder)
            returned = write(emitter, *map(_argument, signature.args, arguments))
            return context.get_dummy_value() if returned is None else returned

        return result(*kinds), generate

    return typed


@_vector_code
def block_scores(
    emitter: Emitters,
    width: int,
    rows: int,
    queries: Any,
    query_offset: Any,
    keys: Any,
    key_offset: Any,
    count: Any,
    scores: Any,
    score_offset: Any,
    score_stride: Any,
) -> None:
    """scores[offset + g * stride + i] = queries[g] . keys[i], for ``count`` adjacent keys and a group's queries."""
    emit = emitter(_lanes(width))
    builder, columns = emit.builder, range(0, width, _lanes(width))
    q, k = emit.pointer(queries, query_offset), emit.pointer(keys, key_offset)
    out = emit.pointer(scores, score_offset)
    held = [[emit.load(emit.at(q, g * width + c), False) for c in columns] for g in range(rows)]

    def dots(first: Any, at_once: int) -> None:
        """The scores of ``at_once`` keys from ``first`` on."""
        products = [[emit.zero()] * at_once for _ in range(rows)]
        for i in range(at_once):
            key = emit.at(k, builder.mul(builder.add(first, _number(i)), _number(width)))
            for column, c in enumerate(columns):
                part = emit.load(emit.at(key, c), keys.is_half)
                for g in range(rows):
                    products[g][i] = emit.fused(held[g][column], part, products[g][i])
        for g in range(rows):
            sums = emit.sums(products[g])
            place = emit.at(out, builder.add(builder.mul(score_stride, _number(g)), first))
            builder.store(sums, builder.bitcast(place, sums.type.as_pointer()), align=4)

    at_once = _keys_at_once(rows, _lanes(width))
    full = builder.udiv(count, _number(at_once))
    with cgutils.for_range(builder, full) as loop:
        dots(builder.mul(loop.index, _number(at_once)), at_once)
    done = builder.mul(full, _number(at_once))
    with cgutils.for_range(builder, builder.sub(count, done)) as loop:
        dots(builder.add(done, loop.index), 1)


@_vector_code
def add_weighted(
    emitter: Emitters,
    width: int,
    rows: int,
    weights: Any,
    weight_offset: Any,
    weight_stride: Any,
    values: Any,
    value_offset: Any,
    count: Any,
    sums: Any,
    sum_offset: Any,
) -> None:
    """sums[r] += sum over i of weights[r, i] * values[i], for ``count`` adjacent values and a constant number of rows.

    Rows of weights lie ``weight_stride`` apart, those of sums and values their width. Elements of uint32 are pairs of
    bfloat16, as in ``tile_product``: of two weights, and of two values' numbers at the same place.
    """
    lanes = _lanes(width)
    at_once = max(1, _ACCUMULATORS // rows) * lanes
    emit = emitter(lanes)
    builder = emit.builder
    w, v = emit.pointer(weights, weight_offset), emit.pointer(values, value_offset)
    out = emit.pointer(sums, sum_offset)
    fused = emit.add_pairs if values.holds_pairs else emit.fused
    for first in range(0, width, at_once):
        columns = range(first, min(first + at_once, width), lanes)
        places = {(r, c): emit.at(out, r * width + c) for r in range(rows) for c in columns}
        held = {key: emit.variable(emit.load(place, False)) for key, place in places.items()}
        with cgutils.for_range(builder, count) as loop:
            value = emit.at(v, builder.mul(loop.index, _number(width)))
            parts = {c: emit.load(emit.at(value, c), values.is_half) for c in columns}
            for r in range(rows):
                row = builder.mul(weight_stride, _number(r))
                weight = emit.broadcast(emit.bits(emit.at(w, builder.add(row, loop.index))))
                for c in columns:
                    total = fused(weight, parts[c], builder.load(held[r, c]))
                    builder.store(total, held[r, c])
        for key, place in places.items():
            emit.store(builder.load(held[key]), place)


@_vector_code
def tile_product(
    emitter: Emitters,
    width: int,
    rows: int,
    x: Any,
    x_offset: Any,
    x_stride: Any,
    panel: Any,
    panel_offset: Any,
    count: Any,
    out: Any,
    out_offset: Any,
    out_stride: Any,
) -> None:
    """out[r, :] = sum over k of x[r, k] * panel[k, :], for a constant number of rows and of columns (``width``).

    Rows of ``x`` and ``out`` lie their strides apart, those of ``panel`` its width. Each sum runs over k in order, one
    fused multiply-add after the other, however many rows there are. Elements of uint32 are pairs of bfloat16, whose
    products are added one after the other.
    """
    # A register's width each: LLVM would split wider vectors into more registers than there are.
    lanes = 16 if width >= 64 else 8
    emit = emitter(lanes)
    builder, columns = emit.builder, range(0, width, lanes)
    source, weights = emit.pointer(x, x_offset), emit.pointer(panel, panel_offset)
    target = emit.pointer(out, out_offset)
    starts = [emit.at(source, builder.mul(x_stride, _number(r))) for r in range(rows)]
    fused = emit.add_pairs if x.holds_pairs else emit.fused
    sums = {(r, c): emit.variable(emit.zero()) for r in range(rows) for c in columns}

    def add(k: Any) -> None:
        row = emit.at(weights, builder.mul(k, _number(width)))
        parts = {c: emit.load(emit.at(row, c), panel.is_half) for c in columns}
        for r in range(rows):
            place = emit.at(starts[r], k)
            factor = emit.broadcast(emit.bits(place))
            for c in columns:
                builder.store(fused(factor, parts[c], builder.load(sums[r, c])), sums[r, c])

    full = builder.udiv(count, _number(_UNROLLED))
    with cgutils.for_range(builder, full) as loop:
        first = builder.mul(loop.index, _number(_UNROLLED))
        for i in range(_UNROLLED):
            add(builder.add(first, _number(i)))
    done = builder.mul(full, _number(_UNROLLED))
    with cgutils.for_range(builder, builder.sub(count, done)) as loop:
        add(builder.add(done, loop.index))
    for r in range(rows):
        place = emit.at(target, builder.mul(out_stride, _number(r)))
        for c in columns:
            emit.store(builder.load(sums[r, c]), emit.at(place, c), out.is_half)


@partial(_vector_code, result=types.float32)
def soften(emitter: Emitters, scores: Any, offset: Any, count: Any, state: Any, row: Any, weights: Any) -> Any:
    """``count`` scores from ``offset`` on (a multiple of 16) become weights relative to the running maximum.

    ``weights`` is ``scores``, or a view of it as bfloat16: then they take the first half of the scores' place.
    state[row] is that maximum and the sum of weights. Returns the factor for what was accumulated under the old
    maximum. A score of minus infinity gets a weight of 1e-38.
    """
    emit = emitter(LANES)
    builder = emit.builder
    first, places = emit.pointer(scores, offset), emit.pointer(state, builder.mul(row, _number(2)))
    target = emit.pointer(weights, builder.mul(offset, _number(2)) if weights.is_half else offset)
    turns = builder.udiv(count, _number(LANES))
    old = emit.broadcast(places)
    top = emit.variable(old)
    with cgutils.for_range(builder, turns) as loop:
        place = emit.at(first, builder.mul(loop.index, _number(LANES)))
        builder.store(emit.larger(builder.load(top), emit.load(place, False)), top)
    new = emit.fold(builder.load(top), emit.larger)
    total = emit.variable(emit.zero())
    with cgutils.for_range(builder, turns) as loop:
        at = builder.mul(loop.index, _number(LANES))
        weight = emit.exp_negative(builder.fsub(emit.load(emit.at(first, at), False), new))
        (emit.store_half if weights.is_half else emit.store)(weight, emit.at(target, at))
        builder.store(builder.fadd(builder.load(total), weight), total)
    factor = builder.extract_element(emit.exp_negative(builder.fsub(old, new)), ir.Constant(_WORD, 0))
    lanes = builder.extract_element(emit.fold(builder.load(total), builder.fadd), ir.Constant(_WORD, 0))
    builder.store(builder.extract_element(new, ir.Constant(_WORD, 0)), places)
    place = emit.at(places, 1)
    builder.store(builder.fadd(builder.fmul(builder.load(place), factor), lanes), place)
    return factor


@_vector_code
def widen_run(emitter: Emitters, source: Any, source_offset: Any, count: Any, out: Any) -> None:
    """out[:count] = source[offset : offset + count] as float32; ``count`` is a multiple of 16."""
    emit = emitter(LANES)
    builder = emit.builder
    first, target = emit.pointer(source, source_offset), emit.pointer(out, _number(0))
    with cgutils.for_range(builder, builder.udiv(count, _number(LANES))) as loop:
        at = builder.mul(loop.index, _number(LANES))
        emit.store(emit.load(emit.at(first, at), source.is_half), emit.at(target, at))


@_vector_code
def copy_scaled(
    emitter: Emitters, width: int, source: Any, source_offset: Any, factor: Any, out: Any, out_offset: Any
) -> None:
    """out[offset : offset + width] = source[offset : offset + width] * factor, each in its array's type."""
    emit = emitter(_lanes(width))
    first, target = emit.pointer(source, source_offset), emit.pointer(out, out_offset)
    factors = emit.spread(factor)
    for c in range(0, width, _lanes(width)):
        value = emit.builder.fmul(emit.load(emit.at(first, c), source.is_half), factors)
        emit.store(value, emit.at(target, c), out.is_half)


@_vector_code
def copy_value(emitter: Emitters, width: int, source: Any, source_offset: Any, values: Any, row: Any) -> None:
    """Row ``row`` of ``values``, of ``width`` numbers, becomes source[offset : offset + width].

    In ``values`` of uint32 two rows share a row of words, the even one in their lower halves. It comes first, and
    clears the other.
    """
    lanes = _lanes(width)
    emit = emitter(lanes)
    builder, first = emit.builder, emit.pointer(source, source_offset)
    if not values.holds_pairs:
        target = emit.pointer(values, builder.mul(row, _number(width)))
        for c in range(0, width, lanes):
            emit.store(emit.load(emit.at(first, c), source.is_half), emit.at(target, c))
        return
    target = emit.pointer(values, builder.mul(builder.lshr(row, _number(1)), _number(width)))
    is_odd = builder.trunc(row, ir.IntType(1))
    halves, words = ir.VectorType(_HALF, lanes), ir.VectorType(_WORD, lanes)
    for c in range(0, width, lanes):
        place = builder.bitcast(emit.at(target, c), words.as_pointer())
        source_place = builder.bitcast(emit.at(first, c), halves.as_pointer())
        new = builder.zext(builder.load(source_place, align=2), words)
        upper = builder.shl(new, ir.Constant(words, [16] * lanes))
        builder.store(builder.select(is_odd, builder.or_(builder.load(place, align=4), upper), new), place, align=4)


@_vector_code
def rotate(
    emitter: Emitters,
    head: int,
    source: Any,
    source_offset: Any,
    angles: Any,
    angle_offset: Any,
    scale: Any,
    out: Any,
    out_offset: Any,
) -> None:
    """out[offset : offset + D] = source[offset : offset + D], rotated by the angles (D / 2 cosines, then sines), times
    ``scale``. ``out`` is float32 and may be ``source``."""
    half = head // 2
    emit = emitter(_lanes(half))
    builder = emit.builder
    first, turns = emit.pointer(source, source_offset), emit.pointer(angles, angle_offset)
    target, scales = emit.pointer(out, out_offset), emit.spread(scale)
    for c in range(0, half, _lanes(half)):
        a, b = (emit.load(emit.at(first, at), source.is_half) for at in (c, c + half))
        cos, sin = (builder.fmul(emit.load(emit.at(turns, at), False), scales) for at in (c, c + half))
        emit.store(emit.fused(a, cos, builder.fneg(builder.fmul(b, sin))), emit.at(target, c))
        emit.store(emit.fused(b, cos, builder.fmul(a, sin)), emit.at(target, c + half))


@_vector_code
def transpose(emitter: Emitters, head: int, columns: int, source: Any, out: Any, out_offset: Any) -> None:
    """out[offset + d * columns + i] = source[i * D + d], for 16 rows of ``source`` and each of its D columns.

    A ``source`` of bfloat16 has D / 2 columns of pairs, which become words of ``out``.
    """
    width = head // (2 if source.is_half else 1)
    lanes = _lanes(width)
    emit = emitter(lanes)
    first, target = emit.bits(emit.pointer(source, _number(0))), emit.pointer(out, out_offset)
    for i in range(0, LANES, lanes):
        for d in range(0, width, lanes):
            square = [emit.load(emit.at(first, (i + row) * width + d), False) for row in range(lanes)]
            for row, vector in enumerate(emit.transposed(square)):
                emit.store(vector, emit.at(target, (d + row) * columns + i))


@_vector_code
def prefetch(emitter: Emitters, array: Any, offset: Any, count: Any) -> None:
    """Ask for ``count`` elements from ``offset`` on to be brought into the cache; never faults."""
    emit = emitter(LANES)
    builder, byte_pointer = emit.builder, ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte_pointer, _WORD, _WORD, _WORD])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, high_locality, data_cache = (ir.Constant(_WORD, number) for number in (0, 3, 1))
    step = _LINE_BYTES // (2 if array.is_half else 4)
    first = emit.pointer(array, offset)
    lines = builder.udiv(builder.add(count, _number(step - 1)), _number(step))
    with cgutils.for_range(builder, lines) as loop:
        place = builder.bitcast(emit.at(first, builder.mul(loop.index, _number(step))), byte_pointer)
        builder.call(ask, [place, read, high_locality, data_cache])
