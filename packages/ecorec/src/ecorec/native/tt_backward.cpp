// Gradients of the cores, and of per-sample weights, from the gradient of the bags.

#include <omp.h>

#include <type_traits>

#include "rows.h"

namespace {

// How long before they are needed bags are asked for.
constexpr int32_t AHEAD = 16;
constexpr int64_t ROWS_AHEAD = 8;
constexpr int64_t ROWS = 8;  // of one pair, whose gradients are looked for before they are used

template <typename T>
struct Backward {
    const Shape& s;
    const Batch& b;
    const T *g1, *g2, *g3;
    const T* weights;         // by position, or null
    const T* bag_scale;       // [bags], or null
    const int32_t* position;  // max: [bags][D]
    bool by_count;            // divide by how often the row was asked for
    const T* bag_gradient;    // [bags][D]
    const T* kept;            // [pairs][q1 q2 r2] of the forward, or null
    T *d1, *d2, *d3;          // like g1, g2, g3; added to (d3: written), or null
    T* d_weights;             // by position, or null
    int64_t most_rows, most_pairs, slots, pad;

    Groups groups;
    RowPointers<T> pointers, left;
    T *products, *d_products, *d_left, *d3_slots, *scratch;
    int64_t scratch_size;

    int64_t product_size() const { return s.q1 * s.q2 * s.r2; }

    static int64_t scratch_of(const Shape& s, int64_t pad) {
        const int64_t rows = ROWS * (s.dim + (s.column ? s.columns() : 0) + s.q3 * s.r2);
        const int64_t values = (s.r2 + s.q3) * pad + s.dim;
        const int64_t group = s.q2 * s.r2 * s.r1;
        return round_up(std::max({rows, values, group}), 64 / sizeof(T));
    }
    static int64_t bytes(
        const Shape& s, int64_t pad, int64_t most_pairs, bool keep, int64_t slots, int64_t threads)
    {
        const int64_t product = s.q1 * s.q2 * s.r2;
        return Groups::bytes(s, most_pairs) + 2 * RowPointers<T>::bytes(s, most_pairs) +
               (keep ? 0 : Workspace::bytes(most_pairs * product, sizeof(T))) +
               Workspace::bytes(most_pairs * product, sizeof(T)) +
               Workspace::bytes(most_pairs * s.q1 * s.r1, sizeof(T)) +
               Workspace::bytes(slots * s.p3 * s.q3 * s.r2, sizeof(T)) +
               Workspace::bytes(threads * scratch_of(s, pad), sizeof(T));
    }
    void take(Workspace w, int64_t threads) {
        groups.take(w, s, most_pairs);
        pointers.take(w, s, most_pairs);
        left.take(w, s, most_pairs);
        products = kept ? nullptr : w.take<T>(most_pairs * product_size());
        d_products = w.take<T>(most_pairs * product_size());
        d_left = w.take<T>(most_pairs * s.q1 * s.r1);
        d3_slots = w.take<T>(slots * s.p3 * s.q3 * s.r2);  // [slots][p3][q3][r2]
        scratch_size = scratch_of(s, pad);
        scratch = w.take<T>(threads * scratch_size);
    }

    // Rows of one pair: their gradients [q1 q2][q3], their lines of G3 as [q3][r2], and those of the
    // slot where its gradient is summed.
    struct RowBlock {
        int64_t count, last;  // rows, and the batch's last one counted from the first of these
        const int32_t* i3;
        const T *gradients, *lines, *core;
        T* d_core;
    };

