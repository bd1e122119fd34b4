// What the sort, the forward and the backward share: shapes, a sorted batch, vectors, products.
//
// Everything is deterministic: an element of any result is summed in an order that depends on the
// data (and, for gradients of cores, on the chunks), never on the number of threads.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Cores as they lie in memory, row-major: G1 [p1][q1][r1], G2 [p2][r1][q2][r2], G3 [p3][r2][q3].
// Two cores are three with p1 = q1 = r1 = 1. Column (j1, j2, j3) of a row is column[...] of the
// table, -1 where the table has none (padding).
struct Shape {
    int64_t p1, p2, p3, q1, q2, q3, r1, r2;
    int64_t dim;            // D, columns of the table
    const int32_t* column;  // [q1 q2 q3]; null: as they come, all of them
    int64_t a() const { return q1 * q2; }
    int64_t columns() const { return q1 * q2 * q3; }
};

// The different rows of a batch in the order of their front pairs, and who asks for them.
// Rows u of pair f: pair_start[f] <= u < pair_start[f + 1]; its digits: pair_i1[f], pair_i2[f].
// Lookups e of row u: entry_start[of(u)] <= e < entry_start[of(u) + 1].
struct Batch {
    int64_t uniques, pairs;
    int64_t rows;                 // different rows of the whole batch
    const int32_t* i3;            // [uniques]
    const int32_t* id;            // [uniques] row of entry_start; null: u itself
    const int32_t* pair_start;    // [pairs + 1]
    const int32_t* pair_i1;       // [pairs]
    const int32_t* pair_i2;       // [pairs]
    const int32_t* entry_start;   // [rows + 1]
    const int32_t* entry_bag;     // [entries] its bag, plus FIRST_OF_ROW
    const int32_t* entry_at;      // [entries] position in the flattened input; null if not needed
    int32_t of(int64_t u) const { return id ? id[u] : (int32_t)u; }
};

// In entry_bag: the first lookup of a row. So all lookups of many rows are one loop, whose body has
// no branch; how often a row is asked for is what nothing foretells.
constexpr int32_t FIRST_OF_ROW = INT32_MIN, BAG = INT32_MAX;

enum Mode : int64_t { SUM = 0, MEAN = 1, MAX = 2 };

// So that the sizes of a fixed shape reach every loop as constants.
#define ALWAYS_INLINE inline __attribute__((always_inline))

// Lanes over the columns of a pair's product are many short ones: 32 bytes. Elsewhere the widest.
constexpr int64_t VECTOR_BYTES = 32;
#ifdef __AVX512F__
constexpr int64_t WIDE_BYTES = 64;
#else
constexpr int64_t WIDE_BYTES = 32;
#endif
constexpr int64_t LANES_OF(size_t item) { return VECTOR_BYTES / (int64_t)item; }

template <typename T, int64_t BYTES = VECTOR_BYTES>
struct Vector {
    static constexpr int64_t W = BYTES / sizeof(T);
    typedef T memory __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
    typedef T type __attribute__((vector_size(BYTES)));
};

template <int64_t BYTES = VECTOR_BYTES, typename T>
static inline typename Vector<T, BYTES>::type load(const T* x) {
    return *reinterpret_cast<const typename Vector<T, BYTES>::memory*>(x);
}

template <int64_t BYTES = VECTOR_BYTES, typename T>
static inline void store(T* x, typename Vector<T, BYTES>::type v) {
    *reinterpret_cast<typename Vector<T, BYTES>::memory*>(x) = v;
}

// The cache lines of n numbers, before they are asked for. Inlined early: GCC takes a function that
// only prefetches for one without effect, and drops its calls.
template <bool WRITE, typename T>
static ALWAYS_INLINE void prefetch(const T* x, int64_t n) {
    const char* first = reinterpret_cast<const char*>(x);
    for (int64_t at = 0; at < n * (int64_t)sizeof(T); at += 64)
        __builtin_prefetch(first + at, WRITE);
}

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- C[m][:N] (+)= sum_k A[m][k] B[k][:N], rows of A and C anywhere ----
//
// Each element is summed over k in order, by fused multiply-adds, whatever the block it falls into.

