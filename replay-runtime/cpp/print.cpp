#include "print.h"

#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>

namespace replay {

namespace {

// For a given seed no two values give the same, and for a given value no two seeds.
uint64_t mix(uint64_t seed, uint64_t value) {
  const uint64_t product = (seed ^ value) * 0x9e3779b97f4a7c15ULL;
  return product ^ (product >> 32);
}

// Of values of as many words each, of which a few are read, evenly spread.
template <class Word>
uint64_t sample_words(const void* data, size_t count, size_t words) {
  constexpr size_t kSamples = 8;
  const auto* bytes = static_cast<const char*>(data);
  uint64_t hash = 0;
  for (size_t i = 0; i < std::min(count, kSamples); ++i) {
    const size_t at = count > kSamples ? i * (count - 1) / (kSamples - 1) : i;
    for (size_t word = at * words; word < (at + 1) * words; ++word) {
      Word value;
      std::memcpy(&value, bytes + word * sizeof(Word), sizeof(Word));
      hash = mix(hash, value);
    }
  }
  return hash;
}

// Hash of a few values. Only where they can be read without a copy: dense in host memory.
uint64_t sample_hash(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return 0;
  const auto* data = tensor.const_data_ptr();
  const auto count = static_cast<size_t>(tensor.numel());
  const size_t size = tensor.element_size();
  switch (size) {
    case 2:
      return sample_words<uint16_t>(data, count, 1);
    case 4:
      return sample_words<uint32_t>(data, count, 1);
    case 8:
      return sample_words<uint64_t>(data, count, 1);
    default:
      return sample_words<uint8_t>(data, count, size);
  }
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

bool keeps_values(const at::Tensor& buffer, const at::Tensor& value, const Fingerprint& before, const Fingerprint& now) {
  constexpr size_t kLarge = 1 << 20;
  const bool large = buffer.dim() > 1 && buffer.nbytes() > kLarge && !buffer.is_inference();
  const bool unwritten = now.data == before.data && now.layout == before.layout && now.version == before.version &&
      now.sample == before.sample;
  return (large && unwritten) || same_bits(value, buffer);
}

bool same_place(const Fingerprint& a, const Fingerprint& b) {
  return a.data == b.data && a.layout == b.layout && a.requires_grad == b.requires_grad;
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

Fingerprint fingerprint(const at::Tensor& tensor) {
  const bool stored = has_storage(tensor);
  Fingerprint print{};
  print.version = tensor.is_inference() ? 0 : tensor._version();
  print.data = stored ? reinterpret_cast<uint64_t>(tensor.const_data_ptr()) : 0;
  print.sample = stored ? sample_hash(tensor) : 0;
  print.layout = layout_hash(tensor);
  print.requires_grad = tensor.requires_grad();
  return print;
}

} // namespace replay

using replay::guarded;

int replay_fingerprint(const at::Tensor* tensor, replay::Fingerprint* out) {
  return guarded([&] { *out = replay::fingerprint(*tensor); });
}

int replay_same_bits(const at::Tensor* a, const at::Tensor* b, int* out) {
  return guarded([&] { *out = replay::same_bits(*a, *b); });
}

int replay_keeps_values(const at::Tensor* buffer, const at::Tensor* value, const replay::Fingerprint* before, int* out) {
  return guarded([&] { *out = replay::keeps_values(*buffer, *value, *before, replay::fingerprint(*buffer)); });
}

int replay_differing(
    const at::Tensor* const* tensors,
    const at::Tensor* const* values,
    const replay::Fingerprint* before,
    size_t n,
    size_t from,
    int versions,
    size_t* out) {
  return guarded([&] {
    for (size_t i = from; i < n; ++i) {
      *out = i;
      const auto now = replay::fingerprint(*tensors[i]);
      if (!replay::same_place(now, before[i])) return;
      if (now.version != before[i].version && (values[i] == nullptr || versions != 0)) return;
      if (values[i] == nullptr ? now.sample != before[i].sample
                               : !replay::keeps_values(*tensors[i], *values[i], before[i], now))
        return;
    }
    *out = n;
  });
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