    // Of each row, the sum over its lookups, in order: what its value does to the loss. sums: [rows]
    // [D], of the rows whose lookups are [first, last).
    ALWAYS_INLINE void gradients_of_rows(
        int64_t dim, int64_t first, int64_t last, int64_t end, T* sums) const
    {
        const int32_t* at = b.entry_at;
        const T *of_entry = weights, *of_bag = bag_scale;
        if (mode_is_max()) {
            T* row = sums - dim;
            for (int64_t e = first; e < last; e++) {
                const int64_t bag = b.entry_bag[e] & BAG;
                if (b.entry_bag[e] < 0) std::fill_n(row += dim, dim, T(0));
                for (int64_t i = bag * dim, k = 0; k < dim; i++, k++)
                    if (position[i] == at[e]) row[k] += bag_gradient[i];
            }
        } else if (!of_entry && !of_bag) {
            sums_of_bags(dim, first, last, end, sums, [](int64_t, int64_t) { return 1; });
        } else {
            sums_of_bags(dim, first, last, end, sums, [=](int64_t e, int64_t bag) {
                return (of_entry ? of_entry[at[e]] : T(1)) * (of_bag ? of_bag[bag] : T(1));
            });
        }
    }
    template <typename F>
    ALWAYS_INLINE void sums_of_bags(
        int64_t dim, int64_t first, int64_t last, int64_t end, T* sums, const F& weight) const
    {
        int64_t i = 0;
        for (; i + 4 * Vector<T>::W <= dim; i += 4 * Vector<T>::W)
            sum_lanes<VECTOR_BYTES, 4>(dim, first, last, end, sums + i, i, weight);
        for (; i + Vector<T>::W <= dim; i += Vector<T>::W)
            sum_lanes<VECTOR_BYTES, 1>(dim, first, last, end, sums + i, i, weight);
        for (; i < dim; i++) sum_lanes<sizeof(T), 1>(dim, first, last, end, sums + i, i, weight);
    }
    template <int64_t BYTES, int NV, typename F>
    ALWAYS_INLINE void sum_lanes(
        int64_t dim, int64_t first, int64_t last, int64_t end, T* row, int64_t i,
        const F& weight) const
    {
        typedef Vector<T, BYTES> Lanes;
        typedef typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type Int;
        typedef Int Bits __attribute__((vector_size(BYTES)));
        constexpr bool plain = std::is_same_v<decltype(weight(0, 0)), int>;
        const int32_t* bag_of = b.entry_bag;
        const T* gradient = bag_gradient + i;
        typename Lanes::type sum[NV] = {};
        row -= dim;
        for (int64_t e = first; e < last; e++) {
            const int64_t bag = bag_of[e] & BAG, begins = bag_of[e] < 0;
            prefetch<false>(gradient + (bag_of[std::min(e + AHEAD, end)] & BAG) * dim, NV * Lanes::W);
            row += begins ? dim : 0;
            const T* from = gradient + bag * dim;
            const T w = (T)weight(e, bag);
            const Bits kept = Bits{} + (Int)(begins - 1);
            for (int v = 0; v < NV; v++) {
                const auto more = load<BYTES>(from + v * Lanes::W);
                sum[v] = (typename Lanes::type)((Bits)sum[v] & kept) + (plain ? more : more * w);
                store<BYTES>(row + v * Lanes::W, sum[v]);
            }
        }
    }
    bool mode_is_max() const { return position != nullptr; }

