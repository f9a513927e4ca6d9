// Captured calls of kernels with their arguments, replayed without the interpreter: what a CUDA graph is, on a CPU.
// A binding checks shapes once; everything that depends on the tensors' contents belongs to the function that it
// launches.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <vector>

namespace tokserve {

class Graph {
 public:
  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  // Runs all calls again, in order, without the interpreter lock; their memory must still exist.
  void replay() const;

 private:
  std::vector<std::function<void()>> calls_;
};

// The capture state of the calling thread.
struct Capturing {
  Graph* into = nullptr;   // launched functions are added to it
  bool launching = false;  // inside launch()
  bool replaying = false;  // inside Graph::replay(), that is without the interpreter lock
};
inline thread_local Capturing capturing;

// Calls f, and adds a copy of it to the graph that the thread captures, if any.
template <class F>
void launch(const F& f) {
  if (!capturing.into) return f();
  capturing.launching = true;
  try {
    f();
  } catch (...) {
    capturing.launching = false;
    throw;
  }
  capturing.launching = false;
  capturing.into->add(f);
}

// Releases the interpreter lock in its scope if `release`; replayed calls do not hold it.
class Unlocked {
 public:
  explicit Unlocked(bool release = true) : thread_(release && !capturing.replaying ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (thread_) PyEval_RestoreThread(thread_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

}  // namespace tokserve
