// What a chunk of rows needs, forward and backward: which pairs, grouped by i2, and their products.

#pragma once

#include <algorithm>

#include "tt.h"

// A run of rows [u0, u1), and the pairs [f0, f1) that it touches; a pair may be cut by its ends.
struct Chunk {
    int64_t u0, u1, f0, f1;
    int64_t first_row(const Batch& b, int64_t f) const {
        return std::max<int64_t>(b.pair_start[f], u0);
    }
    int64_t last_row(const Batch& b, int64_t f) const {
        return std::min<int64_t>(b.pair_start[f + 1], u1);
    }
};

// The chunk after c (at first: all zeros), with as many rows and pairs as fit.
static inline Chunk after(
    const Batch& b, const Chunk& c, int64_t most_rows, int64_t most_pairs)
{
    const bool cut = c.f1 > 0 && c.u1 < b.pair_start[c.f1];
    Chunk next{c.u1, std::min(b.uniques, c.u1 + most_rows), c.f1 - cut, c.f1 - cut};
    while (next.f1 < b.pairs && next.f1 - next.f0 < most_pairs && b.pair_start[next.f1] < next.u1)
        next.f1++;
    next.u1 = std::min<int64_t>(next.u1, b.pair_start[next.f1]);
    return next;
}

// The pairs of a chunk in the order of their i2: order[start[g]] .. order[start[g + 1] - 1] have
// i2[g]. Numbers in `order` count from the chunk's first pair.
struct Groups {
    int64_t count;
    int32_t *start, *i2, *order;  // [p2 + 1], [p2], [pairs of a chunk]
    int32_t* place;               // [p2]

    static int64_t bytes(const Shape& s, int64_t pairs) {
        return Workspace::bytes(s.p2 + 1, 4) + 2 * Workspace::bytes(s.p2, 4) +
               Workspace::bytes(pairs, 4);
    }
    void take(Workspace& w, const Shape& s, int64_t pairs) {
        start = w.take<int32_t>(s.p2 + 1);
        i2 = w.take<int32_t>(s.p2);
        place = w.take<int32_t>(s.p2);
        order = w.take<int32_t>(pairs);
    }
    void fill(const Shape& s, const Batch& b, const Chunk& c) {
        std::memset(place, 0, sizeof(int32_t) * s.p2);
        for (int64_t f = c.f0; f < c.f1; f++) place[b.pair_i2[f]]++;
        count = 0;
        int32_t at = 0;
        for (int64_t i = 0; i < s.p2; i++) {
            const int32_t n = place[i];
            place[i] = at;
            if (n == 0) continue;
            start[count] = at;
            i2[count++] = (int32_t)i;
            at += n;
        }
        start[count] = at;
        for (int64_t f = c.f0; f < c.f1; f++) order[place[b.pair_i2[f]]++] = (int32_t)(f - c.f0);
    }
};

// Rows of matrices that lie anywhere: q1 of them for each pair of a chunk, group by group.
template <typename T>
struct RowPointers {
    const T** from;
    T** to;
    static int64_t bytes(const Shape& s, int64_t pairs) {
        return 2 * Workspace::bytes(s.q1 * pairs, sizeof(T*));
    }
    void take(Workspace& w, const Shape& s, int64_t pairs) {
        from = w.take<const T*>(s.q1 * pairs);
        to = w.take<T*>(s.q1 * pairs);
    }
};

// P[f] [q1 q2][r2] = G1[i1] G2[i2] for the pairs of group g. products: of the chunk's first pair.
template <typename T>
static __attribute__((noinline)) void pair_products(
    const Shape& s, const Batch& b, const Chunk& c, const Groups& groups, int64_t g,
    const RowPointers<T>& rows, const T* g1, const T* g2, T* products)
{
    const int64_t first = groups.start[g], n = groups.start[g + 1] - first;
    const int64_t line = s.q2 * s.r2;
    const T** from = rows.from + s.q1 * first;
    T** to = rows.to + s.q1 * first;
    for (int64_t k = 0; k < n; k++) {
        const int64_t f = groups.order[first + k];
        const T* left = g1 + b.pair_i1[c.f0 + f] * s.q1 * s.r1;
        T* product = products + f * s.q1 * line;
        for (int64_t j = 0; j < s.q1; j++) {
            from[k * s.q1 + j] = left + j * s.r1;
            to[k * s.q1 + j] = product + j * line;
        }
    }
    const T* right = g2 + groups.i2[g] * s.r1 * line;
    multiply<T, false>(from, to, s.q1 * n, right, line, s.r1, line);
}

// ---- a row: values[j][a] = sum_r PT[r][a] G3[r][j]; lanes over a = (j1, j2), padded ----

