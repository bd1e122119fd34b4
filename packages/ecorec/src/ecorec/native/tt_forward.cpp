// Bags of rows of a tensor-train table: one product a front pair, one row a different index.

#include <omp.h>

#include "rows.h"

namespace {

// How long before they are needed memory is asked for: bags, and lines of the last core.
constexpr int64_t AHEAD = 16, ROWS_AHEAD = 8;

template <typename T>
struct Forward {
    const Shape& s;
    const Batch& b;
    const T *g1, *g2, *g3;
    const T* weights;   // by position in the flattened input, or null
    Mode mode;
    T* output;          // [bags][D]; zeros
    int32_t* position;  // max: [bags][D] of the lookup that each number comes from; -1
    T* kept;            // [pairs][q1 q2 r2] for the backward, or null
    int64_t bags, most_rows, most_pairs, pad;

    Groups groups;
    RowPointers<T> pointers;
    T *products, *rows, *scratch;
    int64_t scratch_size;

    static int64_t scratch_of(const Shape& s, int64_t pad) {
        return round_up((s.r2 + s.q3) * pad, 64 / sizeof(T));
    }
    static int64_t bytes(
        const Shape& s, int64_t pad, int64_t most_rows, int64_t most_pairs, bool keep,
        int64_t threads)
    {
        const int64_t product = s.q1 * s.q2 * s.r2;
        return Groups::bytes(s, most_pairs) + RowPointers<T>::bytes(s, most_pairs) +
               (keep ? 0 : Workspace::bytes(most_pairs * product, sizeof(T))) +
               Workspace::bytes(most_rows * s.dim, sizeof(T)) +
               Workspace::bytes(threads * scratch_of(s, pad), sizeof(T));
    }
    void take(Workspace w, int64_t threads) {
        groups.take(w, s, most_pairs);
        pointers.take(w, s, most_pairs);
        products = kept ? nullptr : w.take<T>(most_pairs * s.q1 * s.q2 * s.r2);
        rows = w.take<T>(most_rows * s.dim);
        scratch_size = scratch_of(s, pad);
        scratch = w.take<T>(threads * scratch_size);
    }

    template <typename Sizes>
    void rows_of_pair(const Sizes& n, const Chunk& c, int64_t f, const T* product, T* PT) const {
        T* values = PT + n.r2() * n.pad();
        lanes_of_product(n.a(), n.r2(), n.pad(), product, PT);
        const int64_t last = c.last_row(b, f), size = n.r2() * n.q3(), end = b.uniques - 1;
        const int32_t* i3 = b.i3;
        const T* core = g3;
        T* row = rows + (c.first_row(b, f) - c.u0) * n.dim();
        for (int64_t u = c.first_row(b, f); u < last; u++, row += n.dim()) {
            prefetch<false>(core + i3[std::min(u + ROWS_AHEAD, end)] * size, size);
            row_values(PT, n.pad(), n.r2(), core + i3[u] * size, n.q3(), values);
            to_columns(n.a(), n.q3(), n.pad(), n.column(), values, row);
        }
    }

    static ALWAYS_INLINE void add(T* bag, const T* row, int64_t dim) {
        constexpr int64_t W = Vector<T>::W;
        int64_t i = 0;
        for (; i + W <= dim; i += W) store(bag + i, load(bag + i) + load(row + i));
        for (; i < dim; i++) bag[i] += row[i];
    }
    static ALWAYS_INLINE void add(T* bag, const T* row, T weight, int64_t dim) {
        constexpr int64_t W = Vector<T>::W;
        int64_t i = 0;
        for (; i + W <= dim; i += W) store(bag + i, load(bag + i) + load(row + i) * weight);
        for (; i < dim; i++) bag[i] += row[i] * weight;
    }

    void take_larger(int64_t bag, const T* row, int32_t at, int64_t first, int64_t width) const {
        T* best = output + bag * s.dim + first;
        int32_t* from = position + bag * s.dim + first;
        for (int64_t i = 0; i < width; i++)
            if (from[i] < 0 || row[i] > best[i] || (row[i] == best[i] && at < from[i])) {
                best[i] = row[i];
                from[i] = at;
            }
    }