    // For each row: dP[i][:] += sum_j d[i][j] G3T[j][:], and d3[j][:] += sum_i d[i][j] P[i][:].
    // AB lines of the products, JB of the core, lanes of BYTES; a number d is loaded once for both.
    template <int64_t BYTES, int AB, int JB, typename Sizes>
    static ALWAYS_INLINE void add_rows(
        const Sizes& n, const RowBlock& rows, const T* P, T* dP, int64_t a, int64_t j, int64_t r)
    {
        typedef typename Vector<T, BYTES>::type V;
        const int64_t r2 = n.r2(), q3 = n.q3(), size = r2 * q3, columns = n.a() * q3;
        V p[AB], dp[AB];
        for (int i = 0; i < AB; i++) {
            p[i] = load<BYTES>(P + (a + i) * r2 + r);
            dp[i] = load<BYTES>(dP + (a + i) * r2 + r);
        }
        const T *d = rows.gradients + a * q3 + j, *line = rows.lines + j * r2 + r;
        for (int64_t k = 0; k < rows.count; k++, d += columns, line += size) {
            const int64_t next = rows.i3[std::min(k + ROWS_AHEAD, rows.last)] * size;
            prefetch<false>(rows.core + next + r * q3, JB * Vector<T, BYTES>::W);
            const T* core = rows.core + rows.i3[k] * size;
            T* to = rows.d_core + rows.i3[k] * size + j * r2 + r;
            for (int v = 0; v < JB; v++)
                __builtin_prefetch(rows.d_core + next + (j + v) * r2 + r, 1);
            V g[JB], dg[JB];
            if constexpr (Sizes::turns && JB == 4) Blocks::columns<BYTES>(core + 4 * r, g);
            else
                for (int v = 0; v < JB; v++) g[v] = load<BYTES>(line + v * r2);
            for (int v = 0; v < JB; v++) dg[v] = load<BYTES>(to + v * r2);
            for (int i = 0; i < AB; i++)
                for (int v = 0; v < JB; v++) {
                    const V both = V{} + d[i * q3 + v];
                    dp[i] += g[v] * both;
                    dg[v] += p[i] * both;
                }
            for (int v = 0; v < JB; v++) store<BYTES>(to + v * r2, dg[v]);
        }
        for (int i = 0; i < AB; i++) store<BYTES>(dP + (a + i) * r2 + r, dp[i]);
    }
    template <int64_t BYTES, int AB, typename Sizes>
    static ALWAYS_INLINE void add_lines(
        const Sizes& n, const RowBlock& rows, const T* P, T* dP, int64_t a, int64_t r)
    {
        int64_t j = 0;
        for (; j + 4 <= n.q3(); j += 4) add_rows<BYTES, AB, 4>(n, rows, P, dP, a, j, r);
        for (; j < n.q3(); j++) add_rows<BYTES, AB, 1>(n, rows, P, dP, a, j, r);
    }
    template <int64_t BYTES, typename Sizes>
    static ALWAYS_INLINE int64_t add_lanes(
        const Sizes& n, const RowBlock& rows, const T* P, T* dP, int64_t r)
    {
        constexpr int64_t W = Vector<T, BYTES>::W;
        constexpr int AB = BYTES == 64 ? 8 : 4;  // as many as the registers hold
        for (; r + W <= n.r2(); r += W) {
            int64_t a = 0;
            for (; a + AB <= n.a(); a += AB) add_lines<BYTES, AB>(n, rows, P, dP, a, r);
            for (; a < n.a(); a++) add_lines<BYTES, 1>(n, rows, P, dP, a, r);
        }
        return r;
    }

    // The gradients of rows [u, u + count) as [q1 q2][q3] each.
    template <typename Sizes>
    ALWAYS_INLINE T* gradients_in_columns(
        const Sizes& n, int64_t u, int64_t count, int64_t end, T* mine) const
    {
        const int32_t* start = b.entry_start;
        const int64_t dim = n.dim(), columns = s.columns();
        if (!b.id) gradients_of_rows(dim, start[u], start[u + count], end, mine);
        else
            for (int64_t k = 0; k < count; k++)
                gradients_of_rows(
                    dim, start[b.id[u + k]], start[b.id[u + k] + 1], end, mine + k * dim);
        if (by_count)
            for (int64_t k = 0; k < count; k++) {
                const int64_t id = b.of(u + k);
                const T share = T(1) / T(start[id + 1] - start[id]);
                for (int64_t i = 0; i < dim; i++) mine[k * dim + i] *= share;
            }
        const int32_t* column = n.column();
        if (!column) return mine;
        T* to = mine + ROWS * dim;
        for (int64_t k = 0; k < count; k++)
            for (int64_t i = 0; i < columns; i++)
                to[k * columns + i] = column[i] >= 0 ? mine[k * dim + column[i]] : T(0);
        return to;
    }

