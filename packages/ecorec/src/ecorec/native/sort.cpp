// From the indices of a batch to its different rows, their front pairs and who asks for them.

#include <omp.h>

#include <algorithm>
#include <utility>

#include "tt.h"

namespace {

constexpr int DIGIT_BITS = 12;  // of a pass: 4,096 ends of runs stay in the first cache
constexpr int64_t MOST_SORTERS = 8;  // threads: each has counters of its own

struct Key {
    uint32_t row;
    int32_t at;
};

// Least significant digit first, stable. A thread `counts` its share of the keys, then all `sort`;
// the result is where `keys` points to afterwards, the same for any number of threads.
class RadixSort {
    int passes, digit;
    int64_t buckets;
    int32_t* counts;  // of each thread for the pass at hand; of one thread alone, of all passes
    int64_t threads;

    int64_t place(uint32_t row, int pass) const { return row >> (pass * digit) & (buckets - 1); }

    // From how many keys of a digit each thread has to where its first one goes.
    void counts_to_starts(int32_t* of_pass) {
        int32_t start = 0;
        for (int64_t b = 0; b < buckets; b++)
            for (int64_t t = 0; t < threads; t++) {
                const int32_t count = of_pass[t * buckets + b];
                of_pass[t * buckets + b] = start;
                start += count;
            }
    }

public:
    RadixSort(int64_t rows, int32_t* counts, int64_t threads) : counts(counts), threads(threads) {
        int bits = 1;
        while (bits < 32 && (int64_t(1) << bits) < rows) bits++;
        passes = (bits + DIGIT_BITS - 1) / DIGIT_BITS;
        digit = (bits + passes - 1) / passes;
        buckets = int64_t(1) << digit;
    }
    // The thread's counters, cleared.
    ALWAYS_INLINE int32_t* clear(int64_t thread) {
        int32_t* mine = counts + thread * buckets;
        std::memset(mine, 0, sizeof(int32_t) * buckets * (threads == 1 ? passes : 1));
        return mine;
    }
    ALWAYS_INLINE void count(int32_t* mine, uint32_t row, int32_t by) const {
        mine[place(row, 0)] += by;
        if (threads == 1)
            for (int pass = 1; pass < passes; pass++) mine[pass * buckets + place(row, pass)] += by;
    }