template <typename T, int AV, int JB, int UNROLL>
static ALWAYS_INLINE void row_block(
    const T* PT, int64_t pad, int64_t r2, const T* g3, int64_t q3, T* values)
{
    constexpr int64_t W = Vector<T>::W;
    typename Vector<T>::type sum[UNROLL][JB][AV] = {};
    int64_t r = 0;
    for (; r + UNROLL <= r2; r += UNROLL)
        for (int i = 0; i < UNROLL; i++)
            for (int v = 0; v < AV; v++) {
                const auto p = load(PT + (r + i) * pad + v * W);
                for (int j = 0; j < JB; j++) sum[i][j][v] += p * g3[(r + i) * q3 + j];
            }
    for (; r < r2; r++)
        for (int v = 0; v < AV; v++) {
            const auto p = load(PT + r * pad + v * W);
            for (int j = 0; j < JB; j++) sum[0][j][v] += p * g3[r * q3 + j];
        }
    for (int j = 0; j < JB; j++)
        for (int v = 0; v < AV; v++) {
            auto total = sum[0][j][v];
            for (int i = 1; i < UNROLL; i++) total += sum[i][j][v];
            store(values + j * pad + v * W, total);
        }
}

template <typename T>
static ALWAYS_INLINE void row_values(
    const T* PT, int64_t pad, int64_t r2, const T* g3, int64_t q3, T* values)
{
    constexpr int64_t W = Vector<T>::W;
    int64_t v = 0;
    for (; v + 2 * W <= pad; v += 2 * W) {
        int64_t j = 0;
        for (; j + 4 <= q3; j += 4)
            row_block<T, 2, 4, 1>(PT + v, pad, r2, g3 + j, q3, values + j * pad + v);
        for (; j + 2 <= q3; j += 2)
            row_block<T, 2, 2, 2>(PT + v, pad, r2, g3 + j, q3, values + j * pad + v);
        for (; j < q3; j++)
            row_block<T, 2, 1, 4>(PT + v, pad, r2, g3 + j, q3, values + j * pad + v);
    }
    for (; v < pad; v += W) {
        int64_t j = 0;
        for (; j + 4 <= q3; j += 4)
            row_block<T, 1, 4, 2>(PT + v, pad, r2, g3 + j, q3, values + j * pad + v);
        for (; j + 2 <= q3; j += 2)
            row_block<T, 1, 2, 4>(PT + v, pad, r2, g3 + j, q3, values + j * pad + v);
        for (; j < q3; j++)
            row_block<T, 1, 1, 4>(PT + v, pad, r2, g3 + j, q3, values + j * pad + v);
    }
}

// P[q1 q2][r2] as PT[r2][pad], zeros in the padding.
template <typename T>
static ALWAYS_INLINE void lanes_of_product(
    int64_t a, int64_t r2, int64_t pad, const T* P, T* PT)
{
    transpose(P, r2, a, r2, PT, pad);
    for (int64_t i = a; i < pad; i++)
        for (int64_t r = 0; r < r2; r++) PT[r * pad + i] = T(0);
}

// A row is [a][q3], lanes are [q3][a]. Four floats a column: blocks of 4 x 8, by shuffles.
struct Blocks {
    typedef Vector<float>::type V;
    typedef int32_t M __attribute__((vector_size(32)));
    static void in_halves(V* v) {  // each half of four lines: 4 x 4, transposed
        const M even = {0, 8, 2, 10, 4, 12, 6, 14}, odd = {1, 9, 3, 11, 5, 13, 7, 15};
        const V a = __builtin_shuffle(v[0], v[1], even), b = __builtin_shuffle(v[0], v[1], odd);
        const V c = __builtin_shuffle(v[2], v[3], even), d = __builtin_shuffle(v[2], v[3], odd);
        const M low = {0, 1, 8, 9, 4, 5, 12, 13}, high = {2, 3, 10, 11, 6, 7, 14, 15};
        v[0] = __builtin_shuffle(a, c, low);
        v[1] = __builtin_shuffle(b, d, low);
        v[2] = __builtin_shuffle(a, c, high);
        v[3] = __builtin_shuffle(b, d, high);
    }
    static V firsts(V a, V b) { return __builtin_shuffle(a, b, M{0, 1, 2, 3, 8, 9, 10, 11}); }
    static V seconds(V a, V b) { return __builtin_shuffle(a, b, M{4, 5, 6, 7, 12, 13, 14, 15}); }

