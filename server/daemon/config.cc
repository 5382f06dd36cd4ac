#include "server/daemon/config.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "epikv/v1/config.pb.h"
#include "runtime/text/utf8.h"
#include "server/daemon/default_config.h"
#include "server/base/file_contents.h"

namespace epikv {
namespace {

namespace pb = google::protobuf;

// A coalesced message has to fit into the 4 MiB that clients receive by default.
constexpr uint64_t kMaxOutboxBytes = 2 << 20;
// A prompt chunk is a whole number of deterministic forwards.
constexpr uint32_t kDeterministicRows = 16;

using Problems = std::vector<std::string>;

// What the parser of text format has to say, one line each.
class ProblemCollector final : public pb::io::ErrorCollector {
 public:
  // where: a file, or a flag.
  ProblemCollector(std::string where, Problems& problems)
      : where_(std::move(where)), problems_(problems) {}
  void AddError(int line, int column, const std::string& message) override {
    const bool has_lines = line >= 0 && !absl::StartsWith(where_, "--");
    problems_.push_back(has_lines ? absl::StrCat(where_, ":", line + 1, ": ", message)
                                  : absl::StrCat(where_, ": ", message));
  }
  // An unknown field: the parser goes on, so that all of them are named; we do not.
  void AddWarning(int line, int column, const std::string& message) override {
    AddError(line, column, message);
  }

