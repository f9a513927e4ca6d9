// Calls with their arguments, to be made again: a step of a model without the interpreter between its ops.
// A binding checks its tensors once and leaves what depends on their contents to the part that it gives to `perform`.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <vector>

namespace tokserve {

class Record {
 public:
  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  // Makes all calls again, in order, without the interpreter lock; the memory they name must still be there.
  void repeat() const;

 private:
  std::vector<std::function<void()>> calls_;
};

// What the calling thread is doing.
struct Recording {
  Record* into = nullptr;   // what it performs is added to this
  bool performing = false;  // inside of perform()
  bool repeating = false;   // inside of Record::repeat(), so without the interpreter lock
};
inline thread_local Recording recording;

// Calls f, and has it called again when the record that is being made, if any, is repeated.  What f holds is copied.
template <class F>
void perform(const F& f) {
  if (!recording.into) return f();
  recording.performing = true;
  try {
    f();
  } catch (...) {
    recording.performing = false;
    throw;
  }
  recording.performing = false;
  recording.into->add(f);
}

// Without the interpreter lock if `wanted`; a repeated call does not have it to begin with.
class Unlocked {
 public:
  explicit Unlocked(bool wanted = true) : thread_(wanted && !recording.repeating ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (thread_) PyEval_RestoreThread(thread_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

}  // namespace tokserve