    static void to_row(const float* values, int64_t pad, float* row) {
        V v[4];
        for (int j = 0; j < 4; j++) v[j] = load(values + j * pad);
        in_halves(v);
        store(row, firsts(v[0], v[1]));
        store(row + 8, firsts(v[2], v[3]));
        store(row + 16, seconds(v[0], v[1]));
        store(row + 24, seconds(v[2], v[3]));
    }
    // v[j]: column j of as many lines of four as a vector has lanes.
    template <int64_t BYTES>
    static ALWAYS_INLINE void columns(const float* row, typename Vector<float, BYTES>::type* v) {
        if constexpr (BYTES == 32) {
            const V a = load(row), b = load(row + 8), c = load(row + 16), d = load(row + 24);
            v[0] = firsts(a, c), v[1] = seconds(a, c), v[2] = firsts(b, d), v[3] = seconds(b, d);
            in_halves(v);
        } else if constexpr (BYTES == 64) {
            typedef typename Vector<float, 64>::type W;
            typedef int32_t N __attribute__((vector_size(64)));
            const N low = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29}, high = low + 2;
            const N first = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
            const W a = load<64>(row), b = load<64>(row + 16), c = load<64>(row + 32);
            const W d = load<64>(row + 48);
            const W left = __builtin_shuffle(a, b, low), right = __builtin_shuffle(c, d, low);
            v[0] = __builtin_shuffle(left, right, first);
            v[1] = __builtin_shuffle(left, right, first + 8);
            const W more_left = __builtin_shuffle(a, b, high), more = __builtin_shuffle(c, d, high);
            v[2] = __builtin_shuffle(more_left, more, first);
            v[3] = __builtin_shuffle(more_left, more, first + 8);
        } else {
            for (int64_t lane = 0; lane < Vector<float, BYTES>::W; lane++)
                for (int j = 0; j < 4; j++) v[j][lane] = row[4 * lane + j];
        }
    }
    static void from_row(const float* row, int64_t pad, float* values) {
        V v[4];
        columns<32>(row, v);
        for (int j = 0; j < 4; j++) store(values + j * pad, v[j]);
    }
};

// row[D] of the table from values[j][a].
template <typename T>
static ALWAYS_INLINE void to_columns(
    int64_t a, int64_t q3, int64_t pad, const int32_t* column, const T* values, T* row)
{
    if constexpr (sizeof(T) == 4)
        if (!column && q3 == 4 && a % 8 == 0) {
            for (int64_t i = 0; i < a; i += 8) Blocks::to_row(values + i, pad, row + 4 * i);
            return;
        }
    for (int64_t i = 0, k = 0; i < a; i++)
        for (int64_t j = 0; j < q3; j++, k++) {
            const int64_t to = column ? column[k] : k;
            if (to >= 0) row[to] = values[j * pad + i];
        }
}

// values[j][a], zeros in the padding, from row[D].
template <typename T>
static ALWAYS_INLINE void from_columns(
    int64_t a, int64_t q3, int64_t pad, const int32_t* column, const T* row, T* values)
{
    if constexpr (sizeof(T) == 4)
        if (!column && q3 == 4 && a % 8 == 0) {
            for (int64_t i = 0; i < a; i += 8) Blocks::from_row(row + 4 * i, pad, values + i);
            return;
        }
    for (int64_t i = 0, k = 0; i < a; i++)
        for (int64_t j = 0; j < q3; j++, k++) {
            const int64_t from = column ? column[k] : k;
            values[j * pad + i] = from >= 0 ? row[from] : T(0);
        }
    for (int64_t i = a; i < pad; i++)
        for (int64_t j = 0; j < q3; j++) values[j * pad + i] = T(0);
}

// Sizes of a row that are known when this is compiled (0: not), for the shapes that matter most:
// a = q1 q2 = 8 lanes, q3 = 4 columns each, so D = 32.
template <int A, int Q3, int R2>
class Fixed {
    const Shape& s;
    int64_t padded;

public:
    static constexpr bool turns = Q3 == 4 && WIDE_BYTES == 64;  // lines of the last core, in registers
    Fixed(const Shape& s, int64_t pad) : s(s), padded(pad) {}
    int64_t a() const { return A ? A : s.a(); }
    int64_t q3() const { return Q3 ? Q3 : s.q3; }
    int64_t r2() const { return R2 ? R2 : s.r2; }
    int64_t pad() const { return A ? A : padded; }
    int64_t dim() const { return A ? A * Q3 : s.dim; }
    const int32_t* column() const { return A ? nullptr : s.column; }
};

// f(Fixed) with the sizes of this shape.
template <typename T, typename F>
static void with_sizes(const Shape& s, int64_t pad, const F& f)
{
    if constexpr (sizeof(T) == 4)
        if (!s.column && s.a() == 8 && s.q3 == 4) {
            if (s.r2 == 16) return f(Fixed<8, 4, 16>(s, pad));
            if (s.r2 == 32) return f(Fixed<8, 4, 32>(s, pad));
        }
    f(Fixed<0, 0, 0>(s, pad));
}
