#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/lifecycle.h"
#include "server/call/service.h"
#include "server/dialect/vllm_messages.h"
#include "server/generation/generation_service.h"
#include "server/models/models.h"

namespace epikv {

// The service vllm.grpc.engine.VllmEngine, by which routers ask engines of vLLM: the requests of
// GenerationService in other words. Thread-safe; everything given to it outlives it, and it
// outlives its calls.
class VllmService final : public Service {
 public:
  // max_answer_bytes: of an answer in one message.
  VllmService(GenerationService& generation, const Models& models, const Lifecycle& lifecycle,
              const Frontend& frontend, int64_t max_answer_bytes);

 private:
  class GenerateCall;
  class TokenizerCall;

  void Generate(const grpc::ByteBuffer& in, GenerateCall& call);
  Answer<vllm_proto::HealthCheckResponse> HealthCheck(const vllm_proto::HealthCheckRequest&);
  Answer<vllm_proto::AbortResponse> Abort(const vllm_proto::AbortRequest& request,
                                          const Identity& caller);
  Answer<vllm_proto::GetModelInfoResponse> GetModelInfo(const vllm_proto::GetModelInfoRequest&);
  Answer<vllm_proto::GetServerInfoResponse> GetServerInfo(const vllm_proto::GetServerInfoRequest&);
  Answer<vllm_proto::GetLoadsResponse> GetLoads(const vllm_proto::GetLoadsRequest&);

  // A model's tokenizer as an archive.
  struct Bundle {
    std::string bytes, sha256;
  };
  std::shared_ptr<const Bundle> BundleOf(const ServedModel& model);

  GenerationService& generation_;
  const Models& models_;
  const Lifecycle& lifecycle_;
  const int64_t max_answer_bytes_;
  absl::Mutex mu_;
  // The newest that was asked for, and whose it is. Shared with the calls that send it.
  std::shared_ptr<const Bundle> bundle_ ABSL_GUARDED_BY(mu_);
  std::weak_ptr<const ServedModel> bundled_ ABSL_GUARDED_BY(mu_);
};

}  // namespace epikv