    // Called by every thread of a team, after each has counted `mine` keys, its share of the n.
    ALWAYS_INLINE void sort(
        int64_t thread, const Key* mine, int64_t count, Key* keys, Key* spare, int64_t n)
    {
        const Key* from = mine;
        for (int pass = 0; pass < passes; pass++) {
            int32_t* of_pass = threads == 1 ? counts + pass * buckets : counts;
            int32_t* starts = of_pass + thread * buckets;
            if (pass > 0) {
                from = keys + n * thread / threads;
                count = n * (thread + 1) / threads - n * thread / threads;
                if (threads > 1) {
                    clear(thread);
                    for (int64_t e = 0; e < count; e++) starts[place(from[e].row, pass)]++;
                }
            }
#pragma omp barrier
#pragma omp master
            counts_to_starts(of_pass);
#pragma omp barrier
            for (int64_t e = 0; e < count; e++) spare[starts[place(from[e].row, pass)]++] = from[e];
            std::swap(keys, spare);
#pragma omp barrier
        }
    }
    bool ends_in_spare() const { return passes % 2 == 1; }
};

// Pair runs of rows that are sorted and all different.
int64_t pair_runs(
    const uint32_t* rows, int64_t n, int64_t p2, int64_t p3,
    int32_t* i3, int32_t* pair_start, int32_t* pair_i1, int32_t* pair_i2)
{
    int64_t pairs = 0, first = 0, beyond = 0;  // the present pair holds first <= row < beyond
    for (int64_t u = 0; u < n; u++) {
        const int64_t row = rows[u];
        if (u == 0 || row >= beyond) {
            const int64_t pair = row / p3;
            first = pair * p3;
            beyond = first + p3;
            pair_start[pairs] = (int32_t)u;
            pair_i1[pairs] = (int32_t)(pair / p2);
            pair_i2[pairs] = (int32_t)(pair % p2);
            pairs++;
        }
        i3[u] = (int32_t)(row - first);
    }
    pair_start[pairs] = (int32_t)n;
    return pairs;
}

// The bags of a share of the positions: bag(position) for each, in order.
template <typename F>
ALWAYS_INLINE void with_bags(
    const int64_t* edges, int64_t bags, int64_t bag_size, int64_t first, int64_t last, const F& bag)
{
    int64_t now = edges ? std::upper_bound(edges, edges + bags + 1, first) - edges - 1
                        : bag_size ? first / bag_size : 0;
    for (int64_t at = first; at < last; now++)
        for (const int64_t end = std::min(last, edges ? edges[now + 1] : (now + 1) * bag_size);
             at < end; at++)
            if (!bag(at, now)) return;
}

struct alignas(64) Share {
    int64_t kept, wrong, uniques;
};

// What thread t of a team does; all arguments are its own, so that none is read anew in a loop.
template <typename I>
void sort_share(
    const I* input, int64_t n, int64_t N, int64_t padding, const int64_t* edges, int64_t bags,
    int64_t bag_size, int32_t* entry_bag, int32_t* entry_at, int32_t* entry_start, uint32_t* rows,
    Key* keys, Key* spare, int32_t* counts, int64_t threads, int64_t* sizes, Share* shares,
    int64_t t)
{
    RadixSort radix(N, counts, threads);
    const int64_t first = n * t / threads, last = n * (t + 1) / threads;
    // A key carries its position where that is wanted, else its bag at once.
    Share mine{0, -1, 0};
    int32_t* counted = radix.clear(t);
    Key* to = keys + first;
    with_bags(edges, bags, bag_size, first, last, [&](int64_t at, int64_t bag) {
        const int64_t row = input[at];
        if (row < 0 || row >= N) {
            mine.wrong = at;
            return false;
        }
        to[mine.kept] = Key{(uint32_t)row, (int32_t)(entry_at ? at : bag)};
        radix.count(counted, (uint32_t)row, row != padding);
        mine.kept += row != padding;
        return true;
    });
    shares[t] = mine;
#pragma omp barrier
    int64_t kept = 0;
    bool wrong = false;
    for (int64_t i = 0; i < threads; i++) {
        kept += shares[i].kept;
        wrong |= shares[i].wrong >= 0;
    }
    if (!wrong) {
        radix.sort(t, to, mine.kept, keys, spare, kept);
        const Key* sorted = radix.ends_in_spare() ? spare : keys;
        int32_t* bag_of = reinterpret_cast<int32_t*>(radix.ends_in_spare() ? keys : spare);
        if (entry_at)
            with_bags(edges, bags, bag_size, first, last, [&](int64_t at, int64_t bag) {
                bag_of[at] = (int32_t)bag;
                return true;
            });
        const int64_t low = kept * t / threads, high = kept * (t + 1) / threads;
        const auto before = [&](int64_t e) { return e ? int64_t(sorted[e - 1].row) : -1; };
        if (t + 1 < threads) {  // how many rows begin in a share is where the next one writes
            int64_t begins = 0, previous = before(low);
            for (int64_t e = low; e < high; e++) {
                begins += sorted[e].row != previous;
                previous = sorted[e].row;
            }
            shares[t].uniques = begins;
        }
#pragma omp barrier
        int64_t uniques = 0, previous = before(low), e = low;
        for (int64_t i = 0; i < t; i++) uniques += shares[i].uniques;
        const auto write_entry = [&](Key key, bool repeated) {
            entry_bag[e] = (entry_at ? bag_of[key.at] : key.at) | (repeated ? 0 : FIRST_OF_ROW);
            if (entry_at) entry_at[e] = key.at;
        };
        for (; e < high && sorted[e].row == previous; e++) write_entry(sorted[e], true);
        for (; e < high; e++) {
            const Key key = sorted[e];
            // Written always, kept when the row is a new one: no branch to guess.
            const bool repeated = key.row == previous;
            uniques -= repeated;
            entry_start[uniques] = repeated ? entry_start[uniques] : (int32_t)e;
            rows[uniques++] = key.row;
            previous = key.row;
            write_entry(key, repeated);
        }
        if (t + 1 == threads) {
            entry_start[uniques] = (int32_t)kept;
            sizes[0] = kept;
            sizes[1] = uniques;
        }
    }
}

template <typename I>
int64_t sort_batch(
    const I* input, int64_t n, int64_t N, int64_t padding, const int64_t* edges, int64_t bags,
    int64_t bag_size, int32_t* entry_bag, int32_t* entry_at, int32_t* entry_start, uint32_t* rows,
    Key* keys, Key* spare, int32_t* counts, int64_t threads, int64_t* sizes)
{
    Share shares[MOST_SORTERS];
#pragma omp parallel num_threads((int)threads)
    sort_share(input, n, N, padding, edges, bags, bag_size, entry_bag, entry_at, entry_start, rows,
               keys, spare, counts, threads, sizes, shares, omp_get_thread_num());
    for (int64_t t = 0; t < threads; t++)
        if (shares[t].wrong >= 0) {
            sizes[0] = shares[t].wrong;
            return 1;
        }
    return 0;
}

}  // namespace

