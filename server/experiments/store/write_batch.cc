#include "server/experiments/store/write_batch.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "server/base/durations.h"
#include "server/experiments/store/outcome_joiner.h"

namespace epikv {
namespace {

constexpr absl::string_view kSelectById =
    "SELECT r.id, e.request, s.request, a.request FROM requests r "
    "LEFT JOIN ends e ON e.request = r.id LEFT JOIN shadows s ON s.request = r.id "
    "LEFT JOIN pairs a ON a.request = r.id WHERE r.id = $1";
constexpr absl::string_view kInsertRequest =
    "INSERT INTO requests (id, tenant, request_id, unit, unit_is_request, model, began_us, "
    "prompt_tokens, max_output_tokens, covariate) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";
constexpr absl::string_view kInsertPart =
    "INSERT INTO participations (experiment, began_us, request, bucket_version, arm, forced, "
    "exposed, subgroup, pair_arm) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) "
    "ON CONFLICT DO NOTHING";
constexpr absl::string_view kInsertEnd =
    "INSERT INTO ends (request, ended_us, code, reason, finish_reason, request_seconds, "
    "output_tokens, kv_peak_tokens, kv_evicted_tokens, queue_seconds, ttft_seconds, "
    "time_per_output_token_seconds) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)";
constexpr absl::string_view kInsertShadow =
    "INSERT INTO shadows (request, compared_us, tokens, agreed_tokens, kl_nats) "
    "VALUES ($1, $2, $3, $4, $5)";
constexpr absl::string_view kInsertPair =
    "INSERT INTO pairs (request, settled_us, shown_tokens, shown_agreed_tokens, shown_kl_nats, "
    "hidden_tokens, hidden_agreed_tokens, hidden_kl_nats) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)";
// Not a number is NULL, in every database.
SqlValue Number(double value) { return std::isnan(value) ? SqlValue() : SqlValue(value); }
SqlValue Number(bool known, double value) { return known ? Number(value) : SqlValue(); }
SqlValue Count(bool known, uint32_t value) { return known ? SqlValue(int64_t{value}) : SqlValue(); }
SqlValue Flag(bool value) { return int64_t{value}; }

bool Storable(std::initializer_list<absl::string_view> texts) {
  return std::none_of(texts.begin(), texts.end(),
                      [](absl::string_view text) { return text.find('\0') != text.npos; });
}
bool Storable(const v1::RequestBegan& began) {
  if (began.id().empty() || began.parts().empty()) return false;
  return Storable({began.id(), began.tenant(), began.request_id(), began.model()});
}
bool Storable(const v1::RequestEnded& ended) {
  return Storable({ended.id(), ended.code(), ended.reason(), ended.finish_reason()});
}
bool Storable(const v1::ShadowSeen& shadow) {
  return shadow.tokens() > 0 && std::isfinite(shadow.kl_nats()) && Storable({shadow.id()});
}
bool Storable(const v1::PairSeen::Answer& answer) {
  return answer.tokens() > 0 && std::isfinite(answer.kl_nats());
}
bool Storable(const v1::PairSeen& pair) {
  if (pair.has_shown() != pair.has_hidden() || !Storable({pair.id()})) return false;
  return !pair.has_shown() || (Storable(pair.shown()) && Storable(pair.hidden()));
}
bool Storable(const v1::OutcomeSeen& outcome) {
  if (!std::isfinite(outcome.value())) return false;
  return Storable({outcome.tenant(), outcome.request_id(), outcome.metric(), outcome.key()});
}

class WriteBatch {
 public:
  WriteBatch(SqlSession& session, const Definitions& definitions,
             absl::Span<const v1::ExperimentRecord> records, Source source)
      : session_(session),
        records_(records),
        outcomes_(session, definitions, source),
        results_(records.size(), Recorded::kInvalid) {}

  absl::StatusOr<WriteResult> Run() {
    if (absl::Status status = LoadRequests(); !status.ok()) return status;
    if (absl::Status status = outcomes_.Load(records_); !status.ok()) return status;
    for (size_t i = 0; i < records_.size(); ++i) {
      const v1::ExperimentRecord& record = records_[i];
      if (record.has_began() && Storable(record.began())) results_[i] = Take(record.began());
      if (record.has_ended() && Storable(record.ended())) results_[i] = Take(record.ended());
      if (record.has_shadow() && Storable(record.shadow())) results_[i] = Take(record.shadow());
      if (record.has_pair() && Storable(record.pair())) results_[i] = Take(record.pair());
      if (!record.has_outcome() || !Storable(record.outcome())) continue;
      outcomes_.Seen(record.outcome(), results_[i]);
    }
    if (absl::Status status = WriteRequests(); !status.ok()) return status;
    if (absl::Status status = outcomes_.Write(); !status.ok()) return status;
    return WriteResult{.records = std::move(results_), .outcomes = outcomes_.counted()};
  }

 private:
  struct Known {
    bool ended = false, compared = false, paired = false;
  };

