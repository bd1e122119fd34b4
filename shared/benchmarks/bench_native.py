"""native.build: the first build of a source, and the same from the cache by a fresh process.

Each round is two processes with one cache folder of their own, empty at first. What is timed is the
call of `native.build_text` alone: compile, link, checksum, load; then look-up, checksum, load.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from septet_shared import native
from septet_shared.profiling import bench_row

ROUNDS = 7

# Of the size and the means of a real kernel: OpenMP, vectors, sorting, two element types.
SOURCE = """
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {
template <typename T>
void multiply(const T* a, const T* b, T* c, int64_t M, int64_t N, int64_t K, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t m = 0; m < M; ++m) {
    std::vector<T> row(N, T(0));
    for (int64_t k = 0; k < K; ++k)
      for (int64_t n = 0; n < N; ++n) row[n] += a[m * K + k] * b[k * N + n];
    std::copy(row.begin(), row.end(), c + m * N);
  }
}

template <typename T>
void softmax(T* x, int64_t M, int64_t N, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t m = 0; m < M; ++m) {
    T* row = x + m * N;
    const T top = *std::max_element(row, row + N);
    T sum = 0;
    for (int64_t n = 0; n < N; ++n) sum += row[n] = std::exp(row[n] - top);
    for (int64_t n = 0; n < N; ++n) row[n] /= sum;
  }
}
}  // namespace

extern "C" {
int multiply_f32(const float* a, const float* b, float* c, int64_t M, int64_t N, int64_t K,
                 int threads) {
  multiply(a, b, c, M, N, K, threads);
  return 0;
}
int multiply_f64(const double* a, const double* b, double* c, int64_t M, int64_t N, int64_t K,
                 int threads) {
  multiply(a, b, c, M, N, K, threads);
  return 0;
}
int softmax_f32(float* x, int64_t M, int64_t N, int threads) {
  softmax(x, M, N, threads);
  return 0;
}
int softmax_f64(double* x, int64_t M, int64_t N, int threads) {
  softmax(x, M, N, threads);
  return 0;
}
int group(const int64_t* key, int64_t N, int64_t groups, int64_t* offset, int64_t* order,
          int threads) {
  std::vector<std::atomic<int64_t>> count(groups);
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < N; ++n) count[key[n]].fetch_add(1, std::memory_order_relaxed);
  offset[0] = 0;
  for (int64_t g = 0; g < groups; ++g) offset[g + 1] = offset[g] + count[g].load();
  std::iota(order, order + N, int64_t(0));
  std::stable_sort(order, order + N, [&](int64_t i, int64_t j) { return key[i] < key[j]; });
  return 0;
}
}
"""
TIMED = """
import json, sys, time
from septet_shared import native
start = time.perf_counter()
native.build_text("bench", sys.stdin.read())
print(json.dumps([time.perf_counter() - start, native.builds]))
"""


def run() -> Iterator[dict[str, Any]]:
    """Two rows, value the median of the rounds: seconds cold, milliseconds cached."""
    cold_s, cached_ms = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            seconds, builds = timed_build(cache)
            assert builds == 1
            cold_s.append(seconds)
            seconds, builds = timed_build(cache)
            assert builds == 0
            cached_ms.append(seconds * 1e3)
    for variant, values, unit, must in (
        ("cold", cold_s, "s", "<= 4"),
        ("cached", cached_ms, "ms", "<= 10"),
    ):
        notes = (
            f"{len(SOURCE.splitlines())} lines, {native.available()}, {ROUNDS} rounds, "
            f"{min(values):.3g} to {max(values):.3g} {unit}"
        )
        median = statistics.median(values)
        yield bench_row("native.build", variant, median, unit, must=must, notes=notes, threads=1)


def timed_build(cache: str) -> tuple[float, int]:
    """Seconds of one build in a fresh process, and the number of compilations that it took."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED],
        input=SOURCE,
        env={**os.environ, "SEPTET_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    seconds, builds = json.loads(done.stdout)
    return seconds, builds
