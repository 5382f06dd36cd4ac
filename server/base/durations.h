#pragma once

#include <google/protobuf/duration.pb.h>
#include <google/protobuf/timestamp.pb.h>
#include <google/protobuf/util/time_util.h>

#include <cstdint>

#include "absl/time/time.h"

namespace epikv {

inline google::protobuf::Duration DurationProto(absl::Duration duration) {
  const absl::Duration whole = absl::Trunc(duration, absl::Seconds(1));
  google::protobuf::Duration proto;
  proto.set_seconds(absl::ToInt64Seconds(whole));
  proto.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration - whole)));
  return proto;
}

inline absl::Duration DurationOf(const google::protobuf::Duration& proto) {
  return absl::Seconds(proto.seconds()) + absl::Nanoseconds(proto.nanos());
}

inline google::protobuf::Timestamp TimestampProto(absl::Time time) {
  google::protobuf::Timestamp proto;
  proto.set_seconds(absl::ToUnixSeconds(time));
  proto.set_nanos(static_cast<int32_t>(
      absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(proto.seconds()))));
  return proto;
}

// Of the years 1 to 9999: others have no meaning.
inline bool IsTimestamp(const google::protobuf::Timestamp& proto) {
  using google::protobuf::util::TimeUtil;
  return proto.seconds() >= TimeUtil::kTimestampMinSeconds &&
         proto.seconds() <= TimeUtil::kTimestampMaxSeconds && proto.nanos() >= 0 &&
         proto.nanos() < 1'000'000'000;
}

inline int64_t MicrosOf(const google::protobuf::Timestamp& proto) {  // since 1970
  return google::protobuf::util::TimeUtil::TimestampToMicroseconds(proto);
}

inline absl::Time TimeOf(const google::protobuf::Timestamp& proto) {
  return absl::FromUnixSeconds(proto.seconds()) + absl::Nanoseconds(proto.nanos());
}

}  // namespace epikv
