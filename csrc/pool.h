// A few threads that share one list of tasks: they spin briefly for the next list, then sleep at no cost.
// Which thread does which task is left to chance; tasks must therefore not depend on it.  One that throws ends the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tokserve {

class Pool {
 public:
  using Task = void (*)(const void* context, int64_t task);

  ~Pool() { resize(1); }

  int threads() const { return threads_.load(std::memory_order_relaxed); }
  // Use n threads, the caller of run() included.
  void resize(int n);
  // task(context, i) for all i in [0, tasks); returns when all are done.  The caller works too.
  void run(int64_t tasks, Task task, const void* context);

 private:
  void work(uint32_t seen);
  bool wait(uint32_t seen);
  void help();
  void stop_workers();

  std::mutex running_;  // one list at a time; resize() is exclusive too
  std::atomic<int> threads_{1};
  std::vector<std::thread> workers_;

  // The list now offered.  `ticket_` is (list number << 32 | next task); kClosed as next task means: fields may change.
  alignas(64) std::atomic<uint64_t> ticket_{0xffffffffu};
  std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> tasks_{0};
  alignas(64) std::atomic<int64_t> finished_{0};

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
