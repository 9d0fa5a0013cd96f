#include "optim.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace replay {

namespace optim = torch::optim;

struct OptimHandle {
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    // When it was added; of a sharded store, that of the piece.
    std::vector<int64_t> sizes;
    size_t group;
  };

  OptimKind kind;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::vector<Parameter> parameters;
};

namespace {

using Parameter = OptimHandle::Parameter;
using Groups = std::vector<optim::OptimizerParamGroup>;

// A larger count is not one of steps, and LibTorch adds to it without a look.
constexpr int64_t kMaxStep = int64_t{1} << 53;

constexpr std::array<const char*, kSlots> kSlotNames[] = {
    {"momentum_buffer", nullptr, nullptr},
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    {"square_avg", "momentum_buffer", "grad_avg"},
};

OptimKind checked(int kind) {
  TORCH_CHECK(kind >= kSgd && kind <= kRmsProp, "no optimizer has the number ", kind);
  return static_cast<OptimKind>(kind);
}

// The options and the state of one algorithm.
template <class Options_, class State_>
struct Types {
  using Options = Options_;
  using State = State_;
};

template <class Body>
decltype(auto) with_types(OptimKind kind, Body&& body) {
  switch (kind) {
    case kSgd:
      return body(Types<optim::SGDOptions, optim::SGDParamState>());
    case kAdam:
      return body(Types<optim::AdamOptions, optim::AdamParamState>());
    case kAdamW:
      return body(Types<optim::AdamWOptions, optim::AdamWParamState>());
    default:
      return body(Types<optim::RMSpropOptions, optim::RMSpropParamState>());
  }
}

template <class Options>
constexpr bool has_momentum =
    std::is_same_v<Options, optim::SGDOptions> || std::is_same_v<Options, optim::RMSpropOptions>;

struct Slot {
  at::Tensor* tensor;
  // Whether a step with these options reads it.
  bool needed;
};

using Slots = std::vector<Slot>;

Slots slots(optim::SGDParamState& state, const optim::SGDOptions&) {
  return {{&state.momentum_buffer(), true}};
}

Slots slots(optim::AdamParamState& state, const optim::AdamOptions& options) {
  return {{&state.exp_avg(), true}, {&state.exp_avg_sq(), true}, {&state.max_exp_avg_sq(), options.amsgrad()}};
}

Slots slots(optim::AdamWParamState& state, const optim::AdamWOptions& options) {
  return {{&state.exp_avg(), true}, {&state.exp_avg_sq(), true}, {&state.max_exp_avg_sq(), options.amsgrad()}};
}

Slots slots(optim::RMSpropParamState& state, const optim::RMSpropOptions& options) {
  return {
      {&state.square_avg(), true},
      {&state.momentum_buffer(), options.momentum() > 0},
      {&state.grad_avg(), options.centered()}};
}

Slots slots_of(const OptimHandle& optim, const Parameter& parameter, optim::OptimizerParamState& state) {
  return with_types(optim.kind, [&](auto types) {
    using T = decltype(types);
    const auto& options = optim.optimizer->param_groups().at(parameter.group).options();
    return slots(static_cast<typename T::State&>(state), static_cast<const typename T::Options&>(options));
  });
}

int64_t step_of(OptimKind kind, const optim::OptimizerParamState& state) {
  return with_types(kind, [&](auto types) -> int64_t {
    using State = typename decltype(types)::State;
    if constexpr (std::is_same_v<State, optim::SGDParamState>) return 0;
    else return static_cast<const State&>(state).step();
  });
}

optim::OptimizerParamState* find_state(const OptimHandle& optim, const Parameter& parameter) {
  const auto& states = optim.optimizer->state();
  const auto found = states.find(parameter.tensor.unsafeGetTensorImpl());
  return found == states.end() ? nullptr : found->second.get();
}

// LibTorch would broadcast what does not fit, or give up when other parameters have made their step.
void check_state(const OptimHandle& optim, const Parameter& parameter, optim::OptimizerParamState& state) {
  const auto slots = slots_of(optim, parameter, state);
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto& tensor = *slots[i].tensor;
    const auto* slot = kSlotNames[optim.kind][i];
    if (!tensor.defined()) {
      TORCH_CHECK(!slots[i].needed, "the optimizer state of parameter `", parameter.name, "` has no `", slot, "`");
      continue;
    }
    const auto check = [&](bool fits, const auto& is, const auto& expected) {
      TORCH_CHECK(
          fits, "`", slot, "` in the optimizer state of parameter `", parameter.name, "` is ", is, ", not ", expected);
    };
    check(tensor.sizes() == at::IntArrayRef(parameter.sizes), tensor.sizes(), at::IntArrayRef(parameter.sizes));
    check(tensor.device() == parameter.tensor.device(), tensor.device(), parameter.tensor.device());
    const auto kind = tensor.scalar_type();
    check(at::isFloatingType(kind) || at::isComplexType(kind), kind, "of real or complex numbers");
    // A momentum is laid out as the gradient.
    check(optim.kind == kSgd || tensor.layout() == parameter.tensor.layout(), tensor.layout(), parameter.tensor.layout());
  }
}