    // Every thread reads all lookups, in order, and serves the bags and columns that it owns.
    ALWAYS_INLINE void to_bags(
        int64_t dim, const Chunk& c, int64_t low, int64_t high, int64_t first, int64_t width) const
    {
        const int32_t* start = b.entry_start;
        const T* row = rows + first - dim;
        if (!b.id) return to_bags(dim, start[c.u0], start[c.u1], low, high, first, width, row);
        for (int64_t u = c.u0; u < c.u1; u++, row += dim)
            to_bags(dim, start[b.id[u]], start[b.id[u] + 1], low, high, first, width, row);
    }
    // row: that before the first one.
    ALWAYS_INLINE void to_bags(
        int64_t dim, int64_t e, int64_t last, int64_t low, int64_t high, int64_t first,
        int64_t width, const T* row) const
    {
        const int64_t end = b.entry_start[b.rows] - 1;
        const int32_t *bag_of = b.entry_bag, *at = b.entry_at;
        const T* weight = weights;
        T* out = output + first;
        const bool max = mode == MAX;
        for (; e < last; e++) {
            const int64_t bag = bag_of[e] & BAG;
            row += bag_of[e] < 0 ? dim : 0;
            if (bag < low || bag >= high) continue;
            prefetch<true>(out + (bag_of[std::min(e + AHEAD, end)] & BAG) * dim, width);
            if (max) take_larger(bag, row, at[e], first, width);
            else if (weight) add(out + bag * dim, row, weight[at[e]], width);
            else add(out + bag * dim, row, width);
        }
    }
    // Shares of cache lines of columns as far as they go, shares of bags beyond: a bag that is not
    // one's own is a branch that nothing foretells.
    template <typename Sizes>
    void to_bags(const Sizes& n, const Chunk& c, int64_t t, int64_t threads) const {
        if (threads == 1) return to_bags(n.dim(), c, 0, bags, 0, n.dim());
        const int64_t line = 64 / sizeof(T), lines = round_up(n.dim(), line) / line;
        int64_t parts = std::min(lines, threads);
        while (threads % parts) parts--;
        const int64_t first = lines * (t % parts) / parts * line;
        const int64_t after = std::min(lines * (t % parts + 1) / parts * line, n.dim());
        const int64_t others = threads / parts, share = t / parts;
        const int64_t low = bags * share / others, high = bags * (share + 1) / others;
        to_bags(n.dim(), c, low, high, first, after - first);
    }

    // The rows after chunk c (all, when it is zeros). done: chunks, and pair products made in them.
    template <typename Sizes>
    void run(const Sizes& n, int64_t threads, int64_t* done, Chunk c = {0, 0, 0, 0}) {
        const int64_t product = s.q1 * s.q2 * s.r2;
#pragma omp parallel num_threads((int)threads)
        {
            const int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
            for (bool more = c.u1 < b.uniques; more;) {
#pragma omp barrier
#pragma omp single
                {
                    c = after(b, c, most_rows, most_pairs);
                    groups.fill(s, b, c);
                    done[0]++;
                    done[1] += c.f1 - c.f0;
                }
                T* of_chunk = kept ? kept + c.f0 * product : products;
#pragma omp for schedule(dynamic, 4)
                for (int64_t g = 0; g < groups.count; g++)
                    pair_products(s, b, c, groups, g, pointers, g1, g2, of_chunk);
#pragma omp for schedule(dynamic, 8)
                for (int64_t f = c.f0; f < c.f1; f++)
                    rows_of_pair(n, c, f, of_chunk + (f - c.f0) * product, scratch + t * scratch_size);
                to_bags(n, c, t, all);
                more = c.u1 < b.uniques;
            }
        }
    }
};

// The chunk before the second half of the rows, which begins with a pair.
Chunk second_half(const Batch& b) {
    const int32_t* end = b.pair_start + b.pairs;
    const int64_t middle = std::lower_bound(b.pair_start, end, (int32_t)(b.uniques / 2)) - b.pair_start;
    return Chunk{b.pair_start[middle], b.pair_start[middle], middle, middle};
}

Batch first_half(Batch b, const Chunk& rest) {
    b.uniques = rest.u1;
    b.pairs = rest.f1;
    return b;
}

// The rows in two halves, whose bags are added up at the end: two threads then never meet, and need
// nothing that the other wrote. The same sums for any number of threads.
template <typename T>
void forward_in_halves(Forward<T> f, T* second, char* workspace, int64_t threads, int64_t* done)
{
    const Batch& b = f.b;
    const Chunk rest = second_half(b);
    const Batch first = first_half(b, rest);
    Forward<T> one{f.s, first, f.g1, f.g2, f.g3, f.weights, f.mode, f.output, nullptr, f.kept,
                   f.bags, f.most_rows, f.most_pairs, f.pad};
    Forward<T> two{f.s, b, f.g1, f.g2, f.g3, f.weights, f.mode, second, nullptr, f.kept,
                   f.bags, f.most_rows, f.most_pairs, f.pad};
    const int64_t numbers = f.bags * f.s.dim;
    with_sizes<T>(f.s, f.pad, [&](const auto& sizes) {
        if (threads != 2) {
            one.take(Workspace{workspace}, threads);
            two.take(Workspace{workspace}, threads);
            std::memset(second, 0, sizeof(T) * numbers);
            one.run(sizes, threads, done);
            two.run(sizes, threads, done, rest);
        } else {
            one.most_rows = two.most_rows = std::max<int64_t>(1, f.most_rows / 2);
            one.most_pairs = two.most_pairs = std::max<int64_t>(1, f.most_pairs / 2);
            const int64_t each = round_up(Forward<T>::bytes(
                f.s, f.pad, one.most_rows, one.most_pairs, f.kept != nullptr, 1), 64);
            one.take(Workspace{workspace}, 1);
            two.take(Workspace{workspace + each}, 1);
            int64_t of_two[2] = {0, 0};
#pragma omp parallel num_threads(2)
            if (omp_get_thread_num() == 0) {
                one.run(sizes, 1, done);
            } else {
                std::memset(second, 0, sizeof(T) * numbers);
                two.run(sizes, 1, of_two, rest);
            }
            done[0] += of_two[0];
            done[1] += of_two[1];
        }
    });
    T* output = f.output;
#pragma omp parallel for simd num_threads((int)threads)
    for (int64_t i = 0; i < numbers; i++) output[i] += second[i];
}

template <typename T>
void forward(
    const Shape& s, const Batch& b, const T* g1, const T* g2, const T* g3, const T* weights,
    int64_t mode, int64_t bags, T* output, T* second, int32_t* position, T* kept,
    int64_t most_rows, int64_t most_pairs, char* workspace, int64_t threads, int64_t* done)
{
    const int64_t pad = round_up(s.a(), Vector<T>::W);
    Forward<T> f{s, b, g1, g2, g3, weights, (Mode)mode, output, position, kept, bags, most_rows,
                 most_pairs, pad};
    if (second) return forward_in_halves(f, second, workspace, threads, done);
    f.take(Workspace{workspace}, threads);
    with_sizes<T>(s, pad, [&](const auto& sizes) { f.run(sizes, threads, done); });
}

}  // namespace

