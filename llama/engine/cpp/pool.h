// A loop divided among threads, on a machine that other programs use too.
//
// The units of a loop are divided into one run for each thread, so that each thread reads the memory from front to back. A thread
// that has finished its own run takes units from the others' runs. So nobody waits for a thread that is not running, except for the
// one unit that it may have begun. Between two loops, a thread spins for a short time and then sleeps.
//
// A thread that never sleeps must share its core with another program in slices of several milliseconds, and it usually loses the core
// in the middle of a unit. A thread that sleeps half of the time keeps the core while it works. So if units often take long to finish,
// the threads of the pool work for SHIFT and rest for REST, in turns, for some time.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

int64_t torch_threads();  // kernels.cpp defines it, so that the other sources need no headers of torch

class Pool {
    using Clock = std::chrono::steady_clock;
    using Time = int64_t;  // nanoseconds
    static constexpr int64_t MOST = 256;           // threads
    static constexpr Time SPIN = 50'000;           // a thread waits for the next loop this long before it sleeps
    static constexpr Time LONG = 400'000;          // a wait that is longer than some units and this means that a thread has lost its core
    static constexpr Time LOST = 8'000'000;        // after this much time in such waits, beyond a twentieth of all time,
    static constexpr Time SHARED = 500'000'000;    // the cores are considered shared for this time
    static constexpr Time SHIFT = 1'000'000;       // on shared cores, a thread works for this time,
    static constexpr Time REST = 1'000'000;        // then it rests for this time
    static constexpr Time SLICE = 500'000;

    struct alignas(64) Run {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    struct Loop {
        void (*unit)(const void* body, int64_t i);
        const void* body;
        int64_t threads;
        std::atomic<bool> failed{false};
        std::exception_ptr error{};  // of the first unit that failed
    };

    Run runs[MOST];
    alignas(64) std::atomic<Loop*> open{nullptr};
    alignas(64) std::atomic<uint32_t> number{0};  // of loops so far; threads sleep on it
    alignas(64) std::atomic<uint32_t> inside{0};  // threads that may be using the open loop
    std::atomic<Time> shared_until{0};
    Time lost = 0, lost_at = 0;  // the time in long waits, at some time
    std::mutex one_caller;
    int64_t started = 1, allowed = MOST;  // threads, the caller included

    static Time now() { return Clock::now().time_since_epoch().count(); }

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    // Spins until the condition holds, for at most SPIN; returns whether it holds.
    template <typename F>
    static bool spin(F condition) {
        for (const Time end = now() + SPIN; now() < end;)
            for (int i = 0; i < 16; i++) {
                if (condition()) return true;
                relax();
            }
        return condition();
    }

    // Takes units until there are none, or until `end`; returns their number.
    int64_t take(Loop& loop, int64_t thread, Time end) {
        int64_t taken = 0;
        for (int64_t i = 0; i < loop.threads; i++) {
            Run& run = runs[(thread + i) % loop.threads];
            for (int64_t unit; run.next.load(std::memory_order_relaxed) < run.end &&
                               (unit = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;) {
                try {
                    loop.unit(loop.body, unit);
                } catch (...) {  // for the caller; a worker has nobody to catch it
                    if (!loop.failed.exchange(true)) loop.error = std::current_exception();
                }
                taken++;
                if (end && now() > end) return taken;
            }
        }
        return taken;
    }

    // Asks Linux for short slices. From version 6.12 on, a thread with short slices need not wait for the end of another's slice.
    static void ask_for_short_slices() {
#if defined(__linux__) && defined(SYS_sched_setattr)
        struct {
            uint32_t size, policy;
            uint64_t flags;
            int32_t nice;
            uint32_t priority;
            uint64_t runtime, deadline, period;
        } attributes;
        if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0)) return;
        attributes.runtime = SLICE;
        syscall(SYS_sched_setattr, 0, &attributes, 0);  // if it fails, slices have their usual length
#endif
    }