 private:
  const std::string where_;
  Problems& problems_;
};

v1::ServerConfig ParseText(const std::string& text, const std::string& where, Problems& problems) {
  v1::ServerConfig config;
  ProblemCollector collector(where, problems);
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  parser.AllowUnknownField(true);
  parser.ParseFromString(text, &config);
  return config;
}

// A field of ServerConfig as deploy/epikvd.textproto presents it.
struct Setting {
  const pb::FieldDescriptor* field;
  std::vector<std::string> comment;  // lines without "# "
};

const std::vector<Setting>& Settings() {
  static const auto& settings = *[] {
    auto* all = new std::vector<Setting>;
    std::vector<std::string> comment;
    for (absl::string_view line : absl::StrSplit(kDefaultConfig, '\n')) {
      if (absl::ConsumePrefix(&line, "#")) {
        comment.push_back(std::string(absl::StripPrefix(line, " ")));
        continue;
      }
      const std::string name(line.substr(0, line.find(':')));
      const pb::FieldDescriptor* field = v1::ServerConfig::descriptor()->FindFieldByName(name);
      if (field != nullptr) all->push_back({field, comment});
      comment.clear();
    }
    return all;
  }();
  return settings;
}

std::string ValueText(const v1::ServerConfig& config, const pb::FieldDescriptor& field) {
  pb::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  std::string text;
  if (!field.is_repeated()) {
    printer.PrintFieldValueToString(config, &field, -1, &text);
    return text;
  }
  std::vector<std::string> items(config.GetReflection()->FieldSize(config, &field));
  for (size_t i = 0; i < items.size(); ++i) {
    printer.PrintFieldValueToString(config, &field, static_cast<int>(i), &items[i]);
    items[i] = absl::StrCat("{ ", items[i], "}");
  }
  return absl::StrCat("[", absl::StrJoin(items, ", "), "]");
}

// Least number of inserted, deleted and replaced characters.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// Whether who wrote `name` may have meant `known`.
bool IsClose(absl::string_view name, absl::string_view known) {
  const size_t most = 1 + known.size() / 4;
  if (name.size() > known.size() + most) return false;  // each byte more is an edit
  return EditDistance(name, known) <= most || (name.size() >= 3 && absl::StrContains(known, name));
}

std::string UnknownFlag(absl::string_view name) {
  std::vector<std::string> close;
  for (const Setting& setting : Settings()) {
    const std::string& known = setting.field->name();
    if (IsClose(name, known)) close.push_back(absl::StrCat("--", known));
  }
  return absl::StrCat("unknown flag --", name,
                      close.empty()
                          ? "; --help lists all"
                          : absl::StrCat("; did you mean ", absl::StrJoin(close, ", "), "?"));
}

// A flag as it was given.
struct Flag {
  std::string name;
  std::optional<std::string> value;
};

// The command line, sorted out.
struct Arguments {
  bool help = false, print_config = false;
  std::optional<std::string> file;
  std::vector<Flag> flags;
};

bool TakesValue(const std::string& name) {
  if (name == "config") return true;
  const auto* field = v1::ServerConfig::descriptor()->FindFieldByName(name);
  return field != nullptr && field->cpp_type() != pb::FieldDescriptor::CPPTYPE_BOOL;
}

Arguments SortArguments(absl::Span<const std::string> args, Problems& problems) {
  Arguments sorted;
  for (size_t i = 0; i < args.size(); ++i) {
    absl::string_view arg = args[i];
    if (!absl::ConsumePrefix(&arg, "--")) {
      problems.push_back(absl::StrCat("'", args[i], "' is no flag; a setting is --name=value"));
      continue;
    }
    const std::pair<std::string, std::string> split = absl::StrSplit(arg, absl::MaxSplits('=', 1));
    Flag flag{.name = absl::StrReplaceAll(split.first, {{"-", "_"}})};
    if (absl::StrContains(arg, '=')) flag.value = split.second;
    const bool needs_value = TakesValue(flag.name) && !flag.value.has_value();
    if (needs_value && i + 1 == args.size()) {
      problems.push_back(absl::StrCat("--", flag.name, " needs a value"));
      continue;
    }
    if (needs_value) flag.value = args[++i];
    if (flag.name == "help") {
      sorted.help = true;
    } else if (flag.name == "print_config") {
      sorted.print_config = true;
    } else if (flag.name == "config") {
      sorted.file = flag.value;
    } else {
      sorted.flags.push_back(std::move(flag));
    }
  }
  return sorted;
}

void ApplyFile(const std::string& path, v1::ServerConfig& config, Problems& problems) {
  const absl::StatusOr<FileContents> file = ReadFile(path);
  if (!file.ok()) {
    problems.push_back(absl::StrCat("--config: ", file.status().message()));
    return;
  }
  config.MergeFrom(ParseText(file->text, path, problems));
}

void ApplyFlag(const Flag& flag, v1::ServerConfig& config, Problems& problems) {
  const auto* field = v1::ServerConfig::descriptor()->FindFieldByName(flag.name);
  if (field == nullptr) {
    problems.push_back(UnknownFlag(flag.name));
    return;
  }
  std::string text = flag.value.value_or("true");
  if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_STRING) {
    text = absl::StrCat("\"", absl::CEscape(text), "\"");
  }
  if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE) {
    text = absl::StrCat("{", text, "}");
  }
  ProblemCollector collector(absl::StrCat("--", flag.name), problems);
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  const size_t known = problems.size();
  // What follows a value fails without an error.
  if (!parser.ParseFieldValueFromString(text, field, &config) && problems.size() == known) {
    problems.push_back(absl::StrCat("--", flag.name, " must be one value, is \"",
                                    absl::CEscape(flag.value.value_or("")), "\""));
  }
}

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
  check.Require(c.max_concurrent_streams() >= 1 && c.max_concurrent_streams() <= INT32_MAX,
                "max_concurrent_streams", "be 1 to 2147483647");
  check.Require(c.keepalive_floor_seconds() > 0 && c.keepalive_floor_seconds() <= kMostSeconds,
                "keepalive_floor_seconds", "be above 0 and at most 2000000");
  check.Require(is_time(c.max_connection_age_seconds()), "max_connection_age_seconds", kSeconds);
  check.Require(is_time(c.max_connection_age_grace_seconds()), "max_connection_age_grace_seconds",
                kSeconds);
  check.Require(is_time(c.max_connection_idle_seconds()), "max_connection_idle_seconds", kSeconds);
}

