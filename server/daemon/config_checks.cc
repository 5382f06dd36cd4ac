#include "server/daemon/config_checks.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <string>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/processor.h"
#include "runtime/ranks/ranks.h"
#include "runtime/step/deterministic.h"
#include "runtime/text/utf8.h"
#include "server/daemon/config.h"
#include "server/daemon/setting_text.h"
#include "server/models/model_files.h"

namespace epikv {
namespace {

namespace pb = google::protobuf;

// Collects the settings that are out of range.
class Checker {
 public:
  Checker(const v1::ServerConfig& config, std::vector<FieldViolation>& violations)
      : config_(config), violations_(violations) {}

  void Require(bool ok, const std::string& name, absl::string_view must) {
    if (ok) return;
    const auto* field = v1::ServerConfig::descriptor()->FindFieldByName(name);
    violations_.push_back({name, absl::StrCat("must ", must, ", is ", ValueText(config_, *field))});
  }
  // Of a value that must not be shown.
  void RequireHidden(bool ok, const std::string& name, absl::string_view must) {
    if (!ok) violations_.push_back({name, absl::StrCat("must ", must)});
  }
  void RequireAddress(const std::string& address, const std::string& name) {
    const size_t colon = address.rfind(':');
    int port = -1;
    const bool ok = colon != std::string::npos && colon > 0 &&
                    absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 0 &&
                    port <= 65535;
    Require(ok, name, "be host:port with a port of 0 to 65535");
  }

