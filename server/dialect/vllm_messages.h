#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "epikv/v1/generation.pb.h"
#include "runtime/admission/rejection.h"
#include "runtime/request/request.h"
#include "server/models/served_model.h"
#include "vllm/grpc/engine/vllm_engine.pb.h"

// The messages of vllm.grpc.engine.VllmEngine, to and from our own.

namespace epikv {

namespace vllm_proto = ::vllm::grpc::engine;

// The same request in our own words. The rejection names the fields, in the dialect's words, that
// cannot be said in ours, and those that nobody here knows.
std::variant<v1::GenerateRequest, Rejection> FromVllm(const vllm_proto::GenerateRequest& request);

vllm_proto::GetModelInfoResponse ToVllm(const ServedModel& model);

// The tokens of a delta, and what was asked of them.
vllm_proto::GenerateStreamChunk ChunkOf(const Delta& delta, int64_t prompt_tokens);
// How a completion ended; without its tokens.
vllm_proto::GenerateComplete CompleteOf(const Finished& finished, int64_t completion);
// Adds the tokens of a delta to what a completion gave before.
void AddTokens(const Delta& delta, vllm_proto::GenerateComplete& complete);

}  // namespace epikv
