// One backward pass: in whose name it runs, on which thread its closures run, and how other threads bring them there.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

namespace replay {

// Where other threads leave calls for the one that serves.
class Desk {
 public:
  // Has `call` run by the serving thread and waits for it. False when nobody serves any more.
  bool ask(const std::function<void()>& call) {
    Request request{call, Request::kWaiting, nullptr};
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) return false;
    requests_.push_back(&request);
    changed_.notify_all();
    changed_.wait(lock, [&] { return request.state != Request::kWaiting; });
    if (request.error) std::rethrow_exception(request.error);
    return request.state == Request::kDone;
  }

  // Runs calls until `close`; those that are left then are turned away.
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return closed_ || !requests_.empty(); });
      if (closed_) break;
      Request* request = requests_.front();
      requests_.pop_front();
      lock.unlock();
      try {
        request->call();
      } catch (...) {
        request->error = std::current_exception();
      }
      lock.lock();
      request->state = Request::kDone;
      changed_.notify_all();
    }
    for (auto* request : requests_) request->state = Request::kTurnedAway;
    requests_.clear();
    changed_.notify_all();
  }

  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  struct Request {
    enum State { kWaiting, kDone, kTurnedAway };
    const std::function<void()>& call;
    State state = kWaiting;
    std::exception_ptr error;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request*> requests_;
  bool closed_ = false;
};

// One `Rollout::backward`. Shared by the tokens that are pushed in its name.
struct Run {
  const uint64_t rollout;
  const void* const replayer;
  const std::thread::id owner;
  // The leaves that have no gradient yet, or had none when it was last looked. Touched by whoever calls the engine; calls
  // around that one wait.
  std::vector<at::Tensor> bare;
  // Bytes of gradients that were copied; touched as `bare`.
  uint64_t copied = 0;
  // Written and read by the owner alone.
  bool ended = false;
};

// Says in whose name the engine runs. A thread-local of LibTorch's own kind, because the engine carries those
// to its device and pool threads, and to no thread that another backward was started on.
struct Token : c10::DebugInfoBase {
  Token(std::shared_ptr<Run> run, std::shared_ptr<Desk> desk) : run(std::move(run)), desk(std::move(desk)) {}
  const std::shared_ptr<Run> run;
  // Set while the owner serves instead of running the engine itself.
  const std::shared_ptr<Desk> desk;
};

inline constexpr std::string_view kTokenName = "REPLAY_ROLLOUT";
inline const c10::DebugInfoKind kToken(&kTokenName);

} // namespace replay