 private:
  const v1::ServerConfig& config_;
  std::vector<FieldViolation>& violations_;
};

// Operators are told every setting in a message, whose strings are UTF-8; paths too.
void CheckText(const v1::ServerConfig& c, Checker& check) {
  const pb::Descriptor& type = *v1::ServerConfig::descriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const pb::FieldDescriptor& field = *type.field(i);
    if (field.type() != pb::FieldDescriptor::TYPE_STRING) continue;
    const std::string text = c.GetReflection()->GetString(c, &field);
    check.Require(!FirstInvalidUtf8(text).has_value(), field.name(), "be UTF-8");
  }
}

void CheckTransport(const v1::ServerConfig& c, Checker& check) {
  constexpr uint32_t kLeastSent = 2 * kMaxOutboxBytes;  // any message of a stream
  constexpr double kMostSeconds = 2e6;                  // gRPC counts milliseconds in 31 bits
  constexpr absl::string_view kSeconds = "be 0 (never) to 2000000";
  auto is_time = [](double seconds) { return seconds >= 0 && seconds <= kMostSeconds; };
  check.Require(c.max_message_bytes() >= 1024 && c.max_message_bytes() <= INT32_MAX,
                "max_message_bytes", "be 1024 to 2147483647");
  check.Require(c.max_sent_message_bytes() >= kLeastSent && c.max_sent_message_bytes() <= INT32_MAX,
                "max_sent_message_bytes", "be 4194304 to 2147483647");
  check.Require(c.max_connections() >= 1, "max_connections", "be at least 1");
  check.Require(c.max_connections_per_peer() >= 1, "max_connections_per_peer", "be at least 1");
  check.Require(c.max_unread_bytes() / 4 >= c.max_message_bytes() &&
                    c.max_unread_bytes() <= uint64_t{INT64_MAX},
                "max_unread_bytes", "be at least four times max_message_bytes");
  check.Require(c.max_concurrent_streams() >= 1 && c.max_concurrent_streams() <= INT32_MAX,
                "max_concurrent_streams", "be 1 to 2147483647");
  check.Require(c.keepalive_floor_seconds() > 0 && c.keepalive_floor_seconds() <= kMostSeconds,
                "keepalive_floor_seconds", "be above 0 and at most 2000000");
  check.Require(is_time(c.max_connection_age_seconds()), "max_connection_age_seconds", kSeconds);
  check.Require(is_time(c.max_connection_age_grace_seconds()), "max_connection_age_grace_seconds",
                kSeconds);
  check.Require(is_time(c.max_connection_idle_seconds()), "max_connection_idle_seconds", kSeconds);
}

void CheckModelFiles(const v1::ServerConfig& c, Checker& check) {
  check.Require(absl::c_all_of(SplitDigests(c.model_digests()), IsDigest), "model_digests",
                "be sha256: and 64 lower-case hex digits, or several of these");
}

void CheckSecurity(const v1::ServerConfig& c, Checker& check) {
  const bool tls = !c.tls_certificate().empty();
  check.Require(!tls || !c.tls_key().empty(), "tls_key",
                "name the private key file of --tls_certificate");
  check.Require(tls || c.tls_key().empty(), "tls_certificate",
                "name a file, since --tls_key is set");
  check.Require(tls || c.tls_client_ca().empty(), "tls_certificate",
                "name a file, since --tls_client_ca is set");
  check.Require(
      !c.channelz() || IsLoopback(c.admin_listen()) || !c.tls_client_ca().empty(), "channelz",
      "be off: it asks for no token, so it needs --admin_listen on loopback, or --tls_client_ca");
}

bool IsUrl(absl::string_view store) { return absl::StrContains(store, "://"); }

// Text between "://" and '@' is a user, and after ':' his password; or it is a parameter.
bool HasPassword(absl::string_view url) {
  const absl::string_view rest = url.substr(url.find("://") + 3);
  const absl::string_view authority = rest.substr(0, rest.find_first_of("/?"));
  const size_t at = authority.rfind('@');
  const bool of_user =
      at != absl::string_view::npos && absl::StrContains(authority.substr(0, at), ':');
  return of_user || absl::StrContains(rest, "password=");
}

void CheckExperiments(const v1::ServerConfig& c, Checker& check) {
  constexpr uint64_t kLeastSpool = 1 << 20;
  constexpr uint32_t kMostDays = 100 * 365;
  const std::string& store = c.experiment_store();
  check.RequireHidden(!IsUrl(store) || absl::StartsWith(store, "postgresql://") ||
                          absl::StartsWith(store, "postgres://"),
                      "experiment_store", "be a file or postgresql://...");
  check.RequireHidden(!IsUrl(store) || !HasPassword(store), "experiment_store",
                      "hold no password: --print_config and GetConfig would show it. Set "
                      "$PGPASSWORD or $PGPASSFILE");
  check.Require(!IsUrl(store) || !c.experiment_spool().empty(), "experiment_spool",
                "name a folder, since --experiment_store is PostgreSQL");
  check.Require(c.experiment_spool_bytes() >= kLeastSpool &&
                    c.experiment_spool_bytes() <= uint64_t{INT64_MAX},
                "experiment_spool_bytes", "be at least 1048576");
  check.Require(c.experiment_guardrail_seconds() >= .1 && c.experiment_guardrail_seconds() <= 86400,
                "experiment_guardrail_seconds", "be 0.1 to 86400");
  check.Require(c.experiment_lost_seconds() >= 1 && c.experiment_lost_seconds() <= 1e9,
                "experiment_lost_seconds", "be 1 to 1000000000");
  check.Require(c.experiment_retention_days() <= kMostDays, "experiment_retention_days",
                "be 0 (never) to 36500");
  check.Require(c.experiment_shadow_permille() <= 1000, "experiment_shadow_permille",
                "be 0 (none) to 1000");
  check.Require(c.experiment_shadow_time_share() > 0 && c.experiment_shadow_time_share() <= 1,
                "experiment_shadow_time_share", "be above 0 and at most 1");
}

// All but the model, which who prints a configuration need not have.
void CheckRanges(const v1::ServerConfig& c, std::vector<FieldViolation>& violations) {
  constexpr uint64_t kMost = INT64_MAX;
  Checker check(c, violations);
  CheckText(c, check);
  check.RequireAddress(c.listen(), "listen");
  if (!c.metrics_listen().empty()) check.RequireAddress(c.metrics_listen(), "metrics_listen");
  if (!c.admin_listen().empty()) check.RequireAddress(c.admin_listen(), "admin_listen");
  check.Require(LogLevelOf(c.log_level()).has_value(), "log_level",
                "be debug, info, warning or error");
  check.Require(c.model_name().empty() || IsModelName(c.model_name()), "model_name",
                kModelNameRule);
  check.Require(c.threads() <= 1024, "threads", "be at most 1024");
  check.Require(c.kv_pool_bytes() <= kMost, "kv_pool_bytes", "be below 2^63");
  check.Require(c.kv_tier_bytes() <= kMost, "kv_tier_bytes", "be below 2^63");
  check.Require(c.kv_tier_bytes() == 0 || c.device() != "cuda", "kv_tier_bytes",
                "be 0 with --device=cuda: the tier works on the CPU only");
  check.Require(c.packet_bytes() <= kMost, "packet_bytes", "be below 2^63");
  check.Require(c.packet_bytes() == 0 || c.device() != "cuda", "packet_bytes",
                "be 0 with --device=cuda: packets work on the CPU only");
  check.Require(c.draft_model().empty() || c.device() != "cuda", "draft_model",
                "be empty with --device=cuda: drafts work on the CPU only");
  check.Require(c.packet_dir_bytes() <= kMost, "packet_dir_bytes", "be below 2^63");
  check.Require(c.session_bytes() <= kMost, "session_bytes", "be below 2^63");
  check.Require(c.session_bytes() == 0 || c.device() != "cuda", "session_bytes",
                "be 0 with --device=cuda: sessions work on the CPU only");
  check.Require(c.session_ttl_seconds() >= 1 && c.session_ttl_seconds() <= 1e9,
                "session_ttl_seconds", "be 1 to 1000000000");
  check.Require(c.tenant_packet_bytes() <= kMost, "tenant_packet_bytes", "be below 2^63");
  check.Require(c.prefix_cache_share() >= 0 && c.prefix_cache_share() <= 1, "prefix_cache_share",
                "be in [0, 1]");
  check.Require(c.kv_memory_share() > 0 && c.kv_memory_share() <= 1, "kv_memory_share",
                "be in (0, 1]");
  check.Require(KvDTypeOf(c.kv_dtype()).has_value(), "kv_dtype", "be model or int8");
  check.Require(c.max_step_tokens() >= 1, "max_step_tokens", "be at least 1");
  check.Require(c.prefill_chunk_tokens() >= 1, "prefill_chunk_tokens", "be at least 1");
  check.Require(!c.deterministic() || c.prefill_chunk_tokens() % kDeterministicRows == 0,
                "prefill_chunk_tokens", "be a multiple of 16 with --deterministic");
  check.Require(c.max_running_requests() >= 1, "max_running_requests", "be at least 1");
  check.Require(c.max_round_pairs() >= 1 && c.max_round_pairs() <= kMost, "max_round_pairs",
                "be at least 1 and below 2^63");
  check.Require(c.max_queued_requests() >= 1, "max_queued_requests", "be at least 1");
  check.Require(c.max_queued_tokens() >= 1 && c.max_queued_tokens() <= kMost, "max_queued_tokens",
                "be at least 1 and below 2^63");
  check.Require(std::isfinite(c.priority_ageing_seconds()) && c.priority_ageing_seconds() > 0,
                "priority_ageing_seconds", "be above 0");
  check.Require(c.fairness_quantum_tokens() >= 1, "fairness_quantum_tokens", "be at least 1");
  check.Require(c.default_max_output_tokens() >= 1, "default_max_output_tokens", "be at least 1");
  check.Require(c.device() == "cpu" || c.device() == "cuda", "device", "be cpu or cuda");
  check.Require(!c.deterministic() || c.device() != "cuda", "deterministic",
                "be off with --device=cuda: there a result depends on what else is in the batch");
  check.Require(c.kv_dtype() == "model" || c.device() != "cuda", "kv_dtype",
                "be model with --device=cuda: int8 works on the CPU only");
  check.Require(c.tensor_parallel() >= 1 && c.tensor_parallel() <= kMostRanks, "tensor_parallel",
                "be 1 to 8");
  const bool by_ranks = c.tensor_parallel() > 1;
  check.Require(!by_ranks || c.device() != "cuda", "tensor_parallel",
                "be 1 with --device=cuda: several processes serve on the CPU only");
  check.Require(!by_ranks || c.draft_model().empty(), "draft_model",
                "be empty with --tensor_parallel");
  check.Require(!by_ranks || c.kv_tier_bytes() == 0, "kv_tier_bytes",
                "be 0 with --tensor_parallel");
  check.Require(!by_ranks || c.packet_bytes() == 0, "packet_bytes", "be 0 with --tensor_parallel");
  check.Require(!by_ranks || c.session_bytes() == 0, "session_bytes",
                "be 0 with --tensor_parallel");
  check.Require(ProcessorLimitOf(c.cpu()).has_value(), "cpu", "be auto, avx512, avx2 or plain");
  constexpr absl::string_view kKernels[] = {"auto", "flash", "matmul", "batch"};
  check.Require(
      std::find(std::begin(kKernels), std::end(kKernels), c.decode_kernel()) != std::end(kKernels),
      "decode_kernel", "be auto, flash, matmul or batch");
  constexpr absl::string_view kPrefillKernels[] = {"auto", "flash", "batch"};
  check.Require(std::find(std::begin(kPrefillKernels), std::end(kPrefillKernels),
                          c.prefill_kernel()) != std::end(kPrefillKernels),
                "prefill_kernel", "be auto, flash or batch");
  check.Require(std::isfinite(c.stream_stall_seconds()) && c.stream_stall_seconds() > 0,
                "stream_stall_seconds", "be above 0");
  check.Require(c.outbox_messages() >= 2, "outbox_messages", "be at least 2");
  check.Require(c.outbox_bytes() >= 1024 && c.outbox_bytes() <= kMaxOutboxBytes, "outbox_bytes",
                "be 1024 to 2097152");
  check.Require(std::isfinite(c.drain_seconds()) && c.drain_seconds() >= 0, "drain_seconds",
                "be at least 0");
  check.Require(std::isfinite(c.watchdog_seconds()) && c.watchdog_seconds() >= 0,
                "watchdog_seconds", "be at least 0 (never)");
  check.Require(c.metrics_max_series() >= 1, "metrics_max_series", "be at least 1");
  CheckTransport(c, check);
  CheckExperiments(c, check);
  CheckModelFiles(c, check);
  CheckSecurity(c, check);
}

void CheckModels(const v1::ServerConfig& c, std::vector<FieldViolation>& violations) {
  std::set<std::string> names;
  if (!c.model().empty()) names.insert(c.model_name());
  for (int i = 0; i < c.models_size(); ++i) {
    const std::string at = absl::StrCat("models[", i, "].");
    for (const FieldViolation& violation : ViolationsOf(c.models(i))) {
      violations.push_back({absl::StrCat(at, violation.field), violation.description});
    }
    const std::string& name = c.models(i).name();
    if (!name.empty() && !names.insert(name).second) {
      violations.push_back(
          {absl::StrCat(at, "name"), absl::StrCat("another model is already named '", name, "'")});
    }
  }
}

}  // namespace