void CheckSecurity(const v1::ServerConfig& c, Checker& check) {
  const bool tls = !c.tls_certificate().empty();
  check.Require(!tls || !c.tls_key().empty(), "tls_key", "name the key of --tls_certificate");
  check.Require(tls || c.tls_key().empty(), "tls_certificate", "name a file with --tls_key");
  check.Require(tls || c.tls_client_ca().empty(), "tls_certificate",
                "name a file with --tls_client_ca");
  check.Require(
      !c.channelz() || IsLoopback(c.admin_listen()) || !c.tls_client_ca().empty(), "channelz",
      "be off, since it asks for no token, where --admin_listen is not loopback and there "
      "is no --tls_client_ca");
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
  check.RequireHidden(
      !IsUrl(store) || !HasPassword(store), "experiment_store",
      "hold no password, which --print_config and GetConfig would show: set $PGPASSWORD "
      "or $PGPASSFILE");
  check.Require(!IsUrl(store) || !c.experiment_spool().empty(), "experiment_spool",
                "name a folder where --experiment_store is PostgreSQL");
  check.Require(c.experiment_spool_bytes() >= kLeastSpool &&
                    c.experiment_spool_bytes() <= uint64_t{INT64_MAX},
                "experiment_spool_bytes", "be at least 1048576");
  check.Require(c.experiment_guardrail_seconds() >= .1 && c.experiment_guardrail_seconds() <= 86400,
                "experiment_guardrail_seconds", "be 0.1 to 86400");
  check.Require(c.experiment_retention_days() <= kMostDays, "experiment_retention_days",
                "be 0 (never) to 36500");
  check.Require(c.experiment_shadow_permille() <= 1000, "experiment_shadow_permille",
                "be 0 (none) to 1000");
  check.Require(c.experiment_shadow_time_share() > 0 && c.experiment_shadow_time_share() <= 1,
                "experiment_shadow_time_share", "be over 0 and at most 1");
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
  check.Require(c.max_queued_requests() >= 1, "max_queued_requests", "be at least 1");
  check.Require(c.max_queued_tokens() >= 1 && c.max_queued_tokens() <= kMost, "max_queued_tokens",
                "be at least 1 and below 2^63");
  check.Require(std::isfinite(c.priority_ageing_seconds()) && c.priority_ageing_seconds() > 0,
                "priority_ageing_seconds", "be above 0");
  check.Require(c.fairness_quantum_tokens() >= 1, "fairness_quantum_tokens", "be at least 1");
  check.Require(c.default_max_output_tokens() >= 1, "default_max_output_tokens", "be at least 1");
  check.Require(c.device() == "cpu" || c.device() == "cuda", "device", "be cpu or cuda");
  check.Require(!c.deterministic() || c.device() != "cuda", "deterministic",
                "be off with --device=cuda, where kernels share work out by what else is in the "
                "batch");
  check.Require(c.kv_dtype() == "model" || c.device() != "cuda", "kv_dtype",
                "be model with --device=cuda, where nothing reads rows of int8");
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
  check.Require(c.metrics_max_series() >= 1, "metrics_max_series", "be at least 1");
  CheckTransport(c, check);
  CheckExperiments(c, check);
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
      violations.push_back({absl::StrCat(at, "name"), absl::StrCat("'", name, "' is taken")});
    }
  }
}

void CheckModel(const v1::ServerConfig& c, std::vector<FieldViolation>& violations) {
  Checker(c, violations)
      .Require(!c.model().empty() || c.models_size() > 0, "model",
               "name the file that `epikv export` wrote");
}

