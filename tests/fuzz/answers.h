#pragma once

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "epikv/v1/errors.pb.h"
#include "epikv/v1/generation.pb.h"
#include "server/base/errors.h"
#include "tests/fuzz/calls.h"
#include "tests/fuzz/require.h"

// What holds of every answer to a call that nothing but its request can make fail.

namespace epikv {

// The reasons of each code, none of them the server's own fault. Of several faults at once the code
// is INVALID_ARGUMENT and the reason that of one.
inline bool IsOfTheTable(grpc::StatusCode code, const std::string& reason) {
  static const auto& table = *new std::map<grpc::StatusCode, std::set<std::string>>{
      {grpc::INVALID_ARGUMENT,
       {"INVALID_REQUEST", "KV_BUDGET", "CONTEXT_LENGTH", "NOT_UTF8", "MALFORMED", "TOKEN_RANGE",
        "SPAN_RANGE", "KV_POOL_TOO_SMALL", "KV_TIER_TOO_SMALL", "PROMPT_EVICTED", "ROUND_TOO_LARGE",
        "ARTEFACT_MISSING"}},
      {grpc::OUT_OF_RANGE, {"TOKEN_RANGE", "SPAN_RANGE"}},
      {grpc::FAILED_PRECONDITION,
       {"KV_POOL_TOO_SMALL", "KV_TIER_TOO_SMALL", "PROMPT_EVICTED", "ROUND_TOO_LARGE",
        "ARTEFACT_MISSING", "LOADING", "CHAT_FORMAT", "CONSTRAINT_FAILED"}},
      {grpc::NOT_FOUND, {"NOT_FOUND"}},
      {grpc::ALREADY_EXISTS, {"DUPLICATE_ID"}},
      {grpc::RESOURCE_EXHAUSTED, {"QUEUE_FULL"}},
      {grpc::CANCELLED, {"CANCELLED"}},
      {grpc::UNAVAILABLE, {"DRAINING", "UNAVAILABLE"}}};
  const auto found = table.find(code);
  return found != table.end() && found->second.contains(reason);
}

inline void CheckError(const grpc::Status& status) {
  const std::string seen =
      absl::StrCat(CodeName(status.error_code()), ": ", status.error_message());
  v1::Status details;
  Require(details.ParseFromString(status.error_details()) && details.details_size() > 0,
          "an error has details", seen);
  Require(status.error_details().size() < 6144, "an error fits into the trailers", seen);
  v1::ErrorInfo info;
  Require(info.ParseFromString(details.details(0).value()) && info.domain() == "epikv",
          "an error says whose it is", seen);
  const auto trace = info.metadata().find("trace_id");
  Require(trace != info.metadata().end() && trace->second.size() == 32, "and in which trace", seen);
  Require(IsOfTheTable(status.error_code(), info.reason()), "code and reason are of the table",
          absl::StrCat(seen, " ", info.reason()));
  Require(details.code() == status.error_code() && !status.error_message().empty(),
          "an error says what is wrong", seen);
  for (const auto& any : details.details()) {
    v1::BadRequest bad;
    if (!absl::EndsWith(any.type_url(), ".BadRequest")) continue;
    Require(bad.ParseFromString(any.value()) && bad.field_violations_size() > 0, "faults", seen);
    for (const auto& violation : bad.field_violations()) {
      Require(!violation.field().empty() && !violation.description().empty(), "a fault", seen);
    }
  }
}

inline void CheckSummary(const v1::Accepted& accepted, const v1::Summary& summary,
                         const std::vector<std::string>& texts, int64_t token_ids) {
  const std::string seen =
      absl::StrCat(accepted.DebugString(), summary.DebugString(), absl::StrJoin(texts, "|"));
  Require(summary.finish_reason() != v1::FINISH_REASON_UNSPECIFIED, "it says why it ended", seen);
  Require(
      summary.usage().prompt_tokens() == accepted.prompt_tokens() &&
          summary.usage().output_tokens() >= 1 &&
          summary.usage().output_tokens() <= accepted.sampling().n() * accepted.max_output_tokens(),
      "usage is within what was accepted", seen);
  Require(summary.kv().peak_bytes() <= accepted.kv().reserved_bytes(), "KV is what was reserved",
          seen);
  Require(!accepted.output().token_ids() || token_ids == summary.usage().output_tokens(),
          "every token is told of", seen);
  if (accepted.stop().include_stop() || accepted.stop().min_output_tokens() > 0) return;
  for (const std::string& stop : accepted.stop().stop_strings()) {
    for (const std::string& text : texts) {
      Require(!absl::StrContains(text, stop), "no stop string is in the text", seen);
    }
  }
}

inline void CheckStream(const std::vector<v1::GenerateResponse>& messages) {
  using Event = v1::GenerateResponse;
  Require(messages.size() >= 2 && messages.front().has_accepted() && messages.back().has_summary(),
          "a stream is accepted and summed up");
  const uint32_t n = messages.front().accepted().sampling().n();
  std::vector<std::string> texts(n);
  std::set<uint32_t> ended;
  int64_t token_ids = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto event = messages[i].event_case();
    Require((event == Event::kAccepted) == (i == 0), "it is accepted once");
    Require((event == Event::kSummary) == (i + 1 == messages.size()), "it is summed up once");
    Require(messages[i].delta().completion() < n, "output is of a completion");
    texts[messages[i].delta().completion()] += messages[i].delta().text();
    if (event == Event::kFinished) {
      Require(ended.insert(messages[i].finished().completion()).second, "it ends once");
    }
    token_ids += messages[i].delta().token_ids_size();
  }
  CheckSummary(messages.front().accepted(), messages.back().summary(), texts, token_ids);
  Require(ended.size() == (n > 1 ? n : 0), "each of several completions ends");
}

inline void CheckAnswer(const FuzzCall& call, const grpc::Status& status,
                        const std::vector<std::string>& messages) {
  if (!status.ok()) return CheckError(status);
  std::vector<v1::GenerateResponse> stream(messages.size());
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!call.method->server_streaming()) break;
    Require(stream[i].ParseFromString(messages[i]), "a client can read it");
  }
  if (call.method->server_streaming()) return CheckStream(stream);
  Require(messages.size() == 1, "one answer");
  const auto answer = call.NewResponse();
  Require(answer->ParseFromString(messages[0]), "a client can read it");
  if (const auto* result = dynamic_cast<const v1::GenerateResult*>(answer.get())) {
    std::vector<std::string> texts = {result->text()};
    int64_t token_ids = result->token_ids_size();
    for (const v1::Completion& completion : result->completions()) {
      texts.push_back(completion.text());
      token_ids += completion.token_ids_size();
    }
    CheckSummary(result->accepted(), result->summary(), texts, token_ids);
  }
  if (const auto* score = dynamic_cast<const v1::ScoreResponse*>(answer.get())) {
    CheckSummary(score->accepted(), score->summary(), {}, score->token_ids_size());
    Require(score->logprobs_size() == static_cast<int>(score->accepted().max_output_tokens()) &&
                score->greedy_size() == score->logprobs_size(),
            "every token is scored");
  }
}

}  // namespace epikv
