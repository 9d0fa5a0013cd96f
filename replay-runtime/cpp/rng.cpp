#include "rng.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/record_function.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_set>

namespace replay {

struct Watch {
  Watch(Watch* outer, int cuda_index) : outer(outer), cuda_index(cuda_index) {}
  Watch* outer;
  int cuda_index;
  bool drew = false;
  at::Tensor cpu;
  at::Tensor cuda;
  std::exception_ptr error;
};

namespace {

at::Tensor state_of(at::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

std::atomic<int> threads{0};

// Never destroyed: threads may draw while the process ends.
std::mutex& drawing() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// What the calling thread has to do with it.
thread_local bool registered = false;
thread_local bool joined = false;
thread_local int holds = 0;
thread_local int open_draws = 0; // operations that draw, inside each other
thread_local Watch* innermost = nullptr;

void hold() {
  if (holds == 0) drawing().lock();
  ++holds;
}

void release() {
  if (--holds == 0) drawing().unlock();
}

// The names of all operations that draw, by address: an operation's schema is one object. Those that a library
// registers after the first call are not among them.
bool draws(const char* name) {
  static const auto* names = [] {
    auto* found = new std::unordered_set<const char*>;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& operation : dispatcher.getAllOpNames()) {
      const auto handle = dispatcher.findOp(operation);
      if (handle && handle->hasSchema() && handle->hasTag(at::Tag::nondeterministic_seeded))
        found->insert(handle->schema().name().c_str());
    }
    return found;
  }();
  return names->count(name) != 0;
}

// Outermost first: what an outer block noted must not be younger than what an inner one did.
void note(Watch* watch) {
  if (watch == nullptr || watch->drew) return;
  note(watch->outer);
  watch->drew = true;
  hold();
  try {
    watch->cpu = state_of(at::kCPU);
    if (watch->cuda_index >= 0) watch->cuda = state_of(at::Device(at::kCUDA, watch->cuda_index));
  } catch (...) {
    watch->error = std::current_exception();
  }
}

// Called on all threads of the process, most of which have not joined.
std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& operation) {
  if (joined && draws(operation.name()) && open_draws++ == 0) {
    hold();
    note(innermost);
  }
  return nullptr;
}

void after(const at::RecordFunction& operation, at::ObserverContext*) {
  if (joined && open_draws > 0 && draws(operation.name()) && --open_draws == 0) release();
}

// For all threads and for good. LibTorch asks for global callbacks at the start of a program, for their order alone: in 2.13
// its list of them is changed under a lock, and each thread takes a new copy when its number changes. A callback of one thread would not do: the engine puts a thread's callbacks back when
// a node has run, and so would take one away that was added in a replay; and a thread that was alone does not hear that
// a second one has come.
void observe() {
  static const auto handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&before, &after).scopes({at::RecordScope::FUNCTION}));
  static_cast<void>(handle);
}

struct Registration {
  Registration() { ++threads; }
  ~Registration() { --threads; }
};

void mix(uint64_t& seed, uint64_t value) {
  seed ^= std::hash<uint64_t>{}(value) + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2);
}

} // namespace

uint64_t generators_stand(int cuda_index) {
  if (innermost != nullptr && !innermost->drew) return 0;
  uint64_t stand = 1;
  {
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    std::lock_guard<std::mutex> lock(generator.mutex());
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    const auto engine = cpu->engine().data();
    for (const uint64_t part : {uint64_t(engine.left_), uint64_t(engine.next_), uint64_t(engine.state_[0]), uint64_t(engine.state_[1])})
      mix(stand, part);
    // Half of a pair of normal numbers may be waiting.
    mix(stand, cpu->next_float_normal_sample().has_value() + 2 * cpu->next_double_normal_sample().has_value());
  }
  if (cuda_index >= 0) {
    auto generator = at::globalContext().defaultGenerator(at::Device(at::kCUDA, cuda_index));
    std::lock_guard<std::mutex> lock(generator.mutex());
    mix(stand, generator.current_seed());
    mix(stand, generator.get_offset());
  }
  return stand | 1;
}

} // namespace replay

using replay::guarded;

namespace {
at::Device device_of(int device_type, int index) {
  return at::Device(static_cast<at::DeviceType>(device_type), static_cast<c10::DeviceIndex>(index));
}
} // namespace

int replay_rng_get(int device_type, int index, at::Tensor** out) {
  return guarded([&] { *out = new at::Tensor(replay::state_of(device_of(device_type, index))); });
}

int replay_rng_set(int device_type, int index, const at::Tensor* state) {
  return guarded([&] {
    auto generator = at::globalContext().defaultGenerator(device_of(device_type, index));
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(*state);
  });
}

int replay_bytes_hash(const at::Tensor* tensor, uint64_t* out) {
  return guarded([&] {
    TORCH_CHECK(tensor->is_cpu() && tensor->is_contiguous(), "the state of a generator is bytes in host memory");
    const auto* bytes = static_cast<const char*>(tensor->const_data_ptr());
    *out = std::hash<std::string_view>{}(std::string_view(bytes, tensor->nbytes()));
  });
}

int replay_draws_register(int join) {
  return guarded([&] {
    if (!replay::registered) {
      static thread_local replay::Registration registration;
      replay::registered = true;
    }
    if (join != 0) replay::joined = true;
    if (replay::threads > 1) replay::observe();
  });
}

int replay_draws_shared() {
  return replay::threads > 1;
}

void replay_draws_hold() noexcept {
  replay::hold();
  // What is open around may be about to see the generator set.
  replay::note(replay::innermost);
}

void replay_draws_release() noexcept {
  replay::release();
}

int replay_watch_begin(int cuda_index, replay::Watch** out) {
  return guarded([&] {
    replay::joined = true;
    replay::observe();
    *out = new replay::Watch(replay::innermost, cuda_index);
    replay::innermost = *out;
  });
}

int replay_watch_state(const replay::Watch* watch, int device_type, at::Tensor** out) {
  return guarded([&] {
    *out = nullptr;
    if (watch->error) std::rethrow_exception(watch->error);
    const auto& state = static_cast<at::DeviceType>(device_type) == at::kCUDA ? watch->cuda : watch->cpu;
    if (state.defined()) *out = new at::Tensor(state);
  });
}

void replay_watch_end(replay::Watch* watch) noexcept {
  replay::innermost = watch->outer;
  const bool drew = watch->drew;
  delete watch;
  if (drew) replay::release();
}
