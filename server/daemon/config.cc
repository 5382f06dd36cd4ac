#include "server/daemon/config.h"

#include <utility>

#include "runtime/step/deterministic.h"

namespace epikv {
namespace {

// The first by its own settings, then the list.
std::vector<ModelSource> ModelsOf(const v1::ServerConfig& c) {
  std::vector<ModelSource> models;
  if (!c.model().empty()) {
    models.push_back({.path = c.model(),
                      .name = c.model_name(),
                      .artefact_dir = c.artefact_dir(),
                      .draft_model = c.draft_model(),
                      .kv_pool_bytes = static_cast<int64_t>(c.kv_pool_bytes())});
  }
  for (const v1::ModelSource& source : c.models()) {
    models.push_back(FromProto(source));
  }
  return models;
}

// 0: for ever.
absl::Duration SecondsOrNever(double seconds) {
  return seconds == 0 ? absl::InfiniteDuration() : absl::Seconds(seconds);
}

TransportLimits TransportOf(const v1::ServerConfig& c) {
  return {.max_message_bytes = c.max_message_bytes(),
          .max_sent_message_bytes = c.max_sent_message_bytes(),
          .max_concurrent_streams = c.max_concurrent_streams(),
          .keepalive_floor = absl::Seconds(c.keepalive_floor_seconds()),
          .max_connection_age = SecondsOrNever(c.max_connection_age_seconds()),
          .max_connection_age_grace = SecondsOrNever(c.max_connection_age_grace_seconds()),
          .max_connection_idle = SecondsOrNever(c.max_connection_idle_seconds())};
}

ExperimentsOptions ExperimentsOf(const v1::ServerConfig& c) {
  const std::string& spool = c.experiment_spool();
  return {.store = c.experiment_store(),
          .spool = spool.empty() ? c.experiment_store() + ".spool" : spool,
          .spool_bytes = static_cast<int64_t>(c.experiment_spool_bytes()),
          .retention = c.experiment_retention_days() == 0
                           ? absl::InfiniteDuration()
                           : absl::Hours(24) * c.experiment_retention_days(),
          .judge_every = absl::Seconds(c.experiment_guardrail_seconds()),
          .lost_after = absl::Seconds(c.experiment_lost_seconds()),
          .shadow = {.share_of_requests = c.experiment_shadow_permille() / 1000.,
                     .share_of_time = c.experiment_shadow_time_share()}};
}

}  // namespace

Config ConfigOf(const v1::ServerConfig& c) {
  return {
      .listen = c.listen(),
      .metrics_listen = c.metrics_listen(),
      .admin_listen = c.admin_listen(),
      .log_level = LogLevelOf(c.log_level()).value_or(LogLevel::kInfo),
      .models = ModelsOf(c),
      .model_files = {.root = c.model_root(), .digests = SplitDigests(c.model_digests())},
      .processor = ProcessorLimitOf(c.cpu()).value_or(ProcessorLimit::kNone),
      .runtime = {.device = c.device(),
                  .threads = c.threads(),
                  .kv_pool_bytes = static_cast<int64_t>(c.kv_pool_bytes()),
                  .kv_memory_share = c.kv_memory_share(),
                  .kv_tier_bytes = static_cast<int64_t>(c.kv_tier_bytes()),
                  .kv_tier_dir = c.kv_tier_dir(),
                  .max_step_tokens = c.max_step_tokens(),
                  .prefill_chunk_tokens = c.prefill_chunk_tokens(),
                  .max_running_requests = c.max_running_requests(),
                  .deterministic = c.deterministic(),
                  .trusts_code = c.trust_compiled_models(),
                  .kv_dtype = KvDTypeOf(c.kv_dtype()).value_or(KvDType::kModel),
                  .decode_kernel = c.decode_kernel(),
                  .prefill_kernel = c.prefill_kernel(),
                  .mass_interval = c.evicted_mass_interval_tokens()},
      .tensor_parallel = c.tensor_parallel(),
      .serving = {.scheduler = {.max_step_tokens = c.max_step_tokens(),
                                .prefill_chunk_tokens = c.prefill_chunk_tokens(),
                                .fixed_chunk_tokens = c.deterministic() ? kDeterministicRows : 0,
                                .max_round_pairs = static_cast<int64_t>(c.max_round_pairs())},
                  .max_running_requests = c.max_running_requests(),
                  .prefix_cache_share = c.prefix_cache_share(),
                  .queue = {.max_requests = c.max_queued_requests(),
                            .max_tokens = static_cast<int64_t>(c.max_queued_tokens())},
                  .queue_rule = {.ageing = absl::Seconds(c.priority_ageing_seconds()),
                                 .quantum_tokens = c.fairness_quantum_tokens()},
                  .refuse_infeasible_deadlines = c.refuse_infeasible_deadlines(),
                  .defaults = {.max_output_tokens = c.default_max_output_tokens(),
                               .policy = c.default_policy(),
                               .equal_protection = c.default_equal_protection()},
                  .deterministic = c.deterministic()},
      .outbox = {.max_messages = c.outbox_messages(),
                 .max_bytes = static_cast<int64_t>(c.outbox_bytes()),
                 .stall = absl::Seconds(c.stream_stall_seconds())},
      .drain = absl::Seconds(c.drain_seconds()),
      .watchdog = SecondsOrNever(c.watchdog_seconds()),
      .metrics_max_series = c.metrics_max_series(),
      .reflection = c.reflection(),
      .vllm_dialect = c.vllm_dialect(),
      .load_reports = c.load_reports(),
      .channelz = c.channelz(),
      .transport = TransportOf(c),
      .connections = {.most = c.max_connections(),
                      .most_of_peer = c.max_connections_per_peer(),
                      .unread_bytes = static_cast<int64_t>(c.max_unread_bytes())},
      .tls = {.certificate = c.tls_certificate(),
              .key = c.tls_key(),
              .client_ca = c.tls_client_ca()},
      .tokens_file = c.auth_tokens_file(),
      .shared_prefixes = c.shared_prefixes(),
      .access_log = c.access_log(),
      .experiments = ExperimentsOf(c),
      .packets = {.bytes = static_cast<int64_t>(c.packet_bytes()),
                  .folder = c.packet_dir(),
                  .folder_bytes = static_cast<int64_t>(c.packet_dir_bytes()),
                  .tenant_bytes = static_cast<int64_t>(c.tenant_packet_bytes())},
      .sessions = {.bytes = static_cast<int64_t>(c.session_bytes()),
                   .ttl = absl::Seconds(c.session_ttl_seconds())}};
}

ModelSource FromProto(const v1::ModelSource& source) {
  return {.path = source.path(),
          .name = source.name(),
          .artefact_dir = source.artefact_dir(),
          .draft_model = source.draft_model(),
          .kv_pool_bytes = static_cast<int64_t>(source.kv_pool_bytes()),
          .threads = source.threads()};
}

}  // namespace epikv
