#include "pool.h"

#include <chrono>
#include <cstdlib>
#include <new>

namespace tokserve {

namespace {

constexpr uint32_t kClosed = 0xffffffffu;
constexpr auto kSpin = std::chrono::microseconds(60);  // longer than the gap between two ops of a step

uint32_t number(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
uint32_t next(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool& pool() {
  static Pool* one = new Pool;  // never destroyed: a thread of ours may still be asleep in it while the process exits
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

void Pool::resize(int n) {
  std::lock_guard lock(running_);
  if (n == threads_.load()) return;
  stop_workers();
  threads_.store(n);
  const uint32_t seen = number(ticket_.load());
  for (int i = 1; i < n; i++) workers_.emplace_back([this, seen] { work(seen); });
}

// Takes tasks of the offered list until none is left.  A claim is a compare-and-swap of the whole ticket, so it
// succeeds only while the list whose fields were read is still the one offered.
void Pool::help() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (next(ticket) != kClosed) {
    const Task task = task_.load(std::memory_order_acquire);
    const void* context = context_.load(std::memory_order_acquire);
    if (next(ticket) >= static_cast<uint64_t>(tasks_.load(std::memory_order_acquire))) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    task(context, next(ticket));
    finished_.fetch_add(1, std::memory_order_release);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void Pool::run(int64_t tasks, Task task, const void* context) {
  // Weights are packed in a thread beside the steps: whoever finds the other at work goes on alone rather than wait.
  std::unique_lock lock(running_, std::defer_lock);
  if (tasks <= 1 || threads() == 1 || !lock.try_lock()) {
    for (int64_t i = 0; i < tasks; i++) task(context, i);
    return;
  }
  const uint64_t list = static_cast<uint64_t>(number(ticket_.load()) + 1) << 32;
  ticket_.store((list - (uint64_t{1} << 32)) | kClosed);
  task_.store(task, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  tasks_.store(tasks, std::memory_order_release);
  finished_.store(0, std::memory_order_release);
  ticket_.store(list);
  if (sleepers_.load() > 0) {
    { std::lock_guard order(sleep_); }  // whoever counted itself as a sleeper is in wait() now, or will see the ticket
    wake_.notify_all();
  }
  help();
  for (int spins = 0; finished_.load(std::memory_order_acquire) != tasks; spins++) {
    if (spins < 2000) relax();
    else std::this_thread::yield();
  }
}

// Returns when a list other than `seen` is offered (true) or the pool stops (false).
bool Pool::wait(uint32_t seen) {
  const auto arrived = [&] { return number(ticket_.load()) != seen && next(ticket_.load()) != kClosed; };
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

void Pool::work(uint32_t seen) {
  while (wait(seen)) {
    seen = number(ticket_.load(std::memory_order_acquire));
    help();
  }
}

namespace {

struct Scratch {
  char* memory = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(memory); }
};

}  // namespace

char* thread_scratch(int64_t bytes) {
  static thread_local Scratch scratch;
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

}  // namespace tokserve
