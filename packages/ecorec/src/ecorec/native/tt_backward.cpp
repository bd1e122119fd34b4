// Gradients of the cores, and of per-sample weights, from the gradient of the bags.

#include <omp.h>

#include <type_traits>

#include "rows.h"

namespace {

// How long before they are needed memory is asked for: bags, and lines of the last core.
constexpr int32_t AHEAD = 8;
constexpr int64_t ROWS_AHEAD = 3;

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
    static int64_t lines(const Shape& s) { return round_up(s.r2, Vector<T>::W); }

    static int64_t scratch_of(const Shape& s, int64_t pad) {
        // Of a row: its gradient twice, its values; of a pair: P padded, P transposed, dP.
        const int64_t rows = s.columns() + s.dim + 2 * s.q3 * pad;
        const int64_t pair = s.a() * lines(s) + 2 * s.r2 * pad;
        const int64_t group = s.q2 * s.r2 * s.r1;
        return round_up(std::max(rows + pair, group), 64 / sizeof(T));
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

    // Sum over the lookups of a row, in order: what its value does to the loss. In `row`, or where
    // it lies already.
    ALWAYS_INLINE const T* gradient_of_row(int64_t dim, int64_t id, int64_t end, T* row) const {
        const int32_t first = b.entry_start[id], last = b.entry_start[id + 1];
        const T count = by_count ? T(1) / T(last - first) : T(1);
        const int32_t *bag_of = b.entry_bag, *at = b.entry_at;
        const T *gradient = bag_gradient, *of_entry = weights, *of_bag = bag_scale;
        if (mode_is_max()) {
            for (int64_t i = 0; i < dim; i++) row[i] = T(0);
            for (int32_t e = first; e < last; e++)
                for (int64_t i = bag_of[e] * dim, k = 0; k < dim; i++, k++)
                    if (position[i] == at[e]) row[k] += gradient[i] * count;
        } else if (!of_entry && !of_bag && !by_count) {
            if (last - first == 1) {
                prefetch<false>(gradient + bag_of[std::min<int64_t>(first + AHEAD, end - 1)] * dim, dim);
                return gradient + bag_of[first] * dim;
            }
            sum_of_bags(gradient, bag_of, first, last, end, dim, row, [](int32_t) { return 1; });
        } else {
            sum_of_bags(gradient, bag_of, first, last, end, dim, row, [=](int32_t e) {
                T w = count;
                if (of_entry) w *= of_entry[at[e]];
                if (of_bag) w *= of_bag[bag_of[e]];
                return w;
            });
        }
        return row;
    }
    template <typename F>
    static ALWAYS_INLINE void sum_of_bags(
        const T* gradient, const int32_t* bag_of, int32_t first, int32_t last, int64_t end,
        int64_t dim, T* row, const F& weight)
    {
        constexpr int64_t W = Vector<T>::W;
        constexpr bool plain = std::is_same_v<decltype(weight(0)), int>;
        int64_t i = 0;
        for (; i + 4 * W <= dim; i += 4 * W) {
            typename Vector<T>::type sum[4] = {};
            for (int32_t e = first; e < last; e++) {
                prefetch<false>(gradient + bag_of[e + AHEAD < end ? e + AHEAD : e] * dim + i, 4 * W);
                const T* bag = gradient + bag_of[e] * dim + i;
                const T w = (T)weight(e);
                for (int v = 0; v < 4; v++) sum[v] += plain ? load(bag + v * W) : load(bag + v * W) * w;
            }
            for (int v = 0; v < 4; v++) store(row + i + v * W, sum[v]);
        }
        for (; i + W <= dim; i += W) {
            typename Vector<T>::type sum = {};
            for (int32_t e = first; e < last; e++)
                sum += load(gradient + bag_of[e] * dim + i) * (T)weight(e);
            store(row + i, sum);
        }
        for (; i < dim; i++) {
            T sum = 0;
            for (int32_t e = first; e < last; e++)
                sum += gradient[bag_of[e] * dim + i] * (T)weight(e);
            row[i] = sum;
        }
    }
    bool mode_is_max() const { return position != nullptr; }

    // dPT[r][a] += sum_j G3[r][j] dT[j][a]
    template <int Q3>
    static ALWAYS_INLINE void add_lanes(
        const T* row3, int64_t q3, const T* dT, int64_t pad, T* dPT, int64_t r2)
    {
        typename Vector<T>::type d[Q3];
        for (int j = 0; j < Q3; j++) d[j] = load(dT + j * pad);
        for (int64_t r = 0; r < r2; r++) {
            auto sum = load(dPT + r * pad);
            for (int j = 0; j < Q3; j++) sum += d[j] * row3[r * q3 + j];
            store(dPT + r * pad, sum);
        }
    }
    template <typename Sizes>
    static ALWAYS_INLINE void add_to_product(
        const Sizes& n, const T* row3, const T* dT, T* dPT)
    {
        const int64_t q3 = n.q3(), pad = n.pad();
        for (int64_t v = 0; v < pad; v += Vector<T>::W) {
            int64_t j = 0;
            for (; j + 4 <= q3; j += 4)
                add_lanes<4>(row3 + j, q3, dT + j * pad + v, pad, dPT + v, n.r2());
            for (; j + 2 <= q3; j += 2)
                add_lanes<2>(row3 + j, q3, dT + j * pad + v, pad, dPT + v, n.r2());
            for (; j < q3; j++)
                add_lanes<1>(row3 + j, q3, dT + j * pad + v, pad, dPT + v, n.r2());
        }
    }

    // d3[j][r] += sum_a P[a][r] dT[j][a]; lines of P are `ld` long and padded with zeros.
    template <int64_t BYTES, int JB, int RB>
    static ALWAYS_INLINE void add_block(
        const T* P, int64_t ld, int64_t a, const T* dT, int64_t pad, T* d3, int64_t line,
        int64_t left)
    {
        constexpr int64_t W = Vector<T, BYTES>::W;
        typename Vector<T, BYTES>::type sum[JB][RB] = {};
        for (int64_t i = 0; i < a; i++) {
            typename Vector<T, BYTES>::type p[RB];
            for (int v = 0; v < RB; v++) p[v] = load<BYTES>(P + i * ld + v * W);
            for (int j = 0; j < JB; j++)
                for (int v = 0; v < RB; v++) sum[j][v] += p[v] * dT[j * pad + i];
        }
        for (int j = 0; j < JB; j++)
            for (int v = 0; v < RB; v++) {
                T* to = d3 + j * line + v * W;
                if (left - v * W >= W) store<BYTES>(to, load<BYTES>(to) + sum[j][v]);
                else
                    for (int64_t r = 0; r < left - v * W; r++) to[r] += sum[j][v][r];
            }
    }
    template <int64_t BYTES, int RB, typename Sizes>
    static ALWAYS_INLINE void add_lines(
        const Sizes& n, const T* P, int64_t ld, const T* dT, T* d3, int64_t r)
    {
        const int64_t left = n.r2() - r;
        P += r;
        d3 += r;
        int64_t j = 0;
        for (; j + 4 <= n.q3(); j += 4)
            add_block<BYTES, 4, RB>(P, ld, n.a(), dT + j * n.pad(), n.pad(), d3 + j * n.r2(), n.r2(), left);
        for (; j < n.q3(); j++)
            add_block<BYTES, 1, RB>(P, ld, n.a(), dT + j * n.pad(), n.pad(), d3 + j * n.r2(), n.r2(), left);
    }
    template <typename Sizes>
    static ALWAYS_INLINE void add_to_last_core(
        const Sizes& n, const T* P, int64_t ld, const T* dT, T* d3)
    {
        constexpr int64_t W = Vector<T>::W, WIDE = Vector<T, WIDE_BYTES>::W;
        int64_t r = 0;
        for (; r + 2 * WIDE <= n.r2(); r += 2 * WIDE) add_lines<WIDE_BYTES, 2>(n, P, ld, dT, d3, r);
        if (WIDE > W)
            for (; r + WIDE <= n.r2(); r += WIDE) add_lines<WIDE_BYTES, 1>(n, P, ld, dT, d3, r);
        for (; r + 2 * W <= n.r2(); r += 2 * W) add_lines<VECTOR_BYTES, 2>(n, P, ld, dT, d3, r);
        for (; r < n.r2(); r += W) add_lines<VECTOR_BYTES, 1>(n, P, ld, dT, d3, r);
    }

    void weights_of_row(int64_t id, const T* row) const {
        for (int32_t e = b.entry_start[id]; e < b.entry_start[id + 1]; e++) {
            const T* bag = bag_gradient + (int64_t)b.entry_bag[e] * s.dim;
            T sum = 0;
            for (int64_t i = 0; i < s.dim; i++) sum += bag[i] * row[i];
            d_weights[b.entry_at[e]] = sum;
        }
    }

    template <typename Sizes>
    void rows_of_pair(
        const Sizes& n, const Chunk& c, int64_t f, const T* P, T* dP, T* d3_slot, T* mine) const
    {
        T* row = mine;
        T* value = row + s.columns();
        T* dT = value + s.dim;
        T* values = dT + n.q3() * n.pad();
        T* padded = values + n.q3() * n.pad();
        T* PT = padded + n.a() * lines(s);
        T* dPT = PT + n.r2() * n.pad();
        const bool into_product = d1 || d2, into_last = d3, into_weights = d_weights;
        int64_t ld = n.r2();
        const T* lines_of_P = P;
        if (n.r2() % Vector<T>::W && into_last) {
            ld = lines(s);
            for (int64_t i = 0; i < n.a(); i++)
                for (int64_t r = 0; r < ld; r++)
                    padded[i * ld + r] = r < n.r2() ? P[i * n.r2() + r] : T(0);
            lines_of_P = padded;
        }
        if (into_weights) lanes_of_product(n.a(), n.r2(), n.pad(), P, PT);
        if (into_product) std::memset(dPT, 0, sizeof(T) * n.r2() * n.pad());
        const int64_t first = c.first_row(b, f), last = c.last_row(b, f), size = n.r2() * n.q3();
        const int64_t end = b.uniques - 1, entries = b.entry_start[b.rows];
        const int32_t* i3 = b.i3;
        const T* core = g3;
        for (int64_t u = first; u < last; u++) {
            const int64_t id = b.of(u), next = i3[std::min(u + ROWS_AHEAD, end)];
            const T* row3 = core + i3[u] * size;
            prefetch<false>(core + next * size, size);
            if (into_last) prefetch<true>(d3_slot + next * size, size);
            if (into_product || into_last) {
                const T* of_row = gradient_of_row(n.dim(), id, entries, row);
                from_columns(n.a(), n.q3(), n.pad(), n.column(), of_row, dT);
            }
            if (into_product) add_to_product(n, row3, dT, dPT);
            if (into_last) add_to_last_core(n, lines_of_P, ld, dT, d3_slot + i3[u] * size);
            if (into_weights) {
                row_values(PT, n.pad(), n.r2(), row3, n.q3(), values);
                to_columns(n.a(), n.q3(), n.pad(), n.column(), values, value);
                weights_of_row(id, value);
            }
        }
        if (into_product) transpose(dPT, n.pad(), n.r2(), n.a(), dP, n.r2());
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
            if (d3) {
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
