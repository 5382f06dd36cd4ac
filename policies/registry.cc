#include "policies/registry.h"

namespace epikv {

extern const PolicySpec kDefensiveKv;
extern const PolicySpec kEpikvFlat;
extern const PolicySpec kFull;
extern const PolicySpec kH2o;
extern const PolicySpec kKnorm;
extern const PolicySpec kLongflow;
extern const PolicySpec kObcache;
extern const PolicySpec kOracle;
extern const PolicySpec kRaas;
extern const PolicySpec kRandom;
extern const PolicySpec kRkv;
extern const PolicySpec kRkvEpikv;
extern const PolicySpec kScissorhands;
extern const PolicySpec kSliding;
extern const PolicySpec kSnapkv;
extern const PolicySpec kTova;

PolicyCatalog AllPolicies() {
  static constexpr const PolicySpec* kAll[] = {
      &kDefensiveKv,   //
      &kEpikvFlat,     //
      &kFull,          //
      &kH2o,           //
      &kKnorm,         //
      &kLongflow,      //
      &kObcache,       //
      &kOracle,        //
      &kRaas,          //
      &kRandom,        //
      &kRkv,           //
      &kRkvEpikv,      //
      &kScissorhands,  //
      &kSliding,       //
      &kSnapkv,        //
      &kTova,          //
  };
  return kAll;
}

}  // namespace epikv
