#pragma once

#include <google/protobuf/util/time_util.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "epikv/v1/experiment.pb.h"
#include "epikv/v1/experiment_record.pb.h"
#include "server/durations.h"

namespace epikv {

// Seconds since an arbitrary moment, as records and rows have them.
inline google::protobuf::Timestamp Second(double seconds) {
  return google::protobuf::util::TimeUtil::MicrosecondsToTimestamp(1'700'000'000'000'000 +
                                                                   int64_t(seconds * 1e6));
}

struct Begun {
  std::string id;
  std::string client = id;  // request_id
  double at = 0;
  std::vector<std::string> experiments = {"x"};
  std::string arm = "a";
  std::string tenant = "t";
};
inline v1::ExperimentRecord Record(const Begun& request) {
  v1::ExperimentRecord record;
  v1::RequestBegan& began = *record.mutable_began();
  began.set_id(request.id);
  began.set_tenant(request.tenant);
  began.set_request_id(request.client);
  began.set_unit(0xfedcba9876543210);
  began.set_model("m");
  *began.mutable_time() = Second(request.at);
  began.set_prompt_tokens(7);
  began.set_max_output_tokens(100);
  for (const std::string& experiment : request.experiments) {
    v1::RequestBegan::Part& part = *began.add_parts();
    part.set_experiment(experiment);
    part.set_bucket_version(2);
    part.set_arm(request.arm);
    part.set_exposed(true);
  }
  return record;
}

inline v1::ExperimentRecord Ended(const std::string& id, double at) {
  v1::ExperimentRecord record;
  v1::RequestEnded& ended = *record.mutable_ended();
  ended.set_id(id);
  *ended.mutable_time() = Second(at);
  ended.set_code("OK");
  ended.set_finish_reason("length");
  ended.set_request_seconds(1.0 / 3);
  ended.set_output_tokens(9);
  ended.set_kv_evicted_tokens(4);
  return record;
}

inline v1::ExperimentRecord Compared(const std::string& id, double at) {
  v1::ExperimentRecord record;
  v1::ShadowSeen& shadow = *record.mutable_shadow();
  shadow.set_id(id);
  *shadow.mutable_time() = Second(at);
  shadow.set_tokens(9);
  shadow.set_agreed_tokens(8);
  shadow.set_kl_nats(1.0 / 3);
  return record;
}

struct Seen {
  std::string client;
  double at = 0;  // received
  double value = 1;
  std::string metric = "good";
  std::string key = {};
  std::string tenant = "t";
};
inline v1::ExperimentRecord Record(const Seen& seen) {
  v1::ExperimentRecord record;
  v1::OutcomeSeen& outcome = *record.mutable_outcome();
  outcome.set_tenant(seen.tenant);
  outcome.set_request_id(seen.client);
  outcome.set_metric(seen.metric);
  outcome.set_value(seen.value);
  outcome.set_key(seen.key);
  *outcome.mutable_time() = Second(seen.at);
  *outcome.mutable_received() = Second(seen.at);
  return record;
}

// Declares `good` and has a window of 100 s, but where said.
struct Defined {
  std::string name;
  std::string metric = "good";
  absl::Duration window = absl::Seconds(100);
};
inline v1::Experiment Definition(const Defined& defined) {
  v1::Experiment experiment;
  experiment.set_name(defined.name);
  experiment.set_state(v1::Experiment::STATE_RUNNING);
  experiment.add_metrics()->set_name(defined.metric);
  *experiment.mutable_outcome_window() = DurationProto(defined.window);
  return experiment;
}

}  // namespace epikv
