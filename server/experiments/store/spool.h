#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "epikv/v1/experiment_record.pb.h"

namespace epikv {

struct SpoolOptions {
  int64_t max_bytes = int64_t{256} << 20;
  int64_t segment_bytes = int64_t{1} << 20;  // about; a segment ends once it has so many
};

// What could not be read: the end of a record that a crash cut off, or what a disk has changed.
struct SpoolDamage {
  int64_t tails = 0;  // places from which the rest of a segment was given up
  int64_t bytes = 0;
};

// Records in a folder, for as long as their store is away: appended, read in order, removed once
// they are elsewhere. What Append has taken survives kill -9 and power loss; what was removed may
// come again after them. Files are for their owner alone. Of one thread.
//
// A folder holds `lock`, and segments 0000000000000001.spool and so on: "epikvSP1", then a record
// after another: length and CRC-32 of length and record (4 bytes each, little end first), record.
class Spool {
 public:
  // Makes the folder, in one that is there. kFailedPrecondition: another process uses it, or a
  // newer program wrote it. A torn tail is cut.
  static absl::StatusOr<std::unique_ptr<Spool>> Open(const std::string& folder,
                                                     const SpoolOptions& options = {});
  ~Spool();

  // All of them, or none but for what a crash may leave of a failed call. kResourceExhausted:
  // beyond max_bytes, or the disk is full; kUnavailable: it cannot be written.
  absl::Status Append(absl::Span<const v1::ExperimentRecord> records);

  // The oldest that were not removed.
  struct Batch {
    std::vector<v1::ExperimentRecord> records;
    uint64_t segment = 0;
    int64_t end = 0;  // where in the segment the next record begins
  };
  // At most max_records, and none only if the spool is empty.
  absl::StatusOr<Batch> Read(size_t max_records);
  // batch: what Read gave last. Removes its records.
  void Remove(const Batch& batch);

  bool empty() const { return segments_.empty(); }
  int64_t bytes() const;
  int64_t max_bytes() const { return options_.max_bytes; }
  SpoolDamage damage() const { return damage_; }

 private:
  struct Segment {
    uint64_t number = 0;
    int64_t bytes = 0;
  };
  class File;

  Spool(std::string folder, const SpoolOptions& options, std::unique_ptr<File> lock);
  std::string PathOf(uint64_t segment) const;
  absl::Status FindSegments();
  absl::Status CheckMagic(const Segment& segment) const;
  absl::StatusOr<int64_t> SoundBytes(const Segment& segment);
  absl::Status CutTail();
  absl::Status Extend();
  void Seal();
  void RemoveFirst();
  absl::StatusOr<std::string> Contents(const Segment& segment, int64_t from) const;

  const std::string folder_;
  const SpoolOptions options_;
  const std::unique_ptr<File> lock_;
  std::deque<Segment> segments_;     // oldest first
  std::unique_ptr<File> appending_;  // to the last of them; null: the next record begins another
  int64_t read_from_;                // in the first
  uint64_t next_number_ = 1;
  SpoolDamage damage_;
};

}  // namespace epikv
