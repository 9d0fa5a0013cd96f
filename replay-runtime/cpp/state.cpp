#include "state.h"
#include "print.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <string>

using replay::guarded;
using replay::value_of;

int replay_detach_output(const at::Tensor* tensor, int aliases, at::Tensor** out) {
  return guarded([&] {
    at::AutoGradMode off(false);
    at::Tensor result = tensor->detach();
    if (aliases != 0 && result.layout() == at::kStrided &&
        torch::autograd::isDifferentiableType(result.scalar_type())) {
      result = at::alias(result); // which, unlike `view_as`, keeps the strides of dimensions of size one
      torch::autograd::impl::get_view_autograd_meta(result)->set_creation_meta(
          torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
    }
    *out = new at::Tensor(std::move(result));
  });
}

int replay_copy(const at::Tensor* tensor, at::Tensor** out) {
  return guarded([&] {
    at::AutoGradMode off(false);
    *out = new at::Tensor(tensor->detach().clone());
  });
}

uintptr_t replay_impl(const at::Tensor* tensor) {
  return reinterpret_cast<uintptr_t>(tensor->unsafeGetTensorImpl());
}

uintptr_t replay_storage(const at::Tensor* tensor) {
  return value_of<uintptr_t>([&] {
    return replay::has_storage(*tensor)
        ? reinterpret_cast<uintptr_t>(tensor->storage().unsafeGetStorageImpl())
        : 0;
  });
}

int replay_owns_storage(const at::Tensor* tensor) {
  return value_of<int>([&] { return replay::has_storage(*tensor) && tensor->storage().use_count() == 1 ? 1 : 0; });
}

int replay_inference_mode() {
  return c10::InferenceMode::is_enabled();
}

void* replay_inference_enter() {
  return value_of<void*>([] { return new c10::InferenceMode(); });
}

void replay_inference_leave(void* guard) {
  delete static_cast<c10::InferenceMode*>(guard);
}

int replay_modes_get(replay::Modes* out) {
  return guarded([&] {
    namespace autocast = at::autocast;
    const auto& context = at::globalContext();
    out->grad = c10::GradMode::is_enabled();
    out->autocast_cpu = autocast::is_autocast_enabled(at::kCPU);
    out->autocast_cuda = autocast::is_autocast_enabled(at::kCUDA);
    out->autocast_cache = autocast::is_autocast_cache_enabled();
    out->autocast_cpu_dtype = static_cast<int8_t>(autocast::get_autocast_dtype(at::kCPU));
    out->autocast_cuda_dtype = static_cast<int8_t>(autocast::get_autocast_dtype(at::kCUDA));
    out->default_dtype = static_cast<int8_t>(c10::get_default_dtype_as_scalartype());
    out->deterministic = context.deterministicAlgorithms();
    out->deterministic_warn_only = context.deterministicAlgorithmsWarnOnly();
    out->deterministic_fill = context.deterministicFillUninitializedMemory();
  });
}

// Writes only what differs: some setters warn when they are called at all.
int replay_modes_set(const replay::Modes* modes) {
  return guarded([&] {
    namespace autocast = at::autocast;
    replay::Modes now{};
    replay_modes_get(&now);
    auto& context = at::globalContext();
    c10::GradMode::set_enabled(modes->grad != 0);
    if (now.autocast_cpu != modes->autocast_cpu)
      autocast::set_autocast_enabled(at::kCPU, modes->autocast_cpu != 0);
    if (now.autocast_cuda != modes->autocast_cuda)
      autocast::set_autocast_enabled(at::kCUDA, modes->autocast_cuda != 0);
    if (now.autocast_cache != modes->autocast_cache)
      autocast::set_autocast_cache_enabled(modes->autocast_cache != 0);
    if (now.autocast_cpu_dtype != modes->autocast_cpu_dtype)
      autocast::set_autocast_dtype(at::kCPU, static_cast<at::ScalarType>(modes->autocast_cpu_dtype));
    if (now.autocast_cuda_dtype != modes->autocast_cuda_dtype)
      autocast::set_autocast_dtype(at::kCUDA, static_cast<at::ScalarType>(modes->autocast_cuda_dtype));
    if (now.default_dtype != modes->default_dtype)
      c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<at::ScalarType>(modes->default_dtype)));
    if (now.deterministic != modes->deterministic ||
        now.deterministic_warn_only != modes->deterministic_warn_only)
      context.setDeterministicAlgorithms(modes->deterministic != 0, modes->deterministic_warn_only != 0);
    if (now.deterministic_fill != modes->deterministic_fill)
      context.setDeterministicFillUninitializedMemory(modes->deterministic_fill != 0);
  });
}

int replay_autocast_enter(int device_type, int enabled, int dtype) {
  return guarded([&] {
    const auto device = static_cast<at::DeviceType>(device_type);
    at::autocast::set_autocast_enabled(device, enabled != 0);
    at::autocast::set_autocast_dtype(device, static_cast<at::ScalarType>(dtype));
    at::autocast::increment_nesting();
  });
}

int replay_autocast_leave(int device_type, int enabled, int dtype) {
  return guarded([&] {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    const auto device = static_cast<at::DeviceType>(device_type);
    at::autocast::set_autocast_enabled(device, enabled != 0);
    at::autocast::set_autocast_dtype(device, static_cast<at::ScalarType>(dtype));
  });
}

int replay_autocast_clear_cache() {
  return guarded([] { at::autocast::clear_cache(); });
}

int replay_autocast_nesting() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

int replay_autocast_end_beyond(int nesting) {
  return guarded([&] {
    if (replay_autocast_nesting() <= nesting) return;
    while (at::autocast::decrement_nesting() > nesting) {
    }
    at::autocast::clear_cache();
  });
}

int replay_has_cuda() {
  return value_of<int>([] { return at::hasCUDA(); });
}

int replay_version(char* out, size_t capacity) {
  return guarded([&] {
    const std::string config = at::show_config();
    const std::string key = "TORCH_VERSION=";
    const auto start = config.find(key);
    std::string version;
    if (start != std::string::npos) {
      const auto from = start + key.size();
      version = config.substr(from, config.find_first_of(", \n", from) - from);
    }
    const size_t length = std::min(version.size(), capacity - 1);
    std::memcpy(out, version.data(), length);
    out[length] = '\0';
  });
}
