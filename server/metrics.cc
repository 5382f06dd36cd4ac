#include "server/metrics.h"

#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/errors.h"

namespace epikv {
namespace {

constexpr absl::string_view kRejectReasons[] = {"invalid_request",
                                                "token_range",
                                                "context_length",
                                                "kv_budget",
                                                "kv_pool_too_small",
                                                "queue_full",
                                                "draining",
                                                "duplicate_id",
                                                "not_found",
                                                "not_utf8",
                                                "malformed",
                                                "deadline_infeasible",
                                                "other"};
constexpr absl::string_view kMethods[] = {"GenerationService/Generate",
                                          "GenerationService/GenerateOnce",
                                          "GenerationService/Score",
                                          "GenerationService/CancelRequest",
                                          "TokenizationService/Tokenize",
                                          "TokenizationService/Detokenize",
                                          "ModelService/ListModels",
                                          "ModelService/GetModel",
                                          "PolicyService/ListPolicies",
                                          "PolicyService/GetPolicy",
                                          "other"};
constexpr size_t kNumCodes = 17;
// exposer_*, the HTTP library's own.
constexpr int64_t kNumExposerSeries = 7;

}  // namespace

absl::StatusOr<std::unique_ptr<Metrics>> Metrics::Create(const MetricsOptions& options) {
  std::unique_ptr<Metrics> metrics(new Metrics(options));
  const int64_t bound = metrics->series_bound();
  if (bound <= options.max_series) return metrics;
  return absl::InvalidArgumentError(
      absl::StrCat("/metrics can grow to ", bound, " series with ", options.policies.size(),
                   " policies and --metrics_max_series allows ", options.max_series,
                   "; raise it to at least ", bound));
}

Metrics::Metrics(const MetricsOptions& options)
    : gauges_(std::make_shared<EngineGauges>(options.model, options.kv_capacity_bytes,
                                             options.max_running_requests)),
      declare_(*registry_, options.model),
      requests_(declare_, {.policies = options.policies,
                           .lanes = options.lanes,
                           .kv_bytes_per_token = options.kv_bytes_per_token}),
      steps_(declare_, options.policies.size()),
      stream_full_(declare_, "epikv_stream_write_stall_seconds",
                   "How long a stream's outbox was full because its client read slowly.", 1,
                   Decades(.001, 100)),
      rpcs_(declare_.Counters("epikv_grpc_requests_total", "RPCs that have ended.",
                              std::size(kMethods) * kNumCodes)),
      rejected_(declare_.Counters("epikv_requests_rejected_total",
                                  "Requests that were refused before they were queued.",
                                  std::size(kRejectReasons))),
      draining_(
          declare_.Gauges("epikv_drain_state", "1 once new requests are refused.", 1).Add({})) {
  AddInfo(options);
}

void Metrics::AddInfo(const MetricsOptions& options) {
  declare_.Gauges("epikv_build_info", "1; the labels say what was built.", 1)
      .Add({{"version", EPIKV_VERSION}})
      .Set(1);
  declare_.Gauges("epikv_model_info", "1; the labels say what is served.", 1)
      .Add({{"architecture", options.architecture},
            {"dtype", options.dtype},
            {"decode_kernel", options.decode_kernel}})
      .Set(1);
  declare_.Gauges("epikv_config_info", "1; the labels are settings.", 1).Add(options.config).Set(1);
  auto& policies = declare_.Gauges("epikv_policy_info", "1; the policies of this build.",
                                   options.policies.size());
  for (const PolicySpec* spec : options.policies) {
    policies
        .Add({{"policy", std::string(spec->name)},
              {"evaluation_only", spec->evaluation_only ? "true" : "false"}})
        .Set(1);
  }
  declare_.Gauges("epikv_threads", "Threads, by pool.", 1)
      .Add({{"pool", "engine"}})
      .Set(static_cast<double>(options.threads));
  declare_.Gauges("epikv_model_load_seconds", "Loading, measuring and warming up.", 1)
      .Add({})
      .Set(Seconds(options.model_load));
  declare_.Count(EngineGauges::kNumSeries + ProcessMetrics::kNumSeries + kNumExposerSeries);
  prometheus::Gauge& bound =
      declare_
          .Gauges("epikv_metrics_series",
                  "Most series that this page can hold, to compare with metrics_max_series.", 1)
          .Add({});
  bound.Set(static_cast<double>(declare_.bound()));
}

void Metrics::OnAdmitted(const Request& request, absl::Duration queued) {
  requests_.OnAdmitted(queued);
}

void Metrics::OnStep(const StepStats& step) {
  gauges_->Set(step);
  if (step.sequences > 0) steps_.Add(step, std::exchange(evicting_, {}));
}

void Metrics::OnFirstToken(const Request& request, absl::Duration since_arrival) {
  requests_.OnFirstToken(request, since_arrival);
}

void Metrics::OnEvicted(const EvictedStats& evicted) {
  evicting_.insert(evicted.request.spec->name);
  requests_.OnEvicted(evicted);
}

void Metrics::OnFinished(const Request& request, const Finished& finished) {
  requests_.OnFinished(request, finished);
}

void Metrics::OnRpcFinished(absl::string_view method, grpc::StatusCode code) {
  rpcs_
      .Add({{"method", std::string(KnownOr(kMethods, method, "other"))},
            {"code", std::string(CodeName(code))}})
      .Increment();
}

void Metrics::OnRejected(absl::string_view reason) {
  const std::string lower = absl::AsciiStrToLower(reason);
  rejected_.Add({{"reason", std::string(KnownOr(kRejectReasons, lower, "other"))}}).Increment();
}

void Metrics::OnStreamWasFull(absl::Duration full) { stream_full_.Of({}).Observe(Seconds(full)); }

void Metrics::OnDraining() { draining_.Set(1); }

std::vector<std::shared_ptr<prometheus::Collectable>> Metrics::collectables() const {
  return {registry_, gauges_, process_};
}

}  // namespace epikv