template <typename T, int64_t BYTES, int MR, int NV, bool ADD>
static inline void tile(
    const T* const* A, T* const* C, const T* B, int64_t ldb, int64_t K, int64_t n)
{
    constexpr int64_t W = Vector<T, BYTES>::W;
    typename Vector<T, BYTES>::type sum[MR][NV] = {};
    if (ADD)
        for (int m = 0; m < MR; m++)
            for (int v = 0; v < NV; v++) sum[m][v] = load<BYTES>(C[m] + n + v * W);
    for (int64_t k = 0; k < K; k++) {
        typename Vector<T, BYTES>::type b[NV];
        for (int v = 0; v < NV; v++) b[v] = load<BYTES>(B + k * ldb + n + v * W);
        for (int m = 0; m < MR; m++)
            for (int v = 0; v < NV; v++) sum[m][v] += A[m][k] * b[v];
    }
    for (int m = 0; m < MR; m++)
        for (int v = 0; v < NV; v++) store<BYTES>(C[m] + n + v * W, sum[m][v]);
}

template <typename T, int MR, bool ADD>
static void panel(
    const T* const* A, T* const* C, const T* B, int64_t ldb, int64_t K, int64_t N)
{
    constexpr int64_t W = Vector<T>::W, WIDE = Vector<T, WIDE_BYTES>::W;
    int64_t n = 0;
    for (; n + 2 * WIDE <= N; n += 2 * WIDE)
        tile<T, WIDE_BYTES, MR, 2, ADD>(A, C, B, ldb, K, n);
    for (; n + W <= N; n += W) tile<T, VECTOR_BYTES, MR, 1, ADD>(A, C, B, ldb, K, n);
    for (; n < N; n++)
        for (int m = 0; m < MR; m++) {
            T sum = ADD ? C[m][n] : T(0);
            for (int64_t k = 0; k < K; k++) sum += A[m][k] * B[k * ldb + n];
            C[m][n] = sum;
        }
}

template <typename T, bool ADD>
static void multiply(
    const T* const* A, T* const* C, int64_t M, const T* B, int64_t ldb, int64_t K, int64_t N)
{
    int64_t m = 0;
    for (; m + 6 <= M; m += 6) panel<T, 6, ADD>(A + m, C + m, B, ldb, K, N);
    switch (M - m) {
        case 5: panel<T, 5, ADD>(A + m, C + m, B, ldb, K, N); break;
        case 4: panel<T, 4, ADD>(A + m, C + m, B, ldb, K, N); break;
        case 3: panel<T, 3, ADD>(A + m, C + m, B, ldb, K, N); break;
        case 2: panel<T, 2, ADD>(A + m, C + m, B, ldb, K, N); break;
        case 1: panel<T, 1, ADD>(A + m, C + m, B, ldb, K, N); break;
    }
}

// ---- C[k][:N] += sum_m A[m][k] B[m][:N]: A transposed, rows of A and B anywhere ----

template <typename T, int64_t BYTES, int KR, int NV>
static inline void outer_tile(
    const T* const* A, const T* const* B, int64_t M, T* C, int64_t ldc, int64_t k, int64_t n)
{
    constexpr int64_t W = Vector<T, BYTES>::W;
    typename Vector<T, BYTES>::type sum[KR][NV];
    for (int i = 0; i < KR; i++)
        for (int v = 0; v < NV; v++) sum[i][v] = load<BYTES>(C + (k + i) * ldc + n + v * W);
    for (int64_t m = 0; m < M; m++) {
        const T *left = A[m] + k, *right = B[m] + n;
        typename Vector<T, BYTES>::type b[NV];
        for (int v = 0; v < NV; v++) b[v] = load<BYTES>(right + v * W);
        for (int i = 0; i < KR; i++)
            for (int v = 0; v < NV; v++) sum[i][v] += left[i] * b[v];
    }
    for (int i = 0; i < KR; i++)
        for (int v = 0; v < NV; v++) store<BYTES>(C + (k + i) * ldc + n + v * W, sum[i][v]);
}

template <typename T, int KR>
static void outer_panel(
    const T* const* A, const T* const* B, int64_t M, T* C, int64_t ldc, int64_t k, int64_t N)
{
    constexpr int64_t W = Vector<T>::W, WIDE = Vector<T, WIDE_BYTES>::W;
    int64_t n = 0;
    for (; n + 2 * WIDE <= N; n += 2 * WIDE)
        outer_tile<T, WIDE_BYTES, KR, 2>(A, B, M, C, ldc, k, n);
    for (; n + W <= N; n += W) outer_tile<T, VECTOR_BYTES, KR, 1>(A, B, M, C, ldc, k, n);
    for (; n < N; n++)
        for (int i = 0; i < KR; i++) {
            T sum = C[(k + i) * ldc + n];
            for (int64_t m = 0; m < M; m++) sum += A[m][k + i] * B[m][n];
            C[(k + i) * ldc + n] = sum;
        }
}

