#include "policies/registry.h"

namespace epikv {

extern const PolicySpec kCur;
extern const PolicySpec kEpikvFlat;
extern const PolicySpec kExpectedAttention;
extern const PolicySpec kFull;
extern const PolicySpec kH2o;
extern const PolicySpec kInfokv;
extern const PolicySpec kKeydiff;
extern const PolicySpec kKnorm;
extern const PolicySpec kLagkv;
extern const PolicySpec kLaprox;
extern const PolicySpec kOracle;
extern const PolicySpec kRandom;
extern const PolicySpec kRandomAttention;
extern const PolicySpec kSliding;
extern const PolicySpec kSnapkv;
extern const PolicySpec kStreamingLlm;
extern const PolicySpec kVase;

PolicyCatalog AllPolicies() {
  static constexpr const PolicySpec* kAll[] = {
      &kCur,                //
      &kEpikvFlat,          //
      &kExpectedAttention,  //
      &kFull,               //
      &kH2o,                //
      &kInfokv,             //
      &kKeydiff,            //
      &kKnorm,              //
      &kLagkv,              //
      &kLaprox,             //
      &kOracle,             //
      &kRandom,             //
      &kRandomAttention,    //
      &kSliding,            //
      &kSnapkv,             //
      &kStreamingLlm,       //
      &kVase,               //
  };
  return kAll;
}

}  // namespace epikv
