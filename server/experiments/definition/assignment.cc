#include "server/experiments/definition/assignment.h"

#include <openssl/sha.h>

#include <array>
#include <string>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

constexpr uint32_t kBucketsPerPermille = kNumBuckets / 1000;

}  // namespace

uint64_t UnitHash(absl::string_view salt, uint32_t version, absl::string_view unit) {
  constexpr absl::string_view kEnd("\0", 1);
  const std::string text = absl::StrCat(salt, kEnd, version, kEnd, unit);
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const uint8_t*>(text.data()), text.size(), digest.data());
  uint64_t hash = 0;
  for (int i = 0; i < 8; ++i) hash = hash << 8 | digest[i];
  return hash;
}

uint32_t BucketOf(uint64_t hash) {
  // The upper 64 bits of the product, from two halves.
  const uint64_t low = (hash & 0xffffffff) * kNumBuckets >> 32;
  return static_cast<uint32_t>(((hash >> 32) * kNumBuckets + low) >> 32);
}

// No salt has a slash, so layers, pairs and experiments hash apart.
uint32_t LayerBucket(absl::string_view layer, absl::string_view unit) {
  return BucketOf(UnitHash(absl::StrCat("layer/", layer), 0, unit));
}

uint64_t PairHash(const v1::Experiment& experiment, absl::string_view unit) {
  return UnitHash(absl::StrCat("pairs/", experiment.salt()), experiment.bucket_version(), unit);
}

bool HasPair(const v1::Experiment& experiment, uint64_t pair_hash) {
  return BucketOf(pair_hash) < experiment.pairs().permille() * kBucketsPerPermille;
}

const v1::Arm* ArmOf(const v1::Experiment& experiment, absl::string_view unit) {
  return ArmOf(experiment, unit, LayerBucket(experiment.layer(), unit));
}

const v1::Arm* ArmOf(const v1::Experiment& experiment, absl::string_view unit,
                     uint32_t layer_bucket) {
  const uint32_t slice = experiment.traffic_permille() * kBucketsPerPermille;
  const uint32_t first = experiment.first_bucket();
  if (layer_bucket < first || layer_bucket - first >= slice) return nullptr;
  const uint32_t bucket = BucketOf(UnitHash(experiment.salt(), experiment.bucket_version(), unit));
  uint32_t end = 0;
  for (const v1::Arm& arm : experiment.arms()) {
    end += arm.weight_permille() * kBucketsPerPermille;
    if (bucket < end) return &arm;
  }
  return nullptr;
}

}  // namespace epikv
