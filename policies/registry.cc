#include "policies/registry.h"

namespace epikv {

extern const PolicySpec kEpikvFlat;
extern const PolicySpec kEpikvHsVariance;
extern const PolicySpec kFull;
extern const PolicySpec kH2o;
extern const PolicySpec kKnorm;
extern const PolicySpec kOracle;
extern const PolicySpec kRandom;
extern const PolicySpec kSliding;
extern const PolicySpec kSnapkv;

PolicyCatalog AllPolicies() {
  static constexpr const PolicySpec* kAll[] = {
      &kEpikvFlat,        //
      &kEpikvHsVariance,  //
      &kFull,             //
      &kH2o,              //
      &kKnorm,            //
      &kOracle,           //
      &kRandom,           //
      &kSliding,          //
      &kSnapkv,           //
  };
  return kAll;
}

}  // namespace epikv
