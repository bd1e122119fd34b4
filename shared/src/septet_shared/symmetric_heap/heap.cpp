// Flag words in memory that several processes map: signal, wait, barrier. And a copy past the caches.
//
// A word has a 64-byte line of its own, so that waiting for one never slows the writer of another.
// Waiting goes in three stages: spin (the peer runs on another core and is nearly there), yield (it
// may need this very core: ranks that share one meet only as fast as they let go of it), sleep on a
// futex (it will be long). A call returns after `slice_ns`, so that the caller can look after dead
// peers and interrupts. Plain C ABI.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <sched.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int SPINS = 8;  // under a microsecond: enough for a peer that is in step
constexpr int64_t YIELD_NS = 50'000;
// Kernels in the interpreter and ranks without a compiler raise a word without waking sleepers.
constexpr int64_t LONGEST_SLEEP_NS = 1'000'000;

struct Line {
    std::atomic<int32_t> epoch;
    std::atomic<int32_t> sleepers;
    uint64_t stamp[2];  // of the operation that a barrier belongs to, by parity of its epoch
    char unused[40];
};
static_assert(sizeof(Line) == 64);
static_assert(std::atomic<int32_t>::is_always_lock_free);

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Epochs wrap round: b is at or after a when it is less than half the range ahead.
bool reached(int32_t value, int32_t epoch) {
    return int32_t(uint32_t(value) - uint32_t(epoch)) >= 0;
}

void sleep_until_changed(Line* line, int32_t seen, int64_t most_ns) {
    timespec t{0, long(most_ns < LONGEST_SLEEP_NS ? most_ns : LONGEST_SLEEP_NS)};
#ifdef __linux__
    line->sleepers.fetch_add(1);
    syscall(SYS_futex, &line->epoch, FUTEX_WAIT, seen, &t, nullptr, 0);
    line->sleepers.fetch_sub(1);
#else
    t.tv_nsec = t.tv_nsec < 50'000 ? t.tv_nsec : 50'000;
    nanosleep(&t, nullptr);
#endif
}

void wake(Line* line) {
#ifdef __linux__
    if (line->sleepers.load() > 0) {
        syscall(SYS_futex, &line->epoch, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
#endif
}

}  // namespace

enum Outcome { DONE = 0, NOT_YET = 1, POISONED = 2, MISMATCH = 3 };

extern "C" {

// Raises the word to `epoch` if it is lower; all writes made before are visible to who sees it.
void heap_signal(Line* line, int32_t epoch) {
    int32_t seen = line->epoch.load(std::memory_order_relaxed);
    while (!reached(seen, epoch) && !line->epoch.compare_exchange_weak(seen, epoch)) {
    }
    wake(line);
}

int heap_wait(Line* line, int32_t epoch, const std::atomic<int32_t>* poison, int64_t slice_ns) {
    if (poison->load(std::memory_order_acquire)) return POISONED;
    for (int i = 0; i < SPINS; ++i) {
        if (reached(line->epoch.load(std::memory_order_acquire), epoch)) return DONE;
        relax();
    }
    for (const int64_t start = now_ns();;) {
        const int32_t seen = line->epoch.load(std::memory_order_acquire);
        if (reached(seen, epoch)) return DONE;
        if (poison->load(std::memory_order_acquire)) return POISONED;
        const int64_t waited = now_ns() - start;
        if (waited >= slice_ns) return NOT_YET;
        if (waited < YIELD_NS) {
            sched_yield();
        } else {
            sleep_until_changed(line, seen, slice_ns - waited);
        }
    }
}

// One rank's side of the barriers of a channel. `lines[r]` is rank r's arrival line, written by r
// alone (null: r takes no part); the two lines after it hold the names of its latest operations.
struct Barrier {
    Line** lines;
    const std::atomic<int32_t>* poison;
    int32_t size;
    int32_t rank;
    int32_t epoch;
    int32_t arrived;  // a barrier that was given up is resumed, not passed twice
    int32_t culprit;  // who is missing, or whose operation differs
};

int heap_barrier(Barrier* b, uint64_t stamp, const char* name, int64_t slice_ns) {
    if (b->poison->load(std::memory_order_acquire)) return POISONED;
    if (!b->arrived) {
        b->epoch = int32_t(uint32_t(b->epoch) + 1);
        Line* mine = b->lines[b->rank];
        // Two stamps are enough: a rank reaches the next but one epoch only after all have read.
        const int parity = b->epoch & 1;
        mine->stamp[parity] = stamp;
        std::strncpy(reinterpret_cast<char*>(mine + 1 + parity), name, sizeof(Line) - 1);
        mine->epoch.store(b->epoch);
        b->arrived = 1;
        wake(mine);
    }
    // Usually one rank is late, and whoever is waited for next is there: the slice is for each.
    for (int r = 0; r < b->size; ++r) {
        if (r == b->rank || !b->lines[r]) continue;
        const int outcome = heap_wait(b->lines[r], b->epoch, b->poison, slice_ns);
        if (outcome != DONE) {
            b->culprit = r;
            return outcome;
        }
    }
    b->arrived = 0;
    const int parity = b->epoch & 1;
    for (int r = 0; r < b->size; ++r) {
        if (b->lines[r] && b->lines[r]->stamp[parity] != b->lines[b->rank]->stamp[parity]) {
            b->culprit = r;
            return MISMATCH;
        }
    }
    return DONE;
}

// memcpy whose writes go past the caches: a line that nobody reads soon is not fetched to be
// overwritten, which is a third of the traffic. All writes are visible before the return.
void heap_stream(char* to, const char* from, int64_t nbytes) {
#ifdef __x86_64__
    constexpr int64_t LINE = 64, AHEAD = 4096;  // hardware prefetch stops where a page ends
    const int64_t head = std::min<int64_t>(-reinterpret_cast<uintptr_t>(to) & (LINE - 1), nbytes);
    std::memcpy(to, from, head);
    int64_t done = head;
    for (; done + LINE <= nbytes; done += LINE) {
        _mm_prefetch(from + done + AHEAD, _MM_HINT_T0);
        __m128i part[4];
        std::memcpy(part, from + done, LINE);
        for (int i = 0; i < 4; ++i) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + done) + i, part[i]);
        }
    }
    std::memcpy(to + done, from + done, nbytes - done);
    _mm_sfence();
#else
    std::memcpy(to, from, nbytes);
#endif
}

void heap_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Replaces the word by `value` when it is 0; the word's value before.
int32_t heap_claim(std::atomic<int32_t>* word, int32_t value) {
    int32_t seen = 0;
    word->compare_exchange_strong(seen, value);
    return seen;
}

}  // extern "C"