    // Lines [r2][q3] of the last core as [q3][r2].
    template <typename Sizes>
    ALWAYS_INLINE void turn_lines(
        const Sizes& n, const int32_t* i3, int64_t count, T* turned) const
    {
        const int64_t q3 = n.q3(), r2 = n.r2();
        for (int64_t k = 0; k < count; k++, turned += q3 * r2) {
            const T* line = g3 + i3[k] * q3 * r2;
            int64_t r = 0;
            if constexpr (sizeof(T) == 4)
                if (q3 == 4)
                    for (; r + 8 <= r2; r += 8) Blocks::from_row(line + 4 * r, r2, turned + r);
            for (; r < r2; r++)
                for (int64_t j = 0; j < q3; j++) turned[j * r2 + r] = line[r * q3 + j];
        }
    }

    template <typename Sizes>
    void cores_of_pair(
        const Sizes& n, const Chunk& c, int64_t f, const T* P, T* dP, T* d3_slot, T* mine) const
    {
        const int64_t first = c.first_row(b, f), last = c.last_row(b, f);
        const int64_t end = b.entry_start[b.rows] - 1;
        const int32_t* i3 = b.i3;
        T* lines = mine + ROWS * (s.dim + (n.column() ? s.columns() : 0));
        std::memset(dP, 0, sizeof(T) * n.a() * n.r2());
        RowBlock rows;
        rows.lines = lines;
        rows.core = g3;
        rows.d_core = d3_slot;
        for (int64_t u = first; u < last; u += rows.count) {
            rows.count = std::min(ROWS, last - u);
            rows.last = b.uniques - 1 - u;
            rows.i3 = i3 + u;
            rows.gradients = gradients_in_columns(n, u, rows.count, end, mine);
            if (!Sizes::turns) turn_lines(n, i3 + u, rows.count, lines);
            int64_t r = 0;
            if constexpr (WIDE_BYTES > VECTOR_BYTES) r = add_lanes<WIDE_BYTES>(n, rows, P, dP, r);
            r = add_lanes<VECTOR_BYTES>(n, rows, P, dP, r);
            r = add_lanes<16>(n, rows, P, dP, r);
            add_lanes<sizeof(T)>(n, rows, P, dP, r);
        }
    }

    template <typename Sizes>
    void rows_of_pair(
        const Sizes& n, const Chunk& c, int64_t f, const T* P, T* dP, T* d3_slot, T* mine) const
    {
        if (d1 || d2 || d3) cores_of_pair(n, c, f, P, dP, d3_slot, mine);
        if (d_weights) weights_of_pair(n, c, f, P, mine);
    }

    template <typename Sizes>
    void weights_of_pair(const Sizes& n, const Chunk& c, int64_t f, const T* P, T* mine) const {
        T* PT = mine;
        T* values = PT + n.r2() * n.pad();
        T* row = values + n.q3() * n.pad();
        lanes_of_product(n.a(), n.r2(), n.pad(), P, PT);
        for (int64_t u = c.first_row(b, f); u < c.last_row(b, f); u++) {
            row_values(PT, n.pad(), n.r2(), g3 + b.i3[u] * n.r2() * n.q3(), n.q3(), values);
            to_columns(n.a(), n.q3(), n.pad(), n.column(), values, row);
            const int64_t id = b.of(u);
            for (int32_t e = b.entry_start[id]; e < b.entry_start[id + 1]; e++) {
                const T* bag = bag_gradient + (int64_t)(b.entry_bag[e] & BAG) * s.dim;
                T sum = 0;
                for (int64_t i = 0; i < s.dim; i++) sum += bag[i] * row[i];
                d_weights[b.entry_at[e]] = sum;
            }
        }
    }

