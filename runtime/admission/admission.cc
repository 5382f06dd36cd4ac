#include "runtime/admission/admission.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "runtime/admission/resolver.h"
#include "runtime/base/reason.h"
#include "runtime/kv/kv_layout.h"
#include "runtime/model/model_shape.h"

namespace epikv {
bool ReadsRows(const PolicyTraits& traits) {
  const SignalSet& signals = traits.signals;
  return signals.Has(Signal::kKeys) || signals.Has(Signal::kQueries) ||
         signals.Has(Signal::kQueryMoments) || traits.pass.any();
}

int64_t TokensOf(double ratio, int64_t tokens) {
  // Of 100 tokens 0.07 are 7, though in doubles they are a little more.
  constexpr double kRounding = 1 - 1e-15;
  return static_cast<int64_t>(std::ceil(ratio * static_cast<double>(tokens) * kRounding));
}

Admission::Admission(const Manifest& manifest, ModelShape shape, PolicyCatalog catalog,
                     AdmissionLimits limits)
    : manifest_(manifest),
      shape_(std::move(shape)),
      catalog_(catalog),
      limits_(std::move(limits)),
      defaults_(limits_.defaults) {}

int64_t Admission::MaxOutputTokens(std::optional<int64_t> asked, int64_t prompt_tokens) const {
  const int64_t left = manifest_.context_length - prompt_tokens;
  return asked.value_or(std::max<int64_t>(1, std::min(defaults().max_output_tokens, left)));
}

RequestDefaults Admission::defaults() const {
  absl::MutexLock lock(&mu_);
  return defaults_;
}

void Admission::SetDefaults(RequestDefaults defaults) {
  absl::MutexLock lock(&mu_);
  defaults_ = std::move(defaults);
}

Admission::Admission(const Manifest& manifest, PolicyCatalog catalog, AdmissionLimits limits)
    : Admission(manifest, ShapeOf(manifest), catalog, std::move(limits)) {}

std::string Admission::DefaultPolicy() const {
  const auto& calibration = manifest_.calibration;
  if (calibration.has_value() && calibration->confirmed) return calibration->policy;
  return defaults().policy;
}

int64_t Admission::kv_bytes_per_token() const {
  return shape_.num_layers * shape_.num_kv_heads * LayoutOf(shape_, kv_format(), {}, 0).row_bytes;
}

int64_t Admission::MostPacketBytes(const Request& request) const {
  return epikv::MostPacketBytes(LayoutOf(shape_, kv_format(), request.traits, 0), request);
}

std::variant<Request, Rejection> Admission::Resolve(RequestOptions options) const {
  if (options.forced.empty()) FillIn(manifest_.sampling, options.sampling);
  Resolver resolver(*this, options);
  Request& request = resolver.request();
  request.forced = options.forced;
  request.force_in_chunks = options.force_in_chunks && !options.forced.empty();
  resolver.CheckFields();
  resolver.AddPackets();
  const bool has_lengths = resolver.ResolveLengths();
  resolver.CheckSteering();
  const PolicySpec* spec = resolver.ResolvePolicy();
  const bool has_budget = resolver.ResolveBudget();
  const bool has_protection = resolver.CheckProtection(has_lengths);
  if (has_lengths && has_protection && has_budget && spec != nullptr) {
    resolver.ResolveProtectionAndDemand();
  }
  if (!resolver.ok()) return resolver.TakeRejection();

  request.id = std::move(options.id);
  request.sampling = options.sampling;
  if (options.steering.has_value()) {
    request.steering = {.vector = SteeringOf(shape_), .options = *options.steering};
  }
  request.stop_strings = std::move(options.stop.strings);
  request.stop_tokens = std::move(options.stop.tokens);
  if (!options.stop.ignore_end) request.end_tokens = manifest_.eos_tokens;
  request.include_stop = options.stop.include;
  request.min_output_tokens = options.stop.min_output_tokens;
  request.ignore_end = options.stop.ignore_end;
  request.output = options.output;
  request.answer = options.answer;
  request.thinking = options.thinking;
  request.evict_thinking = options.kv.evict_thinking && options.thinking.has_value();
  request.scheduling = std::move(options.scheduling);
  request.arm = std::move(options.arm);
  request.chat = options.chat;
  request.positions = options.kv.positions;
  request.prefix_salt = std::move(options.kv.prefix_salt);
  request.bypass_prefix_cache =
      options.kv.bypass_prefix_cache || !request.packets.empty() || request.soft != nullptr;
  auto failed = [&](absl::string_view why) {
    return Rejection{
        .code = absl::StatusCode::kInternal,
        .reason = std::string(kPolicyFailed),
        .message = absl::StrCat("policy '", spec->name, "' could not be set up: ", why)};
  };
  try {
    request.policy = Share(*spec, request.params);
  } catch (const std::exception& e) {
    return failed(e.what());
  } catch (...) {
    return failed(kNoException);
  }
  request.arrival = options.arrival;
  request.deadline = options.deadline;
  return std::move(request);
}

std::shared_ptr<const Policy> Admission::Share(const PolicySpec& spec, const Params& params) const {
  absl::MutexLock lock(&mu_);
  std::weak_ptr<const Policy>& slot = shared_[{std::string(spec.name), params.values()}];
  std::shared_ptr<const Policy> policy = slot.lock();
  if (policy == nullptr) {
    policy = spec.make(params, shape_);
    slot = policy;
    std::erase_if(shared_, [](const auto& entry) { return entry.second.expired(); });
  }
  return policy;
}

}  // namespace epikv
