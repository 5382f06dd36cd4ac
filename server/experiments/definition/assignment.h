#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "epikv/v1/experiment.pb.h"

// Which units take part in an experiment, and with which arm. Hashes of the unit alone: every
// replica finds the same without asking, and so does `epikv experiment assign`.

namespace epikv {

// Units are dealt to so many buckets: of a layer, which experiments share, and of an experiment,
// which its arms share.
inline constexpr uint32_t kNumBuckets = 10000;

// The first eight bytes, big endian, of SHA-256 over salt, version in decimal and unit, with a zero
// byte after each of the first two. Precondition: salt has no zero byte.
uint64_t UnitHash(absl::string_view salt, uint32_t version, absl::string_view unit);

// In [0, kNumBuckets): the hash as a fraction of 2^64, times kNumBuckets, rounded down.
uint32_t BucketOf(uint64_t hash);

// Of a layer's units. One that is in the slice of an experiment is in no other's.
uint32_t LayerBucket(absl::string_view layer, absl::string_view unit);

// What deals pairs (Experiment.pairs) to units that take part: apart from what deals arms.
uint64_t PairHash(const v1::Experiment& experiment, absl::string_view unit);
// Whether a unit of this PairHash has a pair. False of an experiment that has none.
bool HasPair(const v1::Experiment& experiment, uint64_t pair_hash);

// The arm of a unit that takes part; null: it does not. Precondition: CheckDefinition found no
// fault with the experiment, and its slice of the layer is set.
const v1::Arm* ArmOf(const v1::Experiment& experiment, absl::string_view unit);
// The same, where the unit's LayerBucket in the experiment's layer is known.
const v1::Arm* ArmOf(const v1::Experiment& experiment, absl::string_view unit,
                     uint32_t layer_bucket);

}  // namespace epikv
