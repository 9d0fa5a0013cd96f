#include "rng.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>

namespace replay {

// What the next numbers of a generator depend on. LibTorch's own way to read the CPU's makes a tensor of 5 KB; this one
// is read and compared around each block.
struct GeneratorState {
  explicit GeneratorState(at::Device device) : device(device) {}
  at::Device device;
  at::mt19937_data_pod engine{}; // it and the next two: the CPU's
  std::optional<float> float_normal;
  std::optional<double> double_normal;
  at::Tensor other; // of another device's, as LibTorch gives it
};

struct Watch {
  Watch(Watch* outer, int cuda_index) : outer(outer), cuda_index(cuda_index) {}
  Watch* outer;
  int cuda_index;
  bool drew = false;
  std::optional<GeneratorState> cpu;
  std::optional<GeneratorState> cuda;
  std::exception_ptr error;
};

namespace {

GeneratorState state_of(at::Device device) {
  GeneratorState state(device);
  at::Generator generator = at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  if (device.is_cpu()) {
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    state.engine = cpu->engine().data();
    state.float_normal = cpu->next_float_normal_sample();
    state.double_normal = cpu->next_double_normal_sample();
  } else {
    state.other = generator.get_state();
  }
  return state;
}

void put(const GeneratorState& state) {
  at::Generator generator = at::globalContext().defaultGenerator(state.device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  if (state.device.is_cpu()) {
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    at::mt19937 engine(0);
    engine.set_data(state.engine);
    cpu->set_engine(engine);
    cpu->set_next_float_normal_sample(state.float_normal);
    cpu->set_next_double_normal_sample(state.double_normal);
  } else {
    generator.set_state(state.other);
  }
}

// Bit for bit, also where a sample is not a number.
template <class Number>
bool same(const std::optional<Number>& a, const std::optional<Number>& b) {
  return a.has_value() == b.has_value() && (!a || std::memcmp(&*a, &*b, sizeof(Number)) == 0);
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  TORCH_CHECK(
      a.is_cpu() && b.is_cpu() && a.is_contiguous() && b.is_contiguous(),
      "the state of a generator is bytes in host memory");
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Field by field: there is room between them.
bool same(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b) {
  return a.seed_ == b.seed_ && a.left_ == b.left_ && a.seeded_ == b.seeded_ && a.next_ == b.next_ &&
      std::memcmp(a.state_.data(), b.state_.data(), sizeof(a.state_)) == 0;
}

bool same(const GeneratorState& a, const GeneratorState& b) {
  return a.device == b.device && same(a.engine, b.engine) && same(a.float_normal, b.float_normal) &&
      same(a.double_normal, b.double_normal) && same(a.other, b.other);
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

int replay_rng_read(int device_type, int index, replay::GeneratorState** out) {
  return guarded([&] { *out = new replay::GeneratorState(replay::state_of(device_of(device_type, index))); });
}

int replay_rng_write(const replay::GeneratorState* state) {
  return guarded([&] { replay::put(*state); });
}

int replay_rng_stands(const replay::GeneratorState* state, int* out) {
  return guarded([&] { *out = replay::same(*state, replay::state_of(state->device)); });
}

int replay_rng_equal(const replay::GeneratorState* a, const replay::GeneratorState* b, int* out) {
  return guarded([&] { *out = replay::same(*a, *b); });
}

void replay_rng_free(replay::GeneratorState* state) noexcept {
  delete state;
}

int replay_rng_bytes(int device_type, int index, at::Tensor** out) {
  return guarded([&] {
    at::Generator generator = at::globalContext().defaultGenerator(device_of(device_type, index));
    std::lock_guard<std::mutex> lock(generator.mutex());
    *out = new at::Tensor(generator.get_state());
  });
}

int replay_rng_set_bytes(int device_type, int index, const at::Tensor* bytes) {
  return guarded([&] {
    at::Generator generator = at::globalContext().defaultGenerator(device_of(device_type, index));
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(*bytes);
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

int replay_watch_state(const replay::Watch* watch, int device_type, replay::GeneratorState** out) {
  return guarded([&] {
    *out = nullptr;
    if (watch->error) std::rethrow_exception(watch->error);
    const auto& state = static_cast<at::DeviceType>(device_type) == at::kCUDA ? watch->cuda : watch->cpu;
    if (state) *out = new replay::GeneratorState(*state);
  });
}

void replay_watch_end(replay::Watch* watch) noexcept {
  replay::innermost = watch->outer;
  const bool drew = watch->drew;
  delete watch;
  if (drew) replay::release();
}
