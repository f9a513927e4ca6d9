#include "pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <chrono>
#include <cstdlib>
#include <new>

namespace tokserve {

namespace {

constexpr uint32_t kClosed = 0xffffffffu;
constexpr auto kSpin = std::chrono::microseconds(60);  // longer than the gap between two ops of a step

uint32_t number(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
uint32_t low(uint64_t word) { return static_cast<uint32_t>(word); }

// Runs the calling thread on this CPU only; false if the system refuses.
bool bind([[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t* set = CPU_ALLOC(cpu + 1);
  if (!set) return false;
  const size_t size = CPU_ALLOC_SIZE(cpu + 1);
  CPU_ZERO_S(size, set);
  CPU_SET_S(cpu, size, set);
  const bool bound = pthread_setaffinity_np(pthread_self(), size, set) == 0;
  CPU_FREE(set);
  return bound;
#else
  return false;
#endif
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool& pool() {
  static Pool* one = new Pool;  // never destroyed: a worker may still sleep in it while the process exits
  return *one;
}

void Pool::stop_workers() {
  {
    std::lock_guard lock(sleep_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
  stop_.store(false);
}

bool Pool::resize(int n, const std::vector<int>& cpus) {
  std::lock_guard lock(running_);
  std::atomic<bool> bound{true};
  if (n != threads_.load() || !cpus.empty()) {
    stop_workers();
    threads_.store(n);
    regions_.reset(new Region[n]);
    const uint32_t seen = number(offer_.load());
    std::atomic<int> started{1};
    for (int i = 1; i < n; i++) {
      workers_.emplace_back([this, seen, i, &cpus, &bound, &started] {
        if (!cpus.empty() && !bind(cpus[i])) bound.store(false);
        started.fetch_add(1);  // the last use of the caller's variables
        work(i, seen);
      });
    }
    while (started.load() < n) std::this_thread::yield();
  }
  return bound.load();
}

// Claims the next task of a region of the offered list; -1 if there is none.  A thread that is late, with a list that
// is finished, claims nothing: it sees another offer, or the region's word has changed because all tasks were claimed.
int64_t Pool::claim(int region, uint64_t offer, int64_t tasks) {
  const int64_t begin = tasks * region / threads(), end = tasks * (region + 1) / threads();
  if (begin == end) return -1;
  std::atomic<uint64_t>& claimed = regions_[region].claimed;
  uint64_t word = claimed.load(std::memory_order_acquire);
  while (offer_.load(std::memory_order_acquire) == offer) {
    const int64_t count = number(word) == number(offer) ? low(word) : 0;
    if (begin + count >= end) return -1;
    const uint64_t next = offer | static_cast<uint64_t>(count + 1);
    if (claimed.compare_exchange_weak(word, next, std::memory_order_acq_rel, std::memory_order_acquire))
      return begin + count;
  }
  return -1;
}

// Runs tasks of the offered list until none is left: of this thread's region, then of the following ones.
void Pool::help(int thread) {
  const uint64_t offer = offer_.load(std::memory_order_acquire);
  if (low(offer) == kClosed) return;
  const Task task = task_.load(std::memory_order_acquire);
  const void* context = context_.load(std::memory_order_acquire);
  const int64_t tasks = tasks_.load(std::memory_order_acquire);
  if (offer_.load(std::memory_order_acquire) != offer) return;  // the fields may be those of the next list
  int64_t done = 0;
  for (int i = 0; i < threads(); i++) {
    const int region = (thread + i) % threads();
    for (int64_t at; (at = claim(region, offer, tasks)) >= 0; done++) task(context, at);
  }
  if (done > 0) finished_.fetch_add(done, std::memory_order_release);
}

void Pool::run(int64_t tasks, Task task, const void* context) {
  // Weights may be packed in another thread meanwhile: a caller that finds the pool busy runs its tasks alone.
  std::unique_lock lock(running_, std::defer_lock);
  if (tasks <= 1 || threads() == 1 || !lock.try_lock()) {
    for (int64_t i = 0; i < tasks; i++) task(context, i);
    return;
  }
  const uint32_t last = number(offer_.load());
  const uint64_t list = static_cast<uint64_t>(last + 1 == 0 ? 1 : last + 1) << 32;  // 0: that of a fresh region
  offer_.store(static_cast<uint64_t>(last) << 32 | kClosed);
  task_.store(task, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  tasks_.store(tasks, std::memory_order_release);
  finished_.store(0, std::memory_order_release);
  offer_.store(list);
  if (sleepers_.load() > 0) {
    {
      std::lock_guard order(sleep_);
    }  // a counted sleeper is now in wait(), or will see the offer
    wake_.notify_all();
  }
  help(0);
  for (int spins = 0; finished_.load(std::memory_order_acquire) != tasks; spins++) {
    if (spins < 2000) relax();
    else std::this_thread::yield();
  }
}

// Returns when a list other than `seen` is offered (true) or the pool stops (false).
bool Pool::wait(uint32_t seen) {
  const auto arrived = [&] { return number(offer_.load()) != seen && low(offer_.load()) != kClosed; };
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  for (int spins = 1; !stop_.load(std::memory_order_relaxed); spins++) {
    if (arrived()) return true;
    relax();
    if (spins % 64 == 0 && std::chrono::steady_clock::now() > deadline) break;
  }
  std::unique_lock lock(sleep_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return stop_.load() || arrived(); });
  sleepers_.fetch_sub(1);
  return !stop_.load();
}

void Pool::work(int thread, uint32_t seen) {
  while (wait(seen)) {
    seen = number(offer_.load(std::memory_order_acquire));
    help(thread);
  }
}

namespace {

struct Scratch {
  char* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(memory); }
};

char* reserve(Scratch& scratch, int64_t bytes) {
  if (bytes > scratch.size) {
    std::free(scratch.memory);
    scratch.size = (bytes + 4095) / 4096 * 4096;
    scratch.memory = static_cast<char*>(std::aligned_alloc(4096, scratch.size));
    if (!scratch.memory) {
      scratch.size = 0;
      throw std::bad_alloc();
    }
  }
  return scratch.memory;
}

}  // namespace

char* thread_scratch(int64_t bytes) {
  static thread_local Scratch scratch;
  return reserve(scratch, bytes);
}

char* thread_workspace(int64_t bytes) {
  static thread_local Scratch workspace;
  return reserve(workspace, bytes);
}

}  // namespace tokserve