extern "C" {

int64_t tt_forward_bytes(
    const Shape* s, int64_t item, int64_t most_rows, int64_t most_pairs, int64_t keep,
    int64_t threads)
{
    const int64_t pad = round_up(s->a(), LANES_OF(item));
    return item == 4 ? Forward<float>::bytes(*s, pad, most_rows, most_pairs, keep, threads)
                     : Forward<double>::bytes(*s, pad, most_rows, most_pairs, keep, threads);
}

// How many chunks a forward takes; in halves, how many both of them do.
int64_t tt_chunks(const Batch* b, int64_t most_rows, int64_t most_pairs, int64_t halves)
{
    int64_t chunks = 0;
    const auto count = [&](const Batch& part, Chunk c) {
        for (; c.u1 < part.uniques; chunks++) c = after(part, c, most_rows, most_pairs);
    };
    if (!halves) {
        count(*b, Chunk{0, 0, 0, 0});
    } else {
        const Chunk rest = second_half(*b);
        count(first_half(*b, rest), Chunk{0, 0, 0, 0});
        count(*b, rest);
    }
    return chunks;
}

// Adds the rows of this batch to `output`; by way of `second` [bags][D] where that is not null. done:
// its chunks and the pair products made are added.
void tt_forward_f32(
    const Shape* s, const Batch* b, const float* g1, const float* g2, const float* g3,
    const float* weights, int64_t mode, int64_t bags, float* output, float* second, int32_t* position,
    float* kept,
    int64_t most_rows, int64_t most_pairs, char* workspace, int64_t threads, int64_t* done)
{
    forward(*s, *b, g1, g2, g3, weights, mode, bags, output, second, position, kept, most_rows,
            most_pairs, workspace, threads, done);
}

void tt_forward_f64(
    const Shape* s, const Batch* b, const double* g1, const double* g2, const double* g3,
    const double* weights, int64_t mode, int64_t bags, double* output, double* second, int32_t* position,
    double* kept, int64_t most_rows, int64_t most_pairs, char* workspace, int64_t threads,
    int64_t* done)
{
    forward(*s, *b, g1, g2, g3, weights, mode, bags, output, second, position, kept, most_rows,
            most_pairs, workspace, threads, done);
}

}  // extern "C"
