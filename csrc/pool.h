// Threads that share one list of tasks: they spin briefly for the next list, then sleep at no cost.
// Each thread begins with its own region of the list, the same share of every list, and then helps with the regions of
// others: what a thread packed, it mostly reads again, from its own cache and its own memory node.  Still, which thread
// does which task is open, so tasks must not depend on it.  A task that throws ends the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tokserve {

class Pool {
 public:
  using Task = void (*)(const void* context, int64_t task);

  ~Pool() { resize(1); }

  int threads() const { return threads_.load(std::memory_order_relaxed); }
  // Use n threads, the caller of run() included.  `cpus`, if not empty: thread i runs on CPU cpus[i] only, but for the
  // caller, thread 0, whose own threads would inherit it.  False if the system does not allow that.
  bool resize(int n, const std::vector<int>& cpus = {});
  // task(context, i) for all i in [0, tasks); returns when all are done.  The caller works too.
  void run(int64_t tasks, Task task, const void* context);

 private:
  void work(int thread, uint32_t seen);
  bool wait(uint32_t seen);
  void help(int thread);
  int64_t claim(int region, uint64_t offer, int64_t tasks);
  void stop_workers();

  std::mutex running_;  // one list at a time; resize() is exclusive too
  std::atomic<int> threads_{1};
  std::vector<std::thread> workers_;

  // The list now offered: its number, and below it whether its fields may be read (0) or are changing (kClosed).
  alignas(64) std::atomic<uint64_t> offer_{0xffffffffu};
  std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> tasks_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
  // Of each region: (list number << 32 | tasks claimed).  Another number means none is claimed, so nothing is reset.
  struct alignas(64) Region {
    std::atomic<uint64_t> claimed{0};
  };
  std::unique_ptr<Region[]> regions_{new Region[1]};

  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex sleep_;
  std::condition_variable wake_;
};

Pool& pool();

// A buffer of at least `bytes` bytes, aligned to 64, that belongs to the calling thread until it asks again.
char* thread_scratch(int64_t bytes);

// run(tasks, f) for a callable f(task).
template <class F>
void parallel(int64_t tasks, const F& f) {
  pool().run(tasks, [](const void* context, int64_t task) { (*static_cast<const F*>(context))(task); }, &f);
}

}  // namespace tokserve