  // What is known of the ids that begin, end or were replayed, alone or as a pair.
  absl::Status LoadRequests() {
    std::vector<SqlRow> calls;
    for (const v1::ExperimentRecord& record : records_) {
      if (record.has_began()) calls.push_back({record.began().id()});
      if (record.has_ended()) calls.push_back({record.ended().id()});
      if (record.has_shadow()) calls.push_back({record.shadow().id()});
      if (record.has_pair()) calls.push_back({record.pair().id()});
    }
    return session_.RunEach(kSelectById, calls, [this](size_t, const SqlRow& row) {
      known_[TextOf(row[0])] = {
          .ended = !IsNull(row[1]), .compared = !IsNull(row[2]), .paired = !IsNull(row[3])};
    });
  }

  Recorded Take(const v1::RequestBegan& began) {
    if (!known_.emplace(began.id(), Known()).second) return Recorded::kDuplicate;
    const int64_t began_us = MicrosOf(began.time());
    new_requests_.push_back(
        {began.id(), began.tenant(), began.request_id(), static_cast<int64_t>(began.unit()),
         Flag(began.unit_is_request()), began.model(), began_us, int64_t{began.prompt_tokens()},
         int64_t{began.max_output_tokens()}, Number(began.has_covariate(), began.covariate())});
    for (const v1::RequestBegan::Part& part : began.parts()) {
      new_parts_.push_back({part.experiment(), began_us, began.id(), int64_t{part.bucket_version()},
                            part.arm(), Flag(part.forced()), Flag(part.exposed()), part.subgroup(),
                            part.pair_arm()});
    }
    outcomes_.Began(began);
    return Recorded::kWritten;
  }

  Recorded Take(const v1::RequestEnded& ended) {
    const auto request = known_.find(ended.id());
    if (request == known_.end()) return Recorded::kUnknownRequest;
    if (std::exchange(request->second.ended, true)) return Recorded::kDuplicate;
    new_ends_.push_back(
        {ended.id(), MicrosOf(ended.time()), ended.code(), ended.reason(), ended.finish_reason(),
         Number(ended.request_seconds()), int64_t{ended.output_tokens()},
         Count(ended.has_kv_peak_tokens(), ended.kv_peak_tokens()),
         Count(ended.has_kv_evicted_tokens(), ended.kv_evicted_tokens()),
         Number(ended.has_queue_seconds(), ended.queue_seconds()),
         Number(ended.has_ttft_seconds(), ended.ttft_seconds()),
         Number(ended.has_time_per_output_token_seconds(), ended.time_per_output_token_seconds())});
    return Recorded::kWritten;
  }

  Recorded Take(const v1::ShadowSeen& shadow) {
    const auto request = known_.find(shadow.id());
    if (request == known_.end()) return Recorded::kUnknownRequest;
    if (std::exchange(request->second.compared, true)) return Recorded::kDuplicate;
    new_shadows_.push_back({shadow.id(), MicrosOf(shadow.time()), int64_t{shadow.tokens()},
                            int64_t{shadow.agreed_tokens()}, shadow.kl_nats()});
    return Recorded::kWritten;
  }

  Recorded Take(const v1::PairSeen& pair) {
    const auto request = known_.find(pair.id());
    if (request == known_.end()) return Recorded::kUnknownRequest;
    if (std::exchange(request->second.paired, true)) return Recorded::kDuplicate;
    SqlRow& row = new_pairs_.emplace_back(SqlRow{pair.id(), MicrosOf(pair.time())});
    for (const v1::PairSeen::Answer* answer : {&pair.shown(), &pair.hidden()}) {
      row.push_back(Count(pair.has_shown(), answer->tokens()));
      row.push_back(Count(pair.has_shown(), answer->agreed_tokens()));
      row.push_back(Number(pair.has_shown(), answer->kl_nats()));
    }
    return Recorded::kWritten;
  }

  absl::Status WriteRequests() {
    absl::Status status = session_.RunEach(kInsertRequest, new_requests_);
    if (status.ok()) status = session_.RunEach(kInsertPart, new_parts_);
    if (status.ok()) status = session_.RunEach(kInsertEnd, new_ends_);
    if (status.ok()) status = session_.RunEach(kInsertShadow, new_shadows_);
    if (status.ok()) status = session_.RunEach(kInsertPair, new_pairs_);
    return status;
  }

  SqlSession& session_;
  const absl::Span<const v1::ExperimentRecord> records_;
  OutcomeJoiner outcomes_;
  std::vector<Recorded> results_;
  std::map<std::string, Known> known_;  // requests
  std::vector<SqlRow> new_requests_, new_parts_, new_ends_, new_shadows_, new_pairs_;
};

}  // namespace

absl::StatusOr<WriteResult> WriteRecords(SqlSession& session, const Definitions& definitions,
                                         absl::Span<const v1::ExperimentRecord> records,
                                         Source source) {
  return WriteBatch(session, definitions, records, source).Run();
}

}  // namespace epikv