template <typename T>
static void add_outer(
    const T* const* A, const T* const* B, int64_t M, T* C, int64_t ldc, int64_t K, int64_t N)
{
    int64_t k = 0;
    for (; k + 8 <= K; k += 8) outer_panel<T, 8>(A, B, M, C, ldc, k, N);
    for (; k + 4 <= K; k += 4) outer_panel<T, 4>(A, B, M, C, ldc, k, N);
    for (; k < K; k++) outer_panel<T, 1>(A, B, M, C, ldc, k, N);
}

// ---- transposes ----

// Lines of float vectors, or of double: v[i][k] becomes v[k][i], W x W.
static inline void transpose_square(Vector<float>::type* v) {
    typedef Vector<float>::type V;
    typedef int32_t M __attribute__((vector_size(32)));
    for (int i = 0; i < 8; i += 2) {
        const V a = v[i], b = v[i + 1];
        v[i] = __builtin_shuffle(a, b, M{0, 8, 2, 10, 4, 12, 6, 14});
        v[i + 1] = __builtin_shuffle(a, b, M{1, 9, 3, 11, 5, 13, 7, 15});
    }
    for (int k = 0; k < 4; k++) {
        const int i = k + (k & 2);
        const V a = v[i], b = v[i + 2];
        v[i] = __builtin_shuffle(a, b, M{0, 1, 8, 9, 4, 5, 12, 13});
        v[i + 2] = __builtin_shuffle(a, b, M{2, 3, 10, 11, 6, 7, 14, 15});
    }
    for (int i = 0; i < 4; i++) {
        const V a = v[i], b = v[i + 4];
        v[i] = __builtin_shuffle(a, b, M{0, 1, 2, 3, 8, 9, 10, 11});
        v[i + 4] = __builtin_shuffle(a, b, M{4, 5, 6, 7, 12, 13, 14, 15});
    }
}

static inline void transpose_square(Vector<double>::type* v) {
    typedef Vector<double>::type V;
    typedef int64_t M __attribute__((vector_size(32)));
    for (int i = 0; i < 4; i += 2) {
        const V a = v[i], b = v[i + 1];
        v[i] = __builtin_shuffle(a, b, M{0, 4, 2, 6});
        v[i + 1] = __builtin_shuffle(a, b, M{1, 5, 3, 7});
    }
    for (int i = 0; i < 2; i++) {
        const V a = v[i], b = v[i + 2];
        v[i] = __builtin_shuffle(a, b, M{0, 1, 4, 5});
        v[i + 2] = __builtin_shuffle(a, b, M{2, 3, 6, 7});
    }
}

// to[j][i] = from[i][j] for i < rows, j < columns.
template <typename T>
static ALWAYS_INLINE void transpose(
    const T* from, int64_t ld_from, int64_t rows, int64_t columns, T* to, int64_t ld_to)
{
    constexpr int64_t W = Vector<T>::W;
    const int64_t whole_rows = rows / W * W, whole_columns = columns / W * W;
    for (int64_t i = 0; i < whole_rows; i += W)
        for (int64_t j = 0; j < whole_columns; j += W) {
            typename Vector<T>::type v[W];
            for (int k = 0; k < W; k++) v[k] = load(from + (i + k) * ld_from + j);
            transpose_square(v);
            for (int k = 0; k < W; k++) store(to + (j + k) * ld_to + i, v[k]);
        }
    for (int64_t j = 0; j < columns; j++)
        for (int64_t i = j < whole_columns ? whole_rows : 0; i < rows; i++)
            to[j * ld_to + i] = from[i * ld_from + j];
}

// ---- memory of a call: one block that the caller gives, cut into pieces ----

struct Workspace {
    char* next;
    template <typename T>
    T* take(int64_t count) {
        next = reinterpret_cast<char*>(round_up(reinterpret_cast<intptr_t>(next), 64));
        T* found = reinterpret_cast<T*>(next);
        next += count * (int64_t)sizeof(T);
        return found;
    }
    // What `take` may use at the most.
    static int64_t bytes(int64_t count, int64_t item) { return count * item + 64; }
};
