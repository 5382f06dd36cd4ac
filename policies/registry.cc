#include "policies/registry.h"

namespace epikv {

extern const PolicySpec kCur;
extern const PolicySpec kDefensiveKv;
extern const PolicySpec kEpikvFlat;
extern const PolicySpec kExpectedAttention;
extern const PolicySpec kFull;
extern const PolicySpec kH2o;
extern const PolicySpec kInfokv;
extern const PolicySpec kKeydiff;
extern const PolicySpec kKnorm;
extern const PolicySpec kLagkv;
extern const PolicySpec kLaprox;
extern const PolicySpec kLongflow;
extern const PolicySpec kObcache;
extern const PolicySpec kOracle;
extern const PolicySpec kRaas;
extern const PolicySpec kRandom;
extern const PolicySpec kRandomAttention;
extern const PolicySpec kRkv;
extern const PolicySpec kRkvEpikv;
extern const PolicySpec kScissorhands;
extern const PolicySpec kSliding;
extern const PolicySpec kSnapkv;
extern const PolicySpec kStreamingLlm;
extern const PolicySpec kTova;
extern const PolicySpec kVase;

PolicyCatalog AllPolicies() {
  static constexpr const PolicySpec* kAll[] = {
      &kCur,  //
      &kDefensiveKv,  //
      &kEpikvFlat,  //
      &kExpectedAttention,  //
      &kFull,  //
      &kH2o,  //
      &kInfokv,  //
      &kKeydiff,  //
      &kKnorm,  //
      &kLagkv,  //
      &kLaprox,  //
      &kLongflow,  //
      &kObcache,  //
      &kOracle,  //
      &kRaas,  //
      &kRandom,  //
      &kRandomAttention,  //
      &kRkv,  //
      &kRkvEpikv,  //
      &kScissorhands,  //
      &kSliding,  //
      &kSnapkv,  //
      &kStreamingLlm,  //
      &kTova,  //
      &kVase,  //
  };
  return kAll;
}

}  // namespace epikv
