#include "policies/registry.h"

namespace epikv {

extern const PolicySpec kAttentionHsProduct;
extern const PolicySpec kCake;
extern const PolicySpec kCur;
extern const PolicySpec kDbtrimkv;
extern const PolicySpec kDefensiveKv;
extern const PolicySpec kDms;
extern const PolicySpec kDuoAttention;
extern const PolicySpec kEpicache;
extern const PolicySpec kEpikvBandAdaptive;
extern const PolicySpec kEpikvFlat;
extern const PolicySpec kEpikvForecast;
extern const PolicySpec kEpikvHsVariance;
extern const PolicySpec kEpikvLagKv;
extern const PolicySpec kEpikvLagKvKey;
extern const PolicySpec kEpikvProbe;
extern const PolicySpec kEpikvSeg;
extern const PolicySpec kExpectedAttention;
extern const PolicySpec kFull;
extern const PolicySpec kH2o;
extern const PolicySpec kHeadkv;
extern const PolicySpec kInfokv;
extern const PolicySpec kKeydiff;
extern const PolicySpec kKnorm;
extern const PolicySpec kKvKeyVariance;
extern const PolicySpec kKvValueVariance;
extern const PolicySpec kKvzap;
extern const PolicySpec kKvzip;
extern const PolicySpec kKvzipPlus;
extern const PolicySpec kLagkv;
extern const PolicySpec kLaprox;
extern const PolicySpec kLaq;
extern const PolicySpec kLaqPlus;
extern const PolicySpec kLongflow;
extern const PolicySpec kObcache;
extern const PolicySpec kOracle;
extern const PolicySpec kQuest;
extern const PolicySpec kRaas;
extern const PolicySpec kRaasPage;
extern const PolicySpec kRandom;
extern const PolicySpec kRandomAttention;
extern const PolicySpec kRkv;
extern const PolicySpec kRkvEpikv;
extern const PolicySpec kRpc;
extern const PolicySpec kScissorhands;
extern const PolicySpec kSegmentHs;
extern const PolicySpec kSkipkv;
extern const PolicySpec kSliding;
extern const PolicySpec kSnapkv;
extern const PolicySpec kStreamingLlm;
extern const PolicySpec kThinkv;
extern const PolicySpec kThinkvTbe;
extern const PolicySpec kTova;
extern const PolicySpec kTriattention;
extern const PolicySpec kTrimkv;
extern const PolicySpec kVase;

PolicyCatalog AllPolicies() {
  static constexpr const PolicySpec* kAll[] = {
      &kAttentionHsProduct,  //
      &kCake,                //
      &kCur,                 //
      &kDbtrimkv,            //
      &kDefensiveKv,         //
      &kDms,                 //
      &kDuoAttention,        //
      &kEpicache,            //
      &kEpikvBandAdaptive,   //
      &kEpikvFlat,           //
      &kEpikvForecast,       //
      &kEpikvHsVariance,     //
      &kEpikvLagKv,          //
      &kEpikvLagKvKey,       //
      &kEpikvProbe,          //
      &kEpikvSeg,            //
      &kExpectedAttention,   //
      &kFull,                //
      &kH2o,                 //
      &kHeadkv,              //
      &kInfokv,              //
      &kKeydiff,             //
      &kKnorm,               //
      &kKvKeyVariance,       //
      &kKvValueVariance,     //
      &kKvzap,               //
      &kKvzip,               //
      &kKvzipPlus,           //
      &kLagkv,               //
      &kLaprox,              //
      &kLaq,                 //
      &kLaqPlus,             //
      &kLongflow,            //
      &kObcache,             //
      &kOracle,              //
      &kQuest,               //
      &kRaas,                //
      &kRaasPage,            //
      &kRandom,              //
      &kRandomAttention,     //
      &kRkv,                 //
      &kRkvEpikv,            //
      &kRpc,                 //
      &kScissorhands,        //
      &kSegmentHs,           //
      &kSkipkv,              //
      &kSliding,             //
      &kSnapkv,              //
      &kStreamingLlm,        //
      &kThinkv,              //
      &kThinkvTbe,           //
      &kTova,                //
      &kTriattention,        //
      &kTrimkv,              //
      &kVase,                //
  };
  return kAll;
}

}  // namespace epikv