std::vector<FieldViolation> ViolationsOf(const v1::ServerConfig& config) {
  std::vector<FieldViolation> violations;
  CheckRanges(config, violations);
  CheckModels(config, violations);
  return violations;
}

std::vector<FieldViolation> ViolationsOf(const v1::ModelSource& source) {
  std::vector<FieldViolation> violations;
  auto require = [&](bool ok, const char* field, absl::string_view must) {
    if (!ok) violations.push_back({field, std::string(must)});
  };
  require(!source.path().empty(), "path", "must name the file that `epikv export` wrote");
  require(!FirstInvalidUtf8(source.path()).has_value(), "path", "must be UTF-8");
  require(!FirstInvalidUtf8(source.name()).has_value(), "name", "must be UTF-8");
  require(source.name().empty() || IsModelName(source.name()), "name",
          absl::StrCat("must ", kModelNameRule));
  require(!FirstInvalidUtf8(source.artefact_dir()).has_value(), "artefact_dir", "must be UTF-8");
  require(!FirstInvalidUtf8(source.draft_model()).has_value(), "draft_model", "must be UTF-8");
  require(source.kv_pool_bytes() <= uint64_t{INT64_MAX}, "kv_pool_bytes", "must be below 2^63");
  require(source.threads() <= 1024, "threads", "must be at most 1024");
  return violations;
}

