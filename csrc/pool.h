// A thread pool that works on one list of tasks at a time: threads spin briefly for the next list, then sleep.
// A thread begins with its region of the list, the same share of every list, then steals from other regions: so it
// mostly reads the weights that it packed, from its own cache and memory node.  Which thread runs a task is not fixed,
// so tasks must not depend on it.  A task that throws ends the process.
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
  // Uses n threads, the caller of run() included.  `cpus`, if not empty: thread i runs on CPU cpus[i] only, except the
  // caller, thread 0, because threads that it creates would inherit that.  False if the system does not allow it.
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

  // The current list: its number in the upper half, kClosed in the lower half while its fields change, else 0.
  alignas(64) std::atomic<uint64_t> offer_{0xffffffffu};
  std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> tasks_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
  // (list number << 32 | tasks claimed) of a region.  With another list's number it counts as none claimed: no reset.
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

// A buffer of at least `bytes` bytes, aligned to 64, that the calling thread may use until its next call.
char* thread_scratch(int64_t bytes);

// Another one, for what a call keeps while its tasks use their scratch memory.
char* thread_workspace(int64_t bytes);

// run(tasks, f) for a callable f(task).
template <class F>
void parallel(int64_t tasks, const F& f) {
  pool().run(tasks, [](const void* context, int64_t task) { (*static_cast<const F*>(context))(task); }, &f);
}

}  // namespace tokserve