    // d2[i2] += sum over pairs of G1[i1]^T dP; d_left = dP G2[i2]^T.
    __attribute__((noinline)) void cores_of_group(const Chunk& c, int64_t g, T* mine) const {
        const int64_t first = groups.start[g], n = groups.start[g + 1] - first;
        const int64_t line = s.q2 * s.r2, i2 = groups.i2[g];
        const T** from = pointers.from + s.q1 * first;
        const T** of_left = left.from + s.q1 * first;
        T** to = left.to + s.q1 * first;
        for (int64_t k = 0; k < n; k++) {
            const int64_t f = groups.order[first + k];
            for (int64_t j = 0; j < s.q1; j++) {
                from[k * s.q1 + j] = d_products + f * product_size() + j * line;
                of_left[k * s.q1 + j] = g1 + (b.pair_i1[c.f0 + f] * s.q1 + j) * s.r1;
                to[k * s.q1 + j] = d_left + (f * s.q1 + j) * s.r1;
            }
        }
        const int64_t M = s.q1 * n;
        if (d2) add_outer(of_left, from, M, d2 + i2 * s.r1 * line, line, s.r1, line);
        if (d1) {
            transpose(g2 + i2 * s.r1 * line, line, s.r1, line, mine, s.r1);
            multiply<T, false>(from, to, M, mine, s.r1, line, s.r1);
        }
    }

    // Each thread adds up the pairs of the i1 that it owns.
    void first_core(const Chunk& c, int64_t low, int64_t high) const {
        const int64_t size = s.q1 * s.r1;
        for (int64_t f = c.f0; f < c.f1; f++) {
            const int64_t i1 = b.pair_i1[f];
            if (i1 < low || i1 >= high) continue;
            const T* from = d_left + (f - c.f0) * size;
            for (int64_t k = 0; k < size; k++) d1[i1 * size + k] += from[k];
        }
    }

    // The pair at which a slot's rows begin: slots hold about equally many rows.
    int64_t slot_start(const Chunk& c, int64_t slot) const {
        const int64_t u = c.u0 + (c.u1 - c.u0) * slot / slots;
        const int32_t* found =
            std::lower_bound(b.pair_start + c.f0, b.pair_start + c.f1, (int32_t)u);
        return slot == 0 ? c.f0 : found - b.pair_start;
    }

    // d3[r][j] = sum over slots of slot[j][r], in their order, for lines [low, high) of the core.
    __attribute__((noinline)) void last_core(int64_t low, int64_t high) const {
        const int64_t size = s.q3 * s.r2, all = s.p3 * size, r2 = s.r2, q3 = s.q3, n = slots;
        T* to = d3;
        const T* from = d3_slots;
        for (int64_t i = low * size; i < high * size; i += size) {
            int64_t r = 0;
            if constexpr (sizeof(T) == 4)
                if (q3 == 4)
                    for (; r + 8 <= r2; r += 8) {
                        float sums[32], turned[32];
                        for (int j = 0; j < 4; j++) {
                            auto sum = load(from + i + j * r2 + r);
                            for (int64_t slot = 1; slot < n; slot++)
                                sum += load(from + slot * all + i + j * r2 + r);
                            store(sums + 8 * j, sum);
                        }
                        Blocks::to_row(sums, 8, turned);
                        for (int k = 0; k < 32; k += 8) store(to + i + 4 * r + k, load(turned + k));
                    }
            for (; r < r2; r++)
                for (int64_t j = 0; j < q3; j++) {
                    T sum = from[i + j * r2 + r];
                    for (int64_t slot = 1; slot < n; slot++) sum += from[slot * all + i + j * r2 + r];
                    to[i + r * q3 + j] = sum;
                }
        }
    }