std::vector<FieldViolation> ViolationsOfRun(const v1::ServerConfig& config) {
  std::vector<FieldViolation> violations;
  if (config.model().empty() && config.models_size() == 0) {
    violations.push_back({"model", "must name the file that `epikv export` wrote"});
  }
  if (config.model().empty() && !config.draft_model().empty()) {
    violations.push_back(
        {"draft_model", "must be empty without a model: of `models` each has its own"});
  }
  if (config.vllm_dialect() && config.models_size() + (config.model().empty() ? 0 : 1) > 1) {
    violations.push_back(
        {"vllm_dialect", "must be false where several models are served: its requests name none"});
  }
  if (config.tensor_parallel() > 1 && config.models_size() + (config.model().empty() ? 0 : 1) > 1) {
    violations.push_back({"tensor_parallel", "must be 1 where several models are served"});
  }
  if (!config.auth_tokens_file().empty() || config.allow_anonymous()) return violations;
  auto require_loopback = [&](const char* name, const std::string& address) {
    if (address.empty() || IsLoopback(address)) return;
    violations.push_back(
        {name, absl::StrCat("must be on loopback, is \"", address,
                            "\": whoever reaches it may do everything; set --auth_tokens_file, or "
                            "--allow_anonymous if that is meant")});
  };
  require_loopback("listen", config.listen());
  require_loopback("admin_listen", config.admin_listen());
  return violations;
}

}  // namespace epikv