void check_step(const OptimHandle& optim, const Parameter& parameter) {
  const auto& tensor = parameter.tensor;
  const auto grad = tensor.grad();
  if (!grad.defined()) return;
  const at::IntArrayRef sizes(parameter.sizes);
  TORCH_CHECK(
      tensor.sizes() == sizes, "parameter `", parameter.name, "` was ", sizes, " when the optimizer was made, and is ",
      tensor.sizes());
  TORCH_CHECK(
      grad.sizes() == sizes, "the gradient of parameter `", parameter.name, "` is ", grad.sizes(), ", not ", sizes);
  TORCH_CHECK(
      grad.device() == tensor.device(), "the gradient of parameter `", parameter.name, "` is on ", grad.device(),
      ", not on ", tensor.device());
  TORCH_CHECK(
      optim.kind == kSgd || !grad.is_sparse(), "the gradient of parameter `", parameter.name,
      "` is sparse, for which this optimizer has no step");
  if (auto* state = find_state(optim, parameter)) check_state(optim, parameter, *state);
}

std::unique_ptr<optim::Optimizer> make(OptimKind kind, const OptimOptions& from) {
  const auto adam = [&](auto options) {
    options.betas(std::make_tuple(from.beta1, from.beta2)).eps(from.eps);
    return options.weight_decay(from.weight_decay).amsgrad(from.amsgrad != 0);
  };
  switch (kind) {
    case kSgd: {
      auto options = optim::SGDOptions(from.lr).momentum(from.momentum).dampening(from.dampening);
      options.weight_decay(from.weight_decay).nesterov(from.nesterov != 0);
      return std::make_unique<optim::SGD>(Groups(), options);
    }
    case kAdam:
      return std::make_unique<optim::Adam>(Groups(), adam(optim::AdamOptions(from.lr)));
    case kAdamW:
      return std::make_unique<optim::AdamW>(Groups(), adam(optim::AdamWOptions(from.lr)));
    default: {
      auto options = optim::RMSpropOptions(from.lr).alpha(from.alpha).eps(from.eps).momentum(from.momentum);
      options.weight_decay(from.weight_decay).centered(from.centered != 0);
      return std::make_unique<optim::RMSprop>(Groups(), options);
    }
  }
}

// LibTorch's constructors refuse what is negative or not a number; whoever sets an option later is not asked.
void check_value(const char* what, double value) {
  TORCH_CHECK(std::isfinite(value) && value >= 0, "a ", what, " of ", value, " is refused: it must be finite and not negative");
}

void set(optim::OptimizerOptions& options, OptimKind kind, int setting, double value) {
  with_types(kind, [&](auto types) {
    using Options = typename decltype(types)::Options;
    auto& own = static_cast<Options&>(options);
    switch (setting) {
      case kLr:
        check_value("learning rate", value);
        own.lr(value);
        return;
      case kMomentum:
        if constexpr (has_momentum<Options>) {
          check_value("momentum", value);
          own.momentum(value);
        } else {
          TORCH_CHECK(false, "this optimizer has betas and no momentum");
        }
        return;
      default:
        check_value("weight decay", value);
        own.weight_decay(value);
    }
  });
}

} // namespace
} // namespace replay

using replay::guarded;

const char* replay_optim_slot(int kind, size_t slot) {
  const bool known = kind >= replay::kSgd && kind <= replay::kRmsProp && slot < replay::kSlots;
  return known ? replay::kSlotNames[kind][slot] : nullptr;
}

