#include "policies/registry.h"

namespace epikv {

extern const PolicySpec kAttentionHsProduct;
extern const PolicySpec kEpikvBandAdaptive;
extern const PolicySpec kEpikvFlat;
extern const PolicySpec kEpikvHsVariance;
extern const PolicySpec kEpikvLagKv;
extern const PolicySpec kEpikvLagKvKey;
extern const PolicySpec kEpikvSeg;
extern const PolicySpec kFull;
extern const PolicySpec kH2o;
extern const PolicySpec kKnorm;
extern const PolicySpec kKvKeyVariance;
extern const PolicySpec kKvValueVariance;
extern const PolicySpec kOracle;
extern const PolicySpec kRandom;
extern const PolicySpec kSegmentHs;
extern const PolicySpec kSliding;
extern const PolicySpec kSnapkv;
extern const PolicySpec kThinkv;

PolicyCatalog AllPolicies() {
  static constexpr const PolicySpec* kAll[] = {
      &kAttentionHsProduct,  //
      &kEpikvBandAdaptive,  //
      &kEpikvFlat,  //
      &kEpikvHsVariance,  //
      &kEpikvLagKv,  //
      &kEpikvLagKvKey,  //
      &kEpikvSeg,  //
      &kFull,  //
      &kH2o,  //
      &kKnorm,  //
      &kKvKeyVariance,  //
      &kKvValueVariance,  //
      &kOracle,  //
      &kRandom,  //
      &kSegmentHs,  //
      &kSliding,  //
      &kSnapkv,  //
      &kThinkv,  //
  };
  return kAll;
}

}  // namespace epikv
