#include "server/experiments/store/request_reader.h"

#include <utility>

#include "absl/strings/string_view.h"

namespace epikv {
namespace {

constexpr int64_t kPageRequests = 1000;

// A row an outcome, and one for a request that has none.
constexpr absl::string_view kSelectPage =
    "SELECT p.request, p.began_us, p.bucket_version, p.arm, p.forced, p.exposed, p.subgroup, "
    "p.pair_arm, "
    "r.unit, r.unit_is_request, r.model, r.prompt_tokens, r.max_output_tokens, r.covariate, "
    "e.ended_us, e.code, e.reason, e.finish_reason, e.request_seconds, e.output_tokens, "
    "e.kv_peak_tokens, e.kv_evicted_tokens, e.queue_seconds, e.ttft_seconds, "
    "e.time_per_output_token_seconds, s.tokens, s.agreed_tokens, s.kl_nats, "
    "a.request, a.shown_tokens, a.shown_agreed_tokens, a.shown_kl_nats, a.hidden_tokens, "
    "a.hidden_agreed_tokens, a.hidden_kl_nats, "
    "o.metric, o.outcome_key, o.value, o.happened_us, o.received_us "
    "FROM (SELECT * FROM participations WHERE experiment = $1 AND began_us < $2 "
    "AND (began_us, request) > ($3, $4) ORDER BY began_us, request LIMIT $5) p "
    "JOIN requests r ON r.id = p.request LEFT JOIN ends e ON e.request = p.request "
    "LEFT JOIN shadows s ON s.request = p.request LEFT JOIN pairs a ON a.request = p.request "
    "LEFT JOIN outcomes o ON o.request = p.request "
    "ORDER BY p.began_us, p.request, o.metric, o.outcome_key";
constexpr size_t kRequestColumns = 14;
constexpr size_t kEndColumns = 11;
constexpr size_t kShadowColumns = 3;
constexpr size_t kPairColumns = 1 + 2 * kShadowColumns;

// Takes the values of a row one after another.
class Columns {
 public:
  Columns(const SqlRow& row, size_t first) : row_(row), next_(first) {}
  bool null() const { return IsNull(row_[next_]); }
  int64_t Int() { return IntOf(row_[next_++]); }
  bool Flag() { return Int() != 0; }
  double Double() { return DoubleOf(row_[next_++]); }
  std::string Text() { return TextOf(row_[next_++]); }
  absl::Time Time() { return absl::FromUnixMicros(Int()); }
  std::optional<int64_t> OptionalInt() {
    const SqlValue& value = row_[next_++];
    return IsNull(value) ? std::nullopt : std::optional(IntOf(value));
  }
  std::optional<double> OptionalDouble() {
    const SqlValue& value = row_[next_++];
    return IsNull(value) ? std::nullopt : std::optional(DoubleOf(value));
  }

 private:
  const SqlRow& row_;
  size_t next_;
};

// Their members are given in the order of the columns.
EndRow EndOf(Columns columns) {
  return {.time = columns.Time(),
          .code = columns.Text(),
          .reason = columns.Text(),
          .finish_reason = columns.Text(),
          .request_seconds = columns.Double(),
          .output_tokens = columns.Int(),
          .kv_peak_tokens = columns.OptionalInt(),
          .kv_evicted_tokens = columns.OptionalInt(),
          .queue_seconds = columns.OptionalDouble(),
          .ttft_seconds = columns.OptionalDouble(),
          .time_per_output_token_seconds = columns.OptionalDouble()};
}

ShadowRow ShadowOf(Columns columns) {
  return {.tokens = columns.Int(), .agreed_tokens = columns.Int(), .kl_nats = columns.Double()};
}

std::optional<ShadowRow> AnswerOf(const Columns& columns) {
  return columns.null() ? std::nullopt : std::optional(ShadowOf(columns));
}

RequestRow RequestOf(const SqlRow& row) {
  RequestRow request;
  Columns columns(row, 0);
  request.id = columns.Text();
  request.began = columns.Time();
  request.bucket_version = static_cast<uint32_t>(columns.Int());
  request.arm = columns.Text();
  request.forced = columns.Flag();
  request.exposed = columns.Flag();
  request.subgroup = columns.Text();
  request.pair_arm = columns.Text();
  request.unit = static_cast<uint64_t>(columns.Int());
  request.unit_is_request = columns.Flag();
  request.model = columns.Text();
  request.prompt_tokens = columns.Int();
  request.max_output_tokens = columns.Int();
  request.covariate = columns.OptionalDouble();
  const Columns end(row, kRequestColumns);
  if (!end.null()) request.end = EndOf(end);
  const Columns shadow(row, kRequestColumns + kEndColumns);
  if (!shadow.null()) request.shadow = ShadowOf(shadow);
  const size_t pair = kRequestColumns + kEndColumns + kShadowColumns;
  if (!IsNull(row[pair])) {
    request.pair = PairRow{.shown = AnswerOf(Columns(row, pair + 1)),
                           .hidden = AnswerOf(Columns(row, pair + 1 + kShadowColumns))};
  }
  return request;
}

OutcomeRow OutcomeOf(Columns columns) {
  return {.metric = columns.Text(),
          .key = columns.Text(),
          .value = columns.Double(),
          .happened = columns.Time(),
          .received = columns.Time()};
}

}  // namespace

RequestReader::RequestReader(const v1::Experiment& experiment, const Reading& reading)
    : experiment_(experiment.name()),
      outcome_window_(OutcomeWindow(experiment)),
      until_us_(absl::ToUnixMicros(reading.until)),
      began_us_(absl::ToUnixMicros(reading.from)) {  // and no request: all of that time follow
  for (const v1::Metric& metric : experiment.metrics()) metrics_.insert(metric.name());
}

// Those of the request's other experiments may be of other metrics, or later.
bool RequestReader::Wanted(const OutcomeRow& outcome, const RequestRow& request) const {
  return metrics_.count(outcome.metric) > 0 && outcome.received - request.began <= outcome_window_;
}

absl::StatusOr<std::vector<RequestRow>> RequestReader::Next(SqlSession& session) {
  std::vector<RequestRow> page;
  auto take = [this, &page](size_t, const SqlRow& row) {
    if (page.empty() || page.back().id != TextOf(row[0])) page.push_back(RequestOf(row));
    const Columns columns(row, kRequestColumns + kEndColumns + kShadowColumns + kPairColumns);
    if (columns.null()) return;
    OutcomeRow outcome = OutcomeOf(columns);
    if (Wanted(outcome, page.back())) page.back().outcomes.push_back(std::move(outcome));
  };
  const SqlRow parameters = {experiment_, until_us_, began_us_, request_, kPageRequests};
  if (absl::Status status = session.RunEach(kSelectPage, {&parameters, 1}, take); !status.ok()) {
    return status;
  }
  done_ = page.size() < static_cast<size_t>(kPageRequests);
  if (!page.empty()) {
    began_us_ = absl::ToUnixMicros(page.back().began);
    request_ = page.back().id;
  }
  return page;
}

}  // namespace epikv