int replay_optim_new(int kind, const replay::OptimOptions* options, replay::OptimHandle** out) {
  return guarded([&] {
    const auto known = replay::checked(kind);
    auto optimizer = replay::make(known, *options);
    replay::check_value("learning rate", options->lr);
    *out = new replay::OptimHandle{known, std::move(optimizer), {}};
  });
}

void replay_optim_free(replay::OptimHandle* optim) {
  delete optim;
}

int replay_optim_add_group(replay::OptimHandle* optim) {
  return guarded([&] {
    optim->optimizer->param_groups().emplace_back(std::vector<at::Tensor>(), optim->optimizer->defaults().clone());
  });
}

int replay_optim_add_parameter(
    replay::OptimHandle* optim,
    const at::Tensor* parameter,
    size_t group,
    const char* name) {
  return guarded([&] {
    TORCH_CHECK(parameter->defined(), "parameter `", name, "` is undefined");
    auto& members = optim->optimizer->param_groups().at(group).params();
    optim->parameters.push_back({name, *parameter, parameter->sizes().vec(), group});
    members.push_back(*parameter);
  });
}

int replay_optim_step(replay::OptimHandle* optim) {
  return guarded([&] {
    for (const auto& parameter : optim->parameters) replay::check_step(*optim, parameter);
    optim->optimizer->step();
  });
}

int replay_optim_set(replay::OptimHandle* optim, size_t group, int setting, double value) {
  return guarded(
      [&] { replay::set(optim->optimizer->param_groups().at(group).options(), optim->kind, setting, value); });
}

int replay_optim_lr(const replay::OptimHandle* optim, size_t group, double* out) {
  return guarded([&] { *out = optim->optimizer->param_groups().at(group).options().get_lr(); });
}

int replay_optim_state(
    const replay::OptimHandle* optim,
    size_t parameter,
    int* exists,
    int64_t* step,
    at::Tensor** tensors) {
  return guarded([&] {
    const auto& owner = optim->parameters.at(parameter);
    auto* state = replay::find_state(*optim, owner);
    *exists = state != nullptr;
    if (state == nullptr) return;
    *step = replay::step_of(optim->kind, *state);
    std::array<std::unique_ptr<at::Tensor>, replay::kSlots> found;
    const auto slots = replay::slots_of(*optim, owner, *state);
    for (size_t i = 0; i < slots.size(); ++i)
      if (slots[i].tensor->defined()) found[i] = std::make_unique<at::Tensor>(slots[i].tensor->detach());
    for (size_t i = 0; i < found.size(); ++i) tensors[i] = found[i].release();
  });
}

int replay_optim_set_state(
    replay::OptimHandle* optim,
    size_t parameter,
    int64_t step,
    const at::Tensor* const* tensors) {
  return guarded([&] {
    const auto& owner = optim->parameters.at(parameter);
    TORCH_CHECK(step >= 0 && step < replay::kMaxStep, "parameter `", owner.name, "` cannot have made ", step, " steps");
    auto state = replay::with_types(optim->kind, [&](auto types) -> std::unique_ptr<torch::optim::OptimizerParamState> {
      using State = typename decltype(types)::State;
      auto fresh = std::make_unique<State>();
      if constexpr (!std::is_same_v<State, torch::optim::SGDParamState>) fresh->step(step);
      else TORCH_CHECK(step == 0, "SGD counts no steps, and parameter `", owner.name, "` has ", step);
      return fresh;
    });
    const auto slots = replay::slots_of(*optim, owner, *state);
    for (size_t i = 0; i < slots.size(); ++i) {
      if (tensors[i] == nullptr) continue;
      const auto value = tensors[i]->detach();
      const auto device = owner.tensor.device();
      *slots[i].tensor = value.device() == device ? value.clone() : value.to(device);
    }
    replay::check_state(*optim, owner, *state);
    optim->optimizer->state()[owner.tensor.unsafeGetTensorImpl()] = std::move(state);
  });
}

int replay_optim_drop_state(replay::OptimHandle* optim, size_t parameter) {
  return guarded([&] { optim->optimizer->state().erase(optim->parameters.at(parameter).tensor.unsafeGetTensorImpl()); });
}
