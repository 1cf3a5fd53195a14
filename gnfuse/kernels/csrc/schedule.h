// Who does what: units (groups or samples) with two phases, each in parts.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace gnfuse {

inline void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The threads that a kernel may use here: one inside another parallel region.
inline int64_t worker_count() {
  return at::in_parallel_region() ? 1 : at::get_num_threads();
}

// Calls `work(worker)` once on each of `workers` threads.
template <typename Work>
void run_workers(int64_t workers, const Work& work) {
  if (workers == 1) {
    work(0);
    return;
  }
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      work(worker);
    }
  });
}

// Where a unit fits a core's cache, one worker takes it through both phases, so that the second finds its data there.
// Where units are few or large, all workers share each unit. Both do the same arithmetic in the same order.
class Schedule {
 public:
  Schedule(int64_t units, int64_t parts1, int64_t parts2, int64_t unit_bytes)
      : units_(units), parts1_(parts1), parts2_(parts2) {
    const int64_t parts = units * (parts1 + parts2);
    workers_ = std::max<int64_t>(1, std::min(worker_count(), parts / 2));
    // 16 MiB: half of the last-level cache of a small server chip
    const bool spills = unit_bytes * workers_ > (int64_t(16) << 20);
    shared_ = workers_ > 1 && parts1 + parts2 > 2 && (units < 4 * workers_ || spills);
    if (!shared_) {
      workers_ = std::min(workers_, std::max<int64_t>(1, units));
    }
  }

  int64_t workers() const {
    return workers_;
  }

  // Whether workers share units.
  bool shared() const {
    return shared_;
  }

  // Sets of per-unit scratch that are in use at a time.
  int64_t slots() const {
    return shared_ ? units_ : workers_;
  }

  // first(unit, part, slot, worker) for all parts, then finish(unit, slot), then second(unit, part, slot, worker).
  // None may throw: other workers would wait for ever.
  template <typename First, typename Finish, typename Second>
  void run(const First& first, const Finish& finish, const Second& second) const {
    if (shared_) {
      return run_shared(first, finish, second);
    }
    std::atomic<int64_t> ticket{0};
    run_workers(workers_, [&](int64_t worker) {
      for (int64_t unit; (unit = ticket.fetch_add(1, std::memory_order_relaxed)) < units_;) {
        for (int64_t part = 0; part < parts1_; ++part) {
          first(unit, part, worker, worker);
        }
        finish(unit, worker);
        for (int64_t part = 0; part < parts2_; ++part) {
          second(unit, part, worker, worker);
        }
      }
    });
  }

 private:
  // Tickets go unit by unit, first phase then second. A ticket waits only for lower ones, which are running: no deadlock.
  template <typename First, typename Finish, typename Second>
  void run_shared(const First& first, const Finish& finish, const Second& second) const {
    struct State {
      std::atomic<int64_t> left;
      std::atomic<bool> ready{false};
    };
    std::unique_ptr<State[]> states(new State[units_]);
    for (int64_t unit = 0; unit < units_; ++unit) {
      states[unit].left.store(parts1_, std::memory_order_relaxed);
    }
    std::atomic<int64_t> ticket{0};
    const int64_t per_unit = parts1_ + parts2_;
    run_workers(workers_, [&](int64_t worker) {
      for (int64_t t; (t = ticket.fetch_add(1, std::memory_order_relaxed)) < units_ * per_unit;) {
        const int64_t unit = t / per_unit;
        const int64_t part = t % per_unit;
        State& state = states[unit];
        if (part < parts1_) {
          first(unit, part, unit, worker);
          if (state.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            finish(unit, unit);
            state.ready.store(true, std::memory_order_release);
          }
          continue;
        }
        while (!state.ready.load(std::memory_order_acquire)) {
          pause_thread();
        }
        second(unit, part - parts1_, unit, worker);
      }
    });
  }

  int64_t units_;
  int64_t parts1_;
  int64_t parts2_;
  int64_t workers_;
  bool shared_;
};

} // namespace gnfuse