    template <typename Sizes>
    void run(const Sizes& n, int64_t threads) {
        Chunk c{0, 0, 0, 0};
        const int64_t core3 = s.p3 * s.q3 * s.r2;
#pragma omp parallel num_threads((int)threads)
        {
            const int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
            T* mine = scratch + t * scratch_size;
            if (d1 || d2 || d3) {
                const int64_t size = slots * core3, low = size * t / all;
                std::memset(d3_slots + low, 0, sizeof(T) * (size * (t + 1) / all - low));
            }
            for (bool more = b.uniques > 0; more;) {
#pragma omp barrier
#pragma omp single
                {
                    c = after(b, c, most_rows, most_pairs);
                    groups.fill(s, b, c);
                }
                const T* of_chunk = kept ? kept + c.f0 * product_size() : products;
                if (!kept) {
#pragma omp for schedule(dynamic, 4)
                    for (int64_t g = 0; g < groups.count; g++)
                        pair_products(s, b, c, groups, g, pointers, g1, g2, products);
                }
#pragma omp for schedule(dynamic, 1)
                for (int64_t slot = 0; slot < slots; slot++) {
                    T* d3_slot = d3_slots + slot * core3;
                    const int64_t end = slot + 1 == slots ? c.f1 : slot_start(c, slot + 1);
                    for (int64_t f = slot_start(c, slot); f < end; f++)
                        rows_of_pair(n, c, f, of_chunk + (f - c.f0) * product_size(),
                                     d_products + (f - c.f0) * product_size(), d3_slot, mine);
                }
                if (d1 || d2) {
#pragma omp for schedule(dynamic, 2)
                    for (int64_t g = 0; g < groups.count; g++) cores_of_group(c, g, mine);
                }
                if (d1) first_core(c, s.p1 * t / all, s.p1 * (t + 1) / all);
                more = c.u1 < b.uniques;
            }
            if (d3) {
#pragma omp barrier
                last_core(s.p3 * t / all, s.p3 * (t + 1) / all);
            }
        }
    }
};

template <typename T>
void backward(
    const Shape& s, const Batch& b, const T* const* cores, const T* weights, const T* bag_scale,
    const int32_t* position, int64_t by_count, const T* bag_gradient, const T* kept,
    T* const* d_cores, T* d_weights, int64_t most_rows, int64_t most_pairs, int64_t slots,
    char* workspace, int64_t threads)
{
    const int64_t pad = round_up(s.a(), Vector<T>::W);
    Backward<T> d{s, b, cores[0], cores[1], cores[2], weights, bag_scale, position, by_count != 0,
                  bag_gradient, kept, d_cores[0], d_cores[1], d_cores[2], d_weights, most_rows,
                  most_pairs, slots, pad};
    d.take(Workspace{workspace}, threads);
    with_sizes<T>(s, pad, [&](const auto& sizes) { d.run(sizes, threads); });
}

}  // namespace

extern "C" {

int64_t tt_backward_bytes(
    const Shape* s, int64_t item, int64_t most_pairs, int64_t keep, int64_t slots, int64_t threads)
{
    const int64_t pad = round_up(s->a(), LANES_OF(item));
    return item == 4 ? Backward<float>::bytes(*s, pad, most_pairs, keep, slots, threads)
                     : Backward<double>::bytes(*s, pad, most_pairs, keep, slots, threads);
}

void tt_backward_f32(
    const Shape* s, const Batch* b, const float* const* cores, const float* weights,
    const float* bag_scale, const int32_t* position, int64_t by_count, const float* bag_gradient,
    const float* kept, float* const* d_cores, float* d_weights, int64_t most_rows,
    int64_t most_pairs, int64_t slots, char* workspace, int64_t threads)
{
    backward(*s, *b, cores, weights, bag_scale, position, by_count, bag_gradient, kept, d_cores,
             d_weights, most_rows, most_pairs, slots, workspace, threads);
}

void tt_backward_f64(
    const Shape* s, const Batch* b, const double* const* cores, const double* weights,
    const double* bag_scale, const int32_t* position, int64_t by_count, const double* bag_gradient,
    const double* kept, double* const* d_cores, double* d_weights, int64_t most_rows,
    int64_t most_pairs, int64_t slots, char* workspace, int64_t threads)
{
    backward(*s, *b, cores, weights, bag_scale, position, by_count, bag_gradient, kept, d_cores,
             d_weights, most_rows, most_pairs, slots, workspace, threads);
}

}  // extern "C"