// The first by its own settings, then the list.
std::vector<ModelSource> ModelsOf(const v1::ServerConfig& c) {
  std::vector<ModelSource> models;
  if (!c.model().empty()) {
    models.push_back({.path = c.model(),
                      .name = c.model_name(),
                      .artefact_dir = c.artefact_dir(),
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
      .runtime = {.device = c.device(),
                  .threads = c.threads(),
                  .kv_pool_bytes = static_cast<int64_t>(c.kv_pool_bytes()),
                  .kv_memory_share = c.kv_memory_share(),
                  .max_step_tokens = c.max_step_tokens(),
                  .prefill_chunk_tokens = c.prefill_chunk_tokens(),
                  .max_running_requests = c.max_running_requests(),
                  .deterministic = c.deterministic(),
                  .kv_dtype = KvDTypeOf(c.kv_dtype()).value_or(KvDType::kModel),
                  .decode_kernel = c.decode_kernel(),
                  .prefill_kernel = c.prefill_kernel(),
                  .mass_interval = c.evicted_mass_interval_tokens()},
      .serving = {.scheduler = {.max_step_tokens = c.max_step_tokens(),
                                .prefill_chunk_tokens = c.prefill_chunk_tokens(),
                                .fixed_chunk_tokens = c.deterministic() ? kDeterministicRows : 0},
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
      .metrics_max_series = c.metrics_max_series(),
      .reflection = c.reflection(),
      .channelz = c.channelz(),
      .transport = TransportOf(c),
      .tls = {.certificate = c.tls_certificate(),
              .key = c.tls_key(),
              .client_ca = c.tls_client_ca()},
      .tokens_file = c.auth_tokens_file(),
      .access_log = c.access_log(),
      .experiments = ExperimentsOf(c)};
}

namespace {

PrintConfig ToPrintConfig(const v1::ServerConfig& config) {
  PrintConfig print;
  for (const Setting& setting : Settings()) {
    for (const std::string& line : setting.comment) absl::StrAppend(&print.text, "# ", line, "\n");
    absl::StrAppend(&print.text, setting.field->name(), ": ", ValueText(config, *setting.field),
                    "\n\n");
  }
  return print;
}

PrintHelp ToPrintHelp(const v1::ServerConfig& defaults) {
  PrintHelp help{.text =
                     "epikvd serves a TorchScript model over gRPC, each request's KV cache held to "
                     "a budget of its own.\n\n"
                     "  epikvd --model=model.pt [--config=FILE] [--name=value ...]\n\n"
                     "  --config=FILE   settings in text format; deploy/epikvd.textproto has all\n"
                     "  --print_config  print the settings as they are after file and flags\n"
                     "  --help          this\n\n"};
  for (const Setting& setting : Settings()) {
    absl::StrAppend(&help.text, "  --", setting.field->name(), "=",
                    ValueText(defaults, *setting.field), "\n");
    for (const std::string& line : setting.comment) {
      absl::StrAppend(&help.text, "      ", line, "\n");
    }
  }
  return help;
}

// Defaults, then the file, then flags.
v1::ServerConfig Settle(const Arguments& arguments, Problems& problems) {
  v1::ServerConfig config = ParseText(kDefaultConfig, "defaults", problems);
  if (arguments.file.has_value()) ApplyFile(*arguments.file, config, problems);
  for (const Flag& flag : arguments.flags) ApplyFlag(flag, config, problems);
  return config;
}

absl::Status StatusOf(Problems problems, const std::vector<FieldViolation>& violations) {
  for (const FieldViolation& violation : violations) {
    problems.push_back(absl::StrCat("--", violation.field, " ", violation.description));
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
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
  require(source.kv_pool_bytes() <= uint64_t{INT64_MAX}, "kv_pool_bytes", "must be below 2^63");
  require(source.threads() <= 1024, "threads", "must be at most 1024");
  return violations;
}

ModelSource FromProto(const v1::ModelSource& source) {
  return {.path = source.path(),
          .name = source.name(),
          .artefact_dir = source.artefact_dir(),
          .kv_pool_bytes = static_cast<int64_t>(source.kv_pool_bytes()),
          .threads = source.threads()};
}

absl::StatusOr<Command> ParseCommandLine(absl::Span<const std::string> args) {
  Problems problems;
  const Arguments arguments = SortArguments(args, problems);
  if (arguments.help) return ToPrintHelp(ParseText(kDefaultConfig, "defaults", problems));
  v1::ServerConfig config = Settle(arguments, problems);
  std::vector<FieldViolation> violations = ViolationsOf(config);
  if (!arguments.print_config) CheckModel(config, violations);
  if (absl::Status status = StatusOf(problems, violations); !status.ok()) return status;
  if (arguments.print_config) return ToPrintConfig(config);
  return Run{std::move(config)};
}

absl::StatusOr<Config> ParseSettings(absl::Span<const std::string> args) {
  Problems problems;
  const Arguments arguments = SortArguments(args, problems);
  if (arguments.help) problems.push_back("--help is for epikvd");
  if (arguments.print_config) problems.push_back("--print_config is for epikvd");
  const v1::ServerConfig config = Settle(arguments, problems);
  if (absl::Status status = StatusOf(problems, ViolationsOf(config)); !status.ok()) return status;
  return ConfigOf(config);
}

}  // namespace epikv