extern "C" {

// Entries sorted by row, then by position. Returns 0, or 1 when the index at sizes[0] is not in
// [0, N). sizes: entries (without padding), different rows.
// edges [bags + 1], or null for bags of bag_size each; n positions are in bags. threads: at most 8.
// scratch: 4,096 int32 for each thread, for 3 at least, and 16 n bytes.
int64_t tt_sort(
    const void* input, int64_t wide, int64_t n, int64_t N, int64_t padding, const int64_t* edges,
    int64_t bags, int64_t bag_size, int32_t* entry_bag, int32_t* entry_at, int32_t* entry_start,
    uint32_t* rows, char* scratch, int64_t threads, int64_t* sizes)
{
    int32_t* counts = reinterpret_cast<int32_t*>(scratch);
    Key* keys = reinterpret_cast<Key*>(counts + (std::max<int64_t>(threads, 3) << DIGIT_BITS));
    Key* spare = keys + n;
    if (wide)
        return sort_batch(
            static_cast<const int64_t*>(input), n, N, padding, edges, bags, bag_size, entry_bag,
            entry_at, entry_start, rows, keys, spare, counts, threads, sizes);
    return sort_batch(
        static_cast<const int32_t*>(input), n, N, padding, edges, bags, bag_size, entry_bag,
        entry_at, entry_start, rows, keys, spare, counts, threads, sizes);
}

// All rows by front pair, as tt_pairs gives them, and which i2 go back-first: those where the
// products of back pairs and the rows after them are priced below those of front pairs.
// prices: front pair, front row, back pair, back row (numbers of FLOPs, weighted by how fast they
// are); null for two cores, which have one direction. counts [3][p2]: rows, front pairs, back pairs
// of each i2. seen: p2 * p3 bits. sizes: front pairs, then for rows that go back: rows, front pairs
// saved, back pairs.
void tt_count(
    const uint32_t* rows, int64_t n, int64_t p2, int64_t p3, const int64_t* prices,
    int64_t* counts, uint64_t* seen, uint8_t* back_first, int32_t* i3, int32_t* pair_start,
    int32_t* pair_i1, int32_t* pair_i2, int64_t* sizes)
{
    int64_t *uniques_of = counts, *front_of = counts + p2, *back_of = counts + 2 * p2;
    std::memset(counts, 0, sizeof(int64_t) * 3 * p2);
    if (prices) std::memset(seen, 0, sizeof(uint64_t) * ((p2 * p3 + 63) / 64));
    int64_t pairs = 0, beyond = 0, first = 0, i2 = 0;  // the present pair: first <= row < beyond
    for (int64_t u = 0; u < n; u++) {
        const int64_t row = rows[u];
        if (u == 0 || row >= beyond) {
            const int64_t pair = row / p3, i1 = pair / p2;
            first = pair * p3;
            beyond = first + p3;
            i2 = pair - i1 * p2;
            front_of[i2]++;
            pair_start[pairs] = (int32_t)u;
            pair_i1[pairs] = (int32_t)i1;
            pair_i2[pairs] = (int32_t)i2;
            pairs++;
        }
        uniques_of[i2]++;
        i3[u] = (int32_t)(row - first);
        if (prices) {
            const int64_t bit = i2 * p3 + row - first;
            const uint64_t mask = uint64_t(1) << (bit & 63);
            back_of[i2] += (seen[bit >> 6] & mask) == 0;
            seen[bit >> 6] |= mask;
        }
    }
    pair_start[pairs] = (int32_t)n;
    sizes[0] = pairs;
    sizes[1] = sizes[2] = sizes[3] = 0;
    for (int64_t i = 0; prices && i < p2; i++) {
        const int64_t front = prices[0] * front_of[i] + prices[1] * uniques_of[i];
        const int64_t back = prices[2] * back_of[i] + prices[3] * uniques_of[i];
        back_first[i] = back < front;
        sizes[1] += back < front ? uniques_of[i] : 0;
        sizes[2] += back < front ? front_of[i] : 0;
        sizes[3] += back < front ? back_of[i] : 0;
    }
}

// The rows whose i2 goes front-first (back == 0), or back-first (back == 1: digits and factors
// mirrored), sorted by pair; id [n]: which of the rows each is. back_first [p2]. scratch: 4,096 int32 and 16 n bytes. sizes: rows, pairs.
void tt_pairs(
    const uint32_t* rows, int64_t n, int64_t p1, int64_t p2, int64_t p3, const uint8_t* back_first,
    int64_t back, int32_t* id, int32_t* i3, int32_t* pair_start, int32_t* pair_i1,
    int32_t* pair_i2, char* scratch, int64_t* sizes)
{
    int32_t* counts = reinterpret_cast<int32_t*>(scratch);
    Key* keys = reinterpret_cast<Key*>(counts + (3 << DIGIT_BITS));
    Key* spare = keys + n;
    RadixSort radix(p1 * p2 * p3, counts, 1);
    int32_t* counted = radix.clear(0);
    int64_t chosen = 0;
    for (int64_t u = 0; u < n; u++) {
        const int64_t row = rows[u], pair = row / p3, i2 = pair % p2;
        const int64_t mirrored = (row % p3 * p2 + i2) * p1 + pair / p2;
        keys[chosen] = Key{(uint32_t)(back ? mirrored : row), (int32_t)u};
        radix.count(counted, (uint32_t)mirrored, back_first[i2] == back);
        chosen += back_first[i2] == back;
    }
    if (back) radix.sort(0, keys, chosen, keys, spare, chosen);
    const bool moved = back && radix.ends_in_spare();
    const Key* chosen_keys = moved ? spare : keys;
    uint32_t* sorted = reinterpret_cast<uint32_t*>(moved ? keys : spare);
    for (int64_t u = 0; u < chosen; u++) {
        sorted[u] = chosen_keys[u].row;
        id[u] = chosen_keys[u].at;
    }
    sizes[0] = chosen;
    sizes[1] = pair_runs(sorted, chosen, p2, back ? p1 : p3, i3, pair_start, pair_i1, pair_i2);
}

}  // extern "C"
