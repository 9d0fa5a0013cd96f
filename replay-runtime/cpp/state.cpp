#include "state.h"

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
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace replay {

using WeakImpl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct WeakTensor {
  WeakImpl impl;
};

// `identity` keeps the address of the tensor it was made from (not its data) from being used again, so that
// equal addresses mean the same tensor for as long as this lives.
struct SavedTensor {
  at::Tensor data; // detached: same storage and version counter; or a copy on the host
  at::Device device;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides; // of the tensor without its expanded dimensions; for a copy on the host
  bool on_host;
  WeakImpl identity;
};

namespace {

uint64_t mix(uint64_t seed, uint64_t value) {
  return seed ^ (std::hash<uint64_t>{}(value) + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2));
}

// Hash of a few values, evenly spread. Only where they can be read without a copy: dense in host memory.
uint64_t sample_hash(const at::Tensor& tensor) {
  constexpr size_t kSamples = 8;
  if (!tensor.is_cpu() || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return 0;
  const auto* bytes = static_cast<const char*>(tensor.const_data_ptr());
  const auto count = static_cast<size_t>(tensor.numel());
  const size_t size = tensor.element_size();
  const size_t samples = std::min(count, kSamples);
  uint64_t hash = 0;
  for (size_t i = 0; i < samples; ++i) {
    const size_t at = samples > 1 ? i * (count - 1) / (samples - 1) : 0;
    hash = mix(hash, std::hash<std::string_view>{}(std::string_view(bytes + at * size, size)));
  }
  return hash;
}

// The values as bytes, row by row.
at::Tensor flat_bytes(const at::Tensor& tensor) {
  const bool plain = tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  if (plain && tensor.is_cpu()) return tensor;
  at::Tensor dense = tensor.layout() == at::kStrided ? tensor : tensor.to_dense();
  dense = dense.resolve_conj().resolve_neg().contiguous();
  // Not by `reshape`, which leaves a single value whatever stride it has.
  return dense.as_strided({dense.numel()}, {1}).view(at::kByte);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  at::AutoGradMode off(false);
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type() || a.device() != b.device()) return false;
  const at::Tensor x = flat_bytes(a);
  const at::Tensor y = flat_bytes(b);
  if (!x.is_cpu()) return at::equal(x, y);
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

bool has_storage(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.storage().nbytes() != 0;
}

// A tensor without its expanded dimensions, so that a copy holds each value once.
at::Tensor collapse(at::Tensor tensor) {
  if (tensor.layout() != at::kStrided) return tensor;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) tensor = tensor.narrow(dim, 0, 1);
  return tensor;
}

} // namespace

uint64_t layout_hash(const at::Tensor& tensor) {
  uint64_t hash = mix(static_cast<uint64_t>(tensor.scalar_type()), static_cast<uint64_t>(tensor.layout()));
  hash = mix(hash, static_cast<uint64_t>(tensor.device().type()));
  hash = mix(hash, static_cast<uint64_t>(tensor.device().index()));
  for (const auto size : tensor.sizes()) hash = mix(hash, static_cast<uint64_t>(size));
  if (tensor.layout() == at::kStrided)
    for (const auto stride : tensor.strides()) hash = mix(hash, static_cast<uint64_t>(stride));
  return hash;
}

} // namespace replay

using replay::guarded;

namespace {
// The value of `body`, or zero where it throws.
template <class Value, class Body>
Value value_of(Body&& body) noexcept {
  Value value{};
  guarded([&] { value = body(); });
  return value;
}
} // namespace

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

int replay_fingerprint(const at::Tensor* tensor, replay::Fingerprint* out) {
  return guarded([&] {
    out->version = tensor->is_inference() ? 0 : tensor->_version();
    out->data = replay::has_storage(*tensor) ? reinterpret_cast<uint64_t>(tensor->const_data_ptr()) : 0;
    out->sample = replay::has_storage(*tensor) ? replay::sample_hash(*tensor) : 0;
    out->layout = replay::layout_hash(*tensor);
    out->requires_grad = tensor->requires_grad();
  });
}

int replay_same_bits(const at::Tensor* a, const at::Tensor* b, int* out) {
  return guarded([&] { *out = replay::same_bits(*a, *b); });
}

int replay_put_values(const at::Tensor* tensor, const at::Tensor* value, uint64_t version) {
  return guarded([&] {
    at::AutoGradMode off(false);
    at::Tensor target = *tensor;
    if (target.sizes() == value->sizes() && target.scalar_type() == value->scalar_type() &&
        target.device() == value->device()) {
      target.variable_data().copy_(*value);
    } else {
      target.set_data(value->clone());
    }
    if (target.is_inference()) return;
    c10::VariableVersion counter = target.unsafeGetTensorImpl()->version_counter(); // a handle to the shared one
    counter.set_version(static_cast<int64_t>(version));
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

uint64_t replay_nbytes(const at::Tensor* tensor) {
  return value_of<uint64_t>([&] { return replay::collapse(tensor->detach()).nbytes(); });
}

int replay_saved_new(const at::Tensor* tensor, int on_host, replay::SavedTensor** out) {
  return guarded([&] {
    at::AutoGradMode off(false);
    auto saved = std::make_unique<replay::SavedTensor>(replay::SavedTensor{
        tensor->detach(),
        tensor->device(),
        tensor->sizes().vec(),
        {},
        on_host != 0 && tensor->is_cuda() && tensor->layout() == at::kStrided,
        replay::WeakImpl(tensor->getIntrusivePtr())});
    if (saved->on_host) {
      const at::Tensor once = replay::collapse(saved->data);
      at::Tensor host = at::empty_like(once, once.options().device(at::kCPU).pinned_memory(true));
      host.copy_(once);
      saved->strides = once.strides().vec();
      saved->data = std::move(host);
    }
    *out = saved.release();
  });
}

int replay_saved_leaf(const replay::SavedTensor* saved, int requires_grad, at::Tensor** out) {
  return guarded([&] {
    at::AutoGradMode off(false);
    at::Tensor leaf = saved->data;
    if (saved->on_host) {
      // In the strides of the forward, since kernels are chosen by them too.
      leaf = at::empty_strided(leaf.sizes(), saved->strides, leaf.options().device(saved->device).pinned_memory(false));
      leaf.copy_(saved->data);
      leaf = leaf.expand(saved->sizes);
    }
    leaf = leaf.detach();
    if (requires_grad != 0) leaf.set_requires_grad(true);
    *out = new at::Tensor(std::move(leaf));
  });
}

int replay_saved_on_host(const replay::SavedTensor* saved) {
  return saved->on_host;
}

int replay_saved_fingerprint(const replay::SavedTensor* saved, replay::Fingerprint* out) {
  return replay_fingerprint(&saved->data, out);
}

void replay_saved_free(replay::SavedTensor* saved) {
  delete saved;
}

replay::WeakTensor* replay_weak_new(const at::Tensor* tensor) {
  return value_of<replay::WeakTensor*>(
      [&] { return new replay::WeakTensor{replay::WeakImpl(tensor->getIntrusivePtr())}; });
}

at::Tensor* replay_weak_lock(const replay::WeakTensor* weak) {
  return value_of<at::Tensor*>([&]() -> at::Tensor* {
    auto impl = weak->impl.lock();
    return impl.defined() ? new at::Tensor(std::move(impl)) : nullptr;
  });
}

void replay_weak_free(replay::WeakTensor* weak) {
  delete weak;
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