    void work(int64_t thread) {
        ask_for_short_slices();
        uint32_t seen = number.load();
        for (Time begun = now(), end = 0;;) {
            if (end && now() > end) {
                std::this_thread::sleep_for(std::chrono::nanoseconds(REST));
                begun = now();
            } else if (!spin([&] { return number.load(std::memory_order_acquire) != seen; })) {
                number.wait(seen);
                begun = now();
            }
            end = now() < shared_until.load(std::memory_order_relaxed) ? begun + SHIFT : 0;
            seen = number.load();
            inside.fetch_add(1);
            if (Loop* loop = open.load(); loop && thread < loop->threads) take(*loop, thread, end);
            if (inside.fetch_sub(1) == 1) inside.notify_one();
        }
    }

    // Starts threads until there are so many. If the system refuses one, the loops run on those that exist.
    void start(int64_t threads) {
        sigset_t others, before;
        sigfillset(&others);  // signals are handled by the program's own threads, except for those of a fault
        for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, fault);
        pthread_sigmask(SIG_SETMASK, &others, &before);
        try {
            for (; started < threads; started++) std::thread([this, thread = started] { work(thread); }).detach();
        } catch (const std::exception&) {
            allowed = started;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Waits until the threads have left a loop, of which the caller has done some units since `begun`.
    void wait(Time begun, int64_t units) {
        const Time end = now(), usual = (end - begun) / std::max<int64_t>(1, units);
        if (!spin([&] { return inside.load() == 0; }))
            for (uint32_t left; (left = inside.load());) inside.wait(left);
        const Time done = now();
        if (done - end <= LONG + 4 * usual) return;
        lost = std::max<Time>(0, lost - (done - lost_at) / 20) + (done - end), lost_at = done;
        if (lost > LOST) shared_until.store(done + SHARED, std::memory_order_relaxed), lost = LOST / 2;
    }

public:
    template <typename F>
    void run(int64_t count, int64_t threads, const F& body) {
        threads = std::min({threads, count, MOST});
        std::unique_lock lock(one_caller, std::defer_lock);
        if (threads < 2 || !lock.try_lock()) {
            for (int64_t i = 0; i < count; i++) body(i);
            return;
        }
        if (started < std::min(threads, allowed)) start(threads);
        threads = std::min(threads, started);
        for (int64_t i = 0; i < threads; i++) {
            runs[i].next.store(count * i / threads, std::memory_order_relaxed);
            runs[i].end = count * (i + 1) / threads;
        }
        Loop loop{[](const void* body, int64_t i) { (*(const F*)body)(i); }, &body, threads};
        open.store(&loop);
        number.fetch_add(1);
        number.notify_all();
        const Time begun = now();
        const int64_t taken = take(loop, 0, 0);
        open.store(nullptr);
        if (inside.load()) wait(begun, taken);
        if (loop.failed) std::rethrow_exception(loop.error);
    }
};

inline constinit Pool pool;  // its destructor is trivial, since threads outlive static objects
inline const int at_fork = pthread_atfork(nullptr, nullptr, [] { new (&pool) Pool; });  // a child has only the thread that forked
static_assert(std::is_trivially_destructible_v<Pool>);

// The number of threads for loops that the calling thread starts; 0: as many as torch uses.
inline int64_t& chosen_threads() {
    thread_local int64_t threads = 0;
    return threads;
}

inline int64_t thread_count() { return chosen_threads() ? chosen_threads() : torch_threads(); }

// Calls body(i) for i from 0 to count - 1, each once, in any order and on several threads.
template <typename F>
void for_each_unit(int64_t count, const F& body) {
    pool.run(count, thread_count(), body);
}

// The same for short units, each of which reads `bytes` of memory in order: a thread takes several at once.
constexpr int64_t PART = 1 << 15;  // bytes
template <typename F>
void for_each_part(int64_t count, int64_t bytes, const F& body) {
    const int64_t together = std::clamp<int64_t>(count / (8 * thread_count()), 1, std::max<int64_t>(1, PART / bytes));
    for_each_unit((count + together - 1) / together, [&](int64_t part) {
        for (int64_t i = part * together; i < std::min(count, (part + 1) * together); i++) body(i);
    });
}
